"""Starts and audits a `Pipeline` on Spark."""

from __future__ import annotations

import json
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from delivered.audit.report import AuditReport
from delivered.contract.powers import planned
from delivered.contract.sink import SinkGroup
from delivered.contract.source import Source
from delivered.engine.direct import ArrowTransform, Direct
from delivered.model.bad_row import OnBadRow
from delivered.model.dedup import Dedup
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.guarantee import Guarantee
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.transform import Transform
from delivered.planner import Refusal
from delivered.spark import dedup_kept, first_offsets
from delivered.spark.audit import audit as run_audit
from delivered.spark.audit_spec import AuditSpec
from delivered.spark.dedup import without_repeats
from delivered.spark.dedup_table import without_seen_repeats
from delivered.spark.direct import mark_sink, mark_source
from delivered.spark.drain import OPTION as DRAIN
from delivered.spark.drain import new_drain
from delivered.spark.facts import logged
from delivered.spark.formats import is_registered, register
from delivered.spark.frames import batches_fit_for
from delivered.spark.hooks import already_planned
from delivered.spark.messages import translated
from delivered.spark.session import make_active, session
from delivered.spark.settings import START_OPTION, TRANSFORM_OPTION
from delivered.spark.sinks import (
    COORDINATES,
    FORMAT,
    OPTION,
    is_group,
    opened,
    packed,
    plain_routes,
    projected,
    routed,
    taken,
    without_async,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from delivered.spark.pipeline import Pipeline


def start(pipeline: Pipeline, given: SparkSession | None, takeover: bool) -> tuple[StreamingQuery, Path]:
    """Plan, keep the source's first offsets, start the query. Returns it with the path that drains it.

    Raises:
        Refused: the plan is a refusal.
    """
    plan = pipeline.plan(given, takeover=takeover)
    if isinstance(plan, Refusal):
        raise plan.error
    spark = ready(pipeline, given)
    drain = new_drain()
    try:
        return _query(pipeline, spark, drain), drain
    except DeliveredError:
        raise
    except Exception as error:
        found = translated(error)
        raise (found if found is not None else error) from None


def ready(pipeline: Pipeline, given: SparkSession | None) -> SparkSession:
    """The session given, or a new one, with every format registered, and active in this thread."""
    spark = given or SparkSession.getActiveSession()
    if spark is None:
        spark = new_session(pipeline)
    if not is_registered(spark):
        register(spark)
    make_active(spark)
    return spark


def _once(pipeline: Pipeline, spark: SparkSession, frame: DataFrame, dedup: Dedup) -> DataFrame:
    """The stream without its repeats, by what the pipeline lets remember them."""
    if not dedup.in_table:
        return without_repeats(frame, dedup)
    name, sinks = opened(pipeline)
    sink = next(m.sink for m in sinks.members if m.name == name) if isinstance(sinks, SinkGroup) else sinks
    shards = int(str(spark.conf.get("spark.sql.shuffle.partitions")))
    return without_seen_repeats(frame, dedup, sink, pipeline.name, name, shards)


def _keep_dedup(pipeline: Pipeline) -> None:
    name, _ = opened(pipeline)
    fresh = logged(pipeline.checkpoint)[0] is None
    dedup_kept.keep(pipeline.checkpoint, pipeline.dedup, fresh=fresh, sink=name)


def new_session(pipeline: Pipeline) -> SparkSession:
    """A session fit for a pipeline's guarantee, with its own configuration on top."""
    conf = pipeline.conf
    if pipeline.guarantee is Guarantee.AT_MOST_ONCE:
        # A stage that Spark runs again after lost shuffle files counts its attempts from 0: tasks would send again.
        conf = {"spark.stage.maxConsecutiveAttempts": "1", **conf}
    return session(pipeline.name, pipeline.master, conf)


def _query(pipeline: Pipeline, spark: SparkSession, drain: Path) -> StreamingQuery:
    source = pipeline.source
    projections = [s.projection for s in pipeline.sinks]
    opened: Source | None = None
    direct: Direct | None = None
    if source.is_spark_own:
        reader = spark.readStream.format(source.system).options(**source.options)
    else:
        opened = planned(source.source())
        offsets = first_offsets.keep(pipeline.checkpoint, opened)
        if offsets is not None:
            source = source.with_options(startingOffsets=json.dumps(offsets))
        reader = spark.readStream.format(f"delivered_{source.system}").options(**source.options)
        reader = reader.option(DRAIN, str(drain)).option("checkpointLocation", pipeline.checkpoint)
        plain = all(p.is_plain if is_group(pipeline) else p.is_all for p in projections)
        if pipeline.transform.kind in ("none", "arrow") and plain and pipeline.dedup is None:
            direct = Direct(opened, arrow_transform(pipeline.transform))
            reader = mark_source(reader)
    frame = reader.load()
    if direct is None:
        if pipeline.dedup is not None:
            frame = _once(pipeline, spark, frame, pipeline.dedup)
        frame = apply_transform(pipeline.transform, spark, opened)(frame)
        if not frame.isStreaming:
            raise UsageError(
                "TRANSFORM_NOT_STREAMING",
                "The transform gave a DataFrame that does not come from its source: it holds no stream.",
                next_step="build the result from the DataFrame that the function gets, or from the view `source`",
            )
    writer = _to_sinks(pipeline, frame, direct=direct is not None)
    writer = writer.option("guarantee", pipeline.guarantee.value).option("pipeline", pipeline.name)
    writer = writer.option("checkpointLocation", pipeline.checkpoint).queryName(pipeline.name)
    writer = writer.option(TRANSFORM_OPTION, pipeline.transform_version).option(START_OPTION, uuid.uuid4().hex)
    if pipeline.new_checkpoint:
        writer = writer.option("newCheckpoint", "accept")
    if pipeline.missing_ledger:
        writer = writer.option("missingLedger", "accept")
    if pipeline.new_target:
        writer = writer.option("newTarget", "accept")
    if direct is not None:
        writer = mark_sink(writer, direct)
    _keep_dedup(pipeline)
    with (
        already_planned(),
        batches_fit_for(spark, frame.schema),
    ):  # a query keeps the configuration that it started with
        return writer.trigger(**pipeline.trigger.for_spark()).start()


def _to_sinks(pipeline: Pipeline, frame: DataFrame, direct: bool) -> DataStreamWriter:
    """The format and the options that name the sinks, with what Spark's asynchronous progress was told beside them."""
    sinks = pipeline.sinks
    projections = [s.projection for s in sinks]
    if not is_group(pipeline):
        if not direct:
            frame = projected(frame, projections[0])
        writer = frame.writeStream.format(f"delivered_{sinks[0].system}").options(**without_async(sinks[0]).options)
        if sinks[0].name is not None:
            writer = writer.option("sink", sinks[0].name)
    else:
        routes = plain_routes(projections)
        if not direct:
            keep = COORDINATES if pipeline.on_bad_row is OnBadRow.DEAD_LETTER else ()
            frame, routes = routed(frame, projections, keep)
        writer = frame.writeStream.format(f"delivered_{FORMAT}").option(OPTION, packed(pipeline, routes))
    beside = {k: v for s in pipeline.all_sinks for k, v in s.options.items() if k not in without_async(s).options}
    return writer.options(**beside)


def apply_transform(
    transform: Transform, spark: SparkSession, source: Source | None
) -> Callable[[DataFrame], DataFrame]:
    """The transform as a function of DataFrames."""
    _travel_by_value(transform)
    match transform.kind:
        case "sql":

            def query(frame: DataFrame) -> DataFrame:
                frame.createOrReplaceTempView("source")
                return spark.sql(transform.sql)

            return query
        case "python":
            function = transform.function
            if function is None:
                raise UsageError("TRANSFORM_MISSING", "The transform is a function, and none was given.")
            return function
        case "arrow":
            return _map_in_arrow(arrow_transform(transform), source)
        case _:
            return lambda frame: frame


def arrow_transform(transform: Transform) -> ArrowTransform:
    _travel_by_value(transform)
    return ArrowTransform(transform.select, transform.function)


def _map_in_arrow(transform: ArrowTransform, source: Source | None) -> Callable[[DataFrame], DataFrame]:
    def apply(frame: DataFrame) -> DataFrame:
        rows = source.schema() if source is not None else to_arrow_schema(frame.schema, timezone="UTC")
        made = transform(pa.RecordBatch.from_pylist([], schema=rows)).schema

        def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield transform(batch)

        return frame.mapInArrow(each, from_arrow_schema(made))

    return apply


def _travel_by_value(transform: Transform) -> None:
    """A module of the user's own is not installed on executors: send its functions along."""
    name = getattr(transform.function, "__module__", None)
    module: ModuleType | None = sys.modules.get(name) if name else None
    file = getattr(module, "__file__", None)
    if module is None or file is None or name == "__main__":
        return
    installed = [sysconfig.get_path(p) for p in ("purelib", "platlib", "stdlib")]
    if not any(file.startswith(str(folder)) for folder in installed):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def audit(
    pipeline: Pipeline,
    given: SparkSession | None,
    sink: str | None,
    samples_max: int,
    sink_from: Mapping[str, Any] | None,
    progress: Callable[[str], None] | None,
) -> AuditReport:
    """Audit one sink of a pipeline, against its own rows and columns.

    Raises:
        UsageError: no such sink, several and none named, or a source that is Spark's own.
    """
    chosen = _chosen(pipeline, sink)
    if pipeline.source.is_spark_own:
        raise UsageError(
            "AUDIT_SOURCE",
            f"The source {pipeline.source.format!r} is Spark's own; an audit cannot read a range of it.",
            next_step=f"read it with the format {pipeline.source.system!r}",
        )
    spark = ready(pipeline, given)
    source = planned(pipeline.source.source())
    decider, everything = opened(pipeline)
    by = {**pipeline.audit_by, **chosen.audit}
    spec = AuditSpec(
        pipeline=pipeline.name,
        guarantee=pipeline.guarantee,
        checkpoint=pipeline.checkpoint,
        source=source,
        sink=chosen.sink(),
        sink_name=chosen.name,
        transform=_all_transforms(pipeline, chosen, spark, source),
        dedup=pipeline.dedup,
        id=by.get("id"),
        key=by.get("key"),
        own=by.get("own"),
        samples_max=samples_max,
        sink_from=dict(sink_from) if sink_from is not None else None,
        decided_by=(decider, everything),
        transform_version=pipeline.transform_version,
        dead_letters=next((m.name for m in everything.members if m.dead_letters), None)
        if isinstance(everything, SinkGroup)
        else None,
    )
    return run_audit(spark, spec, progress)


def _chosen(pipeline: Pipeline, sink: str | None) -> Endpoint:
    endpoints = {e.name or e.sink().name: e for e in map(without_async, pipeline.sinks)}
    if sink is None and len(endpoints) == 1:
        return next(iter(endpoints.values()))
    if sink not in endpoints:
        said = "no sink was named" if sink is None else f"there is none of the name {sink!r}"
        raise UsageError(
            "AUDIT_SINK",
            f"An audit follows one sink, and {said}; the pipeline writes to {', '.join(endpoints)}.",
            next_step="name one of them; `delivered audit` goes through all",
        )
    return endpoints[sink]


def _all_transforms(
    pipeline: Pipeline, sink: Endpoint, spark: SparkSession, source: Source
) -> Callable[[DataFrame], DataFrame] | None:
    """The pipeline's transform, then what the sink selects of it."""
    shared = apply_transform(pipeline.transform, spark, source) if pipeline.transform.kind != "none" else None
    validating = pipeline.on_bad_row is OnBadRow.DEAD_LETTER
    if sink.projection.is_all and not validating:
        return shared

    def all_of_it(frame: DataFrame) -> DataFrame:
        mine = projected(frame if shared is None else shared(frame), sink.projection)
        return taken(mine, sink.sink()) if validating else mine

    return all_of_it

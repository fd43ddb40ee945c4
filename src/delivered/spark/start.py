"""Starts and audits a `Pipeline` on Spark."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from delivered.audit.report import AuditReport
from delivered.contract import Source
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.guarantee import Guarantee
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.transform import Transform
from delivered.plan import Refusal
from delivered.spark import first_offsets
from delivered.spark.audit import AuditSpec
from delivered.spark.audit import audit as run_audit
from delivered.spark.direct import mark_sink, mark_source
from delivered.spark.drain import OPTION as DRAIN
from delivered.spark.drain import new_drain
from delivered.spark.facts import without_async
from delivered.spark.formats import is_registered, register
from delivered.spark.frames import batches_fit_for
from delivered.spark.messages import translated
from delivered.spark.session import session
from delivered.write.direct import ArrowTransform, Direct

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

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
    """The session given, or a new one, with every format registered."""
    spark = given or SparkSession.getActiveSession()
    if spark is None:
        spark = new_session(pipeline)
    if not is_registered(spark):
        register(spark)
    return spark


def new_session(pipeline: Pipeline) -> SparkSession:
    """A session fit for a pipeline's guarantee, with its own configuration on top."""
    conf = pipeline.conf
    if pipeline.guarantee is Guarantee.AT_MOST_ONCE:
        # A stage that Spark runs again after lost shuffle files counts its attempts from 0: tasks would send again.
        conf = {"spark.stage.maxConsecutiveAttempts": "1", **conf}
    return session(pipeline.name, pipeline.master, conf)


def _query(pipeline: Pipeline, spark: SparkSession, drain: Path) -> StreamingQuery:
    source, sink = pipeline.source, pipeline.sinks[0]
    opened: Source | None = None
    direct: Direct | None = None
    if source.is_spark_own:
        reader = spark.readStream.format(source.system).options(**source.options)
    else:
        opened = source.source()
        offsets = first_offsets.keep(pipeline.checkpoint, opened)
        source = source.with_options(startingOffsets=json.dumps(offsets))
        reader = spark.readStream.format(f"delivered_{source.system}").options(**source.options)
        reader = reader.option(DRAIN, str(drain))
        if pipeline.transform.kind in ("none", "arrow"):
            direct = Direct(opened, arrow_transform(pipeline.transform))
            reader = mark_source(reader)
    frame = reader.load()
    if direct is None:
        frame = apply_transform(pipeline.transform, spark, opened)(frame)
        if not frame.isStreaming:
            raise UsageError(
                "TRANSFORM_NOT_STREAMING",
                "The transform gave a DataFrame that does not come from its source: it holds no stream.",
                next_step="build the result from the DataFrame that the function gets, or from the view `source`",
            )
    writer = frame.writeStream.format(f"delivered_{sink.system}").options(**without_async(sink).options)
    asynchronous = {k: v for k, v in sink.options.items() if k not in without_async(sink).options}
    writer = writer.options(**asynchronous)
    writer = writer.option("guarantee", pipeline.guarantee.value).option("pipeline", pipeline.name)
    writer = writer.option("checkpointLocation", pipeline.checkpoint).queryName(pipeline.name)
    if sink.name is not None:
        writer = writer.option("sink", sink.name)
    if pipeline.new_checkpoint:
        writer = writer.option("newCheckpoint", "accept")
    if pipeline.missing_ledger:
        writer = writer.option("missingLedger", "accept")
    if direct is not None:
        writer = mark_sink(writer, direct)
    if pipeline.transform.stateful:
        writer = writer.outputMode("update")
    with batches_fit_for(spark, frame.schema):  # a query keeps the configuration that it started with
        return writer.trigger(**pipeline.trigger.for_spark()).start()


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
    samples_max: int,
    sink_from: Mapping[str, Any] | None,
    progress: Callable[[str], None] | None,
) -> AuditReport:
    """Audit the one sink of a pipeline. Raises UsageError for more sinks, or a source that is Spark's own."""
    if len(pipeline.sinks) != 1:
        raise UsageError("SINKS_NOT_ONE", f"The pipeline names {len(pipeline.sinks)} sinks; an audit follows one.")
    if pipeline.source.is_spark_own:
        raise UsageError(
            "AUDIT_SOURCE",
            f"The source {pipeline.source.format!r} is Spark's own; an audit cannot read a range of it.",
            next_step=f"read it with the format {pipeline.source.system!r}",
        )
    spark = ready(pipeline, given)
    source = pipeline.source.source()
    transform: Any = None
    if pipeline.transform.kind != "none":
        transform = apply_transform(pipeline.transform, spark, source)
    sink: Endpoint = without_async(pipeline.sinks[0])
    spec = AuditSpec(
        pipeline=pipeline.name,
        guarantee=pipeline.guarantee,
        checkpoint=pipeline.checkpoint,
        source=source,
        sink=sink.sink(),
        sink_name=sink.name,
        transform=transform,
        id=pipeline.audit_by.get("id"),
        key=pipeline.audit_by.get("key"),
        samples_max=samples_max,
        sink_from=dict(sink_from) if sink_from is not None else None,
    )
    return run_audit(spark, spec, progress)

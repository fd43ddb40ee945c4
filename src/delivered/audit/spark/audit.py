"""Audit one sink of one pipeline in Spark: its request, and the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.audit.account import Progress, account, guarded
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest, Recompute, Sealing, Transform
from delivered.audit.spark.comparison import in_spark
from delivered.audit.spark.recompute import recompute
from delivered.contract.sink import Sink
from delivered.contract.source import Source
from delivered.engine.shard import validated
from delivered.model.capability import APPEND
from delivered.model.errors import Refused, UsageError
from delivered.model.rows import OnBadRow, Rows
from delivered.pipeline.definition import Definition, grouping_columns
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import as_started, sink_as_started
from delivered.spark.rows import Failing, apply_transform, own_views, projected
from delivered.spark.start import ready

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def audit_sink(
    pipeline: Definition,
    session: SparkSession | None,
    sink: str | None,
    samples_max: int,
    sink_from: Mapping[str, Any] | None,
    progress: Callable[[str], None] | None,
    recompute: bool = False,
    sealing: Sealing | None = None,
) -> AuditReport:
    """Audit one sink of a pipeline, against its own rows and columns.

    Args:
        sealing: None: read everything, and seal nothing. So it is with `sink_from` and `recompute`.

    Raises:
        UsageError: no such sink, several sinks and none named, or one of Spark's own sources.
    """
    spark, request = request_for(pipeline, chosen_sink(pipeline, sink), session, samples_max, sink_from, recompute)
    if sink_from is None and not recompute:
        request = replace(request, sealing=sealing)
    with own_views(pipeline.transform, spark, pipeline.sources):
        return audit(spark, request, progress)


def request_for(
    pipeline: Definition,
    chosen: Endpoint,
    session: SparkSession | None,
    samples_max: int,
    sink_from: Mapping[str, Any] | None = None,
    recompute: bool = False,
) -> tuple[SparkSession, AuditRequest]:
    """
    Raises:
        UsageError: one of Spark's own sources.
        Refused: only a recompute can judge this.
    """
    sparks = next((e for e in pipeline.sources.values() if e.is_spark_own), None)
    if sparks is not None:
        raise UsageError("AUDIT_SOURCE", format=sparks.format, system=sparks.system)
    if not recompute and pipeline.output_mode != "append" and chosen.sink().capability().write == APPEND:
        raise Refused("AUDIT_OUTPUT_MODE", output_mode=pipeline.output_mode)
    spark = ready(pipeline, session)
    sources = {n: e.source().planned() for n, e in as_started(pipeline).items()}
    sinks = pipeline.spec.open()
    by = {**pipeline.audit_by, **chosen.audit}
    return spark, AuditRequest(
        pipeline=pipeline.name,
        guarantee=pipeline.guarantee,
        checkpoint=pipeline.checkpoint,
        sources=sources,
        sink=chosen.sink(),
        sink_name=chosen.name,
        transform=_all_transforms(pipeline, chosen, spark, sources),
        dedup=pipeline.dedup,
        id=by.get("id"),
        key=by.get("key"),
        own=by.get("own"),
        samples_max=samples_max,
        sink_from=dict(sink_from) if sink_from is not None else None,
        decided_by=sinks,
        transform_version=pipeline.spec.transform,
        recompute=_recompute(pipeline, chosen) if recompute else None,
        rejects=pipeline.on_bad_row is not OnBadRow.FAIL,
        dead_letters=next((m.name for m in sinks.members if m.dead_letters), None),
    )


def _recompute(pipeline: Definition, sink: Endpoint) -> Recompute:
    facts = pipeline.transform.facts()
    keys = sink.sink().capability().write.keys or grouping_columns(pipeline.transform.sql)
    sql = pipeline.transform.kind == "sql"
    return Recompute(pipeline.output_mode, tuple(keys), facts.changing, pipeline.transform.deterministic, sql)


def chosen_sink(pipeline: Definition, sink: str | None) -> Endpoint:
    """Raises UsageError: no such sink, or several and none named."""
    endpoints = {e.name or e.sink().name: e for e in pipeline.sinks}
    if sink is None and len(endpoints) == 1:
        return next(iter(endpoints.values()))
    if sink not in endpoints:
        reason = "no sink was named" if sink is None else f"no sink is named {sink!r}"
        raise UsageError("AUDIT_SINK.UNNAMED", reason=reason, endpoints=", ".join(endpoints))
    return endpoints[sink]


def _all_transforms(
    pipeline: Definition, sink: Endpoint, spark: SparkSession, sources: Mapping[str, Source]
) -> Transform | None:
    """The pipeline's transform, followed by the sink's projection."""
    failing = Failing.FAIL if pipeline.on_bad_row is OnBadRow.FAIL else Failing.SKIP
    shared = apply_transform(pipeline.transform, spark, sources, failing=failing)
    validating = pipeline.on_bad_row is OnBadRow.DEAD_LETTER
    if sink.projection.is_all and not validating:
        return shared if pipeline.transform.kind != "none" else None

    def all_of_it(frames: Mapping[str, DataFrame]) -> DataFrame:
        expected = projected(shared(frames), sink.projection)
        return _accepted(expected, sink_as_started(pipeline, sink)) if validating else expected

    return all_of_it


def audit(spark: SparkSession, request: AuditRequest, progress: Progress | None = None) -> AuditReport:
    """Reconcile source and sink. What cannot be read yields the verdict `unknown`, not an exception.

    Args:
        progress: called at each step with its description.

    Raises:
        UsageError: the id or key expression is invalid.
    """
    say = progress or (lambda _: None)

    def run() -> AuditReport:
        if request.recompute is not None:
            return recompute(spark, request, say)
        return account(request, partial(in_spark, spark), say)

    return guarded(request, run, {"pyspark": version("pyspark")})


def _accepted(frame: DataFrame, sink: Sink) -> DataFrame:
    """The valid rows of a frame, as the sink validates them."""

    def pick(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield validated(sink, Rows(batch)).good

    return frame.mapInArrow(pick, frame.schema)

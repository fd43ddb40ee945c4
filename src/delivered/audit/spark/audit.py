"""Audit one sink of one pipeline in Spark: its request, and the job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.audit.account import Progress, account, guarded
from delivered.audit.keys import KeyShare
from delivered.audit.local import chosen_sink, request_of
from delivered.audit.recheck import Rechecked, recheck
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest, Sealing, Transform
from delivered.audit.seal import Seal
from delivered.audit.sealing import Seals
from delivered.audit.spark.comparison import in_spark
from delivered.checkpoint.folder import read_view
from delivered.checkpoint.history import audits
from delivered.contract.sink import Sink
from delivered.contract.source import Source
from delivered.engine.shard import validate
from delivered.model.errors import DeliveredError, Refused
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Rows
from delivered.model.schedule import Load
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.progress import plain_report
from delivered.pipeline.start import sink_as_started
from delivered.source import lag
from delivered.spark.compat import PYTHON_SOURCES
from delivered.spark.internals import IDLE, is_connect
from delivered.spark.rows import Failing, apply_transform, own_views, projected
from delivered.spark.settings import AUDIT_POOL
from delivered.spark.start import ready

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PROPERTY, _JOB_GROUP = "spark.scheduler.pool", "spark.jobGroup.id"


def audit_sink(
    pipeline: Definition,
    session: SparkSession | None,
    sink: str | None,
    samples_max: int,
    sink_from: Mapping[str, Any] | None,
    progress: Callable[[str], None] | None,
    recompute: bool = False,
    sealing: Sealing | None = None,
    keys: KeyShare | None = None,
) -> AuditReport:
    """Audit one sink of a pipeline, against its own rows and columns.

    Args:
        sealing: as for `request_of`.
        keys: compare only this share of the keys; by recomputing, if accounting for records cannot judge them.

    Raises:
        UsageError: no such sink, several sinks and none named, or one of Spark's own sources.
        Refused: nothing says which keys the sink has.
    """
    chosen = chosen_sink(pipeline, sink)
    if keys is not None:
        recompute = recompute or _needs_recompute(pipeline, chosen)
    spark, request = request_for(pipeline, chosen, session, samples_max, sink_from, recompute, sealing)
    if keys is not None:
        request = replace(request, keys=_numbered(keys, request))
    with own_views(pipeline.transform, spark, pipeline.sources):
        return audit(spark, request, progress)


def recheck_sink(
    pipeline: Definition,
    session: SparkSession | None,
    sink: str,
    seals: Sequence[Seal],
    wanted: Callable[[Seal], bool],
    progress: Progress,
) -> list[Rechecked]:
    """Compare sealed batches of one sink once more: `delivered.audit.recheck`."""
    spark, request = request_for(pipeline, chosen_sink(pipeline, sink), session, 0)
    with own_views(pipeline.transform, spark, pipeline.sources):
        return recheck(request, partial(in_spark, spark), seals, wanted, progress)


def request_for(
    pipeline: Definition,
    chosen: Endpoint,
    session: SparkSession | None,
    samples_max: int,
    sink_from: Mapping[str, Any] | None = None,
    recompute: bool = False,
    sealing: Sealing | None = None,
) -> tuple[SparkSession, AuditRequest]:
    """Raises as `request_of`."""
    request = request_of(pipeline, chosen, samples_max, sink_from, recompute, sealing)
    spark = ready(pipeline, session)
    return spark, replace(request, transform=_all_transforms(pipeline, chosen, spark, request.sources))


def _needs_recompute(pipeline: Definition, sink: Endpoint) -> bool:
    """Whether accounting for single records cannot judge a share of the keys."""
    mode = sink.sink().capability().write
    return pipeline.output_mode != "append" or mode.version is None or mode.conditional or not mode.upserts


def _numbered(keys: KeyShare, request: AuditRequest) -> KeyShare:
    mode, how = request.write_mode, request.recompute
    if not (mode.upserts or request.id is not None or (how is not None and how.keys)):
        raise Refused("AUDIT_KEYS.NO_KEY", sink=request.named_sink)
    view = read_view(request.checkpoint)
    known: list[Mapping[str, Any]] = [*audits(request.checkpoint)]
    with contextlib.suppress(DeliveredError):  # then the audit says so itself
        known += Seals(request, Scope(request.pipeline, request.named_sink, view.incarnation)).shares()
    return keys.after(known, request.named_sink, f"{view.incarnation}/{view.batch}")


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
            if not PYTHON_SOURCES:
                raise Refused("SPARK_VERSION.RECOMPUTE", version=spark.version)
            from delivered.audit.spark.recompute import recompute

            return recompute(spark, request, say)
        return account(request, partial(in_spark, spark), say)

    return guarded(request, run, {"pyspark": version("pyspark")})


def _accepted(frame: DataFrame, sink: Sink) -> DataFrame:
    """The valid rows of a frame, as the sink validates them."""

    def pick(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield validate(sink, Rows(batch)).good

    return frame.mapInArrow(pick, frame.schema)


# Audits of a running query in its own Spark application: in a session and a scheduler pool of their own, which gets
# what the query leaves.


def load_of(query: Any) -> Load:
    """What a query does now. It is behind if more offsets wait than its last batch took."""
    if not query.isActive:
        return Load(idle=True, behind=False)
    idle, last = query.status["message"] in IDLE, query.lastProgress
    if last is None:
        return Load(idle)
    behind = None
    for source in plain_report(last)["sources"]:
        waits = lag(source)
        took = lag({"endOffset": source.get("startOffset"), "latestOffset": source.get("endOffset")})
        if waits is not None and took is not None:
            behind = bool(behind) or waits > took
    return Load(idle, behind)


class AuditSession:
    """Where the audits of a pipeline run, one at a time.

    Args:
        spark: of the query.
        name: of the pipeline.
        own: in a session of their own, so that settings of an audit are not the query's. Views of the user are not
            there.
    """

    def __init__(self, spark: SparkSession, name: str, *, own: bool) -> None:
        self._spark = spark.newSession() if own else spark
        self._context = None if is_connect(spark) else spark.sparkContext
        self._group = f"{AUDIT_POOL}-{name}"

    @contextlib.contextmanager
    def low_priority(self) -> Iterator[SparkSession]:
        """The jobs of this thread, and only these, are in the pool, and `cancel` ends them."""
        context = self._context
        if context is None:
            yield self._spark
            return
        context.setJobGroup(self._group, "audit", interruptOnCancel=True)
        context.setLocalProperty(_PROPERTY, AUDIT_POOL)
        try:
            yield self._spark
        finally:
            for name in (_PROPERTY, _JOB_GROUP):
                context.setLocalProperty(name, None)  # type: ignore[arg-type]

    def cancel(self) -> None:
        """End the jobs of a running audit."""
        if self._context is not None:
            self._context.cancelJobGroup(self._group)

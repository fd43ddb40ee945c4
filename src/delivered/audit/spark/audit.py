"""Audit one sink of one pipeline in Spark: its request, the job, and the sink compared with its sources."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial, reduce
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.window import Window

from delivered.audit.account import Comparison, Findings, Progress, Ranges, account, guarded
from delivered.audit.evidence import locating_column, sink_partitions
from delivered.audit.local import chosen_sink, request_of
from delivered.audit.recheck import Rechecked, recheck
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest, KeyShare, Sealing, Transform
from delivered.audit.seal import Seal
from delivered.audit.sealing import Seals
from delivered.audit.spark.reconcile import Slots, hashed, reconcile, slot_of, without_order
from delivered.audit.spark.slices import SliceRows, beyond_rows, kept_plain, shuffles_fit_for, slice_frame
from delivered.audit.spark.source import (
    Deduplicated,
    FinalState,
    SentRows,
    SharedKeys,
    expressions,
    record_columns,
    shared_keys,
)
from delivered.checkpoint import read_view
from delivered.checkpoint.history import audits
from delivered.contract.sink import BoundedScan, Sink
from delivered.contract.source import Slice, Source
from delivered.engine.shard import fingerprint_seed, validate
from delivered.model.errors import DeliveredError, Refused
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Rows
from delivered.operate.continuous import Load
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.progress import plain_report
from delivered.pipeline.start import sink_as_started
from delivered.source import lag
from delivered.spark.internals import IDLE, PYTHON_SOURCES, from_arrow, is_connect
from delivered.spark.rows import Failing, apply_transform, own_views, projected
from delivered.spark.settings import AUDIT_POOL, batches_fit_for
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


@contextmanager
def in_spark(spark: SparkSession, request: AuditRequest, scope: Scope, scan: BoundedScan) -> Iterator[SparkComparison]:
    """A comparison whose rows are on the executors' disks while the context is open."""
    with ExitStack() as context:
        source = context.enter_context(closing(SentRows(spark, request)))
        probe = source.rows().drop(*([request.write_mode.delete] if request.write_mode.delete else []))
        source.keys = shared_keys(request, request.write_mode.keys, probe, from_arrow(scan.schema()))
        context.enter_context(batches_fit_for(spark, probe.schema, from_arrow(scan.schema())))
        context.enter_context(kept_plain(spark))
        yield SparkComparison(spark, request, scope, scan, source, probe, context)


class SparkComparison(Comparison):
    """A sink compared with its sources in Spark jobs.

    Args:
        probe: a frame with the columns that are written to the sink.
        context: outlives the comparison; what it persists ends with it.
    """

    def __init__(
        self,
        spark: SparkSession,
        request: AuditRequest,
        scope: Scope,
        scan: BoundedScan,
        source: SentRows,
        probe: DataFrame,
        context: ExitStack,
    ) -> None:
        self._spark, self._request, self._scope, self._scan = spark, request, scope, scan
        self._source, self._probe, self._context = source, probe, context
        self._places = Slots()
        self._again = 0
        self.sources = source.sources

    def read(self, slices: Sequence[Slice], expected: int, again: int = 0) -> tuple[int, int]:
        self._again = again
        stored = self._rows(slices, self._places).persist(StorageLevel.DISK_ONLY)
        self._context.callback(stored.unpersist)
        rows, foreign = _count(stored, self._request)
        self._context.enter_context(shuffles_fit_for(self._spark, rows + expected))
        self._own = stored.filter("own").drop("own") if self._request.own is not None else stored
        return rows, foreign

    def _rows(self, slices: Sequence[Slice], places: Slots) -> DataFrame:
        """Rows of the sink, others' among them."""
        source = self._source
        return stored_rows(
            self._spark, self._request, self._scan, slices, self._scope, self._probe, places, source.keys
        )

    def compare(self, ranges: Ranges) -> Findings:
        request, source, scope, own, read = self._request, self._source, self._scope, self._own, ranges.read
        mode = request.write_mode
        unclear, undeleted, excluded, ordered = None, 0, 0, True
        deduplicated: Deduplicated | None = None
        ahead: DataFrame | None = None
        sealed: DataFrame | None = None
        state: FinalState | None = None
        if request.dedup is not None:
            deduplicated = self._context.enter_context(
                source.deduplicated(request.dedup, scope, read.start, ranges.ends)
            )
        if mode.insert:
            sent, undecided = source.inserted(scope, read, own)
            there = own.join(undecided, "id", "left_anti")
        elif mode.upserts:
            state = source.upserted(read, deduplicated)
            state.unclear.persist(StorageLevel.DISK_ONLY)
            unclear = state.unclear.count()
            sent = source.hash_unordered(state.rows, scope)
            sent, there = (f.join(state.unclear, "id", "left_anti") for f in (sent, own))
        elif deduplicated is not None:
            coming = source.hash(scope, [read.undecided])[0] if read.undecided is not None else None
            sent, ahead, there = deduplicated.sides(own, coming)
        else:
            # In the order of the source, by which the order of records is judged.
            again = source.hash(scope, ranges.again)[0] if ranges.again and self._again else None
            optional = [source.hash(scope, ranges.optional)[0]] if ranges.optional else []
            sent, ordered = source.hash(scope, ranges.must)
            there = own
            others: list[DataFrame] = []
            if read.undecided is not None:
                optional.append(source.hash(scope, [read.undecided])[0])
            ahead = reduce(lambda one, other: one.unionByName(other), optional) if optional else None
            if self._again:
                there, ahead, others = self._without_sealed(sent, ahead, again)
            if ranges.before:
                before = without_order(source.hash(scope, ranges.before)[0])
                surplus = _copies(there, sent, *([ahead] if ahead is not None else [])).filter("nth > copies")
                sealed = before.join(surplus, "id", "left_semi")
                if ranges.sealed is not None:
                    late = _copies(sealed, self._rows(ranges.sealed, Slots()), *others).filter("nth > copies")
                    optional = [*([ahead] if ahead is not None else []), late.select(sealed.columns)]
                    ahead = reduce(lambda one, other: one.unionByName(other), optional)
        keys = source.keys
        if keys is not None:
            sent = keys.identified(sent, "id")
        with expressions(request):
            result = reconcile(sent, ahead, there, source.slots, self._places, request.samples_max, sealed)
            if state is not None and result.counts.unexpected:
                undeleted = there.join(state.deleted, "id", "left_semi").count()
            if request.own is not None and result.counts.lost and "own" in sent.columns:
                excluded = sent.filter("NOT own").count()
        dedup = deduplicated.counts if deduplicated is not None else None
        return Findings(result, ordered, undeleted, unclear, dedup, excluded, source.selected)

    def _without_sealed(
        self, sent: DataFrame, ahead: DataFrame | None, again: DataFrame | None
    ) -> tuple[DataFrame, DataFrame | None, list[DataFrame]]:
        """The sink's rows, and what may be among them, if some were compared by an earlier audit; and rows of sealed
        batches that were.

        Args:
            again: rows of sealed batches, which may be among those.
        """
        is_new = slot_of(F.col("at")) >= self._again
        wanted = sent.select("id") if ahead is None else sent.select("id").union(ahead.select("id"))
        repeated = self._own.filter(~is_new).join(wanted, "id", "left_semi")
        others = self._own.filter(~is_new).join(wanted, "id", "left_anti")
        there = self._own.filter(is_new).unionByName(repeated)
        if again is None:
            return there, ahead, [others]
        found = _copies(again, repeated).filter("nth <= copies").select(again.columns)
        return there, found if ahead is None else ahead.unionByName(found), [others, found]

    def combines(self) -> Sequence[str]:
        return beyond_rows(self._probe)


def _copies(rows: DataFrame, *others: DataFrame) -> DataFrame:
    """Each row with its number `nth` among those of its id and value, and how many `copies` of it others have."""
    copies = reduce(lambda one, other: one.union(other), [o.select("id", "low") for o in others])
    copies = copies.groupBy("id", "low").agg(F.count("*").alias("copies"))
    nth = F.row_number().over(Window.partitionBy("id", "low").orderBy("at"))
    return rows.withColumn("nth", nth).join(copies, ["id", "low"], "left").fillna(0, "copies")


def _count(stored: DataFrame, request: AuditRequest) -> tuple[int, int]:
    """Read the rows of the sink; return their number, and how many belong to other writers."""
    if request.own is None:
        return stored.count(), 0
    with expressions(request):
        (row,) = stored.agg(F.count("*").alias("rows"), F.count_if(~F.col("own")).alias("foreign")).collect()
    return int(row["rows"]), int(row["foreign"])


def stored_rows(
    spark: SparkSession,
    request: AuditRequest,
    scan: BoundedScan,
    slices: Sequence[Slice],
    scope: Scope,
    sent: DataFrame,
    places: Slots,
    keys: SharedKeys | None = None,
) -> DataFrame:
    """What a reader of the sink sees in these slices, as rows for `reconcile`.

    Args:
        sent: a frame with the columns that were written to the sink.
        places: collects the slots of these rows.
        keys: of the rows, those that are wanted; None: all.
    """
    frame: SliceRows | DataFrame = SliceRows(spark, scan, slices)
    if keys is not None and keys.by_columns:
        frame = keys.rows(slice_frame(spark, scan, slices))
    names = record_columns(request, sent, frame.schema.names).names
    located_by = locating_column(frame.schema.names, names)
    at = places.placed(sink_partitions(slices, located_by))

    def canonical(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(names)

    with expressions(request):
        rows = hashed(
            frame,
            canonical,
            fingerprint_seed(scope),
            at,
            request.id,
            request.key,
            own_sql=request.own,
            position=located_by,
            routed_by=request.sink.routed_by,
        )
    return rows if keys is None else keys.identified(rows, "id")

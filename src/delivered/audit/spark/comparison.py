"""A sink compared with its sources in Spark jobs: see `delivered.audit.account.Comparison`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.window import Window

from delivered.audit.account import Comparison, Findings, Ranges
from delivered.audit.places import locating_column, sink_partitions
from delivered.audit.request import AuditRequest
from delivered.audit.spark.keys import SharedKeys, shared_keys
from delivered.audit.spark.reconcile import Slots, hashed, reconcile, slot_of, without_order
from delivered.audit.spark.slices import SliceRows, beyond_rows, kept_plain, shuffles_fit_for, slice_frame
from delivered.audit.spark.source import Deduplicated, FinalState, SentRows, expressions, record_columns
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Slice
from delivered.engine.shard import fingerprint_seed
from delivered.model.identity import Scope
from delivered.spark.internals import from_arrow
from delivered.spark.settings import batches_fit_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
    """
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
        stored = stored_rows(
            self._spark, self._request, self._scan, slices, self._scope, self._probe, self._places, self._source.keys
        )
        stored = stored.persist(StorageLevel.DISK_ONLY)
        self._context.callback(stored.unpersist)
        rows, foreign = _count(stored, self._request)
        self._context.enter_context(shuffles_fit_for(self._spark, rows + expected))
        self._own = stored.filter("own").drop("own") if self._request.own is not None else stored
        return rows, foreign

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
            if read.undecided is not None:
                optional.append(source.hash(scope, [read.undecided])[0])
            ahead = reduce(lambda one, other: one.unionByName(other), optional) if optional else None
            if self._again:
                there, ahead = self._without_sealed(sent, ahead, again)
            if ranges.before:
                before = without_order(source.hash(scope, ranges.before)[0])
                known = sent.select("id") if ahead is None else sent.select("id").union(ahead.select("id"))
                unexpected = there.select("id").join(known, "id", "left_anti")
                sealed = before.join(unexpected, "id", "left_semi")
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
    ) -> tuple[DataFrame, DataFrame | None]:
        """The sink's rows, and what may be among them, if some were compared by an earlier audit.

        Args:
            again: rows of sealed batches, which may be among those.
        """
        is_new = slot_of(F.col("at")) >= self._again
        wanted = sent.select("id") if ahead is None else sent.select("id").union(ahead.select("id"))
        repeated = self._own.filter(~is_new).join(wanted, "id", "left_semi")
        there = self._own.filter(is_new).unionByName(repeated)
        if again is None:
            return there, ahead
        copies = repeated.groupBy("id", "low").agg(F.count("*").alias("copies"))
        nth = F.row_number().over(Window.partitionBy("id", "low").orderBy("at"))
        found = again.withColumn("nth", nth).join(copies, ["id", "low"]).filter("nth <= copies").select(again.columns)
        return there, found if ahead is None else ahead.unionByName(found)

    def combines(self) -> Sequence[str]:
        return beyond_rows(self._probe)


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
        )
    return rows if keys is None else keys.identified(rows, "id")

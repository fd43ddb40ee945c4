"""The source side of an audit: source ranges, as they were written to the sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from delivered.audit.ranges import Positions, SourceRange, SourceSet, slices_of, split_by_batch
from delivered.audit.request import AuditRequest, BadExpression, id_sql
from delivered.audit.spark.dedup import Deduplicated
from delivered.audit.spark.reconcile import Slots, by_partition, canonical_schema, hashed, without_order
from delivered.audit.spark.slices import SliceRows, keeps_partitions, slice_frame
from delivered.checkpoint import sidecar
from delivered.checkpoint.sidecar import stream_driver
from delivered.contract.source import Slice
from delivered.engine.shard import fingerprint_seed
from delivered.model.capability import WriteMode
from delivered.model.dedup import Dedup
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.ranges import backquoted
from delivered.spark.internals import from_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_AT, _PARTITION, _DELETED, _ROW = (f"__delivered_{n}" for n in ("at", "partition", "deleted", "row"))

_START_UNKNOWN = (
    "the checkpoint sidecar does not record where batch 0 started, and the source may start elsewhere today"
)


def record_columns(request: AuditRequest, sent: DataFrame, stored: Sequence[str]) -> pa.Schema:
    """Rows of `sent` as a reader of the sink sees them.

    Args:
        sent: a frame with the columns that were written to the sink.
        stored: columns of the sink.
    """
    records = canonical_schema(sent.schema, request.sink.records)
    missing = [n for n in records.names if n not in stored]
    if missing:
        raise DeliveredError("AUDIT_COLUMNS", sink=request.named_sink, columns=list(stored), missing=missing)
    return records


@contextmanager
def expressions(request: AuditRequest) -> Iterator[None]:
    """Report an invalid id, key or condition as the user's error, not as a failed audit."""
    try:
        yield
    except (AnalysisException, ParseException) as error:
        if request.id is None and request.key is None and request.own is None:
            raise
        raise BadExpression(
            "AUDIT_EXPRESSION", id=request.id, key=request.key, own=request.own, error=str(error).splitlines()[0]
        ) from None


class SentRows:
    """Ranges of the sources, through the transform."""

    def __init__(self, spark: SparkSession, request: AuditRequest) -> None:
        self.spark, self._request = spark, request
        at = request.checkpoint
        self.sources = SourceSet(
            {n: stream_driver(s, at, writes=False, name=n) for n, s in request.sources.items()},
            {n: sidecar.kept_first(at, n) for n in request.sources},
        )
        self.slots = Slots()

    def close(self) -> None:
        self.sources.close()

    def start(self) -> tuple[Positions, str]:
        """Where the pipeline's first batch started, and why that is uncertain; empty if it is certain."""
        return self.sources.first, _START_UNKNOWN if self.sources.unknown else ""

    def rows(self, slices: Sequence[Slice] = ()) -> DataFrame:
        """Rows written to the sink for slices of the sources; without slices, only the columns matter."""
        return self.transform(self._read(slices))

    def stream(self) -> DataFrame:
        """The transform over streams with the sources' columns, for its plan: of a batch, Spark drops watermarks."""
        frames = {}
        for name, source in self._request.sources.items():
            nothing = [F.lit(None).cast(c.dataType).alias(c.name) for c in from_arrow(source.schema())]
            frames[name] = self.spark.readStream.format("rate").load().select(*nothing)
        return self.transform(frames)

    def transform(self, frames: Mapping[str, DataFrame]) -> DataFrame:
        """The transform's rows from those of each source, by name."""
        if self._request.transform is None:
            (frame,) = frames.values()
            return frame
        rows: DataFrame = self._request.transform(frames)
        return rows

    def _read(self, slices: Sequence[Slice]) -> dict[str, DataFrame]:
        return {
            n: slice_frame(self.spark, s, slices_of(slices, n), rejects=self._request.rejects)
            for n, s in self._request.sources.items()
        }

    def _transform_only(self, read: DataFrame) -> DataFrame:
        (name,) = self._request.sources
        return self.transform({name: read})

    @contextmanager
    def deduplicated(
        self, dedup: Dedup, scope: Scope, start: Positions, ends: Sequence[tuple[int, Positions]]
    ) -> Iterator[Deduplicated]:
        """A deduplicated range, persisted while the context is open.

        Args:
            ends: (batch, its end), as far back as the ledger keeps them.
        """
        request, mode = self._request, self._request.write_mode
        ranges = split_by_batch(start, ends)
        slices, indices = self.sources.slices_by_range(ranges)
        (read,) = self._read(slices).values()

        def key_and_content(records: DataFrame) -> DataFrame:
            frame = self._transform_only(records)
            content = F.xxhash64(*map(backquoted, frame.columns)).alias("low")
            return frame.select(F.expr(id_sql(mode)).alias("id"), content)

        def hash_rows(records: DataFrame) -> DataFrame:
            return self.hash_unordered(self._transform_only(records), scope, "all")

        with closing(
            Deduplicated(
                read,
                indices,
                ranges,
                dedup,
                named=request.id is not None,
                hash_rows=key_and_content if mode.upserts else hash_rows,
                transform=self._transform_only,
            )
        ) as deduplicated:
            yield deduplicated

    def hash(self, scope: Scope, ranges: Sequence[tuple[Positions, Positions]]) -> tuple[DataFrame, bool]:
        """Rows for `reconcile`, and whether their partition and order are known.

        Args:
            ranges: consecutive source ranges, in every partition after those of an earlier call.
        """
        request = self._request
        slices = [piece for start, end in ranges for piece in self.sources.slices(start, end)]
        frame: SliceRows | DataFrame
        if request.transform is None:
            (source,) = request.sources.values()
            frame = SliceRows(self.spark, source, [s.data[1] for s in slices], rejects=request.rejects)
        else:
            frame = self.rows(slices)
        ordered = not slices or isinstance(frame, SliceRows) or keeps_partitions(frame)
        at = self.slots.placed(_partitions(slices)) if ordered else self.slots.unplaced("all")
        canonical, seed = request.sink.records, fingerprint_seed(scope)
        with expressions(request):
            hashes = hashed(frame, canonical, seed, at, request.id, request.key, own_sql=request.own)
        return hashes if ordered else without_order(hashes), ordered

    def hash_unordered(self, rows: DataFrame, scope: Scope, partition: str = "keys") -> DataFrame:
        """Rows for `reconcile`, without partition and order."""
        request = self._request
        with expressions(request):
            at = self.slots.unplaced(partition)
            return without_order(hashed(rows, request.sink.records, fingerprint_seed(scope), at, request.id))

    def upserted(self, read: SourceRange, deduplicated: Deduplicated | None) -> FinalState:
        """The rows that an upsert of a range must leave. Keys that an undecided batch touches are not judged."""
        mode = self._request.write_mode
        if deduplicated is not None:
            state = final_state(deduplicated.must(), mode, None)
            unclear = state.unclear.union(deduplicated.unclear_ids())
        else:
            slices = self.sources.slices(read.start, read.end) if read.end is not None else []
            frame = self.rows(slices)
            names = _partitions(slices)
            numbers = [sorted(set(names)).index(n) for n in names]
            state = final_state(frame, mode, numbers if slices and keeps_partitions(frame) else None)
            unclear = state.unclear
        if read.undecided is not None:
            coming = self.rows(self.sources.slices(*read.undecided))
            unclear = unclear.union(coming.select(F.expr(id_sql(mode)).alias("id")))
        return FinalState(state.rows, unclear.distinct(), state.deleted)

    def inserted(self, scope: Scope, read: SourceRange, stored: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Rows for `reconcile` that mode insert must leave, and the ids of keys that only an undecided batch has.

        Of a key whose rows lie in several source partitions, or were shuffled, any row may have come first: expected is
        the one that is there, if it was sent.

        Args:
            stored: the sink's rows, for `reconcile`.
        """
        mode = self._request.write_mode
        slices = self.sources.slices(read.start, read.end) if read.end is not None else []
        frame = self.rows(slices)
        names = _partitions(slices)
        partition = F.monotonically_increasing_id()  # order unknown: each row its own
        if slices and keeps_partitions(frame):
            partition = by_partition([names.index(n) for n in names])
        columns = list(map(backquoted, frame.columns))
        placed = frame.select(*columns, partition.alias(_PARTITION), F.monotonically_increasing_id().alias(_AT))
        row = F.struct(*columns)
        first = placed.groupBy(*map(backquoted, mode.keys), _PARTITION).agg(F.min_by(row, _AT).alias(_ROW))
        candidates = self.hash_unordered(first.select(f"{_ROW}.*"), scope)
        there = stored.select("id", "low", F.lit(1).alias("is_there")).distinct()
        best = Window.partitionBy("id").orderBy(F.col("is_there").desc_nulls_last(), "low")
        chosen = candidates.join(there, ["id", "low"], "left").withColumn("nth", F.row_number().over(best))
        sent = chosen.filter("nth = 1").select(candidates.columns)
        coming = self.rows(self.sources.slices(*read.undecided) if read.undecided is not None else [])
        ids = coming.select(F.expr(id_sql(mode)).alias("id")).distinct()
        return sent, ids.join(sent.select("id"), "id", "left_anti")


def _partitions(slices: Sequence[Slice]) -> list[str]:
    return [s.partition or f"slice {i}" for i, s in enumerate(slices)]


@dataclass(frozen=True)
class FinalState:
    """
    Attributes:
        rows: must be in the sink; without the delete column.
        unclear: ids (by `id_sql`) of keys whose final row the source alone does not determine.
        deleted: ids of keys whose last row is a delete; they must not be in the sink, unless unclear.
    """

    rows: DataFrame
    unclear: DataFrame
    deleted: DataFrame


def final_state(frame: DataFrame, mode: WriteMode, partitions: Sequence[int] | None) -> FinalState:
    """
    Args:
        frame: every row written to the sink.
        partitions: for each partition of `frame` the index of its source partition, rows in its order; None: rows were
            shuffled.
    """
    version = F.col(backquoted(str(mode.version)))
    deletes = F.lit(False) if mode.delete is None else F.coalesce(F.col(backquoted(mode.delete)), F.lit(False))
    kept = [c for c in frame.columns if c != mode.delete]
    placed = frame.select(
        *map(backquoted, kept),
        deletes.alias(_DELETED),
        by_partition(partitions or ()).alias(_PARTITION),
        F.monotonically_increasing_id().alias(_AT),
    )
    by_key = placed.groupBy(*map(backquoted, mode.keys)).agg(
        # Of equal versions the first one wins.
        F.max_by(F.struct(*map(backquoted, kept), _DELETED, _AT), F.struct(version, -F.col(_AT))).alias(_ROW),
        F.max(F.when(~F.col(_DELETED), F.col(_AT))).alias("newest"),
        F.min(_PARTITION).alias("first_partition"),
        F.max(_PARTITION).alias("last_partition"),
    )
    # A delete discards the key's version: a row of a later batch is inserted again, even if it is older.
    order_known = (F.col("first_partition") == F.col("last_partition")) & F.lit(partitions is not None)
    perhaps_back = F.col("newest").isNotNull() & (~order_known | (F.col("newest") > F.col(f"{_ROW}.{_AT}")))
    unclear = F.col(f"{_ROW}.{_DELETED}") & perhaps_back
    rows = by_key.filter(~F.col(f"{_ROW}.{_DELETED}")).select(
        *[F.col(f"{_ROW}.{backquoted(c)}").alias(c) for c in kept]
    )
    key = F.expr(id_sql(mode)).alias("id")
    return FinalState(rows, by_key.filter(unclear).select(key), by_key.filter(f"{_ROW}.{_DELETED}").select(key))

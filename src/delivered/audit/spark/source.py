"""The source side of an audit: source ranges, as they were written to the sink.

With dedup, what must have been written is derived from the source range alone. Spark decided batch by batch which
record of a key was first, and which were late. The audit knows only where each batch ended, from the ledger, so it
judges what is certain whatever the order within a batch:

    a key whose records lie within `within` of each other, at least one certainly not late: in the sink exactly once
    every other key: its records may or may not be in the sink

A table of keys drops no late records, but expires keys: with one, a key is judged if all its records lie within
`within`, and none had expired by the newest time of the batches before its last one.

A record is certainly not late if it is newer than the newest record of the earlier batches, minus `within`: Spark's
watermark is never higher. Which of several copies was delivered is unknown too. If the transform maps all copies to the
same row, any of them will do; otherwise the sink must hold one of them, under the id that they share; copies with
different ids are not judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    IntegralType,
    StringType,
    StructType,
)
from pyspark.sql.window import Window

from delivered.audit.evidence import DedupCounts, source_partitions
from delivered.audit.request import (
    FINER,
    AuditRequest,
    BadExpression,
    BatchRange,
    KeyShare,
    Positions,
    SourceRange,
    check_columns,
    id_sql,
    slices_of,
    split_by_batch,
)
from delivered.audit.sealing import open_sources
from delivered.audit.spark.reconcile import Slots, by_partition, canonical_schema, hashed, without_order
from delivered.audit.spark.slices import SliceRows, keeps_partitions, slice_frame
from delivered.contract.source import Slice
from delivered.engine.shard import fingerprint_seed
from delivered.model.capability import Dedup, WriteMode
from delivered.model.identity import Scope
from delivered.model.rows import backquoted
from delivered.pipeline.transform import TIME, key_columns
from delivered.spark.internals import from_arrow, physical_plan
from delivered.spark.rows import with_keys

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


_PARTITION, _DELETED, _ROW = (f"__delivered_{n}" for n in ("partition", "deleted", "row"))


def record_columns(request: AuditRequest, sent: DataFrame, stored: Sequence[str]) -> pa.Schema:
    """Rows of `sent` as a reader of the sink sees them.

    Args:
        sent: a frame with the columns that were written to the sink.
        stored: columns of the sink.
    """
    records = canonical_schema(sent.schema, request.sink.records)
    check_columns(request, records.names, stored)
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
            "AUDIT_EXPRESSION.SPARK", id=request.id, key=request.key, own=request.own, error=str(error).splitlines()[0]
        ) from None


class SentRows:
    """Ranges of the sources, through the transform.

    Attributes:
        keys: of the rows, those that are wanted; None: all.
    """

    def __init__(self, spark: SparkSession, request: AuditRequest) -> None:
        self.spark, self._request = spark, request
        self.sources = open_sources(request)
        self.slots = Slots()
        self.keys: SharedKeys | None = None

    def close(self) -> None:
        self.sources.close()

    def rows(self, slices: Sequence[Slice] = ()) -> DataFrame:
        """Rows written to the sink for slices of the sources; without slices, only the columns matter."""
        return self.shared(self.transform(self._read(slices)))

    def shared(self, rows: DataFrame) -> DataFrame:
        """Those of `keys`."""
        return rows if self.keys is None else self.keys.rows(rows)

    @property
    def selected(self) -> str:
        """Where rows of other keys are dropped, for a report; empty: they are not."""
        if self.keys is None:
            return ""
        # Reads nothing: a slice of each source, for Spark's plan.
        return self.keys.selected(self.rows([Slice((name, None)) for name in self._request.sources]))

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
        return self.shared(self.transform({name: read}))

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
        at = self.slots.placed(source_partitions(slices)) if ordered else self.slots.unplaced("all")
        canonical, seed = request.sink.records, fingerprint_seed(scope)
        with expressions(request):
            route = request.sink.routed_by
            hashes = hashed(frame, canonical, seed, at, request.id, request.key, own_sql=request.own, routed_by=route)
        return hashes if ordered else without_order(hashes), ordered

    def hash_unordered(self, rows: DataFrame, scope: Scope, partition: str = "keys") -> DataFrame:
        """Rows for `reconcile`, without partition and order."""
        request = self._request
        with expressions(request):
            at = self.slots.unplaced(partition)
            seed, route = fingerprint_seed(scope), request.sink.routed_by
            return without_order(hashed(rows, request.sink.records, seed, at, request.id, routed_by=route))

    def upserted(self, read: SourceRange, deduplicated: Deduplicated | None) -> FinalState:
        """The rows that an upsert of a range must leave. Keys that an undecided batch touches are not judged."""
        mode = self._request.write_mode
        if deduplicated is not None:
            state = final_state(deduplicated.must(), mode, None)
            unclear = state.unclear.union(deduplicated.unclear_ids())
        else:
            slices = self.sources.slices(read.start, read.end) if read.end is not None else []
            frame = self.rows(slices)
            names = source_partitions(slices)
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
        names = source_partitions(slices)
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


_OWN = "__delivered_once_"
_RANGE, _AT, _LATE, _COPIES, _RANK, _JUDGED, _ALIKE, _UNTIL, _TIMES = (
    f"{_OWN}{n}" for n in ("range", "at", "late", "copies", "rank", "judged", "alike", "until", "times")
)
_COORDINATES = ("topic", "partition", "offset", "timestamp", "timestampType")
"""Columns in which copies of the same record differ."""

Rows = Callable[["DataFrame"], "DataFrame"]


class Deduplicated:
    """A deduplicated source range, ready to be compared with a sink; on the executors' disks until `close`.

    Copies that the transform maps to different rows are found by comparing the rows of all copies with those if every
    copy were like the first one. Of some ids only the value differs, so one of the values must be in the sink; of
    others even the number of rows, so they are not judged.

    Args:
        read: records; its partition i is a slice of `ranges[indices[i]]`.
        named: the audit identifies sink records by an id rather than by all their columns.
        hash_rows: source records -> the rows that the sink must hold for them, with at least `id`, `low` and `high`.
        transform: source records -> rows written to the sink.
    """

    def __init__(
        self,
        read: DataFrame,
        indices: Sequence[int],
        ranges: Sequence[BatchRange],
        dedup: Dedup,
        *,
        named: bool,
        hash_rows: Rows,
        transform: Rows,
    ) -> None:
        self._columns, self._hash_rows, self._transform = read.columns, hash_rows, transform
        placed = with_keys(read, dedup).withColumns(
            {_RANGE: by_partition(indices), _AT: F.monotonically_increasing_id(), TIME: F.unix_micros(TIME)}
        )
        self._all = _judge(placed, _late_until(placed, ranges, dedup), dedup, self._columns)
        self._all.persist(StorageLevel.DISK_ONLY)
        # Without an id, rows of differing copies have nothing in common in the sink.
        self._certain = F.col(_JUDGED) if named else F.col(_JUDGED) & F.col(_ALIKE)
        self._values = _compare_copies(hash_rows(self._copies()), hash_rows(self._first_repeated()))
        self._values.persist(StorageLevel.DISK_ONLY)
        self._unjudged_ids = self._values.where("other_number").select("id").distinct()
        self._either = self._values.where("NOT other_number AND other_value AND is > 0").select("id", "low")

    def close(self) -> None:
        self._values.unpersist()
        self._all.unpersist()

    def must(self) -> DataFrame:
        """Rows written to the sink for keys that must be there exactly once."""
        return self._transform(self._once())

    def unclear_ids(self) -> DataFrame:
        """Ids of keys that cannot be judged in full, for a sink that keeps one row per key."""
        unclear = self._hash_rows(self._perhaps()).select("id")
        return unclear.union(self._unjudged_ids).union(self._either.select("id"))

    def sides(self, stored: DataFrame, coming: DataFrame | None) -> tuple[DataFrame, DataFrame | None, DataFrame]:
        """What must be in the sink, what may be, and what is, for `reconcile`.

        Args:
            stored: what is in the sink.
            coming: rows of the undecided batch.
        """
        must = self._hash_rows(self._once())
        may = [self._hash_rows(self._perhaps())] if self.counts.unclear else []
        if self.counts.unlike_unclear:
            may.append(self._hash_rows(self._copies()).join(self._unjudged_ids, "id", "left_semi"))
            must = must.join(self._unjudged_ids, "id", "left_anti")
        if coming is not None:
            may.append(without_order(coming))  # the shuffle by key loses the order
        if self.counts.unlike:
            must, stored, *may = (_with_one_value(f, self._either) for f in (must, stored, *may))
        return must, union(may), stored

    def _once(self) -> DataFrame:
        """One record of each key that must be in the sink exactly once."""
        return self._where(self._certain & (F.col(_RANK) == 1))

    def _perhaps(self) -> DataFrame:
        """Records of keys that cannot be judged."""
        return self._where(~self._certain)

    def _copies(self) -> DataFrame:
        """All records of keys that repeat in the source and must be in the sink exactly once."""
        return self._where(self._certain & (F.col(_COPIES) > 1))

    def _first_repeated(self) -> DataFrame:
        """As many records as `_copies`, but each key's first one repeated."""
        first = self._all.where(self._certain & (F.col(_COPIES) > 1) & (F.col(_RANK) == 1))
        times = F.explode(F.sequence(F.lit(1), F.col(_COPIES))).alias(_TIMES)
        return first.select(*map(backquoted, self._columns), times).drop(_TIMES)

    def _where(self, condition: Column) -> DataFrame:
        return self._all.where(condition).select(*map(backquoted, self._columns))

    @cached_property
    def counts(self) -> DedupCounts:
        certain, copies, one = self._certain, F.col(_COPIES), F.lit(1).cast("long")
        keys = self._all.where(F.col(_RANK) == 1).agg(
            F.sum(copies).alias("records"),
            F.sum(F.when(certain, copies - 1)).alias("deduplicated"),
            F.sum(F.when(certain, one)).alias("judged"),
            F.sum(F.when(~certain, one)).alias("unclear"),
            F.sum(F.when(~F.col(_JUDGED) & F.col(_LATE), one)).alias("late"),
        )
        ids = self._values.agg(
            F.count_distinct(F.when(F.expr("NOT other_number AND other_value"), F.col("id"))).alias("unlike"),
            F.count_distinct(F.when(F.col("other_number"), F.col("id"))).alias("unlike_unclear"),
        )
        counted = {k: v for frame in (keys, ids) for k, v in frame.collect()[0].asDict().items()}
        return DedupCounts(**{k: int(v or 0) for k, v in counted.items()})


def union(frames: Sequence[DataFrame]) -> DataFrame | None:
    if not frames:
        return None
    first, *others = frames
    for frame in others:
        first = first.unionByName(frame)
    return first


def _late_until(placed: DataFrame, ranges: Sequence[BatchRange], dedup: Dedup) -> list[int]:
    """For each range, the time (microseconds) up to which a record of it may be late."""
    rows = placed.groupBy(_RANGE).agg(F.max(TIME).alias("newest")).collect()
    newest = {r[_RANGE]: r["newest"] or 0 for r in rows}
    until: list[int] = []
    before = 0
    for number, part in enumerate(ranges):
        after = max(before, newest.get(number, 0))
        # Spark's watermark begins at 0, 1970.
        until.append(max(0, (after if part.several else before) - dedup.within_ms * 1_000))
        before = after
    return until


def _judge(placed: DataFrame, late_until: Sequence[int], dedup: Dedup, columns: Sequence[str]) -> DataFrame:
    """One shuffle by key: a key's records meet in one task, which sorts on disk."""
    limits = F.element_at(F.array(*map(F.lit, late_until)), F.col(_RANGE) + 1) if late_until else F.lit(0)
    content = [backquoted(c) for c in columns if c not in _COORDINATES]
    content_hash = F.xxhash64(*content) if content else F.lit(0).cast("long")
    late = F.lit(False) if dedup.in_table else F.coalesce(F.col(TIME) <= limits, F.lit(False))
    marked = placed.withColumn(_LATE, late).withColumn(_ALIKE, content_hash).withColumn(_UNTIL, limits.cast("long"))
    same = Window.partitionBy(*key_columns(dedup))
    first, last = F.min(TIME).over(same), F.max(TIME).over(same)
    timeless = F.max(F.col(TIME).isNull()).over(same)
    near = ~timeless & (last - first <= F.lit(dedup.within_ms * 1_000))
    if dedup.in_table:  # none of the key's records expired before its last one arrived
        near = near & ((F.count(F.lit(1)).over(same) == 1) | (first >= F.max(_UNTIL).over(same)))
    all_late = F.min(_LATE).over(same)
    return marked.select(
        *map(backquoted, columns),
        F.count(F.lit(1)).over(same).alias(_COPIES),
        F.row_number().over(same.orderBy(_RANGE, _AT)).alias(_RANK),
        (near & ~all_late).alias(_JUDGED),
        all_late.alias(_LATE),
        (F.min(_ALIKE).over(same) == F.max(_ALIKE).over(same)).alias(_ALIKE),
    )


def _compare_copies(real: DataFrame, alike: DataFrame) -> DataFrame:
    """By id and value: how often the rows of all copies have it, and whether that id's values differ from what they
    would be if all copies were alike."""

    def side(rows: DataFrame, name: str) -> DataFrame:
        counts = [F.lit(int(name == n)).cast("long").alias(n) for n in ("is", "if_alike")]
        return rows.select("id", "low", *counts)

    both = side(real, "is").unionByName(side(alike, "if_alike"))
    by_value = both.groupBy("id", "low").agg(F.sum("is").alias("is"), F.sum("if_alike").alias("if_alike"))
    same = Window.partitionBy("id")
    return by_value.select(
        "id",
        "low",
        "is",
        (F.sum("is").over(same) != F.sum("if_alike").over(same)).alias("other_number"),
        F.max(F.col("is") != F.col("if_alike")).over(same).alias("other_value"),
    )


def _with_one_value(rows: DataFrame, either: DataFrame) -> DataFrame:
    """Rows for `reconcile` in which interchangeable values are equal."""
    marked = rows.join(either.withColumn(f"{_OWN}one", F.lit(True)), ["id", "low"], "left")
    one = F.coalesce(F.col(f"{_OWN}one"), F.lit(False))
    return marked.select(
        *[
            F.when(one, F.xxhash64("id")).otherwise(F.col(c)).alias(c) if c in ("low", "high") else F.col(c)
            for c in rows.columns
        ]
    )


# Rows of one share of the keys.

_SHARE = "xxhash64("
_OPERATOR = re.compile(r"^[\s:+*|-]*(?:\(\d+\)\s*)?([A-Za-z]+)(.*)")
_UNSPECIFIC = frozenset(
    {
        "AdaptiveSparkPlan",
        "BatchScan",
        "ColumnarToRow",
        "Filter",
        "InputAdapter",
        "Project",
        "Range",
        "WholeStageCodegen",
    }
)
_SOURCE = ("MapInArrow", "PythonMapInArrow")
FROM_SOURCE = "from the rows of the source, before the transform combines them"
FROM_TRANSFORM = "from the rows of the transform"
FROM_RECORDS = "from the rows of the transform as the sink stores them"


def bucket(values: Sequence[Column], of: int) -> Column:
    """The number, from 1, of the share of a key.

    XXH64 with Spark's seed, over strings and bytes as they are, integers of any width as 64 bits, and so on: the same
    key has the same share in every run, and on both sides of an audit.
    """
    return F.pmod(F.xxhash64(*values), F.lit(of)).cast("int") + F.lit(1)


def _like(kind: DataType) -> str:
    """What a type is to `_value`; empty: both sides of an audit may have it in different forms."""
    match kind:
        case StringType() | BinaryType():
            return "bytes"
        case IntegralType():
            return "integer"
        case BooleanType() | DateType():
            return kind.typeName()
        case _:
            return ""


def _value(name: str, kind: DataType) -> Column:
    column = F.col(backquoted(name))
    return column.cast("bigint") if isinstance(kind, IntegralType) else column


class SharedKeys:
    """Drops rows of other shares.

    Where a key has the same form on both sides, whatever the sink makes of it, by the columns of the transform's rows:
    Spark moves such a condition below an aggregation by them, and down to the rows of the source, if that changes no
    result. Otherwise by the text that identifies a row in the audit, of both sides as the sink stores them.

    Args:
        names: the key's columns; empty: it is an expression.
        sent: columns before the sink takes them; stored: of the sink; records: of `sent`, as the sink stores them.
    """

    def __init__(
        self, share: KeyShare, names: Sequence[str], sent: StructType, records: StructType, stored: StructType
    ) -> None:
        self.share, self._names = share, names
        self.by_columns = bool(names) and all(
            n in s.names and _like(s[n].dataType) and _like(s[n].dataType) == _like(sent[n].dataType)
            for n in names
            for s in (sent, records, stored)
        )

    def rows(self, frame: DataFrame) -> DataFrame:
        """Rows of the transform or of the sink."""
        if not self.by_columns:
            return frame
        return frame.where(self.number(frame) == F.lit(self.share.number))

    def number(self, frame: DataFrame) -> Column:
        """The share of a row's key, by its columns."""
        return bucket([_value(n, frame.schema[n].dataType) for n in self._names], self.share.of)

    def identified(self, frame: DataFrame, id_column: str) -> DataFrame:
        """Rows with the text that identifies them."""
        if self.by_columns:
            return frame
        text = F.regexp_replace(id_column, FINER, "}")
        return frame.where(bucket([text], self.share.of) == F.lit(self.share.number))

    def selected(self, frame: DataFrame) -> str:
        """Where Spark drops the rows of other shares, for a report."""
        if not self.by_columns:
            return FROM_RECORDS
        return FROM_SOURCE if _is_lowest(physical_plan(frame)) else FROM_TRANSFORM


def _is_lowest(plan: str) -> bool:
    """Whether the condition on the share stands right above the reading of each source."""
    lines = [m for line in plan.splitlines() if not line.startswith("==") and (m := _OPERATOR.match(line))]
    below = [m[1] for m in lines if m[1] not in _UNSPECIFIC or _SHARE in m[2]]
    at = [i for i, m in enumerate(below) if m == "Filter"]
    reads = [i for i, name in enumerate(below) if name in _SOURCE]
    return bool(at) and len(at) == len(reads) and all(r == a + 1 for a, r in zip(at, reads, strict=True))


def shared_keys(request: AuditRequest, names: Sequence[str], sent: DataFrame, stored: StructType) -> SharedKeys | None:
    """The rows that an audit compares; None: all.

    Args:
        names: the key's columns; empty: it is an expression.
        sent: a frame with the columns that are written to the sink.
    """
    share, mode = request.keys, request.write_mode
    if share is None:
        return None
    # Which rows were written depends on rows of other keys, or is counted for all keys together.
    together = bool(mode.replaces) or mode.expected is not None
    records = from_arrow(canonical_schema(sent.schema, request.sink.records))
    return SharedKeys(share, () if together else names, sent.schema, records, stored)

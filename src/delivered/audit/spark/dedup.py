"""What a deduplicating pipeline must have written to a sink, derived from the source range alone.

Spark decided batch by batch which record of a key was first, and which were late. The audit knows only where each batch
ended, from the ledger, so it judges what is certain whatever the order within a batch:

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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.window import Window

from delivered.audit.evidence import DedupCounts
from delivered.audit.ranges import BatchRange
from delivered.audit.spark.reconcile import by_partition, without_order
from delivered.model.dedup import Dedup
from delivered.model.ranges import backquoted
from delivered.spark.rows import TIME, key_columns, with_keys

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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
        self.counts = self._count()

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

    def _count(self) -> DedupCounts:
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

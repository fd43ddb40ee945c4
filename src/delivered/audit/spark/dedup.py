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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.window import Window

from delivered.audit.classes import DedupCounts
from delivered.audit.dedup import Stretch
from delivered.model.dedup import Dedup
from delivered.model.ranges import backquoted
from delivered.spark.dedup import TIME, key_columns, with_keys

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_OWN = "__delivered_once_"
_STRETCH, _AT, _LATE, _COPIES, _RANK, _JUDGED, _ALIKE, _UNTIL = (
    f"{_OWN}{n}" for n in ("stretch", "at", "late", "copies", "rank", "judged", "alike", "until")
)
_COORDINATES = ("topic", "partition", "offset", "timestamp", "timestampType")
"""Columns in which copies of the same record differ."""

Rows = Callable[["DataFrame"], "DataFrame"]
"""Source records -> the rows that the sink must hold for them, with at least `id`, `low` and `high`."""


class Judged:
    """The records of a range, each with what is certain about it; on the executors' disks until `close`.

    Args:
        read: its partition i is slice i of `cut`.
        named: the audit identifies sink records by an id rather than by all their columns.
    """

    def __init__(
        self, read: DataFrame, numbers: Sequence[int], parts: Sequence[Stretch], dedup: Dedup, *, named: bool
    ) -> None:
        self._columns = read.columns
        self._named = named
        keyed = with_keys(read, dedup)
        stretch = F.element_at(F.array(*map(F.lit, numbers)), F.spark_partition_id() + 1) if numbers else F.lit(0)
        placed = keyed.withColumn(_STRETCH, stretch).withColumn(_AT, F.monotonically_increasing_id())
        placed = placed.withColumn(TIME, F.unix_micros(TIME))
        self._all = _judged(placed, _late_until(placed, parts, dedup), dedup, self._columns)
        self._all.persist(StorageLevel.DISK_ONLY)

    def close(self) -> None:
        self._all.unpersist()

    def once(self) -> DataFrame:
        """One record of each key that must be in the sink exactly once."""
        return self._of(self._certain & (F.col(_RANK) == 1))

    def perhaps(self) -> DataFrame:
        """Records of keys that cannot be judged."""
        return self._of(~self._certain)

    def copies(self) -> DataFrame:
        """All records of keys that repeat in the source and must be in the sink exactly once."""
        return self._of(self._certain & (F.col(_COPIES) > 1))

    def repeated(self) -> DataFrame:
        """As many records as `copies`, but each key's first one repeated."""
        times = F.explode(F.sequence(F.lit(1), F.col(_COPIES))).alias(f"{_OWN}time")
        first = self._all.where(self._certain & (F.col(_COPIES) > 1) & (F.col(_RANK) == 1))
        return first.select(*map(backquoted, self._columns), times).drop(f"{_OWN}time")

    def counts(self) -> DedupCounts:
        certain, copies = self._certain, F.col(_COPIES)
        one = F.lit(1).cast("long")
        (row,) = (
            self._all.where(F.col(_RANK) == 1)
            .agg(
                F.sum(copies).alias("records"),
                F.sum(F.when(certain, copies - 1)).alias("deduplicated"),
                F.sum(F.when(certain, one)).alias("judged"),
                F.sum(F.when(~certain, one)).alias("unclear"),
                F.sum(F.when(~F.col(_JUDGED) & F.col(_LATE), one)).alias("late"),
            )
            .collect()
        )
        return DedupCounts(**{k: int(v or 0) for k, v in row.asDict().items()})

    @property
    def _certain(self) -> Column:
        # Without an id, rows of unlike copies have nothing in common in the sink.
        return F.col(_JUDGED) if self._named else F.col(_JUDGED) & F.col(_ALIKE)

    def _of(self, condition: Column) -> DataFrame:
        return self._all.where(condition).select(*map(backquoted, self._columns))


def _late_until(placed: DataFrame, parts: Sequence[Stretch], dedup: Dedup) -> list[int]:
    """For each stretch, the time (microseconds) up to which a record of it may be late."""
    newest = {r[_STRETCH]: r["newest"] for r in placed.groupBy(_STRETCH).agg(F.max(TIME).alias("newest")).collect()}
    found: list[int] = []
    seen = 0
    for number, part in enumerate(parts):
        own = newest.get(number)
        after = max(seen, own if own is not None else 0)
        # Spark's watermark begins at 0, 1970.
        found.append(max(0, (after if part.several else seen) - dedup.within_ms * 1_000))
        seen = after
    return found


def _judged(placed: DataFrame, late_until: Sequence[int], dedup: Dedup, columns: Sequence[str]) -> DataFrame:
    """One shuffle by key: a key's records meet in one task, which sorts on disk."""
    limits = F.element_at(F.array(*map(F.lit, late_until)), F.col(_STRETCH) + 1) if late_until else F.lit(0)
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
        F.row_number().over(same.orderBy(_STRETCH, _AT)).alias(_RANK),
        (near & ~all_late).alias(_JUDGED),
        all_late.alias(_LATE),
        (F.min(_ALIKE).over(same) == F.max(_ALIKE).over(same)).alias(_ALIKE),
    )


@dataclass(frozen=True)
class Unlike:
    """Copies that the transform maps to different rows.

    Attributes:
        ids: those for which even the number of rows differs between copies.
        either: (id, low): one of these values must be in the sink under the id.
        ids_count, either_count: number of ids in each.
        held: on the executors' disks until `close`.
    """

    ids: DataFrame
    either: DataFrame
    ids_count: int
    either_count: int
    held: DataFrame

    def close(self) -> None:
        self.held.unpersist()


def unlike(judged: Judged, rows: Rows) -> Unlike:
    """Compare the rows of all copies with those if every copy were like the first one."""
    both = _side(rows(judged.copies()), 1).unionByName(_side(rows(judged.repeated()), 0))
    by_value = both.groupBy("id", "low").agg(F.sum("is").alias("is"), F.sum("if_alike").alias("if_alike"))
    same = Window.partitionBy("id")
    marked = by_value.select(
        "id",
        "low",
        "is",
        (F.sum("is").over(same) != F.sum("if_alike").over(same)).alias("other_number"),
        F.max(F.col("is") != F.col("if_alike")).over(same).alias("other_value"),
    ).persist(StorageLevel.DISK_ONLY)
    number, value = F.col("other_number"), F.col("other_value")
    ids = marked.where(number).select("id").distinct()
    either = marked.where(~number & value & (F.col("is") > 0)).select("id", "low")
    (counted,) = marked.agg(
        F.count_distinct(F.when(number, F.col("id"))).alias("ids"),
        F.count_distinct(F.when(~number & value, F.col("id"))).alias("either"),
    ).collect()
    return Unlike(ids, either, int(counted["ids"]), int(counted["either"]), marked)


def _side(rows: DataFrame, real: int) -> DataFrame:
    return rows.select(
        "id", "low", F.lit(real).cast("long").alias("is"), F.lit(1 - real).cast("long").alias("if_alike")
    )


class Once:
    """A deduplicated source range, ready to be compared with a sink.

    Args:
        rows: source records -> rows for `reconcile`.
        transformed: source records -> rows written to the sink.
    """

    def __init__(self, judged: Judged, rows: Rows, transformed: Rows) -> None:
        self._judged = judged
        self._rows = rows
        self._transformed = transformed
        self._unlike = unlike(judged, rows)
        self.counts = replace(judged.counts(), unlike=self._unlike.either_count, unlike_unclear=self._unlike.ids_count)

    def close(self) -> None:
        self._unlike.close()

    def must(self) -> DataFrame:
        """Rows written to the sink for keys that must be there exactly once."""
        return self._transformed(self._judged.once())

    def unclear_ids(self) -> DataFrame:
        """Ids of keys that cannot be judged in full, for a sink that keeps one row per key."""
        perhaps = self._rows(self._judged.perhaps()).select("id")
        return perhaps.union(self._unlike.ids).union(self._unlike.either.select("id"))

    def sides(self, found: DataFrame, coming: DataFrame | None) -> tuple[DataFrame, DataFrame | None, DataFrame]:
        """What must be in the sink, what may be, and what is, for `reconcile`.

        Args:
            found: what is in the sink.
            coming: rows of the undecided batch.
        """
        must, there = self._rows(self._judged.once()), found
        may = self._rows(self._judged.perhaps()) if self.counts.unclear else None
        if self._unlike.ids_count:
            loose = self._rows(self._judged.copies()).join(self._unlike.ids, "id", "left_semi")
            must = must.join(self._unlike.ids, "id", "left_anti")
            may = loose if may is None else may.unionByName(loose)
        if coming is not None:
            coming = coming.withColumn("key_hash", F.lit(None).cast("long"))  # the shuffle by key loses the order
            may = coming if may is None else may.unionByName(coming)
        if self._unlike.either_count:
            must, there = (as_one_value(f, self._unlike.either) for f in (must, there))
            may = as_one_value(may, self._unlike.either) if may is not None else None
        return must, may, there


def as_one_value(rows: DataFrame, either: DataFrame) -> DataFrame:
    """Rows for `reconcile` in which interchangeable values are equal."""
    marked = rows.join(either.withColumn(f"{_OWN}one", F.lit(True)), ["id", "low"], "left")
    one = F.coalesce(F.col(f"{_OWN}one"), F.lit(False))
    return marked.select(
        *[
            F.when(one, F.xxhash64("id")).otherwise(F.col(c)).alias(c) if c in ("low", "high") else F.col(c)
            for c in rows.columns
        ]
    )

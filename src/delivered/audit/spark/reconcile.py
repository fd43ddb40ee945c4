"""Reconcile as Spark aggregations: only bounded samples and sums reach the driver.

`tests/support/reconcile.py` defines the classes record by record; a test compares the two. One pass over each side,
one shuffle by id, one by key for the order. The sides are unioned and counted rather than joined, so null ids and
heavily repeated ids need no special case. Summing before the shuffle would not make it smaller where each record occurs
once on each side, and took a third of the audit's processor time.

All sums and comparisons are on 64-bit numbers, which Spark aggregates in a hash table; for strings and structs it sorts
all rows. So a record's position is one number, `at`: the slot of its slice, then its row in the slice. Details of the
few damaged records are looked up afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.types import LongType, StringType, StructField, StructType
from pyspark.sql.window import Window

from delivered.audit.evidence import ROUTE, ROW_BITS, SHOWN_LENGTH, Counts, Damage, PartitionLine, Places, Sample
from delivered.audit.judge import Result
from delivered.audit.spark.slices import Mapper, SliceRows
from delivered.model.fingerprint import Fingerprint, lanes, record_hashes
from delivered.model.rows import fitted
from delivered.spark.internals import VALID_TEXT, from_arrow, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

_OWN = "__delivered_"
_LOW, _HIGH, _OTHER, _POSITION = (f"{_OWN}{name}" for name in ("low", "high", "other", "position"))
_LIMBS = ((0, 24), (24, 24), (48, 16))
"""64-bit hashes are summed in three parts of at most 24 bits: no overflow below 2**39 records."""

_SUMS = [f"{side}_{name}_{start}" for side in ("must", "there") for name in ("low", "high") for start, _ in _LIMBS]
_SIDES = ("must", "may", "there", "sealed")

Canonical = Callable[[pa.RecordBatch], pa.RecordBatch]


def canonical_schema(columns: StructType, canonical: Canonical) -> pa.Schema:
    """The columns that `canonical` makes of rows with these columns."""
    return canonical(pa.RecordBatch.from_pylist([], schema=to_arrow(columns))).schema


def by_partition(values: Sequence[int]) -> Column:
    """For each row the value of its Spark partition; without values, 0."""
    return F.element_at(F.array(*map(F.lit, values)), F.spark_partition_id() + 1) if values else F.lit(0)


def slot_of(at: Column) -> Column:
    """The slot of a position."""
    return F.shiftright(at, ROW_BITS).cast("int")


def without_order(hashes: DataFrame) -> DataFrame:
    """Rows for `reconcile` whose order is not judged."""
    return hashes.withColumn("key_hash", F.lit(None).cast("long"))


def hashed(
    frame: DataFrame | SliceRows,
    canonical: Canonical,
    seed: int,
    at: Column,
    id_sql: str | None = None,
    key_sql: str | None = None,
    *,
    own_sql: str | None = None,
    position: str | None = None,
    routed_by: str | None = None,
) -> DataFrame:
    """One small row per record: id, hash of the value, hash of the key, position.

    Args:
        canonical: maps rows of `frame` to rows as a reader of the sink sees them.
        at: position of a record, from `Slots`.
        id_sql, key_sql: SQL over the canonical columns. No id: all columns.
        own_sql: SQL condition for records of this pipeline, kept as the column `own`.
        position: column of `frame` that locates the record for users, kept as `position`.
        routed_by: column of `frame` that belongs to a record's id, and not to its hash; SQL may name it.
    """
    records = from_arrow(canonical_schema(frame.schema, canonical))
    route = [StructField(routed_by, StringType())] if routed_by is not None else []
    own = [_LOW, _HIGH, _OTHER, *([_POSITION] if position is not None else [])]
    schema = StructType([*records.fields, *route, *(StructField(name, LongType()) for name in own)])
    rows = frame.mapInArrow(_hasher(canonical, seed, position, routed_by, to_arrow(schema)), schema)
    by_content = F.lower(F.concat(F.lpad(F.hex(_LOW), 16, "0"), F.lpad(F.hex(_OTHER), 16, "0")))
    named = F.expr(id_sql).cast("string") if id_sql else F.lit(None).cast("string")
    routed = F.concat(named, F.lit(ROUTE), F.col(routed_by)) if routed_by is not None else named
    key_sql = key_sql or ("key" if "key" in records.names else None)
    key = F.expr(key_sql) if key_sql else F.lit(None).cast("string")
    return rows.select(
        F.coalesce(routed, by_content).alias("id"),
        (named.isNull() if id_sql else F.lit(False)).cast("int").alias("null_id"),
        F.col(_LOW).alias("low"),
        F.col(_HIGH).alias("high"),
        F.when(key.isNotNull(), F.xxhash64(key)).alias("key_hash"),
        F.substring(F.expr(VALID_TEXT.format(f"cast(({key_sql}) as string)")), 1, SHOWN_LENGTH).alias("shown")
        if key_sql
        else key.alias("shown"),
        at.cast("long").alias("at"),
        *([F.col(_POSITION).alias("position")] if position is not None else []),
        *([F.coalesce(F.expr(own_sql).cast("boolean"), F.lit(False)).alias("own")] if own_sql is not None else []),
    )


def _hasher(canonical: Canonical, seed: int, position: str | None, routed_by: str | None, schema: pa.Schema) -> Mapper:
    import numpy as np

    def hash_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            records = canonical(batch)
            hashes = record_hashes(records, seed)
            low, high = lanes(hashes)
            route = {routed_by: batch.column(routed_by)} if routed_by is not None else {}
            names = [*records.schema.names, *route]
            identified = pa.RecordBatch.from_arrays([*records.columns, *route.values()], names=names)
            own = {
                _LOW: pa.array(low.view(np.int64)),
                _HIGH: pa.array(high.view(np.int64)),
                # A second, independent hash: 64 bits would collide by chance, 128 do not.
                _OTHER: pa.array(record_hashes(identified, ~seed).view(np.int64)),
                **({_POSITION: batch.column(position).cast(pa.int64())} if position is not None else {}),
            }
            columns = [*identified.columns, *own.values()]
            yield fitted(pa.RecordBatch.from_arrays(columns, names=[*names, *own]), schema)

    return hash_all


class Slots(Places):
    """Positions of the rows of frames."""

    def placed(self, names: Sequence[str]) -> Column:
        """Positions of the rows of a frame whose partition i is a slice of `names[i]`. Later calls add later slots."""
        return F.monotonically_increasing_id() + F.lit(self.add(names) << ROW_BITS)

    def unplaced(self, name: str) -> Column:
        """As `placed`, for a frame whose rows were shuffled: all at one position in `name`."""
        return F.lit(self.add([name]) << ROW_BITS)

    def partition(self, at: Column) -> Column:
        """Index of the partition."""
        slot, numbers = slot_of(at), self.partitions()
        return slot if numbers == list(range(len(numbers))) else F.get(F.lit(numbers), slot)


def reconcile(
    sent: DataFrame,
    ahead: DataFrame | None,
    stored: DataFrame,
    origins: Slots,
    places: Slots,
    samples_max: int = 20,
    sealed: DataFrame | None = None,
) -> Result:
    """Classify every record.

    Args:
        sent: from `hashed`: what must be in the sink.
        ahead: what may be in the sink: rows of started, undecided batches.
        stored: what is in the sink.
        origins: slots of `sent` and `ahead`.
        places: slots of `stored`.
        samples_max: damaged records collected per class.
        sealed: what was found in the sink by earlier audits: copies that were found now are duplicates.
    """
    both = _side(sent, "must").unionByName(_side(stored, "there"))
    for side, frame in (("may", ahead), ("sealed", sealed)):
        if frame is not None:
            both = both.unionByName(_side(frame, side))
    classified = _classified(both, origins, places)
    rows = _per_slot(classified).collect()
    null_ids = sum(int(row["null_ids"] or 0) for row in rows)
    result = Result.of_lines((_line(origins.name(row["slot"]), row.asDict()) for row in rows), null_ids=null_ids)
    damaged = _all_damaged(classified, result.counts, samples_max)
    return replace(result, samples=_samples(damaged, sent, stored, origins, places))


def _side(frame: DataFrame, side: str) -> DataFrame:
    """Rows of one side, marked with a 1 in its column."""
    is_sent = side != "there"
    nothing = F.lit(None).cast("long")
    return frame.select(
        *("id", "null_id", "low", "high"),
        # Order is judged by the sent key.
        (F.col("key_hash") if is_sent else nothing).alias("key_hash"),
        *[F.lit(int(side == name)).cast("long").alias(name) for name in _SIDES],
        (F.col("at") if is_sent else nothing).alias("origin"),
        (F.col("at") if not is_sent else nothing).alias("place"),
    )


def _classified(both: DataFrame, origins: Slots, places: Slots) -> DataFrame:
    by_value = (
        both.repartition("id")
        .groupBy("low", "id")
        .agg(
            F.min("high").alias("high"),
            *[F.sum(c).alias(c) for c in (*_SIDES, "null_id")],
            *_firsts(),
        )
    )
    must, may, there, sealed = (F.col(side) for side in _SIDES)
    zero = F.lit(0).cast("long")
    surplus = F.greatest(there - must - may, zero)
    in_progress = F.least(F.greatest(there - must, zero), may)
    was_sent = (must + may + sealed) > 0
    by_id = by_value.groupBy("id").agg(
        *[F.sum(c).alias(c) for c in (*_SIDES, "null_id")],
        *_firsts(),
        F.sum(F.greatest(must - there, zero)).alias("missing"),
        F.sum(in_progress).alias("in_progress"),
        F.sum(F.when(was_sent, surplus).otherwise(zero)).alias("known"),
        F.sum(F.when(was_sent, zero).otherwise(there)).alias("foreign"),
        *[
            F.sum(copies * F.expr(f"shiftrightunsigned({name}, {start}) & {(1 << width) - 1}L")).alias(
                f"{side}_{name}_{start}"
            )
            for side, copies in (("must", must), ("there", there - in_progress))
            for name in ("low", "high")
            for start, width in _LIMBS
        ],
    )
    altered = F.least("missing", "foreign")
    rest = F.col("foreign") - altered
    known_id = (must + may + sealed) > 0
    origin, place = F.col("origin"), F.col("place")
    compared = origin.isNotNull() & place.isNotNull()
    # Records without a key have no order, and must not all be shuffled to one partition.
    same_key = (
        Window.partitionBy(F.coalesce("key_hash", F.xxhash64("id")), origins.partition(origin), places.partition(place))
        .orderBy("place", "origin")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    newest = F.max(F.when(compared, origin)).over(same_key)
    late = compared & F.col("key_hash").isNotNull() & (newest > origin)
    return by_id.select(
        *("id", "must", "may", "there", "null_id", "origin", "place", "in_progress"),
        *_SUMS,
        altered.alias("altered"),
        (F.col("missing") - altered).alias("lost"),
        (F.col("known") + F.when(known_id, rest).otherwise(zero)).alias("duplicated"),
        F.when(known_id, zero).otherwise(rest).alias("unexpected"),
        F.coalesce(late, F.lit(False)).cast("long").alias("reordered"),
    )


def _firsts() -> list[Column]:
    """Where the first copy was sent and is, and the key of the one that was sent first."""
    return [
        F.min_by("key_hash", "origin").alias("key_hash"),
        F.min("origin").alias("origin"),
        F.min("place").alias("place"),
    ]


def _per_slot(classified: DataFrame) -> DataFrame:
    names = ["must", "there", "in_progress", *[d.value for d in Damage], *_SUMS]
    return classified.groupBy(slot_of(F.col("origin")).alias("slot")).agg(
        *[F.sum(n).alias(n) for n in names], F.sum("null_id").alias("null_ids")
    )


def _line(partition: str, row: dict[str, Any]) -> PartitionLine:
    counts = Counts(
        sent=row["must"],
        delivered=row["there"],
        in_progress=row["in_progress"],
        **{d.value: row[d.value] for d in Damage},
    )
    delivered = _fingerprint(row, "there", row["there"] - row["in_progress"])
    return PartitionLine(partition, counts, _fingerprint(row, "must", row["must"]), delivered)


def _fingerprint(row: dict[str, Any], side: str, count: int) -> Fingerprint:
    low, high = (
        sum(int(row[f"{side}_{name}_{start}"]) << start for start, _ in _LIMBS) & ((1 << 64) - 1)
        for name in ("low", "high")
    )
    return Fingerprint(int(count), low, high)


def _all_damaged(classified: DataFrame, counts: Counts, samples_max: int) -> list[tuple[Damage, Row]]:
    """Records of each kind of damage. Classifies again, if there are any: a healthy sink pays nothing for samples."""
    kinds = [d for d in Damage if counts.of(d)]
    if not kinds:
        return []
    damaged = classified.filter(reduce(or_, [F.col(d.value) > 0 for d in kinds])).persist(StorageLevel.DISK_ONLY)
    order = F.col("origin").asc_nulls_last(), F.col("place").asc_nulls_last(), "id"
    try:
        return [
            (damage, row)
            for damage in kinds
            for row in damaged.filter(F.col(damage.value) > 0)
            .orderBy(*order)
            .select("id", "origin", "place", "must", "may", "there")
            .limit(samples_max)
            .collect()
        ]
    finally:
        damaged.unpersist()


def _samples(
    damaged: Sequence[tuple[Damage, Row]], sent: DataFrame, stored: DataFrame, origins: Slots, places: Slots
) -> tuple[Sample, ...]:
    """Damaged records with their readable key and their position in the sink."""
    there = _look_up(stored, [r["id"] for _, r in damaged if r["there"]])
    missing = _look_up(sent, [r["id"] for _, r in damaged if not r["there"]])
    return tuple(
        Sample(
            damage,
            r["id"],
            (there if r["there"] else missing).get(r["id"], (None, None))[0],
            origins.shown(r["origin"]),
            places.shown(r["place"], there.get(r["id"], (None, None))[1]),
            r["must"] + r["may"],
            r["there"],
        )
        for damage, r in damaged
    )


def _look_up(frame: DataFrame, ids: Sequence[str]) -> dict[str, tuple[str | None, int | None]]:
    """Key of a few ids, and the position of the first copy if this side has positions."""
    if not ids:
        return {}
    wanted = frame.sparkSession.createDataFrame([(i,) for i in sorted(set(ids))], "id string")
    position = F.min_by("position", "at") if "position" in frame.columns else F.lit(None).cast("long")
    by_id = frame.join(F.broadcast(wanted), "id", "left_semi").groupBy("id")
    rows = by_id.agg(F.min("shown").alias("shown"), position.alias("position")).collect()
    return {r["id"]: (r["shown"], r["position"]) for r in rows}

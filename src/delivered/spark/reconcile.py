"""Reconcile as Spark aggregations: nothing but bounded samples and sums come to the driver.

Says the same as `delivered.audit.reconcile`, which defines the classes; a test holds the two together. One pass over
each side; then three shuffles: by (id, value), by id, and by key for the order. Both sides are put under each other and
counted instead of joined: an id that occurs a million times is summed before it is sent, and null ids need no care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType
from pyspark.sql.window import Window

from delivered.audit.classes import Counts, Damage
from delivered.audit.report import PartitionLine, Sample
from delivered.model.columns import fitted
from delivered.model.fingerprint import Fingerprint, lanes, record_hashes

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PARTITIONS_MAX = 1_000
"""Source partitions that are reported one by one."""

_OWN = "__delivered_"
_LOW, _HIGH, _OTHER = f"{_OWN}low", f"{_OWN}high", f"{_OWN}other"
_PARTITION, _POSITION = f"{_OWN}partition", f"{_OWN}position"
_SHOWN_LENGTH = 64
_LIMBS = ((0, 24), (24, 24), (48, 16))
"""A 64-bit hash is summed in three parts of at most 24 bits: no overflow below 2**39 records."""

Canonical = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        null_ids: records whose id expression gave null; they were told apart by their whole content instead.
        partitions_left_off: source partitions beyond `PARTITIONS_MAX`; they are in `counts`.
    """

    counts: Counts
    partitions: tuple[PartitionLine, ...]
    samples: tuple[Sample, ...]
    sent: Fingerprint
    delivered: Fingerprint
    null_ids: int
    partitions_left_off: int = 0


def hashed(
    frame: DataFrame,
    canonical: Canonical,
    seed: int,
    partition: Column,
    position: Column,
    partition_names: Sequence[str] | None = None,
    id_sql: str | None = None,
    key_sql: str | None = None,
    *,
    own_sql: str | None = None,
) -> DataFrame:
    """One small row per record: id, value's hash, key's hash, where it stood.

    Args:
        canonical: rows of `frame` as a reader of the sink finds them.
        partition, position: where a record stands, over the columns of `frame`. The partition is a number into
            `partition_names` if these are given, else any text.
        id_sql, key_sql: SQL over the canonical columns. No id: the whole record.
        own_sql: the same, true for records of this pipeline: a column `own` says for which.
    """
    arrow = to_arrow_schema(frame.schema, timezone="UTC")
    empty = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in arrow], schema=arrow)
    records = from_arrow_schema(canonical(empty).schema)
    own = [
        StructField(_LOW, LongType()),
        StructField(_HIGH, LongType()),
        StructField(_OTHER, LongType()),
        StructField(_PARTITION, StringType()),
        StructField(_POSITION, LongType()),
    ]
    schema = StructType([*records.fields, *own])
    placed = frame.select("*", partition.alias(_PARTITION), position.cast("long").alias(_POSITION))
    hashing = _hasher(
        canonical, seed, list(partition_names) if partition_names else None, to_arrow_schema(schema, timezone="UTC")
    )
    rows = placed.mapInArrow(hashing, schema)
    whole = F.lower(F.concat(F.lpad(F.hex(_LOW), 16, "0"), F.lpad(F.hex(_OTHER), 16, "0")))
    named = F.expr(id_sql).cast("string") if id_sql else F.lit(None).cast("string")
    key_sql = key_sql or ("key" if "key" in records.names else None)
    key = F.expr(key_sql) if key_sql else F.lit(None).cast("string")
    return rows.select(
        F.coalesce(named, whole).alias("id"),
        (named.isNull() if id_sql else F.lit(False)).cast("int").alias("null_id"),
        F.col(_LOW).alias("low"),
        F.col(_HIGH).alias("high"),
        F.when(key.isNotNull(), F.xxhash64(key)).alias("key_hash"),
        F.substring(F.expr(f"make_valid_utf8(cast(({key_sql}) as string))"), 1, _SHOWN_LENGTH).alias("shown")
        if key_sql
        else key.alias("shown"),
        F.struct(F.col(_PARTITION).alias("partition"), F.col(_POSITION).alias("position")).alias("at"),
        *([F.coalesce(F.expr(own_sql).cast("boolean"), F.lit(False)).alias("own")] if own_sql is not None else []),
    )


def _hasher(
    canonical: Canonical, seed: int, partition_names: list[str] | None, schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    import numpy as np

    def hash_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            place = batch.select([_PARTITION, _POSITION])
            records = canonical(batch.drop_columns([_PARTITION, _POSITION]))
            hashes = record_hashes(records, seed)
            low, high = lanes(hashes)
            partition = place.column(0)
            if partition_names is not None:
                partition = pa.array(
                    [partition_names[i] if i < len(partition_names) else "?" for i in partition.to_pylist()],
                    pa.string(),
                )
            own = {
                _LOW: pa.array(low.view(np.int64)),
                _HIGH: pa.array(high.view(np.int64)),
                # A second, independent hash: 128 bits tell records apart, 64 would meet themselves by chance.
                _OTHER: pa.array(record_hashes(records, ~seed).view(np.int64)),
                _PARTITION: partition.cast(pa.string()),
                _POSITION: place.column(1),
            }
            columns = [*records.columns, *own.values()]
            yield fitted(pa.RecordBatch.from_arrays(columns, names=[*records.schema.names, *own]), schema)

    return hash_all


def reconcile(sent: DataFrame, ahead: DataFrame | None, found: DataFrame, samples_max: int = 20) -> Result:
    """Classify every record.

    Args:
        sent: from `hashed`: what must be in the sink.
        ahead: what may be in the sink: of batches that began and are not decided yet.
        found: what is in the sink.
        samples_max: damaged records brought to the driver, per class.
    """
    both = _side(sent, "must").unionByName(_side(found, "there"))
    if ahead is not None:
        both = both.unionByName(_side(ahead, "may"))
    classified = _classified(both).persist(StorageLevel.DISK_ONLY)
    try:
        per_partition = _per_partition(classified)
        rows = per_partition.orderBy("partition").limit(PARTITIONS_MAX + 1).collect()
        left_off = 0
        total_rows = rows
        if len(rows) > PARTITIONS_MAX:
            left_off = per_partition.count() - PARTITIONS_MAX
            total_rows = (
                per_partition.withColumn("partition", F.lit("all"))
                .groupBy("partition")
                .agg(*[F.sum(c).alias(c) for c in per_partition.columns if c != "partition"])
                .collect()
            )
        lines = [_line(r.asDict()) for r in rows[:PARTITIONS_MAX]]
        totals = [_line(r.asDict()) for r in total_rows]
        counts = sum((t.counts for t in totals), Counts())
        samples = [s for d in Damage if counts.of(d) for s in _samples(classified, d, samples_max)]
        return Result(
            counts=counts,
            partitions=tuple(lines),
            samples=tuple(samples),
            sent=sum((t.sent_fingerprint for t in totals), Fingerprint()),
            delivered=sum((t.delivered_fingerprint for t in totals), Fingerprint()),
            null_ids=sum(int(r["null_ids"] or 0) for r in total_rows),
            partitions_left_off=left_off,
        )
    finally:
        classified.unpersist()


def _side(frame: DataFrame, side: str) -> DataFrame:
    """Rows of one side, with a 1 in its own column."""
    origin = side != "there"
    nowhere = F.lit(None).cast(frame.schema["at"].dataType)
    return frame.select(
        "id",
        "null_id",
        "low",
        "high",
        "shown",
        # Order is judged by the key that was sent.
        (F.col("key_hash") if origin else F.lit(None).cast("long")).alias("key_hash"),
        *[F.lit(int(side == name)).cast("long").alias(name) for name in ("must", "may", "there")],
        (F.col("at") if origin else nowhere).alias("origin"),
        (F.col("at") if not origin else nowhere).alias("place"),
    )


def _classified(both: DataFrame) -> DataFrame:
    # Numbers first: rows are sorted by what they are grouped by, and ids often begin alike.
    by_value = both.groupBy("low", "id").agg(
        F.min("high").alias("high"),
        *[F.sum(c).alias(c) for c in ("must", "may", "there", "null_id")],
        *[F.min(c).alias(c) for c in ("shown", "key_hash", "origin", "place")],
    )
    must, may, there = F.col("must"), F.col("may"), F.col("there")
    zero = F.lit(0).cast("long")
    surplus = F.greatest(there - must - may, zero)
    was_sent = (must + may) > 0
    by_id = by_value.groupBy(F.xxhash64("id").alias("id_hash"), "id").agg(
        *[F.sum(c).alias(c) for c in ("must", "may", "there", "null_id")],
        *[F.min(c).alias(c) for c in ("shown", "key_hash", "origin", "place")],
        F.sum(F.greatest(must - there, zero)).alias("missing"),
        F.sum(F.least(F.greatest(there - must, zero), may)).alias("in_progress"),
        F.sum(F.when(was_sent, surplus).otherwise(zero)).alias("known"),
        F.sum(F.when(was_sent, zero).otherwise(there)).alias("foreign"),
        *[
            F.sum(copies * F.expr(f"shiftrightunsigned({name}, {start}) & {(1 << width) - 1}L")).alias(
                f"{side}_{name}_{start}"
            )
            for side, copies in (("must", must), ("there", there))
            for name in ("low", "high")
            for start, width in _LIMBS
        ],
    )
    altered = F.least("missing", "foreign")
    rest = F.col("foreign") - altered
    known_id = (must + may) > 0
    compared = F.col("origin").isNotNull() & F.col("place").isNotNull()
    # Records without a key have no order; spread over the cluster they must not meet in one partition.
    same_key = (
        Window.partitionBy(
            F.coalesce("key_hash", F.xxhash64("id")), F.col("origin.partition"), F.col("place.partition")
        )
        .orderBy("place.position", "origin.position")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    newest = F.max(F.when(compared, F.col("origin.position"))).over(same_key)
    late = compared & F.col("key_hash").isNotNull() & (newest > F.col("origin.position"))
    return by_id.select(
        "*",
        altered.alias("altered"),
        (F.col("missing") - altered).alias("lost"),
        (F.col("known") + F.when(known_id, rest).otherwise(zero)).alias("duplicated"),
        F.when(known_id, zero).otherwise(rest).alias("unexpected"),
        F.coalesce(late, F.lit(False)).cast("long").alias("reordered"),
    )


def _per_partition(classified: DataFrame) -> DataFrame:
    limbs = [f"{s}_{n}_{start}" for s in ("must", "there") for n in ("low", "high") for start, _ in _LIMBS]
    names = ["must", "there", "in_progress", *[d.value for d in Damage], *limbs]
    return classified.groupBy(F.coalesce("origin.partition", F.lit("-")).alias("partition")).agg(
        *[F.sum(n).alias(n) for n in names], F.sum("null_id").alias("null_ids")
    )


def _line(row: dict[str, Any]) -> PartitionLine:
    counts = Counts(
        sent=row["must"],
        delivered=row["there"],
        in_progress=row["in_progress"],
        **{d.value: row[d.value] for d in Damage},
    )
    return PartitionLine(row["partition"], counts, _fingerprint(row, "must"), _fingerprint(row, "there"))


def _fingerprint(row: dict[str, Any], side: str) -> Fingerprint:
    low, high = (
        sum(int(row[f"{side}_{name}_{start}"]) << start for start, _ in _LIMBS) & ((1 << 64) - 1)
        for name in ("low", "high")
    )
    return Fingerprint(int(row[side]), low, high)


def _samples(classified: DataFrame, damage: Damage, samples_max: int) -> list[Sample]:
    rows = (
        classified.filter(F.col(damage.value) > 0)
        .orderBy(F.col("origin").asc_nulls_last(), F.col("place").asc_nulls_last(), "id")
        .select("id", "shown", "origin", "place", "must", "may", "there")
        .limit(samples_max)
        .collect()
    )
    return [
        Sample(damage, r["id"], r["shown"], _at(r["origin"]), _at(r["place"]), r["must"] + r["may"], r["there"])
        for r in rows
    ]


def _at(place: Any) -> str | None:
    return None if place is None else f"{place['partition']} @ {place['position']}"

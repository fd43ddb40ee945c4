"""The reconcile job detects every class of damage, exactly as defined in `tests/support/reconcile.py`."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from tests.support.memory import MemorySinkOptions
from tests.support.memory.sink import MemorySink
from tests.support.reconcile import Seen, as_sides, histories
from tests.support.reconcile import reconcile as definition
from tests.support.sweeps import sweep

from delivered.audit.evidence import Counts, Damage
from delivered.audit.judge import Result
from delivered.audit.local import reconcile as in_process
from delivered.audit.spark.audit import _accepted
from delivered.audit.spark.reconcile import Slots, _classified, _side, hashed, reconcile
from delivered.audit.spark.slices import keeps_partitions
from delivered.model.capability import SinkCapability
from delivered.model.fingerprint import Fingerprint, fingerprint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEED = 42
Record = tuple[str | None, str | None]
SENT: list[Record] = [(f"k{i % 3}", json.dumps({"id": i, "n": i * 10})) for i in range(12)]
ID = "get_json_object(value, '$.id')"


def canonical(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key", "value"])


def frame(spark: SparkSession, records: Sequence[Record], id_sql: str | None, slots: Slots) -> DataFrame:
    """The records, in one partition "0" of the source or of the sink."""
    made = spark.createDataFrame(list(records), "key string, value string").coalesce(1)
    return hashed(made, canonical, SEED, slots.placed(["0"]), id_sql=id_sql)


def audit(
    spark: SparkSession, found: Sequence[Record], sent: Sequence[Record] = SENT, id_sql: str | None = ID, **more: Any
) -> Result:
    origins, places = Slots(), Slots()
    must, there = frame(spark, sent, id_sql, origins), frame(spark, found, id_sql, places)
    return reconcile(must, None, there, origins, places, **more)


def altered(record: Record) -> Record:
    return record[0], json.dumps({"id": json.loads(record[1] or "{}")["id"], "n": -1})


DAMAGE: dict[str, tuple[list[Record], Counts]] = {
    "clean": (SENT, Counts(12, 12)),
    "lost": (SENT[:5] + SENT[6:], Counts(12, 11, lost=1)),
    "duplicated": ([*SENT, SENT[3]], Counts(12, 13, duplicated=1)),
    "doubled pair": ([*SENT, SENT[3], SENT[4]], Counts(12, 14, duplicated=2)),
    "three copies": ([*SENT, SENT[3], SENT[3]], Counts(12, 14, duplicated=2)),
    "two copies and a loss": ([*SENT[:11], SENT[3]], Counts(12, 12, lost=1, duplicated=1)),
    "altered": ([altered(SENT[0]), *SENT[1:]], Counts(12, 12, altered=1)),
    "unexpected": ([*SENT, ("k0", json.dumps({"id": 99, "n": 0}))], Counts(12, 13, unexpected=1)),
    "swap within a key": ([SENT[3], *SENT[1:3], SENT[0], *SENT[4:]], Counts(12, 12, reordered=1)),
    "swap across keys": ([SENT[1], SENT[0], *SENT[2:]], Counts(12, 12)),
    "empty sink": ([], Counts(12, 0, lost=12)),
    "everything twice": (SENT + SENT, Counts(12, 24, duplicated=12)),
}


# The definition that the job is held to, over random damage, knows each class.
@pytest.mark.parametrize(
    "name",
    sweep(
        DAMAGE,
        lambda name: name == "clean",
    ),
)
def test_a_damaged_sink_is_seen(spark: SparkSession, name: str) -> None:
    found, counts = DAMAGE[name]
    result = audit(spark, found)
    assert result.counts == counts
    assert result.counts.adds_up
    assert (result.sent == result.delivered) == (sorted(map(str, found)) == sorted(map(str, SENT)))
    for damage in Damage:
        assert sum(s.delivered - s.sent for s in result.samples if s.damage is damage) == {
            Damage.LOST: -counts.lost,
            Damage.DUPLICATED: counts.duplicated,
            Damage.UNEXPECTED: counts.unexpected,
        }.get(damage, 0)
        assert bool(counts.of(damage)) == any(s.damage is damage for s in result.samples)


def test_samples_name_the_record_and_are_bounded(spark: SparkSession) -> None:
    result = audit(spark, SENT[:2], samples_max=3)
    assert [(s.damage, s.id, s.key, s.sent, s.delivered) for s in result.samples] == [
        (Damage.LOST, str(i), f"k{i % 3}", 1, 0) for i in (2, 3, 4)
    ]
    assert result.samples[0].sink is None
    assert result.counts.lost == 10


@pytest.mark.matrix  # the test of records without an id has them among others
def test_without_an_id_a_record_is_told_by_its_content(spark: SparkSession) -> None:
    """Without ids, an altered record looks like a lost and an unexpected one."""
    result = audit(spark, [altered(SENT[0]), *SENT[1:]], id_sql=None)
    assert result.counts == Counts(12, 12, lost=1, unexpected=1)
    assert audit(spark, [*SENT[:11], SENT[3]], id_sql=None).counts == Counts(12, 12, lost=1, duplicated=1)
    assert audit(spark, SENT, id_sql=None).counts == Counts(12, 12)


@pytest.mark.matrix  # the histories of the definition hold ids twice
@pytest.mark.parametrize("id_sql", [ID, None])
def test_what_the_source_held_twice_is_no_duplicate(spark: SparkSession, id_sql: str | None) -> None:
    twice = [*SENT, SENT[0]]
    assert audit(spark, twice, sent=twice, id_sql=id_sql).counts == Counts(13, 13)
    assert audit(spark, [*twice, SENT[0]], sent=twice, id_sql=id_sql).counts.duplicated == 1
    assert audit(spark, SENT, sent=twice, id_sql=id_sql).counts.lost == 1


def test_records_without_an_id_are_told_by_their_content(spark: SparkSession) -> None:
    sent: list[Record] = [*SENT, ("k0", "no json"), ("k1", None), (None, "no key")]
    clean = audit(spark, sent, sent=sent)
    assert clean.counts == Counts(15, 15)
    assert clean.null_ids == 6  # three on either side
    damaged = audit(spark, [*SENT, ("k1", None), ("k1", None), (None, "no key")], sent=sent)
    assert damaged.counts == Counts(15, 15, lost=1, duplicated=1)


@pytest.mark.matrix  # unit/test_audit_evidence.py
def test_empty_against_empty(spark: SparkSession) -> None:
    result = audit(spark, [], sent=[])
    assert result.counts == Counts()
    assert (result.partitions, result.samples, result.sent) == ((), (), Fingerprint())
    assert audit(spark, SENT, sent=[]).counts == Counts(0, 12, unexpected=12)


@pytest.mark.matrix  # test_audit_pipeline.py has an undecided batch
def test_batches_in_progress_may_be_there(spark: SparkSession) -> None:
    origins = Slots()
    must, ahead = frame(spark, SENT[:10], ID, origins), frame(spark, SENT[10:], ID, origins)

    def counts(found: list[Record]) -> Counts:
        places = Slots()
        return reconcile(must, ahead, frame(spark, found, ID, places), origins, places).counts

    assert counts(SENT[:11]) == Counts(10, 11, in_progress=1)
    assert counts(SENT[:10]) == Counts(10, 10)
    assert counts([*SENT[:11], SENT[10]]) == Counts(10, 12, duplicated=1, in_progress=1)


@pytest.mark.matrix
def test_one_id_and_one_key_for_everything(spark: SparkSession) -> None:
    """Skew: rows of one partition are pre-aggregated before the shuffle."""
    rows = 20_000
    slots = Slots()
    at = slots.placed(["0", "0"])

    def hot(values: DataFrame) -> DataFrame:
        same = values.select(F.lit("hot").alias("key"), F.col("id").cast("string").alias("value"))
        return hashed(same, canonical, SEED, at)

    def counts(sent: DataFrame, found: DataFrame) -> Counts:
        return reconcile(sent, None, found, slots, slots).counts

    one = hot(spark.range(0, rows, 1, 2).select(F.lit(0).alias("id")))
    assert counts(one, one.limit(rows - 7)) == Counts(rows, rows - 7, lost=7)
    sent = hot(spark.range(0, rows, 1, 2))
    assert counts(sent, sent) == Counts(rows, rows)
    assert counts(sent, hot(spark.range(rows - 1, -1, -1, 2))) == Counts(rows, rows, reordered=rows - 1)


def test_fingerprints_are_those_of_the_model(spark: SparkSession) -> None:
    """The sums in Spark, in three limbs, are the 64-bit sums of `delivered.model.fingerprint`."""
    result = audit(spark, [*SENT, SENT[0]])
    batch = pa.RecordBatch.from_arrays(
        [pa.array([k for k, _ in SENT]), pa.array([v for _, v in SENT])], names=["key", "value"]
    )
    assert result.sent == fingerprint(batch, SEED)
    assert result.delivered == fingerprint(batch, SEED) + fingerprint(batch.slice(0, 1), SEED)
    assert sum((line.sent_fingerprint for line in result.partitions), Fingerprint()) == result.sent


@pytest.mark.parametrize("id_sql", [None, ID])
def test_a_record_at_another_place_than_its_row_names_is_another_one(spark: SparkSession, id_sql: str | None) -> None:
    """Its fingerprint is the same."""

    def count(topics: str) -> Result:
        slots = Slots()
        sides = [
            hashed(
                spark.createDataFrame([(*SENT[0], t) for t in names], "key string, value string, topic string"),
                canonical,
                SEED,
                slots.unplaced("0"),
                id_sql=id_sql,
                own_sql="topic <> 'z'",
                routed_by="topic",
            )
            for names in ("ab", topics)
        ]
        return reconcile(sides[0], None, sides[1].filter("own"), slots, slots)

    assert count("abz").counts == Counts(2, 2)
    moved = count("ac")
    assert moved.counts == Counts(2, 2, lost=1, unexpected=1)
    assert moved.sent == moved.delivered


def test_bytes_that_are_no_text_do_not_stop_the_report(spark: SparkSession) -> None:
    made = spark.createDataFrame([(b"\xff\xfe\x00", b"\x80"), (None, None)], "key binary, value binary")
    slots = Slots()
    sent = hashed(made.coalesce(1), canonical, SEED, slots.placed(["0"]))
    result = reconcile(sent, None, sent.limit(0), slots, slots)
    assert result.counts == Counts(2, 0, lost=2)
    assert {s.key for s in result.samples} >= {None}


def test_the_job_says_what_the_definition_says(spark: SparkSession) -> None:
    """Hundreds of random small histories in one job: every id is classified as `tests/support/reconcile.py` does, and
    the result is that of the same histories without Spark."""
    slots = Slots()
    slots.placed(["0", "1"])
    for seed in (1, 2):
        sent, found = histories(random.Random(seed), count=300)
        expected = definition(sent, found)
        rows = _classified(
            _side(_seen(spark, [s for s in sent if not s.in_progress]), "must")
            .unionByName(_side(_seen(spark, [s for s in sent if s.in_progress]), "may"))
            .unionByName(_side(_seen(spark, found), "there")),
            slots,
            slots,
        ).collect()
        actual = {
            r["id"]: Counts(
                r["must"],
                r["there"],
                r["lost"],
                r["duplicated"],
                r["altered"],
                r["unexpected"],
                r["reordered"],
                r["in_progress"],
            )
            for r in rows
        }
        assert set(actual) == set(expected)
        different = {i: (actual[str(i)], c) for i, c in expected.items() if actual[str(i)] != c}
        assert different == {}, f"seed {seed}"
        by_spark = reconcile(
            _seen(spark, [s for s in sent if not s.in_progress]),
            _seen(spark, [s for s in sent if s.in_progress]),
            _seen(spark, found),
            slots,
            slots,
        )
        assert by_spark == in_process(*as_sides(sent, found), slots, slots), f"seed {seed}"
        seen = Counter(d for c in expected.values() for d in Damage if c.of(d))
        assert all(seen[d] > 20 for d in Damage), f"the histories hold too little damage to mean anything: {seen}"


def _seen(spark: SparkSession, records: list[Seen]) -> DataFrame:
    rows = [
        (s.id, 0, s.value, s.value, s.key, f"key {s.key}", (int(str(s.partition)) << 33) + s.position) for s in records
    ]
    return spark.createDataFrame(
        rows, "id string, null_id int, low long, high long, key_hash long, shown string, at long"
    )


def test_a_transform_that_moves_rows_is_known(spark: SparkSession) -> None:
    read = spark.range(0, 4, 1, 2)
    assert keeps_partitions(read)
    assert keeps_partitions(read.mapInArrow(lambda batches: batches, read.schema).filter("id > 1").select("id"))
    assert not keeps_partitions(read.repartition(3))
    assert not keeps_partitions(read.coalesce(1))
    assert not keeps_partitions(read.union(read))
    assert not keeps_partitions(read.distinct())
    assert not keeps_partitions(read.orderBy(F.desc("id")))


def test_rows_that_a_sink_rejects_are_not_expected_whatever_its_capability_says(spark: SparkSession) -> None:
    """They are in the dead letters: a task asks the sink, not its capability."""

    class Undeclared(MemorySink):
        def capability(self) -> SinkCapability:
            return replace(super().capability(), validates=False)

    sink = Undeclared(MemorySinkOptions.parse({"world": "none", "valueBytesMax": "3"}))
    rows = spark.createDataFrame([(b"a", b"abc"), (b"b", b"abcd")], "key binary, value binary")
    assert [bytes(r["key"]) for r in _accepted(rows, sink).collect()] == [b"a"]

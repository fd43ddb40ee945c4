"""Audits of a share of a table's keys: a wrong key is found in its share, and in no other."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812
from tests.support.sweeps import sweep

import delivered
from delivered.audit.evidence import Counts, Verdict
from delivered.audit.request import KeyShare
from delivered.audit.seal import Seal, chain_faults, read_sealed
from delivered.audit.spark.source import FROM_RECORDS, FROM_SOURCE, FROM_TRANSFORM, SharedKeys
from delivered.checkpoint.history import last_audits
from delivered.connectors.log import append
from delivered.engine.context import open_ledger
from delivered.model.identity import Scope

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from delivered.audit.report import AuditReport

ROWS, KEYS, OF = 240, 60, 5
TEXT, NUMBER = "CAST(key AS STRING)", "CAST(CAST(value AS STRING) AS BIGINT)"
COUNTS = f"SELECT {TEXT} AS k, count(*) AS n, sum({NUMBER}) AS total FROM source GROUP BY k"
DECIMALS = f"SELECT CAST({TEXT} AS DECIMAL(9, 2)) AS k, max({NUMBER}) AS n FROM source GROUP BY k"
CHANGES = f"SELECT {TEXT} AS k, {NUMBER} AS n, CAST(value AS STRING) AS text FROM source"


def by_function(frame: DataFrame) -> DataFrame:
    changed = frame.selectExpr(f"{TEXT} AS k", f"{NUMBER} AS n")
    return changed.mapInPandas(lambda parts: parts, changed.schema)


CASES: dict[str, dict[str, Any]] = {
    "complete": {"transform": COUNTS, "output_mode": "complete", "selected": FROM_SOURCE},
    "update": {"transform": COUNTS, "output_mode": "update", "keyColumns": "k", "selected": FROM_SOURCE},
    "a version": {"transform": CHANGES, "keyColumns": "k", "versionColumn": "n", "selected": FROM_SOURCE},
    "by arrival": {"transform": CHANGES, "keyColumns": "k", "selected": FROM_SOURCE},
    "insert": {
        "transform": CHANGES,
        "keyColumns": "k",
        "mode": "insert",
        "onConflict": "skip",
        "selected": FROM_SOURCE,
    },
    "a decimal key": {"transform": DECIMALS, "output_mode": "complete", "selected": FROM_RECORDS},
    "a function": {"transform": by_function, "keyColumns": "k", "versionColumn": "n", "selected": FROM_TRANSFORM},
}


class Table:
    """A pipeline whose table has a row for each of 60 keys."""

    def __init__(self, spark: SparkSession, folder: Path, case: dict[str, Any]) -> None:
        sink = {k: v for k, v in case.items() if k not in ("transform", "output_mode", "selected")}
        if "keyColumns" in sink:
            sink.setdefault("mode", "upsert")
        rows = {"key": [str(i % KEYS).encode() for i in range(ROWS)], "value": [str(i).encode() for i in range(ROWS)]}
        append(str(folder / "in"), pa.table(rows))
        self.spark, self.database = spark, folder / "out.db"
        self.pipeline = delivered.Pipeline(
            name="keyed",
            guarantee="exactly_once",
            checkpoint=folder / "checkpoint",
            source=delivered.log(str(folder / "in"), maxOffsetsPerTrigger=KEYS),
            transform=case["transform"],
            sinks=[delivered.sqlite(str(self.database), "rows", **sink)],
            output_mode=case.get("output_mode", "append"),
            trigger="available_now",
        )
        assert self.pipeline.start(spark).awaitTermination(120)

    def audit(self, keys: str, *, recompute: bool = False) -> AuditReport:
        return self.pipeline.audit(self.spark, keys=keys, recompute=recompute)

    def seals(self) -> list[Seal]:
        sink = self.pipeline.sinks[0].sink()
        with closing(open_ledger(sink, Scope("keyed", sink.name, "any"))) as ledger:
            texts = list(ledger.seals(sink.name))
        assert list(chain_faults(texts)) == []
        return [Seal.parse(text) for text in texts]

    def change(self, statement: str) -> None:
        with closing(sqlite3.connect(self.database)) as connection, connection:
            assert connection.execute(statement).rowcount == 1


@pytest.fixture(autouse=True)
def few_partitions(spark: SparkSession) -> Any:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield
    spark.conf.set("spark.sql.shuffle.partitions", before)


@pytest.mark.matrix
@pytest.mark.parametrize("name", sweep(CASES, lambda name: name == "complete"))
def test_a_wrong_key_is_found_in_its_share_and_in_no_other(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Of text, key 7 is in share 5 of 5; of a decimal, the text of the row's identity decides."""
    case = CASES[name]
    table = Table(spark, tmp_path, case)
    report = table.audit("1/5")
    assert report.verdict is Verdict.HELD, str(report)
    assert report.keys is not None
    assert report.keys.selected == case["selected"]
    assert report.counts == Counts(report.keys.compared, report.keys.compared)
    assert last_audits(table.pipeline.checkpoint) == {}, "it is no audit of the table"
    table.change("UPDATE rows SET n = n + 1 WHERE k IN ('7', '7.00')")
    audited = range(1, OF + 1) if name == "a decimal key" else (5, 1)
    found = {n: table.audit(f"#{n}/{OF}") for n in audited}
    (own,) = (n for n, r in found.items() if r.counts.altered)
    assert own == 5 or name == "a decimal key"
    # A row that stood in the table before would stay, too.
    wrong = Verdict.UNKNOWN if name == "insert" else Verdict.BROKEN
    assert {n: r.verdict for n, r in found.items()} == dict.fromkeys(audited, Verdict.HELD) | {own: wrong}
    assert last_audits(table.pipeline.checkpoint)["rows"]["keys"]["share"] == own
    sealed = [(s.keys["share"], s.verdict) for s in table.seals() if s.keys is not None]
    assert sealed == [(report.keys.share.number, Verdict.HELD), *((n, r.verdict) for n, r in found.items())]
    assert read_sealed(s.text for s in table.seals()).ranges == (), "of no batch were all keys compared"


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["complete", "update", "a version"])
def test_the_shares_are_the_table(spark: SparkSession, tmp_path: Path, name: str) -> None:
    table = Table(spark, tmp_path, CASES[name])
    numbers = []
    for _ in range(2):
        report = table.audit("1/5")
        numbers += [report.keys.share.number] if report.keys is not None else []
        (tmp_path / "checkpoint" / "delivered" / "audits.jsonl").unlink()
    assert numbers[1] == numbers[0] % OF + 1, "the ledger knows which share was the last one"
    table.change("DELETE FROM rows WHERE k = '8'")
    table.change(
        "INSERT INTO rows SELECT 'x', n, " + ("text" if name == "a version" else "total") + " FROM rows WHERE k = '9'"
    )
    for recompute in (True,) if name != "a version" else (False, True):
        reports = [table.audit(f"#{n + 1}/{OF}", recompute=recompute) for n in range(OF)]
        counts = sum((r.counts for r in reports), Counts())
        assert counts == Counts(sent=KEYS, delivered=KEYS, lost=1, unexpected=1)
        assert sum(r.keys.compared for r in reports if r.keys) == KEYS + 1
        assert table.pipeline.audit(spark, recompute=recompute or name != "a version").counts == counts
        assert [s.keys is None for s in table.seals()][-OF - 1 :] == [*[False] * OF, True]


def xxh64(data: bytes, seed: int = 42) -> int:
    """Of fewer than 32 bytes, by the published algorithm."""
    p1, p2, p3, p4, p5 = (
        *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
        *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
    )
    mask = (1 << 64) - 1

    def rotated(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (64 - bits))) & mask

    h = (seed + p5 + len(data)) & mask
    while len(data) >= 8:
        k = rotated(int.from_bytes(data[:8], "little") * p2 & mask, 31) * p1 & mask
        h, data = (rotated(h ^ k, 27) * p1 + p4) & mask, data[8:]
    if len(data) >= 4:
        h, data = (rotated(h ^ (int.from_bytes(data[:4], "little") * p1 & mask), 23) * p2 + p3) & mask, data[4:]
    for byte in data:
        h = rotated(h ^ (byte * p5 & mask), 11) * p1 & mask
    for shift, prime in ((33, p2), (29, p3), (32, 1)):
        h = (h ^ (h >> shift)) * prime & mask
    return h - (1 << 64) if h >> 63 else h


@pytest.mark.matrix
def test_the_share_of_a_key_is_the_same_in_every_run_and_type(spark: SparkSession) -> None:
    texts, numbers = ["7", "order-4711", "", "Zürich", "a" * 31], [0, 7, -1, 127, 12_345]
    by_type = {
        "STRING": (texts, [t.encode() for t in texts]),
        "BINARY": ([t.encode() for t in texts], [t.encode() for t in texts]),
        **{
            kind: (numbers[: 4 if kind == "TINYINT" else 5], [n.to_bytes(8, "little", signed=True) for n in numbers])
            for kind in ("TINYINT", "SMALLINT", "INT", "BIGINT")
        },
    }
    for kind, (values, data) in by_type.items():
        frame = spark.createDataFrame([(v,) for v in values], f"k {'BIGINT' if isinstance(values[0], int) else kind}")
        frame = frame.select(F.col("k").cast(kind).alias("k"))
        keys = SharedKeys(KeyShare(1, 9), ["k"], frame.schema, frame.schema, frame.schema)
        shares = dict(frame.select("k", keys.number(frame)).collect())
        assert [shares[v] for v in values] == [xxh64(d) % 9 + 1 for d in data[: len(values)]], kind

"""An audit by recomputing: what it proves, what it cannot, and why. tests/spark/test_totals.py: after kills."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

import delivered
from delivered.audit.classes import Damage, Verdict
from delivered.connectors.log import append

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from delivered.audit.report import AuditReport

pytestmark = pytest.mark.matrix
ROWS, KEYS, PER_BATCH = 120, 10, 40
VALUE = "CAST(CAST(value AS STRING) AS BIGINT)"
BY_KEY = f"SELECT CAST(key AS STRING) AS k, count(*) AS n, sum({VALUE}) AS total, max({VALUE}) AS top FROM source"


@pytest.fixture(autouse=True)
def small_shuffles(spark: SparkSession) -> Iterator[None]:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield
    spark.conf.set("spark.sql.shuffle.partitions", before)


def windows(frame: DataFrame) -> DataFrame:
    """Counts of ten seconds; an event's second is its value plus one."""
    timed = frame.select((F.col("value").cast("string").cast("bigint") + 1).cast("timestamp").alias("at"))
    return timed.withWatermark("at", "5 seconds").groupBy(F.window("at", "10 seconds")).count()


def flat(frame: DataFrame) -> DataFrame:
    return windows(frame).select(F.col("window.end").alias("until"), "count")


class Ran:
    """A pipeline that delivered values 0 to 119, in this order or another, in three batches."""

    def __init__(self, spark: SparkSession, folder: Path, transform: Any, output_mode: str, **sink: Any) -> None:
        values = sink.pop("values", range(ROWS))
        rows = {"key": [f"k{v % KEYS}".encode() for v in values], "value": [str(v).encode() for v in values]}
        append(str(folder / "in"), pa.table(rows))
        self.spark, self.database = spark, folder / "out.db"
        self.pipeline = delivered.Pipeline(
            name="totals",
            guarantee="exactly_once",
            checkpoint=folder / "checkpoint",
            source=delivered.log(str(folder / "in"), maxOffsetsPerTrigger=PER_BATCH),
            transform=transform,
            sinks=[delivered.sqlite(str(self.database), "rows", **sink)],
            output_mode=output_mode,
            trigger="available_now",
        )
        self.pipeline.start(spark).awaitTermination(120)

    def audit(self, change: str = "") -> AuditReport:
        if change:
            with closing(sqlite3.connect(self.database)) as connection, connection:
                assert connection.execute(change).rowcount == 1
        return self.pipeline.audit(self.spark, recompute=True)


def test_complete_owns_its_table_and_floats_have_a_tolerance(spark: SparkSession, tmp_path: Path) -> None:
    ran = Ran(
        spark, tmp_path, f"SELECT CAST(key AS STRING) AS k, avg({VALUE} / 3) AS mean FROM source GROUP BY k", "complete"
    )
    assert ran.audit().verdict is Verdict.HELD
    assert ran.audit("UPDATE rows SET mean = mean * (1 + 1e-12) WHERE k = 'k1'").verdict is Verdict.HELD
    report = ran.audit("UPDATE rows SET mean = mean * (1 + 1e-6) WHERE k = 'k1'")
    assert (report.verdict, report.counts.altered) == (Verdict.BROKEN, 1)
    report = ran.audit("INSERT INTO rows VALUES ('k99', 1)")
    assert (report.verdict, report.counts.unexpected) == (Verdict.BROKEN, 1)


def test_a_version_that_counts_is_exact_and_another_may_tie(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    (tmp_path / "top").mkdir()
    for version, verdict in (("n", Verdict.BROKEN), ("top", Verdict.UNKNOWN)):
        ran = Ran(spark, tmp_path / version, f"{BY_KEY} GROUP BY k", "update", versionColumn=version)
        assert ran.audit().verdict is Verdict.HELD
        report = ran.audit("UPDATE rows SET total = 0 WHERE k = 'k1'")
        assert (report.verdict, report.counts.altered) == (verdict, 1), str(report)
        assert any("of equal ones the first stays" in u for u in report.unknowns) == (version == "top")
        report = ran.audit("DELETE FROM rows WHERE k = 'k2'")
        assert (report.verdict, report.counts.lost) == (Verdict.BROKEN, 1)


@pytest.mark.parametrize(
    ("sql", "why", "counted"),
    [
        (f"{BY_KEY} GROUP BY k HAVING n < 10", "keeps its last row", "unexpected"),
        ("SELECT CAST(key AS STRING) AS k, uuid() AS u, count(*) AS n FROM source GROUP BY k", "uuid()", "altered"),
        ("SELECT CAST(key AS STRING) AS k, now() AS t, count(*) AS n FROM source GROUP BY k", "now()", "altered"),
    ],
)
def test_what_a_batch_cannot_tell_is_unknown(
    spark: SparkSession, sql: str, why: str, counted: str, tmp_path: Path
) -> None:
    report = Ran(spark, tmp_path, sql, "update").audit()
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, [])
    assert report.counts.of(Damage(counted)) == KEYS
    assert any(why in reason for reason in report.unknowns), report.unknowns


@pytest.mark.parametrize("mode", ["update", "append"])
def test_a_watermark_that_dropped_nothing_is_exact(spark: SparkSession, mode: str, tmp_path: Path) -> None:
    """In append mode, the windows that the watermark closed: it stands at 120 - 5 = 115 s."""
    ran = Ran(spark, tmp_path, flat, mode, **keyed(mode))
    report = ran.audit()
    assert report.verdict is Verdict.HELD, str(report)
    assert report.counts.sent == (13 if mode == "update" else 11)
    report = ran.audit('UPDATE rows SET "count" = 99 WHERE rowid = 3')
    assert (report.verdict, report.counts.altered + report.counts.lost) == (Verdict.BROKEN, 1)


def test_late_records_leave_it_open(spark: SparkSession, tmp_path: Path) -> None:
    values = [*range(40, 80), *range(80, 120), *range(40)]
    report = Ran(spark, tmp_path, flat, "update", values=values, **keyed("update")).audit()
    assert (report.verdict, report.counts.lost) == (Verdict.UNKNOWN, 4)
    assert any("1 of 3 batches hold records that may have been dropped as late" in u for u in report.unknowns)


def keyed(mode: str) -> dict[str, str]:
    return {"mode": "upsert", "keyColumns": "until"} if mode == "update" else {}

"""An audit by recomputing: what it proves, what it cannot, and why. tests/spark/test_totals.py: after kills."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml
from pyspark.sql import functions as F  # noqa: N812
from tests.support.by_hand import SINKS, Sink

import delivered
from delivered.audit.evidence import Counts, Damage, Verdict
from delivered.connectors.log import append
from delivered.pipeline.progress import watch
from delivered.spark.internals import recent_reports
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from delivered.audit.report import AuditReport

pytestmark = pytest.mark.usefixtures("small_shuffles")
APP = Path(__file__).parent / "apps" / "run_file.py"
ROWS, KEYS, PER_BATCH = 120, 10, 40
VALUE = "CAST(CAST(value AS STRING) AS BIGINT)"
BY_KEY = f"SELECT CAST(key AS STRING) AS k, count(*) AS n, sum({VALUE}) AS total, max({VALUE}) AS top FROM source"


def windows(frame: DataFrame) -> DataFrame:
    """Counts of ten seconds; an event's second is its value plus one."""
    timed = frame.select((F.col("value").cast("string").cast("bigint") + 1).cast("timestamp").alias("at"))
    return timed.withWatermark("at", "5 seconds").groupBy(F.window("at", "10 seconds")).count()


def flat(frame: DataFrame) -> DataFrame:
    return windows(frame).select(F.col("window.end").alias("until"), "count")


class Ran:
    """A pipeline that delivered values 0 to 119, in this order or another, in three batches."""

    def __init__(
        self, spark: SparkSession, folder: Path, transform: Any, output_mode: str, into: Sink | None = None, **sink: Any
    ) -> None:
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
            sinks=[into.endpoint(**sink) if into else delivered.sqlite(str(self.database), "rows", **sink)],
            output_mode=output_mode,
            trigger="available_now",
        )
        self.query = self.pipeline.start(spark)
        self.query.awaitTermination(120)

    def audit(self, change: str = "") -> AuditReport:
        if change:
            with closing(sqlite3.connect(self.database)) as connection, connection:
                assert connection.execute(change).rowcount == 1
        return self.pipeline.audit(self.spark, recompute=True)


@pytest.mark.matrix
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


@pytest.mark.recompute("totals with a `versionColumn`", "as one batch; then in batches, unless it is a `count(*)`", "")
@pytest.mark.matrix
def test_a_version_that_counts_is_exact_and_another_may_tie(spark: SparkSession, tmp_path: Path) -> None:
    """Of equal versions the first row stays: the replay knows which came first."""
    (tmp_path / "n").mkdir()
    (tmp_path / "top").mkdir()
    for version in ("n", "top"):
        ran = Ran(spark, tmp_path / version, f"{BY_KEY} GROUP BY k", "update", versionColumn=version)
        assert ran.audit().verdict is Verdict.HELD
        report = ran.audit("UPDATE rows SET total = 0 WHERE k = 'k1'")
        assert (report.verdict, report.counts.altered) == (Verdict.BROKEN, 1), str(report)
        assert any("in the ledger's 3 batches" in n for n in report.notes) == (version == "top")
        report = ran.audit("DELETE FROM rows WHERE k = 'k2'")
        assert (report.verdict, report.counts.lost) == (Verdict.BROKEN, 1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sql", "why", "counted"),
    [
        ("SELECT CAST(key AS STRING) AS k, uuid() AS u, count(*) AS n FROM source GROUP BY k", "uuid()", "altered"),
        ("SELECT CAST(key AS STRING) AS k, now() AS t, count(*) AS n FROM source GROUP BY k", "now()", "altered"),
    ],
)
def test_what_depends_on_more_than_batches_is_unknown(
    spark: SparkSession, sql: str, why: str, counted: str, tmp_path: Path
) -> None:
    report = Ran(spark, tmp_path, sql, "update").audit()
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, [])
    assert report.counts.of(Damage(counted)) == KEYS
    assert any(why in reason for reason in report.unknowns), report.unknowns


@pytest.mark.recompute("windows, if no record was late: `update`, `append`", "as one batch", "")
@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["update", "append"])
def test_a_watermark_that_dropped_nothing_is_exact(spark: SparkSession, mode: str, tmp_path: Path) -> None:
    """In append mode, the windows that the watermark closed: it stands at 120 - 5 = 115 s."""
    ran = Ran(spark, tmp_path, flat, mode, **keyed(mode))
    report = ran.audit()
    assert report.verdict is Verdict.HELD, str(report)
    assert report.counts.sent == (13 if mode == "update" else 11)
    assert any("as one batch" in note for note in report.notes)
    report = ran.audit('UPDATE rows SET "count" = 99 WHERE rowid = 3')
    assert (report.verdict, report.counts.altered + report.counts.lost) == (Verdict.BROKEN, 1)


@pytest.mark.recompute("`HAVING`, or a filter above an aggregation", "as one batch, then in batches", "")
@pytest.mark.matrix
def test_a_key_that_no_longer_passes_a_filter_keeps_its_last_row(spark: SparkSession, tmp_path: Path) -> None:
    ran = Ran(spark, tmp_path, f"{BY_KEY} GROUP BY k HAVING n < 10", "update")
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(KEYS, KEYS)), str(report)
    assert any("in the ledger's 3 batches" in note for note in report.notes)
    report = ran.audit("UPDATE rows SET n = 10 WHERE k = 'k3'")
    assert (report.verdict, report.counts.altered) == (Verdict.BROKEN, 1)


@pytest.mark.recompute(
    "windows, if records may have been late: `update`, `append`", "as one batch, then in batches", ""
)
@pytest.mark.matrix  # test_continue.py and unit/test_audit_recompute.py recompute
@pytest.mark.parametrize("mode", ["update", "append"])
def test_records_that_spark_dropped_as_late_are_not_missed(spark: SparkSession, mode: str, tmp_path: Path) -> None:
    """The last batch is all late: its four windows are nowhere."""
    values = [*range(40, 80), *range(80, 120), *range(40)]
    ran = Ran(spark, tmp_path, flat, mode, values=values, **keyed(mode))
    with watch(ran.pipeline, ran.query, recent_reports) as seen:
        assert seen.late >= 4, "`delivered run` counts them"
    report = ran.audit()
    assert report.verdict is Verdict.HELD, str(report)
    assert report.counts.sent == (9 if mode == "update" else 7)
    assert any("in the ledger's" in note for note in report.notes)
    report = ran.audit('UPDATE rows SET "count" = 11 WHERE rowid = 3')
    assert (report.verdict, report.counts.altered + report.counts.lost) == (Verdict.BROKEN, 1)


def keyed(mode: str) -> dict[str, str]:
    return {"mode": "upsert", "keyColumns": "until"} if mode == "update" else {}


TOTALS = BY_KEY.replace(f"sum({VALUE})", f"sum(CAST({VALUE} / 4 AS DECIMAL(18, 2)))") + " GROUP BY k"
TABLES = [s for s in SINKS if s != "kafka"]


@pytest.mark.recompute("running totals: `update`, `complete`", "as one batch", "")
@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["update", "complete"])
@pytest.mark.parametrize("system", TABLES)
def test_every_table_is_recomputed(
    spark: SparkSession, request: pytest.FixtureRequest, system: str, mode: str, tmp_path: Path
) -> None:
    """Exact after the run; a row altered, removed and added by hand is found, and a batch added twice."""
    sink = SINKS[system](request, tmp_path)
    ran = Ran(spark, tmp_path, TOTALS, mode, sink)
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(KEYS, KEYS)), str(report)
    assert any("as one batch" in note for note in report.notes)
    sink.alter("k", "k1", {"top": 7})
    sink.remove("k", "k2")
    sink.add([{"k": "k99", "n": 1, "total": Decimal("1.00"), "top": 1}])
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.BROKEN, Counts(KEYS, KEYS, lost=1, altered=1, unexpected=1))
    assert [(s.damage, json.loads(s.id)) for s in report.samples] == [
        (Damage.LOST, {"k": "k2"}), (Damage.ALTERED, {"k": "k1"}), (Damage.UNEXPECTED, {"k": "k99"})
    ]  # fmt: skip
    assert "rows differ in: top (1)" in report.notes


CHANGES = TOTALS.replace("CAST(key AS STRING) AS k", "CAST(key AS STRING) AS key").replace("GROUP BY k", "GROUP BY 1")
CHANGES = f"SELECT key, concat_ws(',', n, total, top) AS value FROM ({CHANGES})"


@pytest.mark.recompute("each change as a record: `update` to Kafka", "in batches", "")
@pytest.mark.matrix
@pytest.mark.parametrize(("mode", "sql"), [("update", CHANGES), ("append", "SELECT key, value FROM source")])
def test_kafka_holds_each_record_once(
    spark: SparkSession, request: pytest.FixtureRequest, mode: str, sql: str, tmp_path: Path
) -> None:
    """Update: a record for every change of a total, batch by batch."""
    sink = SINKS["kafka"](request, tmp_path)
    ran = Ran(spark, tmp_path, sql, mode, sink)
    rows = KEYS * ROWS // PER_BATCH if mode == "update" else ROWS
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(rows, rows)), str(report)
    assert any("in the ledger's 3 batches" in note for note in report.notes) == (mode == "update")
    sink.add(sink.rows()[3:6])
    sink.add([{"key": b"k99", "value": b"1"}])
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.BROKEN, Counts(rows, rows + 4, duplicated=3, unexpected=1))
    assert [s.damage for s in report.samples].count(Damage.DUPLICATED) == 3


@pytest.mark.matrix
@pytest.mark.parametrize("system", TABLES)
def test_every_table_of_final_rows_is_recomputed(
    spark: SparkSession, request: pytest.FixtureRequest, system: str, tmp_path: Path
) -> None:
    """Append: closed windows, some with late records; a batch written again by hand is found."""
    sink = SINKS[system](request, tmp_path)
    ran = Ran(spark, tmp_path, labelled, "append", sink, values=[*range(40, 80), *range(80, 120), *range(40)])
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(7, 7)), str(report)
    twice = sink.rows()[:4]
    sink.add(twice)
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.BROKEN, Counts(7, 11, duplicated=4)), str(report)
    assert {json.loads(s.id)["label"] for s in report.samples} == {r["label"] for r in twice}
    sink.remove("label", twice[0]["label"])
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.BROKEN, Counts(7, 9, lost=1, duplicated=3)), str(report)


def labelled(frame: DataFrame) -> DataFrame:
    return windows(frame).select(F.date_format("window.end", "HH:mm:ss").alias("label"), "count")


@pytest.mark.recompute("`mode: overwrite` of partitions", "in batches", "")
@pytest.mark.matrix
def test_partitions_that_batches_replaced_are_recomputed(
    spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of part 0 the second batch's rows stay, of part 1 the third's."""
    sink = SINKS["delta"](request, tmp_path)
    sql = f"SELECT CAST({VALUE} / 60 AS BIGINT) AS part, CAST(value AS STRING) AS text FROM source"
    ran = Ran(spark, tmp_path, sql, "append", sink, mode="overwrite", partitionBy="part")
    assert {r["text"] for r in sink.rows()} == {str(v) for v in (*range(40, 60), *range(80, ROWS))}
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(60, 60)), str(report)
    assert any("in the ledger's 3 batches" in note for note in report.notes)
    sink.remove("text", "41")
    report = ran.audit()
    assert (report.verdict, report.counts) == (Verdict.BROKEN, Counts(60, 59, lost=1)), str(report)


LATE = """
from pyspark.sql import functions as F


def windows(frame):
    timed = frame.select((F.col("value").cast("string").cast("bigint") + 1).cast("timestamp").alias("at"))
    found = timed.withWatermark("at", "5 seconds").groupBy(F.window("at", "10 seconds")).count()
    counted = F.col("count").cast("string").alias("value")
    return found.select(F.date_format("window.end", "HH:mm:ss").alias("key"), counted)
"""
KILLS = "commit.decide:after@batch=2,log:before@batch=3,write.prepare:after@batch=4,commit.apply:before@batch=5"


@pytest.mark.matrix
@pytest.mark.parametrize("system", ["delta", "kafka"])
def test_late_records_of_a_killed_run_are_not_missed(
    spark: SparkSession, request: pytest.FixtureRequest, system: str, tmp_path: Path
) -> None:
    """Every other batch is late, and what came in time is cut differently by every watermark."""
    values = [v + 40 * n for n in range(4) for v in (*range(40, 80), *range(20))]
    append(str(tmp_path / "in"), pa.table({"value": [str(v).encode() for v in values]}))
    (tmp_path / "late.py").write_text(LATE)
    sink = SINKS[system](request, tmp_path)
    endpoint = sink.endpoint()
    described = {
        "pipeline": "late", "guarantee": "exactly_once", "checkpoint": str(tmp_path / "checkpoint"),
        "source": {"format": "log", "path": str(tmp_path / "in"), "maxOffsetsPerTrigger": 20},
        "transform": {"python": "late:windows"}, "sinks": [{"format": endpoint.system, **endpoint.options}],
        "trigger": "available_now", "master": "local[2]", "spark": {"spark.sql.shuffle.partitions": 2},
    }  # fmt: skip
    file = tmp_path / "late.yaml"
    file.write_text(yaml.safe_dump(described))
    with (tmp_path / "output").open("wb") as output:
        command = [sys.executable, str(APP), str(file)]
        done = supervisor.run(command, KILLS, tmp_path / "hits", timeout_s=900, output=output)
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == KILLS.count(",") + 1
    text = {k: v.decode() if isinstance(v, bytes) else v for r in sink.rows() for k, v in [(r["key"], r["value"])]}
    assert sum(map(int, text.values())) < len(values) - 40, "Spark dropped none as late"
    report = delivered.Pipeline.from_file(file).audit(spark, recompute=True)
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(len(text), len(text))), str(report)
    assert any("in the ledger's" in note for note in report.notes)
    again = sink.rows()[2]
    sink.add([again])
    report = delivered.Pipeline.from_file(file).audit(spark, recompute=True)
    assert (report.verdict, report.counts.duplicated) == (Verdict.BROKEN, 1), str(report)

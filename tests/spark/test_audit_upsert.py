"""An audit of an upsert: the final state of the table against the last version of each key in the source."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.support import without_spark

import delivered
from delivered import Pipeline
from delivered.audit.evidence import Counts, Verdict
from delivered.audit.request import AuditRequest
from delivered.audit.spark.audit import audit
from delivered.connectors.log import append
from delivered.model.capability import Guarantee
from delivered.pipeline.registry import find_sink, find_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS, KEYS = 200, 20
MODE = {"mode": "upsert", "keyColumns": "id", "versionColumn": "version", "deleteColumn": "gone"}


def changes(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(
        "CAST(CAST(key AS STRING) AS BIGINT) AS id",
        "CAST(CAST(value AS STRING) AS BIGINT) AS version",
        "CAST(value AS STRING) AS text",
        "CAST(CAST(value AS STRING) AS BIGINT) % 7 = 0 AS gone",
    )


def taken(frame: DataFrame, mode: dict[str, str]) -> DataFrame:
    return frame if "deleteColumn" in mode else frame.drop("gone")


def state() -> dict[int, int]:
    last = {i % KEYS: i for i in range(ROWS)}
    return {k: v for k, v in last.items() if v % 7}


@pytest.fixture(scope="module")
def ran(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a pipeline delivered 200 changes of 20 keys, spread over two partitions, in several batches."""
    return deliver(spark, tmp_path_factory.mktemp("audited"), partitions=2)


def deliver(spark: SparkSession, folder: Path, partitions: int, mode: dict[str, str] = MODE) -> Path:
    values = [str(i).encode() for i in range(ROWS)]
    rows = {"key": [str(i % KEYS).encode() for i in range(ROWS)], "value": values}
    rows["partition"] = pa.array([i // KEYS % partitions for i in range(ROWS)], pa.int32())
    append(str(folder / "log"), pa.table(rows))
    stream = spark.readStream.format("delivered_log").option("path", str(folder / "log"))
    query = (
        taken(changes(stream.option("maxOffsetsPerTrigger", "60").load()), mode)
        .writeStream.format("delivered_sqlite")
        .options(guarantee="exactly_once", pipeline="audited", path=str(folder / "sink.db"), table="rows", **mode)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    return folder


def spec(folder: Path, **mode: str) -> AuditRequest:
    return AuditRequest(
        pipeline="audited",
        guarantee=Guarantee.EXACTLY_ONCE,
        checkpoint=str(folder / "checkpoint"),
        sources={"source": find_source("log", {"path": str(folder / "log")})},
        sink=find_sink("sqlite", {"path": str(folder / "sink.db"), "table": "rows", **(mode or MODE)}),
        transform=lambda frames: taken(changes(frames["source"]), mode or MODE),
    )


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "sink.db")) as connection, connection:
        assert connection.execute(statement).rowcount == 1


def test_a_clean_state_is_held(spark: SparkSession, ran: Path) -> None:
    with closing(sqlite3.connect(ran / "sink.db")) as connection:
        assert dict(connection.execute("SELECT id, version FROM rows").fetchall()) == state()
    report = audit(spark, spec(ran))
    assert report.verdict is Verdict.HELD, report.unknowns
    kept = len(state())
    assert report.counts == Counts(kept, kept)
    assert report.fingerprints is not None
    assert report.fingerprints.says == "source and sink agree"
    assert any("one row of each key (id)" in note for note in report.notes)


@pytest.mark.parametrize(
    ("statement", "damage"),
    [
        # The definition that the audit's job is held to alters records, too: test_audit_job.py.
        pytest.param(
            "UPDATE rows SET version = version - 20, text = version - 20 WHERE id = 5",
            {"altered": 1},
            marks=pytest.mark.matrix,
        ),
        pytest.param("UPDATE rows SET text = 'x' WHERE id = 5", {"altered": 1}, marks=pytest.mark.matrix),
        # The test of mode insert takes a key out, too.
        pytest.param("DELETE FROM rows WHERE id = 5", {"lost": 1}, marks=pytest.mark.matrix),
        ("INSERT INTO rows VALUES (999, 1, '1')", {"unexpected": 1}),
    ],
    ids=["an older version", "another value", "a lost key", "a foreign record"],
)
def test_a_damaged_state_is_broken(
    spark: SparkSession, ran: Path, tmp_path: Path, statement: str, damage: dict[str, int]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ran, copy)
    change(copy, statement)
    report = audit(spark, spec(copy))
    # A row that was never sent may be another writer's.
    assert report.verdict is (Verdict.UNKNOWN if "unexpected" in damage else Verdict.BROKEN)
    assert replace(report, own="true").verdict is Verdict.BROKEN
    assert replace(report.counts, sent=0, delivered=0) == Counts(**damage)


def test_a_key_that_should_be_deleted(spark: SparkSession, ran: Path, tmp_path: Path) -> None:
    """Whether its deletion came last in both partitions: undecidable cases are reported, not judged."""
    gone = sorted(set(range(KEYS)) - set(state()))
    assert gone
    copy = tmp_path / "copy"
    shutil.copytree(ran, copy)
    change(copy, f"INSERT INTO rows VALUES ({gone[0]}, 1, '1')")
    report = audit(spark, spec(copy))
    # The keys of this log are in two partitions, so an older row may have arrived after the deletion.
    assert report.verdict is Verdict.HELD
    assert any(f"{len(gone)} keys are not judged" in note for note in report.notes)


@pytest.mark.matrix
def test_a_key_whose_deletion_is_certain_breaks_it_if_it_is_there(spark: SparkSession, tmp_path: Path) -> None:
    """In a shared table too: the key is this pipeline's."""
    deliver(spark, tmp_path, partitions=1)
    gone = sorted(set(range(KEYS)) - set(state()))
    change(tmp_path, f"INSERT INTO rows VALUES ({gone[0]}, 1, '1')")
    report = audit(spark, spec(tmp_path))
    assert report.verdict is Verdict.BROKEN, str(report)
    assert report.breaches == ["1 deleted keys are still in the sink"]


def test_without_version_it_says_why_it_cannot_tell(spark: SparkSession, ran: Path) -> None:
    report = audit(spark, spec(ran, mode="upsert", keyColumns="id", deleteColumn="gone"))
    assert report.verdict is Verdict.UNKNOWN
    assert any("AUDIT_ORDER" in reason and "versionColumn" in reason for reason in report.unknowns), report.unknowns


@pytest.mark.matrix
def test_of_mode_insert_a_row_that_stood_there_before_is_not_altered(spark: SparkSession, tmp_path: Path) -> None:
    """One key stood there, one breaks a constraint: by the ledger's counts both are accounted for, and no third one."""
    insert = {"mode": "insert", "keyColumns": "id", "onConstraint": "dead_letter"}
    with closing(sqlite3.connect(tmp_path / "sink.db")) as connection, connection:
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, version INTEGER, text TEXT, CHECK (id <> 9))")
        connection.execute("INSERT INTO rows VALUES (5, -1, 'before')")
    deliver(spark, tmp_path, partitions=1, mode=insert)
    with closing(sqlite3.connect(tmp_path / "sink.db")) as connection:
        there = dict(connection.execute("SELECT id, version FROM rows").fetchall())
    assert there == {**{k: k for k in range(KEYS) if k != 9}, 5: -1}
    report = audit(spark, spec(tmp_path, **insert))
    assert report.verdict is Verdict.HELD, str(report)
    assert any("172 conflicts, 10 broken constraints" in note for note in report.notes), report.notes
    change(tmp_path, "UPDATE rows SET text = 'x' WHERE id = 3")
    report = audit(spark, spec(tmp_path, **insert))
    assert report.verdict is Verdict.BROKEN and report.counts.altered == 1, str(report)
    change(tmp_path, "DELETE FROM rows WHERE id = 3")
    change(tmp_path, "DELETE FROM rows WHERE id = 4")
    assert audit(spark, spec(tmp_path, **insert)).counts.lost == 1


def _versions(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Of the key n, the time n microseconds after an hour, and the value."""
    numbers = pc.cast(pc.cast(batch.column("key"), pa.string()), pa.int64())
    texts = batch.column("value").cast(pa.string())
    at = pc.add(pa.scalar(3_600_000_000), numbers).cast(pa.timestamp("us", "UTC"))
    version = pc.cast(pc.binary_slice(batch.column("value"), 0, 1).cast(pa.string()), pa.int64())
    return pa.RecordBatch.from_arrays([at, version, texts], names=["at", "version", "text"])


def _by_time(folder: Path, values: dict[bytes, list[bytes]], **options: Any) -> Pipeline:
    keys = [k for k, of_key in values.items() for _ in of_key]
    append(str(folder / "log"), pa.table({"key": keys, "value": [v for of_key in values.values() for v in of_key]}))
    mode = {"mode": "upsert", "keyColumns": "at", "versionColumn": "version"}
    return Pipeline(
        name="by-time",
        guarantee="at_most_once",
        checkpoint=str(folder / "checkpoint"),
        source=delivered.log(str(folder / "log")),
        transform=delivered.arrow(_versions),
        sinks=[delivered.endpoint("sqlite", path=str(folder / "sink.db"), table="rows", ifNotExists=True, **mode)],
        audit={"own": "true"},
        **options,
    )


def test_keys_within_a_millisecond_are_not_mixed_up(spark: SparkSession, tmp_path: Path) -> None:
    pipeline = _by_time(tmp_path, {b"1": [b"1 a"], b"2": [b"1 b"], b"3000": [b"1 c"]})
    without_spark.deliver(pipeline)
    assert pipeline.audit(spark).verdict is Verdict.HELD
    change(tmp_path, "DELETE FROM rows WHERE text = '1 a'")
    change(tmp_path, "INSERT INTO rows SELECT replace(at, '0002', '0004'), 1, 'd' FROM rows WHERE text = '1 b'")
    report = pipeline.audit(spark)
    assert report.counts == Counts(3, 3, lost=1, unexpected=1), report


def test_rows_of_dead_letters_whose_cause_was_fixed_are_unknown(spark: SparkSession, tmp_path: Path) -> None:
    """One key has an older row, and one has none. No other row may differ."""
    with closing(sqlite3.connect(tmp_path / "sink.db")) as connection, connection:
        connection.execute("CREATE TABLE rows (at TEXT NOT NULL PRIMARY KEY, version INTEGER, text TEXT)")
        connection.execute("CREATE INDEX refusing ON rows (json_extract(substr(text, 3), '$.n'))")
    letters = delivered.files(str(tmp_path / "letters"), fileFormat="parquet")
    values = {b"1": [b"1 {}", b"2 bad"], b"2": [b"1 bad"], b"3": [b"1 {}"]}
    pipeline = _by_time(tmp_path, values, on_bad_row="dead_letter", dead_letter=letters)
    without_spark.deliver(pipeline)
    assert pipeline.audit(spark).verdict is Verdict.HELD
    with closing(sqlite3.connect(tmp_path / "sink.db")) as connection, connection:
        connection.execute("DROP INDEX refusing")
    report = pipeline.audit(spark)
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
    assert (report.counts.lost, report.counts.altered) == (1, 1)
    assert "2 were not retried" in report.unknowns[0]
    change(tmp_path, "DELETE FROM rows WHERE text = '1 {}' AND at LIKE '%3%'")
    assert pipeline.audit(spark).breaches

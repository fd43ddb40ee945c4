"""Batches of `foreachBatch`: planned, collected and committed in the user's process."""

from __future__ import annotations

import datetime
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.spark.portable_kills import damage, kills, produce

import delivered
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.connectors.sqlite.writer import staging_folder
from delivered.engine.context import open_ledger
from delivered.model.capability import Guarantee
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope
from delivered.model.patience import patience_s
from delivered.model.step import place
from delivered.spark.check import owners, sender_of
from delivered.spark.settings import with_setting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from tests.support.servers import Kafka

QUERY = "5b2f0a52-0c5e-4e4e-9c55-0d1f3a6f7a10"
WAIT_S = 120.0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a query that is about to run batch 0."""
    folder = tmp_path / "checkpoint"
    (folder / "offsets").mkdir(parents=True)
    (folder / "metadata").write_text(json.dumps({"id": QUERY}))
    logged(folder, 0)
    return folder


def logged(checkpoint: Path, batch: int) -> None:
    """Spark has logged the offsets of this batch, and the end of the one before it."""
    (checkpoint / "offsets" / str(batch)).write_text("v1\n{}\n{}")
    (checkpoint / "commits").mkdir(exist_ok=True)
    if batch:
        (checkpoint / "commits" / str(batch - 1)).write_text("v1\n{}")


def write(frame: DataFrame, batch: int, checkpoint: Path, **options: str) -> None:
    sink = delivered.sqlite(str(checkpoint.parent / "out.db"), "t", **options)
    delivered.write_batch(frame, batch, sink=sink, guarantee="exactly_once", pipeline="own", checkpoint=str(checkpoint))


def rows(checkpoint: Path) -> list[Any]:
    with sqlite3.connect(checkpoint.parent / "out.db") as connection:
        return sorted(connection.execute("SELECT * FROM t"))


def scope_of(checkpoint: Path) -> tuple[Any, Scope]:
    sink = SQLITE.sink({"path": str(checkpoint.parent / "out.db"), "table": "t"})
    return sink, Scope("own", sink.name, QUERY)


def test_a_job_that_fails_leaves_nothing_prepared(spark: SparkSession, checkpoint: Path) -> None:
    """The other task's shard is prepared, and its message is lost with the job."""
    sink, scope = scope_of(checkpoint)
    staged = str(staging_folder(sink.options, scope))

    def second_fails(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            deadline = time.monotonic() + WAIT_S
            while batch.column(0)[0].as_py() and not [p for p in Path(staged).glob("*") if "part" not in p.suffix]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if batch.column(0)[0].as_py():
                raise ValueError("a row that nobody can read")
            yield batch

    with pytest.raises(Exception, match="a row that nobody can read"):
        write(spark.range(0, 2, 1, 2).mapInArrow(second_fails, "id bigint"), 0, checkpoint)
    assert not list(Path(staged).glob("*"))
    write(spark.range(0, 2, 1, 2), 0, checkpoint)
    assert rows(checkpoint) == [(0,), (1,)]


def test_a_frame_without_partitions_is_an_empty_batch(spark: SparkSession, checkpoint: Path) -> None:
    write(spark.range(3), 0, checkpoint, mode="complete")
    assert rows(checkpoint) == [(0,), (1,), (2,)]
    logged(checkpoint, 1)
    empty = spark.range(3).where("false")
    assert empty.rdd.getNumPartitions() == 0
    write(empty, 1, checkpoint, mode="complete")
    assert rows(checkpoint) == []


def test_a_rerun_without_partitions_is_compared(spark: SparkSession, checkpoint: Path) -> None:
    write(spark.range(3), 0, checkpoint)
    with pytest.raises(delivered.ReplayDiffers):
        write(spark.range(3).where("false"), 0, checkpoint)


def test_the_driver_is_the_one_that_registered_its_session(spark: SparkSession, checkpoint: Path) -> None:
    """`foreachBatch` gets a clone of the session, in an object of its own."""
    clone = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())  # type: ignore[attr-defined]
    assert sender_of(clone).owner == list(owners.values())[-1]
    write(clone.range(1), 0, checkpoint)
    sink, scope = scope_of(checkpoint)
    ledger = open_ledger(sink, scope)
    try:
        assert [d.owner for d in ledger.history()] == [sender_of(clone).owner.id]
    finally:
        ledger.close()


def test_a_batch_leaves_no_trace_in_the_users_process(spark: SparkSession, checkpoint: Path) -> None:
    """Its waits are long, and its log lines name the pipeline; those of the next start are and do not."""
    write(spark.range(1), 0, checkpoint)
    logged(checkpoint, 1)
    write(spark.range(1), 1, checkpoint)
    assert patience_s(answered=False) < 15
    assert "pipeline" not in place()


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_times_are_the_same_in_every_zone(spark: SparkSession, checkpoint: Path, zone: str) -> None:
    with with_setting(spark, "spark.sql.session.timeZone", zone):
        write(spark.sql("SELECT timestamp'2026-11-26T07:00:00Z' AS at"), 0, checkpoint)
    ((at,),) = rows(checkpoint)
    seconds = datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).replace(tzinfo=datetime.UTC).timestamp()
    assert seconds == 1795676400.0


def test_a_job_without_a_result_of_each_task_is_not_decided(
    spark: SparkSession, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = type(spark.range(1))
    with monkeypatch.context() as cut:
        collect = frame.collect
        cut.setattr(frame, "collect", lambda self: collect(self)[:-1])
        with pytest.raises(InvariantBroken, match="DELIVERED_MESSAGE_MISSING"):
            write(spark.range(0, 2, 1, 2), 0, checkpoint)
    write(spark.range(0, 2, 1, 2), 0, checkpoint)
    assert rows(checkpoint) == [(0,), (1,)]


@pytest.mark.matrix
def test_a_jvm_that_dies_while_results_are_read_loses_no_rows(tmp_path: Path) -> None:
    """PySpark reads an empty result then, without an error."""
    all_rows = produce(tmp_path, 2)
    for app, code in (("cut_off", 1), ("portable", 0)):
        command = [sys.executable, "-m", f"tests.spark.apps.{app}", str(tmp_path), "exactly_once"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == code, done.stderr
    assert damage(tmp_path, all_rows, ()) == {"sqlite": (0, 0)}


@pytest.mark.matrix
@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_kills_at_random(kafka: Kafka, tmp_path: Path, guarantee: Guarantee) -> None:
    """Of the process tree, of the user's process alone, of tasks. `python -m tests.spark.portable_kills` does more."""
    topic = kafka.topic(2)
    found = kills(tmp_path, 12, (kafka.bootstrap, topic), guarantee=guarantee)
    assert (found["exit_code"], found["kills"]) == (0, 12), (tmp_path / "output").read_text()[-4000:]
    lost, doubled = (sum(pair) for pair in zip(*found["damage"].values(), strict=True))
    assert lost == 0 or guarantee == "at_most_once", found
    assert doubled == 0 or guarantee == "at_least_once", found


@pytest.mark.matrix
def test_kills_over_spark_connect(kafka: Kafka, tmp_path: Path) -> None:
    """Of the client, whose query goes on, and of the server."""
    found = kills(tmp_path, 10, (kafka.bootstrap, kafka.topic(2)), connect=True)
    assert (found["exit_code"], found["kills"]) == (0, 10), (tmp_path / "output").read_text()[-4000:]
    assert {"client, random", "server, random"} <= {*found["where"]}
    assert found["damage"] == {"sqlite": (0, 0), "kafka": (0, 0)}, found

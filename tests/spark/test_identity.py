"""What a run, a target and a pipeline are known by, through Spark."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.kafka_tools import make_topic_anew, produce, read_committed
from tests.support.halted import killed

import delivered
from delivered.crash import CRASH, CRASH_DIR

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.support.servers import Kafka

APP = Path(__file__).parent / "apps" / "batch_run.py"
ROWS = 300


def ids(path: Path) -> Counter[int]:
    with closing(sqlite3.connect(path)) as connection:
        return Counter(number for (number,) in connection.execute("SELECT id FROM orders"))


def write(frame: DataFrame, path: Path, run: str) -> None:
    writer = frame.write.format("delivered_sqlite").mode("append").option("path", str(path)).option("table", "orders")
    writer.option("guarantee", "exactly_once").option("pipeline", "daily").option("runId", run).save()


def monday(path: Path) -> list[str]:
    """A run in a process of its own."""
    options = json.dumps({"path": str(path), "table": "orders"})
    columns = "id", "cast(id % 7 AS string) AS name"
    return [sys.executable, str(APP), "sqlite", options, "monday", str(ROWS), *columns]


@pytest.mark.matrix
def test_a_run_killed_after_its_decision_then_given_again(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    killed(monday(path), "commit.decide:after", tmp_path)
    delivered.register(spark)
    rows = spark.range(ROWS).selectExpr("id", "cast(id % 7 AS string) AS name")
    write(rows.repartition(5), path, "monday")  # the same rows
    assert ids(path) == Counter(range(ROWS))
    for other in (
        rows.where("id <> 5"),
        rows.where("false"),
        rows.union(rows),
        rows.selectExpr("id + 1 AS id", "name"),
    ):
        with pytest.raises(Exception, match="RUN_ID_TAKEN"):
            write(other, path, "monday")
    assert ids(path) == Counter(range(ROWS))
    write(rows, path, "tuesday")
    assert ids(path) == Counter(dict.fromkeys(range(ROWS), 2))


@pytest.mark.matrix
def test_a_run_whose_planning_process_is_killed_says_so_and_can_be_given_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "out.db"
    env = {**os.environ, CRASH: "recover.claim:before!kill", CRASH_DIR: str(tmp_path)}
    done = subprocess.run(monday(path), capture_output=True, text=True, env=env, timeout=280, check=False)
    assert done.returncode != 0
    last = done.stderr.rpartition("delivered.model.errors.")[2]
    assert last.startswith("DeliveredError: [DELIVERED_WORKER_DIED]"), done.stderr[-4000:]
    assert "Next: restart the pipeline" in last
    delivered.register(spark)
    write(spark.range(ROWS).selectExpr("id", "cast(id % 7 AS string) AS name"), path, "monday")
    assert ids(path) == Counter(range(ROWS))


@pytest.mark.matrix  # test_output_mode.py writes in foreachBatch, conformance/test_runs.py gives ids again
def test_for_each_batch_names_the_query_and_the_batch(spark: SparkSession, tmp_path: Path) -> None:
    delivered.register(spark)
    (tmp_path / "in").mkdir()
    path = tmp_path / "out.db"

    def stream(checkpoint: str, by_query: bool) -> None:
        def write_batch(frame: DataFrame, batch_id: int) -> None:
            query_id = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
            write(frame, path, f"{query_id}-{batch_id}" if by_query else str(batch_id))

        lines = spark.readStream.text(str(tmp_path / "in")).selectExpr("cast(value AS bigint) AS id")
        query = lines.writeStream.foreachBatch(write_batch).trigger(availableNow=True)
        query.option("checkpointLocation", str(tmp_path / checkpoint)).start().awaitTermination()

    (tmp_path / "in" / "a.txt").write_text("1\n2\n")
    stream("first", by_query=True)
    stream("second", by_query=True)  # a new checkpoint: its batch 0 is another one
    assert ids(path) == Counter({1: 2, 2: 2})
    stream("third", by_query=False)
    assert ids(path) == Counter({1: 3, 2: 3})
    (tmp_path / "in" / "b.txt").write_text("3\n")
    with pytest.raises(Exception, match="RUN_ID_TAKEN"):  # batch 0 again, with other rows
        stream("fourth", by_query=False)
    assert ids(path) == Counter({1: 3, 2: 3})


@pytest.mark.matrix
@pytest.mark.checkpoint(
    "the sink's topic or table, recreated", "refused", "`TARGET_CHANGED`; `newTarget=accept`: continues"
)
@pytest.mark.checkpoint("the query's name, in the Spark API without `pipeline`", "refused", "`LEDGER_RENAMED`")
def test_a_recreated_topic_and_a_renamed_query_stop_the_next_start(
    spark: SparkSession, kafka: Kafka, tmp_path: Path
) -> None:
    delivered.register(spark)
    source, sink = kafka.topic(2), kafka.topic(2)
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}

    def stream(name: str, **more: str) -> None:
        frame = spark.readStream.format("delivered_kafka").options(**servers).option("subscribe", source)
        frame = frame.option("startingOffsets", "earliest").load().selectExpr("key", "value")
        writer = frame.writeStream.format("delivered_kafka").options(**servers).option("topic", sink).options(**more)
        writer = writer.option("guarantee", "exactly_once").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).queryName(name).start().awaitTermination()

    def delivered_now() -> Counter[bytes | None]:
        return Counter(m.value() for m in read_committed(kafka.bootstrap, sink))

    def send(first: int) -> None:
        produce(kafka.bootstrap, source, [(None, b"%d" % i) for i in range(first, first + 100)])

    send(0)
    stream("orders")
    send(100)
    stream("orders")
    assert delivered_now() == Counter(b"%d" % i for i in range(200))
    send(200)
    with pytest.raises(Exception, match="LEDGER_RENAMED") as caught:
        stream("orders-v2")
    assert "'orders'" in str(caught.value)
    assert "missingLedger" not in str(caught.value)

    make_topic_anew(kafka, sink, 2)
    with pytest.raises(Exception, match="TARGET_CHANGED") as caught:
        stream("orders")
    assert "200 records" in str(caught.value)
    assert delivered_now() == Counter()
    stream("orders", newTarget="accept")
    send(300)
    stream("orders")
    assert delivered_now() == Counter(b"%d" % i for i in range(200, 400))

"""`delivered replay` and `rebuild` as a user runs them: beside the running pipeline, killed, and run again."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.broker.source_help import produce
from tests.spark.cli_help import running

import delivered
from delivered_lab.supervisor import run
from delivered_lab.verify.services import wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T0 = 1_700_000_000_000
ROWS, FIRST, END, WAIT_S = 200, 50, 150, 180.0


def values(folder: Path, table: str) -> Counter[bytes]:
    with closing(sqlite3.connect(folder / "out.db", timeout=60)) as connection:
        there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        return Counter(v for (v,) in connection.execute(f"SELECT value FROM {table}")) if there else Counter()


def expected(first: int, end: int) -> Counter[bytes]:
    return Counter(b"%d" % n for n in range(first, end))


def committed(kafka: Any, topic: str, group: str) -> int:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    try:
        return sum(max(0, p.offset) for p in consumer.committed([TopicPartition(topic, 0)], timeout=60))
    finally:
        consumer.close()


@pytest.mark.matrix
def test_a_replay_beside_the_running_pipeline(kafka: Any, spark: SparkSession, tmp_path: Path) -> None:
    """Killed after a decision that Spark did not log: the same table as without a kill, and nobody else notices."""
    topic = kafka.topic(1, retention_ms=-1)  # the records are old
    produce(kafka, topic, [{"value": b"%d" % n, "timestamp": T0 + n} for n in range(ROWS)])
    server = {"kafka.bootstrap.servers": kafka.bootstrap}
    source = {"format": "kafka", **server, "subscribe": topic, "startingOffsets": "earliest"}
    pipeline = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": "checkpoint", "master": "local[1]",
        "source": {**source, "maxOffsetsPerTrigger": 40, "commitOffsetsToGroup": f"shop-{topic}"},
        "transform": {"select": ["value"]}, "sinks": [{"format": "sqlite", "path": "out.db", "table": "orders"}],
    }  # fmt: skip
    file = tmp_path / "shop.yaml"
    file.write_text(json.dumps(pipeline))
    query = delivered.Pipeline.from_file(file).start(spark)
    try:
        query.processAllAvailable()
        assert values(tmp_path, "orders") == expected(0, ROWS)
        wait_for(lambda: committed(kafka, topic, f"shop-{topic}") == ROWS, WAIT_S, "the group's offsets")
        replay = [sys.executable, "-m", "delivered.cli.main", "replay", str(file), "--into", "again"]
        replay += ["--from", str(T0 + FIRST), "--to", str(T0 + END)]
        done = run(replay, "commit.decide:after@batch=1", tmp_path / "hits", timeout_s=240)
        assert (done.exit_code, done.runs, len(done.kills)) == (0, 2, 1)
        assert values(tmp_path, "again") == expected(FIRST, END)
        assert committed(kafka, topic, f"shop-{topic}") == ROWS
        produce(kafka, topic, [{"value": b"%d" % n, "timestamp": T0 + n} for n in range(ROWS, ROWS + 20)])
        query.processAllAvailable()
        assert values(tmp_path, "orders") == expected(0, ROWS + 20)
    finally:
        query.stop()
    assert values(tmp_path, "again") == expected(FIRST, END)


@pytest.mark.matrix
def test_a_rebuild_of_a_table_from_kafka(kafka: Any, tmp_path: Path) -> None:
    """From several partitions and batches; the pipeline goes on in the new table, where it was."""
    topic = kafka.topic(3)
    produce(kafka, topic, [{"value": b"%d" % n, "key": b"%d" % n} for n in range(100)], partition=None)
    pipeline = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": "checkpoint", "master": "local[2]",
        "source": {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "subscribe": topic,
                   "startingOffsets": "earliest", "maxOffsetsPerTrigger": 40},
        "transform": {"sql": "SELECT value FROM source"}, "trigger": "available_now",
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "orders"}],
    }  # fmt: skip
    file = tmp_path / "shop.yaml"
    file.write_text(json.dumps(pipeline))

    def told(*arguments: str) -> str:
        with running(arguments[0], str(file), *arguments[1:]) as process:
            out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        return out

    told("run")
    assert "both tables have 100 rows, with the same content; audit of the new one: held" in told(
        "rebuild", "--into", "fresh"
    )
    assert values(tmp_path, "orders") == expected(0, 100)
    assert values(tmp_path, "fresh") == Counter()
    produce(kafka, topic, [{"value": b"%d" % n} for n in range(100, 120)], partition=None)
    told("run")
    assert values(tmp_path, "orders") == expected(0, 120)

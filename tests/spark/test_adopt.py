"""`delivered adopt` from a consumer group and from a time: killed in between, no record is read twice or skipped.

tests/spark/test_migrate.py adopts from Spark's own connector; tests/broker/test_adopt.py, what is refused.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.spark.life import once, rows

import delivered
from delivered.audit.evidence import Verdict
from delivered_lab.supervisor import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka

CLI = [sys.executable, "-c", "from delivered.cli.main import app; app()"]
RECORDS, OLD, PER_BATCH = 160, 60, 30
KILLS = "write.prepare:after@batch=0,commit.decide:after@batch=1,log:before@batch=2"


@pytest.mark.matrix  # test_migrate.py adopts and kills in `make test`
@pytest.mark.parametrize("origin", ["group", "timestamp"])
def test_nothing_is_read_twice_or_skipped(origin: str, kafka: Kafka, spark: SparkSession, tmp_path: Path) -> None:
    topic, database = kafka.topic(2), tmp_path / "out.db"
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    began_ms = int(time.time() * 1_000) - 60_000  # recent: Kafka deletes what is older than its retention
    for n in range(RECORDS):
        producer.produce(topic, str(n).encode(), partition=n % 2, timestamp=began_ms + n)
    assert producer.flush(30) == 0
    group = old_job(kafka, topic, database)
    file = tmp_path / "orders.yaml"
    pipeline = {
        "pipeline": "orders", "guarantee": "exactly_once", "checkpoint": "ours", "trigger": "available_now",
        "source": {
            "format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "subscribe": topic,
            "maxOffsetsPerTrigger": PER_BATCH, "startingOffsets": "earliest",
        },
        "transform": {"sql": "SELECT CAST(value AS STRING) AS v FROM source"},
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "rows"}], "master": "local[2]",
    }  # fmt: skip
    file.write_text(yaml.safe_dump(pipeline))
    position = group if origin == "group" else str(began_ms + OLD)
    command = [*CLI, "adopt", str(file), f"--from-{origin}", position, "--yes"]
    for _ in range(2):  # as after a kill between writing and reporting
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert shown.returncode == 0, shown.stderr
        assert all(f"{topic}-{p}: starts at offset {OLD // 2}, 50 offsets ahead" in shown.stdout for p in (0, 1))
    with (tmp_path / "output").open("wb") as output:
        done = run(
            [*CLI, "run", str(file)], KILLS, tmp_path / "hits", timeout_s=600, env=dict(os.environ), output=output
        )
    assert (done.exit_code, len(done.kills)) == (0, 3), (tmp_path / "output").read_text()[-4000:]
    assert once(rows(database), RECORDS)
    report = delivered.Pipeline.from_file(file).audit(spark, sink_from={"rowid": OLD + 1})
    assert (report.verdict, report.counts.sent) == (Verdict.HELD, RECORDS - OLD), str(report)


def old_job(kafka: Kafka, topic: str, database: Path) -> str:
    """A consumer that wrote the first records, committed their offsets, and ended; its group."""
    group = f"old-{topic}"
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, p, 0) for p in (0, 1)])
    values: list[str] = []
    while len(values) < RECORDS:
        message = consumer.poll(30)
        assert message is not None and message.error() is None
        values.append((message.value() or b"").decode())
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE rows (v TEXT)")
        connection.executemany("INSERT INTO rows VALUES (?)", [(v,) for v in values if int(v) < OLD])
    consumer.commit(offsets=[TopicPartition(topic, p, OLD // 2) for p in (0, 1)], asynchronous=False)
    consumer.close()
    return group

"""Spark's own Kafka source, with its JARs on the session, into our sink: killed after the decision, and audited."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Producer
from tests.kafka_tools import produce, read_committed

import delivered
from delivered.audit.evidence import Verdict
from delivered_lab.supervisor import run

ROWS, ABORTED = 300, 20


@pytest.mark.matrix
def test_the_jvm_source_is_read_exactly_once(kafka: Any, spark: Any, spark_kafka_jars: str, tmp_path: Path) -> None:
    source, sink = kafka.topic(2), kafka.topic(2)
    produce(kafka.bootstrap, source, ((f"k{i % 7}".encode(), str(i).encode()) for i in range(ROWS)))
    aborted = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": "aborted"})
    aborted.init_transactions()
    aborted.begin_transaction()
    for i in range(ROWS, ROWS + ABORTED):
        aborted.produce(source, str(i).encode())
    aborted.flush()
    aborted.abort_transaction()
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "pipeline": "jvm-source",
                "guarantee": "exactly_once",
                "checkpoint": str(tmp_path / "checkpoint"),
                "source": {
                    "format": "spark:kafka", **servers, "subscribe": source, "startingOffsets": "earliest",
                    "maxOffsetsPerTrigger": 100,
                },
                "transform": {"sql": "SELECT key, value FROM source"},
                "sinks": [{"format": "kafka", **servers, "topic": sink}],
                "trigger": "available_now",
                "master": "local[2]",
                "spark": {"spark.jars": spark_kafka_jars},
            }
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "delivered.cli.main", "run", str(file)]
    outcome = run(command, "commit.decide:after@batch=1", tmp_path / "hits", timeout_s=240)
    assert (outcome.exit_code, outcome.runs, len(outcome.kills)) == (0, 2, 1)
    found = sorted(int(m.value() or b"-1") for m in read_committed(kafka.bootstrap, sink))
    assert found == list(range(ROWS + ABORTED)), "by default, Spark's source reads aborted records too"
    report = delivered.Pipeline.from_file(file).audit(spark)
    assert (report.verdict, report.counts.sent) == (Verdict.HELD, ROWS + ABORTED), str(report)

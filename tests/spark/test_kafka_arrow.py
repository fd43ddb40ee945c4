"""Kafka to Kafka with `client=arrow` on both ends, killed and started again: every record once, none changed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from tests.kafka_tools import produce, read_committed

from delivered.testing import supervisor

APP = Path(__file__).parent / "apps" / "run_file.py"
RECORDS = 600
POINTS = ("write.prepare:after", "commit.decide:after", "commit.apply:after")


def test_every_record_once_after_every_kill(kafka: Any, tmp_path: Path) -> None:
    source, sink = kafka.topic(2), kafka.topic(2)
    sent = [(f"k{i % 7}".encode() if i % 5 else None, str(i).encode()) for i in range(RECORDS)]
    produce(kafka.bootstrap, source, sent, compression_type="lz4")
    at = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "client": "arrow"}
    pipeline = {
        "pipeline": "arrow",
        "guarantee": "exactly_once",
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {**at, "subscribe": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 150},
        "sinks": [{**at, "topic": sink, "compression": "lz4"}],
        "trigger": "available_now",
        "master": "local[2]",
    }
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    crash = ",".join(f"{point}@batch={number}" for number, point in enumerate(POINTS))
    with (tmp_path / "output").open("wb") as output:
        command = [sys.executable, str(APP), str(file)]
        done = supervisor.run(command, crash, tmp_path / "hits", timeout_s=400, output=output)
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == len(POINTS)
    assert Counter((m.key(), m.value()) for m in read_committed(kafka.bootstrap, sink)) == Counter(sent)

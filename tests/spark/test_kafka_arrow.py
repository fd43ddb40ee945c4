"""Kafka to Kafka with `client=arrow` on both ends, killed, and gone on with: every record once, none changed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.kafka_tools import produce, read_committed
from tests.support.halted import killed

import delivered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APP = Path(__file__).parent / "apps" / "run_file.py"
RECORDS, WAIT_S = 600, 180
APPLIED = "commit.apply:after@batch=2"  # of one shard
EVERY = f"write.prepare:after@batch=0,commit.decide:after@batch=1,{APPLIED}"


@pytest.mark.parametrize("crash", [APPLIED, pytest.param(EVERY, marks=pytest.mark.matrix)])
def test_every_record_once_after_every_kill(kafka: Any, spark: SparkSession, crash: str, tmp_path: Path) -> None:
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
    killed([sys.executable, str(APP), str(file)], crash, tmp_path)
    assert delivered.Pipeline.from_file(file).start(spark).awaitTermination(WAIT_S)
    assert Counter((m.key(), m.value()) for m in read_committed(kafka.bootstrap, sink)) == Counter(sent)

"""An audit of a Kafka pipeline that died between decide and apply: what the next start applies is not reported lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import delivered
from delivered.audit.evidence import Counts, Verdict
from delivered_lab.supervisor import kill_tree

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 400
MARK = "named_struct('key', 'pipeline', 'value', CAST('audited' AS BINARY))"
SQL = f"SELECT key, value, array({MARK}) AS headers FROM source"
OWN = "exists(headers, h -> h.key = 'pipeline' AND h.value = CAST('audited' AS BINARY))"


def produce(bootstrap: str, topic: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for i in range(ROWS):
        producer.produce(topic, key=f"k{i % 9}", value=json.dumps({"id": i}))
    assert producer.flush(30) == 0


def pipeline_file(folder: Path, bootstrap: str, source: str, sink: str) -> Path:
    servers = {"kafka.bootstrap.servers": bootstrap}
    file = folder / "pipeline.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "pipeline": "audited",
                "guarantee": "exactly_once",
                "checkpoint": str(folder / "checkpoint"),
                "source": {
                    "format": "kafka", **servers, "subscribe": source, "startingOffsets": "earliest",
                    "maxOffsetsPerTrigger": 100,
                },
                "transform": {"sql": SQL},
                "sinks": [{"format": "kafka", **servers, "topic": sink}],
                "trigger": "available_now",
                "master": "local[2]",
                "audit": {"id": "get_json_object(CAST(value AS STRING), '$.id')", "own": OWN},
            }
        )
    )  # fmt: skip
    return file


def run(file: Path, crash: str | None, until: Callable[[], bool]) -> None:
    """Start the pipeline; kill all of it when `until` holds, or let it end."""
    hits = file.parent / "hits"
    hits.mkdir(exist_ok=True)
    env = {**os.environ, "DELIVERED_CRASH_DIR": str(hits), "DELIVERED_CRASH": crash or ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "delivered.cli.main", "run", str(file)], env=env, start_new_session=True
    )
    deadline = time.monotonic() + 480
    try:
        while process.poll() is None and not until():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # One meant to be killed must not have ended by itself.
        assert (process.poll() is None) == (crash is not None)
        assert crash is not None or process.returncode == 0
    finally:
        if process.poll() is None:
            kill_tree(process)
            process.wait()


@pytest.mark.matrix
def test_a_batch_that_is_decided_and_not_applied_is_in_progress(
    spark: SparkSession, kafka: Any, tmp_path: Path
) -> None:
    source, sink = kafka.topic(2), kafka.topic(2)
    produce(kafka.bootstrap, source)
    file = pipeline_file(tmp_path, kafka.bootstrap, source, sink)
    run(file, "commit.decide:after@batch=1", lambda: any((tmp_path / "hits").glob("*.hit.json")))

    stopped = delivered.Pipeline.from_file(file).audit(spark)
    assert stopped.verdict is Verdict.HELD, stopped.to_json()
    assert (stopped.counts.sent, stopped.counts.delivered, stopped.counts.lost) == (100, 100, 0)
    assert len(stopped.transactions) == 2
    assert any("decided and shards [0, 1] of it are not visible" in note for note in stopped.notes)

    run(file, None, lambda: False)
    finished = delivered.Pipeline.from_file(file).audit(spark, full=True)
    assert finished.verdict is Verdict.HELD, finished.to_json()
    assert finished.counts == Counts(ROWS, ROWS)
    assert finished.transactions == ()
    assert finished.fingerprints is not None
    assert finished.fingerprints.says == "source, ledger and sink agree"
    assert sorted(line.partition for line in finished.partitions) == [f"{source}-0", f"{source}-1"]

    # One more record by another producer: without the header it is foreign, with it a duplicate.
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(sink, key="k1", value=json.dumps({"id": 7}), partition=0)
    assert producer.flush(30) == 0
    shared = delivered.Pipeline.from_file(file).audit(spark)
    assert (shared.verdict, shared.counts, shared.foreign) == (Verdict.HELD, Counts(), 1), shared.to_json()
    producer.produce(sink, key="k1", value=json.dumps({"id": 7}), partition=0, headers=[("pipeline", b"audited")])
    assert producer.flush(30) == 0
    broken = delivered.Pipeline.from_file(file).audit(spark)
    assert (broken.verdict, broken.exit_code, broken.counts.duplicated) == (Verdict.BROKEN, 1, 1)

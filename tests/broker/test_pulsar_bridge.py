"""Kafka to Pulsar to Delta Lake, killed at random moments, and read by the systems' own clients."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.pulsar import native
from tests.support.servers import Kafka, Pulsar

ROWS, PER_BATCH, KILLS = 12_000, 100, 10


class Bridge:
    """One pipeline, in a process group of its own."""

    def __init__(self, folder: Path, name: str, source: dict[str, Any], sink: dict[str, Any]) -> None:
        self._file, self._checkpoint = folder / f"{name}.json", folder / name
        pipeline = {
            "pipeline": name,
            "guarantee": "exactly_once",
            "checkpoint": str(self._checkpoint),
            "source": {**source, "maxOffsetsPerTrigger": PER_BATCH, "startingOffsets": "earliest"},
            "transform": {"select": ["key", "value"]},
            "sinks": [sink],
        }
        self._file.write_text(json.dumps(pipeline))
        self.unfinished = 0

    def killed(self, dice: random.Random) -> None:
        """Once, up to half a second after it has planned a batch of its own."""
        before = self._planned()
        process = self._start()
        while self._planned() < before + 2:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        until = time.monotonic() + dice.uniform(0, 0.5)
        while time.monotonic() < until and self._planned() < before + 4:  # the rest is for the other kills
            time.sleep(0.01)
        assert process.poll() is None, "it ended before it was killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.unfinished += len(self._batches("offsets")) - len(self._batches("commits"))

    def finished(self) -> None:
        assert self._start().wait(240) == 0

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "delivered_lab.verify.loop", str(self._file)]
        return subprocess.Popen(command, start_new_session=True)

    def _planned(self) -> int:
        return len(self._batches("offsets"))

    def _batches(self, folder: str) -> list[Path]:
        return [p for p in (self._checkpoint / folder).glob("*") if p.name.isdigit()]


def sent(number: int) -> tuple[str, bytes]:
    return f"k{number % 50}", b"row %d" % number


@pytest.mark.matrix
def test_kafka_to_pulsar_to_delta(kafka: Kafka, pulsar: Pulsar, tmp_path: Path) -> None:
    from confluent_kafka import Producer

    orders, topic, table = kafka.topic(3), pulsar.topic(2), tmp_path / "orders"
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(ROWS):
        key, value = sent(number)
        producer.produce(orders, value, key)
        producer.poll(0)
    assert producer.flush(60) == 0
    into = Bridge(
        tmp_path, "into",
        {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "subscribe": orders},
        {"format": "pulsar", **pulsar.options, "topic": topic},
    )  # fmt: skip
    out = Bridge(
        tmp_path, "out",
        {"format": "pulsar", **pulsar.options, "topics": topic},
        {"format": "delta", "path": str(table)},
    )  # fmt: skip
    dice = random.Random(36)
    for _ in range(KILLS):
        into.killed(dice)
    into.finished()
    expected = Counter(sent(number) for number in range(ROWS))
    assert Counter(by_pulsars_client(pulsar, topic)) == expected
    assert into.unfinished, "no kill met a batch that was not finished"
    for _ in range(KILLS):
        out.killed(dice)
    out.finished()
    assert by_deltas_client(table) == expected


def by_pulsars_client(pulsar: Pulsar, topic: str) -> list[tuple[str, bytes]]:
    return [(m.partition_key(), m.data()) for n in range(2) for m in native(pulsar, f"{topic}-partition-{n}")]


def by_deltas_client(table: Path) -> Counter[tuple[str, bytes]]:
    from deltalake import DeltaTable

    rows = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    return Counter((bytes(r["key"]).decode(), bytes(r["value"])) for r in rows)

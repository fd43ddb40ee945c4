"""Where the events come from and where they go."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from examples.demo.crashes import BATCH_ROWS

PARTITIONS = 4
Say = Callable[[str], None]


class System(Protocol):
    """What the demo needs of a source and a sink."""

    name: str

    def load(self, events: pa.Table, say: Say) -> None:
        """Put the events into the source, once, before anything is killed."""

    def source(self) -> dict[str, Any]:
        """The pipeline file's entry."""

    def sink(self, guarantee: str) -> dict[str, Any]:
        """The pipeline file's entry; every guarantee has a sink of its own."""

    def close(self) -> None: ...


class Embedded:
    """A durable log on disk and a SQLite file: no server."""

    name = "a local log to SQLite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, events: pa.Table, say: Say) -> None:
        from delivered.connectors.log import append

        say("writing them into a local log of 4 partitions")
        append(str(self._folder / "flights"), events, partition_by=PARTITIONS)

    def source(self) -> dict[str, Any]:
        return {"format": "log", "path": str(self._folder / "flights"), "maxOffsetsPerTrigger": BATCH_ROWS}

    def sink(self, guarantee: str) -> dict[str, Any]:
        return {"format": "sqlite", "path": str(self._folder / f"{guarantee}.db"), "table": "flights"}

    def close(self) -> None:
        """Nothing runs."""


class Kafka:
    """A real broker of the demo's own, on 127.0.0.1."""

    name = "Kafka to Kafka"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "broker"
        self._broker: Any = None

    def load(self, events: pa.Table, say: Say) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        from delivered_lab import brokers

        shutil.rmtree(self._folder, ignore_errors=True)
        self._broker = brokers.start("kafka", self._folder, say=say, dies_with_parent=True)
        admin = AdminClient({"bootstrap.servers": self._broker.bootstrap})
        from examples.demo.crashes import CRASHES

        topics = ["flights", *(self._topic(guarantee) for guarantee in CRASHES)]
        for made in admin.create_topics([NewTopic(t, PARTITIONS, 1) for t in topics]).values():
            made.result(30)
        say("producing them to the topic flights, 4 partitions")
        _produce(self._broker.bootstrap, events)

    def source(self) -> dict[str, Any]:
        return {
            "format": "kafka",
            "kafka.bootstrap.servers": self._broker.bootstrap,
            "subscribe": "flights",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": BATCH_ROWS,
        }

    def sink(self, guarantee: str) -> dict[str, Any]:
        return {
            "format": "kafka",
            "kafka.bootstrap.servers": self._broker.bootstrap,
            "topic": self._topic(guarantee),
        }

    def close(self) -> None:
        if self._broker is not None:
            self._broker.stop()

    @staticmethod
    def _topic(guarantee: str) -> str:
        return "flights-" + guarantee.replace("_", "-")


def _produce(bootstrap: str, events: pa.Table) -> None:
    from confluent_kafka import Producer

    failed: list[str] = []

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(str(error))

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 20,
            "partitioner": "murmur2_random",
            "queue.buffering.max.messages": 400_000,
        }
    )
    for batch in events.to_batches(max_chunksize=20_000):
        for key, value in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            producer.produce("flights", key=key, value=value, on_delivery=delivered)
        producer.poll(0)
    if producer.flush(60) or failed:
        raise RuntimeError(f"the broker did not take all flights: {failed[:3]}")

"""Pipelines from a log into a Kafka topic whose first records go missing, and their audits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from tests.support.orders import ROWS, Orders

import delivered
from delivered import Pipeline

_names = itertools.count()
DAY_MS = 86_400_000


def select(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key", "value"])


@dataclass
class TopicOrders(Orders):
    """From a log into a topic with two partitions."""

    kafka: Any = None
    settings: dict[str, int] = field(default_factory=lambda: {"retention_ms": DAY_MS})
    name: str = field(default_factory=lambda: f"expired{next(_names)}")
    missing: int = 0
    named: dict[str, str] = field(default_factory=dict)

    transform: Any = staticmethod(select)

    def __post_init__(self) -> None:
        self.topic = self.kafka.topic(2, **self.settings)

    def pipeline(self, **changes: Any) -> Pipeline:
        return Pipeline(
            **changes,
            name=self.name,
            guarantee=self.guarantee,
            checkpoint=self.folder / self.checkpoint,
            source=delivered.log(str(self.folder / "log"), startingOffsets="earliest"),
            transform=delivered.arrow(select=["key", "value"]),
            sinks=[delivered.kafka(self.kafka.bootstrap, topic=self.topic, **self.named)],
        )

    def lose(self, value: bytes) -> None:
        """The topic is another one, which lacks a record."""
        from confluent_kafka import Producer

        producer, other = (
            Producer({"bootstrap.servers": self.kafka.bootstrap}),
            self.kafka.topic(2, **self.settings),
        )
        for message in self.messages():
            if message.value() != value:
                producer.produce(other, message.value(), message.key(), message.partition())
        assert producer.flush(60) == 0
        self.topic, self.missing = other, 1

    def expire(self, batches: int) -> None:
        """Remove all records of the first batches, in one partition, and one more than that."""
        from confluent_kafka import TopicPartition

        first = next(m for m in self.messages() if m.partition() == 1 and int(m.value()) >= batches * ROWS)
        at = TopicPartition(self.topic, 1, first.offset() + 1)
        self.kafka.admin().delete_records([at])[at].result(60)

    def messages(self) -> list[Any]:
        """Of the topic, each partition in its order."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({"bootstrap.servers": self.kafka.bootstrap, "group.id": "reads"})
        consumer.assign([TopicPartition(self.topic, n, 0) for n in range(2)])
        found = [consumer.poll(30) for _ in range(self.sent - self.missing)]
        consumer.close()
        assert all(m is not None and m.error() is None for m in found)
        return found

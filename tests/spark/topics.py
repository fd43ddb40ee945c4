"""Records in and out of a topic, by a client that is not ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def send(kafka: Any, topic: str, values: Iterable[object]) -> None:
    """Each value as text, its own key."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for value in values:
        producer.produce(topic, key=str(value), value=str(value))
    assert producer.flush(30) == 0


def read_values(kafka: Any, topic: str) -> list[bytes]:
    """All values that a read_committed reader finds in a topic now."""
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "tests",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    found: list[bytes] = []
    try:
        partitions = consumer.list_topics(topic, 30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
        ended: set[int] = set()
        while len(ended) < len(partitions):
            message = consumer.poll(30)
            assert message is not None
            if (error := message.error()) is None:
                found.append(message.value())
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                ended.add(message.partition())
        return found
    finally:
        consumer.close()

"""Independent Kafka clients for tests: judges use no code of the product."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, Message, Producer, TopicPartition


def produce(bootstrap: str, topic: str, records: Iterable[tuple[bytes | None, bytes | None]], **config: Any) -> None:
    """Send (key, value) pairs and wait until all are acknowledged; `config` as librdkafka, with `_` for `.`."""
    settings = {"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 5}
    producer = Producer(settings | {k.replace("_", "."): v for k, v in config.items()})
    failed: list[str] = []
    for key, value in records:
        while True:
            try:
                producer.produce(
                    topic, key=key, value=value, on_delivery=lambda e, _: failed.append(str(e)) if e else None
                )
                break
            except BufferError:
                producer.poll(0.1)
    left = producer.flush(60)
    if left or failed:
        raise RuntimeError(f"{left} records of {topic} were not acknowledged, {len(failed)} failed: {failed[:3]}")


def read_committed(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[Message]:
    """Every record that a read_committed reader finds now, partition by partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    try:
        partitions = consumer.list_topics(topic, 30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
        found: list[Message] = []
        ended: set[int] = set()
        while len(ended) < len(partitions):
            for message in consumer.consume(10_000, 0.2):
                if message.error():
                    ended.add(message.partition())
                else:
                    found.append(message)
        return found
    finally:
        consumer.close()


def make_topic_anew(kafka: Any, topic: str, partitions: int) -> None:
    """Delete and recreate it, as soon as the brokers have released its name."""
    admin = kafka.admin()
    admin.delete_topics([topic])[topic].result(30)
    deadline = time.monotonic() + 30
    while True:
        try:
            kafka.topic(partitions, name=topic)
            return
        except Exception:
            if time.monotonic() > deadline:
                raise

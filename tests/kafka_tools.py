"""Independent Kafka clients for tests: judges use no code of the product."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, Message, Producer, TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

_ENDING = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")


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
    """Every record that a read_committed reader finds now, partition by partition.

    First waits for the markers of ended transactions: the broker replies before it writes them, so a reader that asks
    right after a commit may not see it yet.
    """
    if isolation == "read_committed":
        wait_for_markers(bootstrap)
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


def wait_for_markers(bootstrap: str) -> None:
    """Wait until no transaction of any broker is ending; open ones stay open."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        deadline = time.monotonic() + 60
        while ending := _listed(admin):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still ending: {ending}")
            time.sleep(0.02)
    finally:
        admin.close()


def _listed(admin: KafkaAdminClient) -> list[Any]:
    """The transactions that are ending, or the error of a coordinator that still loads its log after a restart."""
    try:
        return [t for ts in admin.list_transactions(state_filters=_ENDING).values() for t in ts]
    except KafkaError as error:
        if not error.retriable:
            raise
        return [error]


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

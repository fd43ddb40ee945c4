"""How long a Kafka topic keeps the records from a position on, asked from a real broker."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.broker.source_help import produce, source

from delivered.contract.source import Offsets, Retained

HOUR_MS = 3_600_000


def retained(kafka: Any, topic: str, at: Offsets) -> Retained:
    with closing(source(kafka, subscribe=topic).driver()) as driver:
        found = driver.retained(at)
    assert found is not None
    return found


def at(kafka: Any, topic: str, *offsets: int) -> Offsets:
    """A position, with the topic's id."""
    with closing(source(kafka, subscribe=topic).driver()) as driver:
        newest = driver.newest()
    assert newest is not None
    return {**newest, topic: {str(p): offset for p, offset in enumerate(offsets)}}


def test_by_age_of_the_first_record(kafka: Any) -> None:
    topic = kafka.topic(3, retention_ms=str(HOUR_MS))
    now = int(time.time() * 1000)
    records = [(0, now - 50_000), (0, now - 10_000), (1, now - 20_000), (1, now)]
    produce(kafka, topic, [{"value": b"v", "partition": p, "timestamp": ms} for p, ms in records], None)
    found = retained(kafka, topic, at(kafka, topic, 0, 1, 0))
    assert found == Retained({}, {f"{topic}/0": now - 50_000 + HOUR_MS, f"{topic}/1": now + HOUR_MS})
    assert retained(kafka, topic, at(kafka, topic, 2, 2, 0)) == Retained(), "nothing waits"


def test_a_topic_that_keeps_all(kafka: Any) -> None:
    topic = kafka.topic(1, retention_ms="-1")
    produce(kafka, topic, [b"v"])
    assert retained(kafka, topic, at(kafka, topic, 0)) == Retained()


def test_by_size_at_the_rate_of_its_growth(kafka: Any) -> None:
    topic = kafka.topic(1, retention_ms="-1", retention_bytes="1000000")
    now = int(time.time() * 1000)
    produce(kafka, topic, [{"value": bytes(10_000), "timestamp": now - 100_000} for _ in range(10)])
    until = retained(kafka, topic, at(kafka, topic, 0)).until_ms[f"{topic}/0"]
    # A tenth of the limit was written in 100 s, so it takes about 900 s more.
    assert 600_000 < until - now < 1_200_000
    later = retained(kafka, topic, at(kafka, topic, 5)).until_ms[f"{topic}/0"]
    assert later > until


def test_what_was_dropped_already(kafka: Any) -> None:
    topic = kafka.topic(1, retention_ms=str(HOUR_MS))
    produce(kafka, topic, [b"v"] * 10)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for future in admin.delete_records([TopicPartition(topic, 0, 6)]).values():
        future.result()
    found = retained(kafka, topic, at(kafka, topic, 4))
    assert found.missing == {f"{topic}/0": 2}
    assert list(found.until_ms) == [f"{topic}/0"], "of those that are there"
    assert retained(kafka, topic, at(kafka, topic, 6)).missing == {}


def test_a_compacted_topic_cannot_tell(kafka: Any) -> None:
    topic = kafka.topic(1, cleanup_policy="compact")
    produce(kafka, topic, [{"key": b"k", "value": b"v"}])
    found = retained(kafka, topic, at(kafka, topic, 0))
    assert "compacted" in found.unknown and not found.until_ms


def test_a_topic_that_was_made_anew_cannot_tell(kafka: Any) -> None:
    topic = kafka.topic(1)
    produce(kafka, topic, [b"v"] * 3)
    before = at(kafka, topic, 1)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    admin.delete_topics([topic])[topic].result()
    deadline = time.monotonic() + 60
    while True:
        try:
            kafka.topic(1, topic)
            break
        except Exception:  # it is being deleted
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    found = retained(kafka, topic, before)
    assert "deleted and recreated" in found.unknown and not found.missing


def test_a_topic_that_is_not_read_any_more_cannot_tell(kafka: Any) -> None:
    topic = kafka.topic(1)
    found = retained(kafka, topic, {**at(kafka, topic, 0), "elsewhere": {"0": 1}})
    assert found == Retained(unknown="elsewhere-0: no longer there, or no longer read")


@pytest.mark.matrix
def test_a_segment_that_expires_is_dropped_no_earlier_than_said(new_kafka: Any) -> None:
    """The broker drops a record after `until_ms`; from then on it is missing."""
    kafka = new_kafka(properties={"log.retention.check.interval.ms": "200"})
    topic = kafka.topic(1, retention_ms="3000", segment_ms="500")
    produce(kafka, topic, [b"first"])
    start = at(kafka, topic, 0)
    until = retained(kafka, topic, start).until_ms[f"{topic}/0"]
    deadline = time.monotonic() + 90
    while not (found := retained(kafka, topic, start)).missing:
        assert time.monotonic() < deadline
        produce(kafka, topic, [b"more"])  # so that a segment is closed
        time.sleep(0.2)
    assert time.time() * 1000 >= until
    assert found.missing[f"{topic}/0"] >= 1

"""What the source's driver asks brokers, compared with what librdkafka's admin client says."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicCollection, TopicPartition
from tests.broker.source_help import produce, source

from delivered.clients.kafka.consumer import EARLIEST, LATEST, describe_topics, list_offsets
from delivered.clients.kafka.protocol import NoTopic, Wire
from delivered.connectors.kafka.reader import KafkaDriverClient
from delivered.model.errors import DeliveredError, UsageError
from delivered_lab.brokers import kafka as samples


@pytest.fixture
def client(kafka: Any) -> Any:
    made = KafkaDriverClient(source(kafka, subscribe="t").options)  # type: ignore[attr-defined]
    yield made
    made.close()


def test_topic_ids_are_those_that_earlier_releases_stored_in_checkpoints(kafka: Any) -> None:
    names = [kafka.topic(1) for _ in range(40)]
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    found = describe_topics(wire, [*names, "no.such.topic"])
    futures = kafka.admin().describe_topics(TopicCollection(names))
    assert {n: t.id for n, t in found.items() if t} == {n: str(f.result(60).topic_id) for n, f in futures.items()}
    assert found["no.such.topic"] is None
    assert any(set("+/") & set(t.id) for t in found.values() if t)
    wire.close()


def test_offsets_by_place_and_by_time(kafka: Any) -> None:
    topic = kafka.topic(3)
    produce(kafka, topic, [{"value": b"x", "timestamp": 1_000 * n} for n in range(1, 6)], partition=1)
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    parts = [(topic, n) for n in range(3)]
    ends = wire.patiently(lambda: list_offsets(wire, dict.fromkeys(parts, LATEST), committed_only=True))
    assert {p: offset for p, (offset, _) in ends.items()} == {(topic, 0): 0, (topic, 1): 5, (topic, 2): 0}
    assert all(epoch == 0 for _, epoch in ends.values())
    assert list_offsets(wire, {parts[1]: EARLIEST}, committed_only=False)[parts[1]][0] == 0
    assert list_offsets(wire, {parts[1]: 2_500}, committed_only=False)[parts[1]][0] == 2
    assert list_offsets(wire, {parts[1]: 9_000}, committed_only=False)[parts[1]][0] is None
    started = time.monotonic()
    for missing in ((topic, 3), ("no.such.topic", 0)):
        with pytest.raises(NoTopic):
            wire.patiently(lambda at=missing: list_offsets(wire, {at: LATEST}, committed_only=True))
    assert time.monotonic() - started < 60  # not waited for
    wire.close()


def test_offsets_of_a_group_are_committed_and_found(kafka: Any, client: KafkaDriverClient) -> None:
    topic = kafka.topic(2)
    produce(kafka, topic, [b"1", b"2", b"3"])
    group, parts = f"group-{topic}", [(topic, 0), (topic, 1)]
    assert client.committed(group, parts) == {}
    assert client.group_members(group) == 0
    client.commit(group, {(topic, 0): 2})
    assert client.committed(group, parts) == {(topic, 0): 2}
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "log_level": 0})
    assert [p.offset for p in consumer.committed([TopicPartition(topic, 0)], 60)] == [2]
    consumer.subscribe([topic])
    deadline = time.monotonic() + 60
    while client.group_members(group) != 1:
        consumer.poll(0.1)
        assert time.monotonic() < deadline
    with pytest.raises(UsageError, match=r"TOPIC_MISSING.*no\.such\.topic"):
        client.commit(group + "-free", {("no.such.topic", 0): 2})
    consumer.close()


def test_samples_for_a_topic_that_is_not_there(kafka: Any) -> None:
    """At once: the client alone would look for it until the records' time-out."""
    with pytest.raises(DeliveredError, match=r"TOPIC\b.*no\.such\.topic.*brokers topic"):
        samples.produce(kafka.bootstrap, "no.such.topic", 3)

"""The range of a replay from Kafka: times become offsets once; times that the broker no longer has are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from tests.broker.source_help import produce

import delivered
from delivered.model.errors import DeliveredError, Refused

T0 = 1_700_000_000_000


def pipeline(kafka: Any, topic: str, folder: Path, into: str | None = None) -> delivered.Pipeline:
    table = delivered.sqlite(str(folder / "s.db"), "rows")
    sinks = [delivered.kafka(kafka.bootstrap, topic=into) if into else table]
    return delivered.Pipeline(
        name="shop",
        guarantee="exactly_once",
        checkpoint=str(folder / "checkpoint"),
        source=delivered.kafka(kafka.bootstrap, subscribe=topic, startingOffsets="latest"),
        sinks=sinks,
    )


def filled(kafka: Any) -> str:
    """A record for each second, in turn in two partitions."""
    topic: str = kafka.topic(2, retention_ms=-1)  # the records are old
    for n in range(20):
        produce(kafka, topic, [{"value": b"%d" % n, "timestamp": T0 + 1_000 * n}], n % 2)
    return topic


def test_a_replay_ends_where_the_times_say(kafka: Any, tmp_path: Path) -> None:
    topic = filled(kafka)
    ours = pipeline(kafka, topic, tmp_path)
    made = ours.replay(str(T0 + 4_000), "2023-11-14T22:13:35+00:00", "again")  # T0 + 15 s
    assert made.until == {"source": {topic: {"0": 8, "1": 7}}}
    produce(kafka, topic, [{"value": b"late", "timestamp": T0 + 5_000}])
    assert ours.replay(str(T0 + 4_000), "2023-11-14T22:13:35+00:00", "again").until == made.until
    whole = ours.replay("earliest", "latest", "whole")
    assert whole.until == {"source": {topic: {"0": 11, "1": 10}}}
    named = ours.replay(f'{{"{topic}": {{"0": 3, "1": -2}}}}', "latest", "named")
    assert named.until == whole.until


def test_times_that_retention_took(kafka: Any, tmp_path: Path) -> None:
    topic = filled(kafka)
    kafka.admin().delete_records([TopicPartition(topic, 0, 4)])[TopicPartition(topic, 0, 4)].result(120)
    ours = pipeline(kafka, topic, tmp_path)
    with pytest.raises(Refused, match=rf"REPLAY_RECORDS_GONE.*before offset 4 of {topic} 0"):
        ours.replay(str(T0 + 4_000), "latest", "again")
    assert ours.replay(str(T0 + 9_000), "latest", "again").until == {"source": {topic: {"0": 10, "1": 10}}}
    assert ours.replay("earliest", str(T0 + 9_000), "again").until == {"source": {topic: {"0": 5, "1": 4}}}


def test_the_pipelines_own_topic_is_no_target(kafka: Any, tmp_path: Path) -> None:
    topic, own = filled(kafka), kafka.topic(1)
    ours = pipeline(kafka, topic, tmp_path, own)
    with pytest.raises(DeliveredError, match="REPLAY_TARGET"):
        ours.replay("earliest", "latest", own)
    same = delivered.kafka(kafka.bootstrap, topic=own, **{"kafka.linger.ms": 7})
    with pytest.raises(DeliveredError, match="REPLAY_TARGET"):
        ours.replay("earliest", "latest", same)

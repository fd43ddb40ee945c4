"""`delivered adopt` from a consumer group and from a time, against a real broker: no record repeated or lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.kafka_tools import produce

import delivered
from delivered.checkpoint import sidecar
from delivered.model.errors import Refused, UsageError


def pipeline(kafka: Any, topic: str, folder: Path, **more: Any) -> delivered.Pipeline:
    return delivered.Pipeline(
        name="taken-over",
        guarantee="exactly_once",
        checkpoint=str(folder / "checkpoint"),
        source=delivered.kafka(kafka.bootstrap, subscribe=topic, **more),
        sinks=[delivered.sqlite(str(folder / "sink.db"), "rows")],
    )


def old_job(kafka: Any, group: str, topic: str, committed: dict[int, int]) -> Consumer:
    """A member of the group, with these offsets committed."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "enable.auto.commit": False})
    consumer.subscribe([topic])
    while not consumer.assignment():
        consumer.poll(0.2)
    consumer.commit(offsets=[TopicPartition(topic, p, o) for p, o in committed.items()], asynchronous=False)
    return consumer


def filled(kafka: Any, partitions: int = 2, rows: int = 40) -> str:
    topic: str = kafka.topic(partitions)
    produce(kafka.bootstrap, topic, ((str(i).encode(), str(i).encode()) for i in range(rows)))
    return topic


def test_a_group_is_taken_over_once_it_is_empty(kafka: Any, tmp_path: Path) -> None:
    topic = filled(kafka)
    ours = pipeline(kafka, topic, tmp_path)
    group = f"old-{topic}"
    with pytest.raises(Refused, match="no committed offset"):
        ours.adopt(group=group)
    member = old_job(kafka, group, topic, {0: 7, 1: 5})
    with pytest.raises(Refused, match=r"ADOPT_RUNNING.*1 members"):
        ours.adopt(group=group)
    member.close()
    shown = ours.adopt(group=group, write=False)
    assert {p: o for p, (o, _) in shown.partitions.items()} == {f"{topic}-0": 7, f"{topic}-1": 5}
    assert sum(ahead for _, ahead in shown.partitions.values()) == 40 - 12
    assert not shown.written and sidecar.read_first(ours.checkpoint) is None
    for _ in range(2):  # as after a kill between writing and reporting
        assert ours.adopt(group=group).written
    kept = sidecar.read_first(ours.checkpoint)
    assert kept is not None and kept[topic] == {"0": 7, "1": 5}
    with pytest.raises(Refused, match=r"ADOPT_STARTED.*another start"):
        ours.adopt(timestamp_ms=0)


def test_what_would_be_skipped_or_read_twice_is_refused(kafka: Any, tmp_path: Path) -> None:
    topic = filled(kafka)
    ours = pipeline(kafka, topic, tmp_path)
    group = f"old-{topic}"
    old_job(kafka, group, topic, {0: 7}).close()
    with pytest.raises(Refused, match=f"ADOPT_PARTITIONS.*no offset of {topic}-1"):
        ours.adopt(group=group)
    old_job(kafka, group, topic, {0: 7, 1: 10_000}).close()
    with pytest.raises(Refused, match=r"ADOPT_OFFSETS_AHEAD.*10000"):
        ours.adopt(group=group)
    old_job(kafka, group, topic, {0: 3, 1: 5}).close()
    kafka.admin().delete_records([TopicPartition(topic, 0, 6)])[TopicPartition(topic, 0)].result(30)
    with pytest.raises(Refused, match=r"ADOPT_RECORDS_GONE.*offset 3.*first record is 6"):
        ours.adopt(group=group)
    lossy = pipeline(kafka, topic, tmp_path, failOnDataLoss="false").adopt(group=group, write=False)
    assert lossy.partitions[f"{topic}-0"][0] == 6
    for wrong in ({}, {"group": group, "timestamp_ms": 0}):
        with pytest.raises(UsageError, match=r"ADOPT_ORIGIN"):
            ours.adopt(**wrong)
    assert sidecar.read_first(ours.checkpoint) is None


def test_from_a_time_and_from_a_checkpoint_of_sparks_own(kafka: Any, tmp_path: Path) -> None:
    topic = kafka.topic(2)
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for n in range(20):
        producer.produce(topic, str(n).encode(), partition=n % 2, timestamp=1_000_000 + n)
    assert producer.flush(30) == 0
    ours = pipeline(kafka, topic, tmp_path)
    found = ours.adopt(timestamp_ms=1_000_005, write=False)
    assert found.partitions == {f"{topic}-0": (3, 7), f"{topic}-1": (2, 8)}
    late = ours.adopt(timestamp_ms=1_000_019, write=False)
    assert late.partitions == {f"{topic}-0": (10, 0), f"{topic}-1": (9, 1)}

    old = tmp_path / "old"
    for folder in ("offsets", "commits", "state"):
        (old / folder).mkdir(parents=True)
    with pytest.raises(Refused, match=r"ADOPT_CHECKPOINT_EMPTY"):
        ours.adopt(checkpoint=old)
    (old / "metadata").write_text('{"id":"old"}')
    (old / "offsets" / "4").write_text("v1\n{}\n" + json.dumps({topic: {"0": 4}}))
    with pytest.raises(Refused, match=r"ADOPT_UNFINISHED.*Batch 4"):
        ours.adopt(checkpoint=old)
    (old / "commits" / "4").write_text("v1\n{}")
    (old / "state" / "0").mkdir()
    with pytest.raises(Refused, match=r"ADOPT_STATE"):
        ours.adopt(checkpoint=old)
    (old / "state" / "0").rmdir()
    found = ours.adopt(checkpoint=old, write=False)
    assert found.partitions == {f"{topic}-0": (4, 6), f"{topic}-1": (0, 10)}
    assert any(f"{topic}-1 was never read by the old job: it begins at 0" in note for note in found.notes)
    (old / "offsets" / "5").write_text("v1\n{}\n" + json.dumps({"another": {"0": 4}}))
    (old / "commits" / "5").write_text("v1\n{}")
    with pytest.raises(Refused, match=r"ADOPT_PARTITIONS.*another-0"):
        ours.adopt(checkpoint=old)
    for number, offsets, code in (
        (6, "0", "ADOPT_OFFSETS.*not those of a Kafka source"),
        (7, "0\n1", "ADOPT_SOURCES.*2 sources"),
    ):
        (old / "offsets" / str(number)).write_text(f"v1\n{{}}\n{offsets}")
        (old / "commits" / str(number)).write_text("v1\n{}")
        with pytest.raises(Refused, match=code):
            ours.adopt(checkpoint=old)
    (old / "delivered").mkdir()
    (old / "delivered" / "source-offsets.json").write_text("{}")
    with pytest.raises(Refused, match=r"ADOPT_OURS"):
        ours.adopt(checkpoint=old)

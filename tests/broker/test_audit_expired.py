"""A first audit of a topic whose retention has removed records."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.orders import ROWS, Orders, clean, states

import delivered
from delivered import Pipeline
from delivered.audit.evidence import Counts, Verdict
from delivered.connectors.kafka import scan

_names = itertools.count()
LOST = b"%d" % (3 * ROWS + 7)


def select(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key", "value"])


@dataclass
class TopicOrders(Orders):
    """From a log into a topic with two partitions."""

    kafka: Any = None
    retention_ms: int = 86_400_000
    name: str = field(default_factory=lambda: f"expired{next(_names)}")
    missing: int = 0
    named: dict[str, str] = field(default_factory=dict)

    transform: Any = staticmethod(select)

    def __post_init__(self) -> None:
        self.topic = self.kafka.topic(2, retention_ms=self.retention_ms)

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
            self.kafka.topic(2, retention_ms=self.retention_ms),
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


@pytest.fixture
def a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the audit: the topics' retention may have removed what was just written."""
    monkeypatch.setattr(scan, "_now_ms", lambda: time.time_ns() // 1_000_000 + 86_400_000)


@pytest.mark.usefixtures("a_day_later")
def test_batches_that_retention_reached_are_unknown_and_the_others_are_judged(kafka: Any, tmp_path: Path) -> None:
    orders = TopicOrders(tmp_path, kafka=kafka)
    orders.run(5)
    orders.expire(1)
    report = orders.audit()
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
    assert report.counts.lost == 0
    assert report.counts.sent == 3 * ROWS
    assert report.counts.earlier == report.counts.delivered - 3 * ROWS > 0
    (why,) = report.unknowns
    assert f"{orders.topic}-1: offsets 0 to" in why and "batches 0 to 1, 40 records" in why
    assert states(orders) == [(0, 1, Verdict.UNKNOWN, False), (2, 4, Verdict.HELD, True)]
    orders.run()
    later = orders.audit()
    assert (later.verdict, later.counts) == (Verdict.HELD, clean(ROWS))
    again = orders.audit(full=True)
    assert again.verdict is Verdict.UNKNOWN and again.counts.lost == 0


@pytest.mark.usefixtures("a_day_later")
def test_retention_hides_no_loss_behind_it(kafka: Any, tmp_path: Path) -> None:
    orders = TopicOrders(tmp_path, kafka=kafka, named={"name": "orders"})
    orders.run(4)
    orders.lose(LOST)
    orders.expire(1)
    report = orders.pipeline().audit()
    assert (report.verdict, report.counts.lost) == (Verdict.BROKEN, 1), report
    assert report.continuation is not None
    added = [(s.first, s.last, s.verdict, s.audited) for s in report.continuation.seals]
    assert added == [(0, 1, Verdict.UNKNOWN, False), (2, 3, Verdict.BROKEN, True)]


@pytest.mark.parametrize("retention_ms", [-1, 86_400_000])
def test_what_no_retention_removed_is_lost(kafka: Any, tmp_path: Path, retention_ms: int) -> None:
    """Without retention, or younger than it."""
    orders = TopicOrders(tmp_path, kafka=kafka, retention_ms=retention_ms)
    orders.run(3)
    orders.expire(1)
    report = orders.audit()
    assert report.verdict is Verdict.BROKEN and report.counts.lost > 0
    assert report.counts == Counts(3 * ROWS, 3 * ROWS - report.counts.lost, lost=report.counts.lost)

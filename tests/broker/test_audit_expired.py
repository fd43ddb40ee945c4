"""Audits of topics whose retention has removed records, and of a sink whose rows name their topics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from tests.kafka_tools import read_committed
from tests.support.orders import ROWS, clean, states
from tests.support.topic_orders import DAY_MS, TopicOrders
from tests.support.without_spark import deliver

import delivered
from delivered import Pipeline
from delivered.audit.evidence import Counts, Verdict
from delivered.audit.local import recheck_here
from delivered.audit.recheck import Again
from delivered.audit.seal import Seal
from delivered.connectors.kafka import reader
from delivered.connectors.kafka.sink import KafkaSink

LOST = b"%d" % (3 * ROWS + 7)


@pytest.fixture
def a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the audit: the topics' retention may have removed what was just written."""
    monkeypatch.setattr(reader, "_now_ms", lambda: time.time_ns() // 1_000_000 + DAY_MS)


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


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"retention_ms": -1}, marks=pytest.mark.matrix),
        {"retention_ms": DAY_MS, "retention_bytes": 1 << 30},
    ],
)
def test_what_no_retention_removed_is_lost(kafka: Any, tmp_path: Path, settings: dict[str, int]) -> None:
    """Without retention; younger than it, and of a shorter log."""
    orders = TopicOrders(tmp_path, kafka=kafka, settings=settings)
    orders.run(3)
    orders.expire(1)
    report = orders.audit()
    assert report.verdict is Verdict.BROKEN and report.counts.lost > 0
    assert report.counts == Counts(3 * ROWS, 3 * ROWS - report.counts.lost, lost=report.counts.lost)


COMPACTED = {"cleanup_policy": "compact", "segment_ms": 100, "min_cleanable_dirty_ratio": 0.001}


def compact(kafka: Any, topic: str, partitions: int, keys: int) -> None:
    """Wait until older records of so many keys were removed. Rolls the segments."""
    deadline = time.monotonic() + 60
    time.sleep(0.3)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for partition in range(partitions):
        producer.produce(topic, b"new", b"new", partition)
    assert producer.flush(30) == 0
    while len(read_committed(kafka.bootstrap, topic)) > keys + partitions:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def rechecked(pipeline: Pipeline, sink: str, seals: Sequence[Seal]) -> list[Again]:
    return [found.outcome for found in recheck_here(pipeline, sink, seals, lambda _: True, lambda _: None)]


def test_what_compaction_may_have_removed_from_a_topic_is_unknown(kafka: Any, tmp_path: Path) -> None:
    """Without seals, and behind one."""
    orders = TopicOrders(tmp_path, kafka=kafka, settings=COMPACTED)
    orders.run()
    assert orders.audit().verdict is Verdict.HELD
    orders.run()
    compact(kafka, orders.topic, 2, keys=5)
    for full in (False, True):
        report = orders.audit(full=full)
        assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
        assert report.counts.lost > 0
        assert f"topic {orders.topic} is compacted" in " ".join(report.unknowns)
    assert rechecked(orders.pipeline(), orders.topic, orders.seals()[:1]) == [Again.EXPIRED]


def test_what_compaction_removed_from_the_source_was_sent(kafka: Any, tmp_path: Path) -> None:
    """Also of equal records, of which the source has one left."""
    topic = kafka.topic(1, **COMPACTED)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for n in range(ROWS):
        producer.produce(topic, b"same" if n % 2 else b"%d" % n, b"%d" % (n % 5))
    assert producer.flush(30) == 0
    servers = {"kafka.bootstrap.servers": kafka.bootstrap, "startingOffsets": "earliest"}
    pipeline = Pipeline(
        name="from-compacted",
        guarantee="exactly_once",
        checkpoint=tmp_path / "checkpoint",
        source=delivered.endpoint("kafka", subscribe=topic, **servers),
        transform=delivered.arrow(select=["key", "value"]),
        sinks=[delivered.sqlite(str(tmp_path / "sink.db"), "rows", ifNotExists=True)],
        audit={"own": "true"},
    )
    assert deliver(pipeline) == 1
    known = pipeline.audit().continuation
    assert known is not None
    compact(kafka, topic, 1, keys=ROWS // 2 + 1)
    report = pipeline.audit(full=True)
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
    assert report.counts.unexpected > 0 and report.counts.duplicated > 0
    assert f"topic {topic} is compacted" in " ".join(report.unknowns)
    assert rechecked(pipeline, "rows", known.seals) == [Again.EXPIRED]


@pytest.mark.parametrize("identified", [{}, {"audit": {"id": "value"}}], ids=["by all columns", "by id"])
def test_a_record_in_another_topic_is_not_the_one_that_was_sent(
    kafka: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identified: dict[str, Any]
) -> None:
    """Such a copy is no duplicate, and hides no loss."""
    first, second = topics = [kafka.topic(1, retention_ms=-1) for _ in range(2)]
    scan = KafkaSink.scan
    both = ",".join(topics)
    # Not of all topics of the other tests.
    monkeypatch.setattr(KafkaSink, "scan", lambda s: scan(replace(s, options=replace(s.options, topic=both))))

    def route(batch: pa.RecordBatch) -> pa.RecordBatch:
        names = [topics[int(v) % 2] for v in batch.column("value").to_pylist()]
        return batch.select(["key", "value"]).append_column("topic", pa.array(names, pa.string()))

    orders = TopicOrders(tmp_path, kafka=kafka)
    pipeline = Pipeline(
        name=orders.name,
        guarantee=orders.guarantee,
        checkpoint=tmp_path / "checkpoint",
        source=orders.pipeline().sources["source"],
        transform=delivered.arrow(route),
        sinks=[delivered.kafka(kafka.bootstrap, name="routed", **identified)],
    )
    orders.send()
    assert deliver(pipeline) == 1
    assert pipeline.audit(full=True).verdict is Verdict.HELD

    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    copied = read_committed(kafka.bootstrap, first)[0]
    producer.produce(second, copied.value(), copied.key())
    assert producer.flush(30) == 0
    report = pipeline.audit(full=True)
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, Counts(ROWS, ROWS + 1, unexpected=1)), report
    assert "match nothing that was sent" in " ".join(report.unknowns)

    at = TopicPartition(first, 0, copied.offset() + 1)
    kafka.admin().delete_records([at])[at].result(60)
    report = pipeline.audit(full=True)
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, Counts(ROWS, ROWS, lost=1, unexpected=1)), report
    assert "1 of them elsewhere than their rows say" in " ".join(report.unknowns)

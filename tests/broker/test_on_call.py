"""What somebody on call is told of a pipeline's servers: transactions of others, a broker that is away."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer
from tests.support.servers import Kafka, paused

import delivered
from delivered.cli.status import table
from delivered.connectors.kafka.source import KafkaDriver
from delivered.engine.context import _place, open_shared_ledger
from delivered.model.work import Owner
from delivered.operate import asking, rules
from delivered.operate.asking import status
from delivered.operate.metrics import text
from delivered.operate.status import Driver, Status, not_ready


@contextmanager
def foreign_transaction(kafka: Kafka, topic: str, name: str) -> Iterator[Producer]:
    """Another application's, open, with a record in partition 0."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name, "log_level": 0})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, value=b"first", partition=0)
    producer.flush(60)
    try:
        yield producer
    finally:
        producer.abort_transaction(60)


def send(kafka: Kafka, topic: str, records: int) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for n in range(records):
        producer.produce(topic, value=b"%d" % n, partition=0)
    producer.flush(60)


def pipeline(kafka: Kafka, folder: Path, source: str, sink: str, **options: Any) -> delivered.Pipeline:
    return delivered.Pipeline(
        name=f"calls-{source}", guarantee="exactly_once", checkpoint=folder / "checkpoint",
        source=delivered.kafka(kafka.bootstrap, subscribe=source, **options),
        sinks=[delivered.kafka(kafka.bootstrap, topic=sink)],
    )  # fmt: skip


def claimed(made: delivered.Pipeline) -> None:
    """As a driver does that lives, before its first batch."""
    spec = made.spec
    sinks = spec.open()
    ledger = open_shared_ledger(sinks, spec.scope(sinks, "incarnation-1"))
    ledger.claim(_place(Owner("owner"), psutil.Process()))
    ledger.close()


def problems(found: Status) -> dict[str, Any]:
    return {p.code.removeprefix("DELIVERED_"): p for p in found.problems}


def test_a_transaction_of_another_application_is_named(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_BLOCKS_S_MIN", 0.0)
    monkeypatch.setattr(rules, "_BLOCKS_SHARE", 0.0)
    source, sink = kafka.topic(1), kafka.topic(1)
    made = pipeline(kafka, tmp_path, source, sink)
    claimed(made)
    assert problems(status(made)) == {}
    with foreign_transaction(kafka, source, "billing-7"), foreign_transaction(kafka, sink, "import-9"):
        send(kafka, source, 41)
        found = status(made)
        assert {n: h.total for n, h in found.held_back.items()} == {"source": 42}
        assert {n: h.total for n, h in found.hidden.items()} == {sink: 1}
        named = [p for p in found.problems if p.code == "DELIVERED_TRANSACTION_BLOCKS"]
        assert sorted(p.about for p in named) == ["billing-7", "import-9"]
        (at_source,) = [p for p in named if p.about == "billing-7"]
        assert "42 offsets" in at_source.text and f"{source}/0 offset 0" in at_source.text
        command = f"kafka-transactions.sh --bootstrap-server {kafka.bootstrap} forceTerminateTransaction"
        assert f"{command} --transactionalId billing-7" in (at_source.next_step or "")
        assert f'delivered_lag_held_back_offsets{{pipeline="{made.name}",source="source"}} 42.0' in text([found])
        json.dumps(found.to_json())
    assert problems(status(made)) == {}


def test_the_lag_to_the_high_watermark_is_shown_beside_the_other(kafka: Kafka, tmp_path: Path) -> None:
    source = kafka.topic(1)
    send(kafka, source, 3)
    made = pipeline(kafka, tmp_path, source, kafka.topic(1))
    with KafkaDriverOf(made) as driver, foreign_transaction(kafka, source, "t"):
        send(kafka, source, 5)
        held = driver.held_back()
        assert held is not None
        (by,) = held.by
        assert (held.offsets, by.id, by.at) == ({f"{source}/0": 6}, "t", {f"{source}/0": 3})
        assert by.timeout_s == 60 and by.since_ms is not None and abs(by.since_ms / 1000 - time.time()) < 600
    uncommitted = pipeline(kafka, tmp_path, source, kafka.topic(1), **{"kafka.isolation.level": "read_uncommitted"})
    with KafkaDriverOf(uncommitted) as driver:
        assert driver.held_back() is None


@contextmanager
def KafkaDriverOf(made: delivered.Pipeline) -> Iterator[KafkaDriver]:  # noqa: N802
    driver = made.sources["source"].source().driver()
    assert isinstance(driver, KafkaDriver)
    try:
        yield driver
    finally:
        driver.close()


def test_a_pipeline_whose_broker_is_away_is_unknown(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ASK_S_MAX", 1.0)
    made = pipeline(kafka, tmp_path, kafka.topic(1), kafka.topic(1))
    claimed(made)
    assert status(made).driver is Driver.RUNNING
    with paused(kafka):
        found = status(made)
    assert (found.driver, found.records) == (Driver.UNKNOWN, None)
    assert found.to_json()["sinks"][0]["records"] is None
    assert not_ready(found) is not None
    shown = [str(cell) for column in table([found]).columns for cell in column.cells]
    assert "unknown" in shown and "never started" not in shown
    assert "delivered_records_total{" not in text([found])


def test_a_pipeline_that_never_started_asks_its_source(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ASK_S_MAX", 1.0)
    made = delivered.Pipeline(
        name="new", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint",
        source=delivered.kafka(kafka.bootstrap, subscribe=kafka.topic(1)),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "t")],
    )  # fmt: skip
    assert status(made).problems == ()
    with paused(kafka):
        found = status(made)
    assert found.driver is Driver.NONE
    assert [p.is_unanswered for p in found.problems] == [True]

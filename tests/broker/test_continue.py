"""Audits of a running pipeline, one after the other, on real systems: each record is compared once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource
from tests.kafka_tools import produce
from tests.support.orders import ROWS, Audited, Orders
from tests.support.servers import Kafka
from tests.support.sweeps import sweep
from tests.support.without_spark import deliver

import delivered
from delivered import Pipeline
from delivered.audit.evidence import Verdict
from delivered.connectors.kafka.sink import TransactionalWriter
from delivered.crash import install_from_environment
from delivered.pipeline import registry
from delivered_lab.verify.systems.base import wait_for


def _key_and_value(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key", "value"])


@dataclass
class KafkaOrders(Audited):
    """From Kafka into Kafka."""

    transform: Any = staticmethod(_key_and_value)
    kafka: Any = None
    source: str = ""
    sink: str = ""

    def pipeline(self, **changes: Any) -> Pipeline:
        at = self.kafka.bootstrap
        return Pipeline(
            **changes,
            name=f"orders-{self.sink}",
            guarantee=self.guarantee,
            checkpoint=self.folder / self.checkpoint,
            source=delivered.kafka(at, subscribe=self.source, startingOffsets="earliest"),
            transform=delivered.arrow(select=["key", "value"]),
            sinks=[delivered.kafka(at, topic=self.sink)],
        )

    def send(self) -> None:
        rows = range(self.sent, self.sent + ROWS)
        produce(self.kafka.bootstrap, self.source, [(b"%d" % (n % 5), b"%d" % n) for n in rows])
        self.sent += ROWS


@pytest.fixture(autouse=True)
def looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_find_others", cache(registry._find_others))


def start(system: str, request: pytest.FixtureRequest, folder: Path, guarantee: str) -> Audited:
    if system == "sqlite":
        return Orders(folder, guarantee=guarantee)
    kafka = request.getfixturevalue("kafka")
    return KafkaOrders(folder, guarantee=guarantee, kafka=kafka, source=kafka.topic(2), sink=kafka.topic(2))


class Running(threading.Thread):
    """Sends records and delivers them, batch by batch, without a pause."""

    def __init__(self, orders: Audited, batches: int) -> None:
        super().__init__()
        self._orders, self._batches = orders, batches
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self._batches):
                self._orders.send()
                deliver(self._orders.pipeline())
        except BaseException as error:
            self.error = error


SYSTEMS = ["kafka", "sqlite"]


@pytest.mark.parametrize(
    ("system", "guarantee"),
    sweep(
        [(s, g) for s in SYSTEMS for g in ("exactly_once", "at_least_once", "at_most_once")],
        lambda system, guarantee: (system, guarantee) == ("kafka", "exactly_once"),
    ),
)
def test_audits_while_the_pipeline_runs(
    system: str, guarantee: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    orders = start(system, request, tmp_path, guarantee)
    orders.run()
    running = Running(orders, 6)
    running.start()
    reports = []
    while running.is_alive():
        reports.append(orders.audit())
    running.join()
    assert running.error is None
    reports.append(orders.audit())
    assert {r.verdict for r in reports} == {Verdict.HELD}, [r for r in reports if r.verdict is not Verdict.HELD]
    seals = orders.seals()
    assert len(seals) > 1
    assert sum(s.sums.counts.sent for s in seals) == sum(s.sums.counts.delivered for s in seals) == orders.sent
    assert seals[-1].total.sent == seals[-1].total.delivered == seals[-1].account.total
    assert seals[-1].unproved == ()


def killed(orders: Audited, point: str) -> None:
    """Deliver in a process that is killed there, and then again."""
    hits = orders.folder / "hits"
    hits.mkdir(exist_ok=True)
    environment = {"DELIVERED_CRASH": f"{point}!kill", "DELIVERED_CRASH_DIR": str(hits)}
    process = multiprocessing.get_context("spawn").Process(target=_deliver, args=(orders, environment))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert len(list(hits.glob("*.hit.json"))) == 1
    for hit in hits.glob("*.hit.json"):
        hit.unlink()
    deliver(orders.pipeline())


def _deliver(orders: Audited, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    install_from_environment()
    deliver(orders.pipeline())


@pytest.mark.matrix
def test_ten_retentions_with_a_seal_each(mortal_kafka: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source drops everything after each seal; the pipeline is killed twice; one record is lost and one repeated,
    each in a range of its own."""
    at = Kafka.start(tmp_path / "broker", {"log.retention.check.interval.ms": "200"})
    try:
        ten_retentions(at, tmp_path, monkeypatch)
    finally:
        at.end()


def ten_retentions(at: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = KafkaOrders(tmp_path, kafka=Bootstrap(at.bootstrap), source=at.topic(2), sink=at.topic(2))
    found: list[tuple[Verdict, tuple[str, ...]]] = []
    for n in range(10):
        orders.send()
        if n in (2, 6):
            killed(orders, "commit.decide:after" if n == 2 else "write.prepare:after")
        elif n == 4:
            with monkeypatch.context() as patched:
                patched.setattr(TransactionalWriter, "stage", losing(TransactionalWriter.stage))
                deliver(orders.pipeline())
        else:
            deliver(orders.pipeline())
        if n == 8:
            produce(at.bootstrap, orders.sink, [(b"0", b"%d" % (n * ROWS))])
        report = orders.audit()
        assert report.counts.sent == ROWS, report
        found.append((report.verdict, tuple(report.breaches)))
        expire(at, orders.source)
    held = (Verdict.HELD, ())
    lost = (Verdict.BROKEN, ("1 records are lost; exactly_once promises none",))
    repeated = (Verdict.BROKEN, ("1 records are duplicated; exactly_once promises none",))
    assert found == [*[held] * 4, lost, *[held] * 3, repeated, held]
    last = orders.seals()[-1]
    assert [(u["state"], u["first"], u["last"]) for u in last.unproved] == [("broken", 4, 4), ("broken", 8, 8)]
    full = orders.audit(full=True)
    assert full.continuation is not None
    assert full.continuation.base == last, "what the source has dropped stays as it was sealed"


def losing(stage: Any) -> Any:
    """A writer that drops the first record that it is given, and counts it."""
    left = [1]

    def lose(self: TransactionalWriter, batch: pa.RecordBatch) -> None:
        drop, left[0] = left[0], 0
        stage(self, batch.slice(drop))

    return lose


@dataclass(frozen=True)
class Bootstrap:
    """Of a broker, for another process."""

    bootstrap: str


def expire(kafka: Any, topic: str) -> None:
    """Let retention remove all records of a topic."""
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    for retention in ("1", "-1"):
        entry = ConfigEntry("retention.ms", retention, incremental_operation=AlterConfigOpType.SET)
        resource.incremental_configs = [entry]
        for future in kafka.admin().incremental_alter_configs([resource]).values():
            future.result(60)
        if retention == "1":
            wait_for(lambda: is_empty(kafka.bootstrap, topic), 120, "records that do not expire")


def is_empty(bootstrap: str, topic: str) -> bool:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bounds"})
    try:
        partitions = consumer.list_topics(topic, 30).topics[topic].partitions
        bounds = (consumer.get_watermark_offsets(TopicPartition(topic, p), 30) for p in partitions)
        return all(first == end for first, end in bounds)
    finally:
        consumer.close()

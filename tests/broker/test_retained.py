"""What sources still have of records that are not sealed, and first audits of what retention reached."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.outbox_help import METHODS, Stream, shop
from tests.support.orders import ROWS, Orders, clean, states
from tests.support.pulsar import PulsarTopic, source
from tests.support.servers import Pulsar, Rabbitmq
from tests.support.sweeps import sweep

import delivered
from delivered import Pipeline
from delivered.audit.evidence import Counts, Verdict
from delivered.connectors.pulsar import source as pulsar_source
from delivered.connectors.rabbitmq.stream import CONNECTOR
from delivered.contract.source import Retained
from delivered.operate.asking import status
from delivered.pipeline import registry
from delivered_lab.verify.services import wait_for

HOUR_MS = 3_600_000


def select(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key", "value"])


@pytest.fixture(autouse=True)
def looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_find_others", cache(registry._find_others))


@pytest.mark.parametrize("how", sweep(METHODS, "sqlite-poll".__eq__))
def test_an_outbox_says_which_rows_are_missing(how: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Rows that the source deleted; with `keep`, those that somebody else did."""
    box = shop(request, tmp_path, how)
    stream = Stream(box.source(keep="true"))
    start = stream.at
    sent = box.send(0, 1, 2)
    assert stream.rest() == sent
    middle = stream.at
    sent += box.send(3, 4, 5)
    assert stream.rest() == sent[3:]
    driver = stream.driver
    assert driver.retained(start) == driver.retained(middle) == Retained()
    box.execute(f"DELETE FROM {box.table} WHERE id IN ('{sent[0]}', '{sent[1]}')")
    assert (driver.retained(start), driver.retained(middle)) == (Retained({box.table: 2}), Retained())
    box.execute(f"DELETE FROM {box.table} WHERE id = '{sent[4]}'")
    assert (driver.retained(start), driver.retained(middle)) == (Retained({box.table: 3}), Retained({box.table: 1}))
    stream.close()

    box = shop(request, tmp_path, how)
    stream = Stream(box.source())
    box.send(0, 1, 2)
    stream.rest()
    middle = stream.at
    box.send(3, 4)
    stream.rest()
    (count,) = (found := stream.driver.retained(middle)).missing.values()
    assert count == (0 if how == "postgres-log" else 2) and "logged" in found.unknown
    assert stream.driver.retained(stream.at).missing == {}
    stream.close()


@dataclass
class OutboxOrders(Orders):
    """From an outbox in SQLite, whose rows the source deletes."""

    transform: Any = staticmethod(select)
    shop: Any = None

    def pipeline(self, **changes: Any) -> Pipeline:
        return Pipeline(
            **changes,
            name="orders",
            guarantee=self.guarantee,
            checkpoint=self.folder / self.checkpoint,
            source=delivered.endpoint("outbox", url=self.shop.url, dbtable=self.shop.table),
            transform=delivered.arrow(select=["key", "value"]),
            sinks=[delivered.sqlite(str(self.folder / "orders.db"), "orders", ifNotExists=True)],
            audit={"every": "1 h"},
        )

    def send(self) -> None:
        self.shop.send(*range(self.sent, self.sent + ROWS))
        self.sent += ROWS

    def acknowledge(self, batch: int) -> None:
        """As Spark does before the next batch."""
        end = (self.folder / self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[2]
        self.pipeline().sources["source"].source().driver().acknowledge(json.loads(end))


@pytest.mark.matrix
def test_batches_whose_rows_the_outbox_deleted_are_never_audited(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    orders = OutboxOrders(tmp_path, shop=shop(request, tmp_path, "sqlite-poll"))
    orders.run(2)
    orders.acknowledge(0)
    report = orders.audit()
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
    assert (report.counts.sent, report.counts.lost, report.counts.earlier) == (ROWS, 0, ROWS)
    assert states(orders) == [(0, 0, Verdict.UNKNOWN, False), (1, 1, Verdict.HELD, True)]
    assert [p.code for p in status(orders.pipeline()).problems] == []
    orders.run(1)
    orders.acknowledge(2)
    (problem,) = status(orders.pipeline()).problems
    assert problem.code == "DELIVERED_UNSEALED_EXPIRED" and f"{ROWS} offsets of {orders.shop.table}" in problem.text
    orders.sql("DELETE FROM orders WHERE rowid = 5")
    assert orders.audit().verdict is Verdict.UNKNOWN
    orders.run(1)
    after = orders.audit()
    assert (after.counts, states(orders)[-1][:2]) == (clean(ROWS), (3, 3)), after


def test_pulsar_says_how_long_messages_are_kept(
    pulsar: Pulsar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = PulsarTopic(pulsar, tmp_path, minutes=60, mebibytes=-1)
    topic.add(10)
    topic.add(10)
    driver = source(pulsar, topic.name, startingOffsets="earliest").driver()
    start = driver.initial()
    sent_ms = time.time_ns() // 1_000_000
    found = driver.retained(start)
    assert found.missing == {} and found.unknown == ""
    (until,) = found.until_ms.values()
    assert sent_ms + HOUR_MS - 120_000 < until < sent_ms + HOUR_MS + 60_000
    assert driver.retained(driver.latest(start, None)).until_ms == {}, "nothing waits"


@pytest.mark.matrix
def test_messages_that_pulsar_deleted_before_they_were_sealed(pulsar: Pulsar, tmp_path: Path) -> None:
    topic = PulsarTopic(pulsar, tmp_path)
    for _ in range(3):
        topic.add(10)
    driver = source(pulsar, topic.name, startingOffsets="earliest").driver()
    start = driver.initial()
    middle = driver.latest(start, 10)
    assert driver.retained(start).missing == {}
    (until,) = driver.retained(start).until_ms.values()
    assert until <= time.time_ns() // 1_000_000, "without retention, as soon as nobody waits"
    topic.acknowledge(1)
    name = topic.name.removeprefix("persistent://public/default/")
    assert driver.retained(start).missing == {name: 0}, "the start says that a ledger was there"
    assert driver.retained(middle).missing == {}
    topic.acknowledge(1)
    assert driver.retained(middle).missing == {name: 0}


@dataclass
class PulsarOrders(Orders):
    """From a log into a Pulsar topic, each batch in a ledger of its own."""

    transform: Any = staticmethod(select)
    topic: Any = None
    name: str = "to-pulsar"
    options: dict[str, str] = field(default_factory=dict)

    def pipeline(self, **changes: Any) -> Pipeline:
        at, ledger = self.topic.pulsar.options, str(self.folder / "ledger.db")
        return Pipeline(
            **changes,
            name=self.name,
            guarantee=self.guarantee,
            checkpoint=self.folder / self.checkpoint,
            source=delivered.log(str(self.folder / "log"), startingOffsets="earliest"),
            transform=delivered.arrow(select=["key", "value"]),
            sinks=[delivered.endpoint("pulsar", **at, topic=self.topic.name, ledger=ledger)],
        )

    def run(self, batches: int = 1, *, latest: bool = False) -> None:
        for _ in range(batches):
            super().run(latest=latest)
            self.topic.pulsar.admin("PUT", f"{self.topic.path}/unload")


@pytest.mark.matrix
@pytest.mark.parametrize(("minutes", "mebibytes"), [(0, 0), (60, -1), (-1, 1)])
def test_a_first_audit_of_a_pulsar_topic_whose_retention_removed_messages(
    pulsar: Pulsar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: int, mebibytes: int
) -> None:
    """The messages may have expired by the topic's retention; with one that keeps them, somebody deleted them."""
    topic = PulsarTopic(pulsar, tmp_path)
    orders = PulsarOrders(tmp_path, topic=topic, guarantee="at_least_once")
    orders.run(4)
    topic.acknowledge(2)
    namespace = topic.name.removeprefix("persistent://").rpartition("/")[0]
    pulsar.admin(
        "POST", f"namespaces/{namespace}/retention", {"retentionTimeInMinutes": minutes, "retentionSizeInMB": mebibytes}
    )
    report = orders.audit()
    if (minutes, mebibytes) == (0, 0):
        assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
        assert "its retention may have removed messages before ledger" in report.unknowns[0]
        assert report.counts.lost == 0 and report.counts.sent == ROWS, report
        assert states(orders)[-1][1:] == (3, Verdict.HELD, True)
    else:
        assert report.verdict is Verdict.BROKEN and report.counts == Counts(4 * ROWS, 2 * ROWS, lost=2 * ROWS), report
    if minutes == 60:
        monkeypatch.setattr(pulsar_source, "_now_ms", lambda: time.time_ns() // 1_000_000 + 2 * HOUR_MS)
        assert orders.audit(full=True).verdict is Verdict.UNKNOWN, "two hours later, they may have expired"


@pytest.mark.matrix
def test_a_stream_says_what_it_dropped_and_how_long_it_keeps_the_rest(rabbitmq: Rabbitmq) -> None:
    stream = rabbitmq.queue(
        "stream", x_max_age="2h", x_max_length_bytes=400_000, x_stream_max_segment_size_bytes=100_000
    )
    rabbitmq.send(stream, [("id", b"row" + b" " * 10_000)] * 5)
    src = CONNECTOR.source({"url": rabbitmq.url, "streams": stream, "startingoffsets": "earliest"})
    driver = src.driver()
    start = driver.initial()
    now_ms = time.time_ns() // 1_000_000
    found = driver.retained(start)
    assert found.missing == {}
    assert now_ms + 2 * HOUR_MS * 14 // 16 < found.until_ms[stream] <= now_ms + 2 * HOUR_MS + 60_000
    assert "x-max-length-bytes" in found.unknown and "policy" in found.unknown

    def dropped() -> bool:
        rabbitmq.send(stream, [("id", b"row" + b" " * 10_000)] * 20)
        return bool(driver.retained(start).missing)

    wait_for(dropped, 60, "the stream drops its first segment")
    first = driver.retained(start).missing[stream]
    assert driver.retained({stream: first}).missing == {}
    endless = rabbitmq.queue("stream")
    rabbitmq.send(endless, [("id", b"row")])
    found = CONNECTOR.source({"url": rabbitmq.url, "streams": endless}).driver().retained({endless: 0})
    assert (found.missing, found.until_ms) == ({}, {})

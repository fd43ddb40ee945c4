"""Batches in flight whose answers are lost together with their broker: it forgets all but each producer's last one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource
from tests.broker.sink_help import EXACT, SCHEMA, Rig, rows, wait_for
from tests.kafka_tools import read_committed
from tests.support.sweeps import sweep

from delivered.clients.kafka import transactions
from delivered.clients.kafka.protocol import ProducerError
from delivered.clients.kafka.record_batch import SEQUENCES
from delivered.clients.kafka.sender import Sender
from delivered.connectors.kafka import sink as warm
from delivered.connectors.kafka.sink import DirectWriter, TransactionalWriter
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Ok, Prepared
from delivered_lab.verify.proxy import Api, KafkaProxy, NetworkFault, Rule

VALUES: list[bytes] = [b"%06d" % i + bytes(89_994) for i in range(50)]
"""Five record batches."""
ALTERED = 600_000
KNOWN = ["some acknowledged", "none acknowledged", "across the wrap", "then split"]


class Link:
    """A writer behind a proxy, and the broker's own view."""

    def __init__(self, kafka: Any, guarantee: Guarantee) -> None:
        self.kafka, self.guarantee = kafka, guarantee
        self.proxy = KafkaProxy(kafka.bootstrap)
        self.rig = Rig(kafka, kafka.topic(1), options={"client": "arrow"})
        if guarantee is EXACT:
            self.context = self.rig.context()
            self.rig.plan(self.context, 0)
        self.rig.options["kafka.bootstrap.servers"] = self.proxy.bootstrap
        self.work = self.rig.work(0)
        self.writer = self.rig.sink.writer(self.work, guarantee, SCHEMA)
        asked = {"bootstrap.servers": kafka.bootstrap, "group.id": "ends", "isolation.level": "read_uncommitted"}
        self._consumer = Consumer(asked | {"log_level": 0})

    @property
    def sender(self) -> Sender:
        if isinstance(self.writer, TransactionalWriter):
            sender = self.writer._begin()
        else:
            assert isinstance(self.writer, DirectWriter)
            sender = self.writer._producer = self.writer._producer or warm.borrow(self.rig.sink.options, self.guarantee)
        assert isinstance(sender, Sender)
        return sender

    def stored(self) -> int:
        low, high = self._consumer.get_watermark_offsets(TopicPartition(self.rig.topic, 0), timeout=30)
        return int(high - low)

    def stage(self, values: list[bytes], stored: int) -> None:
        """Until the broker holds this many records."""
        for first in range(0, len(values), 10):
            self.writer.stage(rows(values[first : first + 10]))
        self.sender._encode_held()
        self.wait_for(lambda: self.stored() == stored)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        def pumped() -> Any:
            found = condition()
            if not found:
                self.sender._pump()
            return found

        wait_for(pumped)

    def kill(self) -> None:
        self.kafka.broker.kill()
        self.proxy.clear()
        self.proxy.reset_all()
        self.kafka.broker.restart()

    def prepare(self) -> list[bytes | None]:
        """What a reader finds then."""
        self.sender.flush(60)
        promise = self.writer.prepare(Fingerprint())
        if self.guarantee is EXACT:
            prepared = Prepared.of(self.work, Fingerprint(), promise)
            assert self.context.committers.commit(self.work, prepared) == Ok(None)
        return [m.value() for m in read_committed(self.kafka.bootstrap, self.rig.topic)]

    def close(self) -> None:
        self.writer.abort()
        self.proxy.close()
        self._consumer.close()


@pytest.fixture(params=sweep([EXACT, Guarantee.AT_LEAST_ONCE], lambda guarantee: guarantee is EXACT), ids=str)
def link(mortal_kafka: Any, request: pytest.FixtureRequest) -> Iterator[Link]:
    opened = Link(mortal_kafka, request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("known", sweep(KNOWN, lambda known: known == "none acknowledged"))
def test_batches_that_a_killed_broker_stored_and_forgot_are_found_in_its_log(link: Link, known: str) -> None:
    first = 20 if known == "some acknowledged" else 0
    if known == "across the wrap":
        link.sender._queue(link.rig.topic, 0).next = SEQUENCES - 25
    if first:
        link.stage(VALUES[:first], first)
        link.wait_for(lambda: not any(map(len, link.sender._queues.values())))
    link.proxy.add(Rule(Api.PRODUCE, NetworkFault.DELAY_REPLY, times=1000, seconds=600))
    link.stage(VALUES[first:], len(VALUES))
    link.kill()
    if known == "then split":
        entry = ConfigEntry("max.message.bytes", str(ALTERED), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, link.rig.topic, incremental_configs=[entry])
        link.kafka.admin().incremental_alter_configs([resource])[resource].result(60)
    assert link.prepare() == VALUES


def test_a_batch_that_was_lost_is_not_taken_for_stored_although_a_later_one_is(link: Link) -> None:
    """A broker without state of a producer accepts any sequence: its last one proves nothing of earlier batches."""
    link.proxy.add(Rule(Api.PRODUCE, NetworkFault.LOSE_REQUEST))
    sender = link.sender
    link.writer.stage(rows(VALUES[:10]))
    link.writer.stage(rows(VALUES[10:20]))
    sender._encode_held()
    link.wait_for(lambda: sender._requests)
    [lost] = sender._requests
    wait_for(lambda: lost.pending.ready(0))
    while sender._dispatch():  # before the lost answer is looked at: over a new connection
        pass
    [(_, missing)] = lost.batches
    wait_for(lambda: link.stored() == 20 - missing.records)
    with pytest.raises(ProducerError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
        link.prepare()
    found = read_committed(link.kafka.bootstrap, link.rig.topic, "read_uncommitted")
    assert [m.value() for m in found] == VALUES[missing.records : 20]


@pytest.mark.matrix
def test_if_the_broker_cannot_be_asked_the_error_stays(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "_DESCRIBE_PRODUCERS", 9_999)
    link.proxy.add(Rule(Api.PRODUCE, NetworkFault.DELAY_REPLY, times=1000, seconds=600))
    link.stage(VALUES, len(VALUES))
    link.kill()
    with pytest.raises(ProducerError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
        link.prepare()

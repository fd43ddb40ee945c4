"""The contract of a queue's receiver. One suite for all queues.

Includes the spool of the crash tests, to show that it behaves like a broker.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.crash.receiver_process import Spool, SpoolReceiver
from tests.support.sweeps import sweep

from delivered.contract.source import MessageBatch, Receiver
from delivered.model.work import Ok

COUNT = 30
"""RocketMQ delivers at most 32 unacknowledged messages of an ordered queue."""


@dataclass
class Rig:
    """An empty queue: how to send, and how to connect.

    Attributes:
        gives_back_all: it cannot return a single message. STOMP: Artemis treats a NACK as an ACK.
        ordered: messages arrive in the order sent.
        goes_back: everything after the first unacknowledged message is redelivered. RocketMQ's ordered groups.
    """

    send: Callable[[list[tuple[str, bytes]]], None]
    connect: Callable[[], Receiver]
    gives_back_all: bool = False
    ordered: bool = True
    goes_back: bool = False

    def fill(self, count: int = COUNT) -> None:
        self.send([(f"id{n}", b"%d" % n) for n in range(count)])


def _spool(request: pytest.FixtureRequest) -> Rig:
    folder: Path = request.getfixturevalue("tmp_path")
    spool = Spool(folder / "spool.db")
    return Rig(spool.send, lambda: SpoolReceiver(spool))


def _rabbitmq(request: pytest.FixtureRequest) -> Rig:
    from delivered.connectors.rabbitmq import CONNECTOR

    server: Any = request.getfixturevalue("rabbitmq")
    name = server.queue()
    queue = CONNECTOR.queue({"url": server.url, "queue": name, "log": "/unused"})
    assert pickle.loads(pickle.dumps(queue)) == queue
    assert queue.preflight() == []
    assert queue.assumes()
    return Rig(lambda messages: server.send(name, messages), queue.receiver)


def _activemq(request: pytest.FixtureRequest) -> Rig:
    from delivered.connectors.activemq import CONNECTOR

    server: Any = request.getfixturevalue("activemq")
    name = server.queue()
    queue = CONNECTOR.queue({"url": server.url, "queue": name, "log": "/unused", "idHeader": "id"})
    assert pickle.loads(pickle.dumps(queue)) == queue
    assert queue.preflight() == []
    assert queue.assumes()
    return Rig(lambda messages: server.send(name, messages), queue.receiver, gives_back_all=True)


def _rocketmq(kind: str) -> Callable[[pytest.FixtureRequest], Rig]:
    ordered = kind == "FIFO"

    def made(request: pytest.FixtureRequest) -> Rig:
        from delivered.connectors.rocketmq import CONNECTOR

        server: Any = request.getfixturevalue("rocketmq")
        topic = server.topic(kind)
        options = {"endpoints": server.url, "topic": topic, "group": server.group(ordered), "log": "/unused"}
        queue = CONNECTOR.queue({**options, "invisibleSeconds": "30"})
        assert pickle.loads(pickle.dumps(queue)) == queue
        assert queue.preflight() == []
        assert queue.assumes()
        group = "one" if ordered else ""
        return Rig(
            lambda messages: server.send(topic, messages, group), queue.receiver,
            gives_back_all=ordered, ordered=ordered, goes_back=ordered,
        )  # fmt: skip

    return made


QUEUES: dict[str, Callable[[pytest.FixtureRequest], Rig]] = {
    "spool": _spool,
    "rabbitmq": _rabbitmq,
    "activemq": _activemq,
    "rocketmq": _rocketmq("NORMAL"),
    "rocketmq_fifo": _rocketmq("FIFO"),
}


@pytest.fixture(params=list(QUEUES))
def rig(request: pytest.FixtureRequest) -> Rig:
    return QUEUES[request.param](request)


def take(receiver: Receiver, count: int, at_most: int = 1_000) -> MessageBatch:
    """Receive that many messages, in any number of calls."""
    all_of_it, deadline = MessageBatch(), time.monotonic() + 120
    while len(all_of_it) < count:
        assert time.monotonic() < deadline, f"{len(all_of_it)} of {count} came"
        batch = receiver.receive(min(at_most, count - len(all_of_it)), 0.2)
        assert len(batch) <= at_most
        for name in ("ids", "keys", "values", "headers", "times_us", "handles"):
            assert len(getattr(batch, name)) == len(batch)
            getattr(all_of_it, name).extend(getattr(batch, name))
    return all_of_it


def is_empty(receiver: Receiver) -> bool:
    return not any(len(receiver.receive(10, 0.2)) for _ in range(3))


def test_messages_come_in_order_with_the_ids_of_their_senders(rig: Rig) -> None:
    rig.fill()
    receiver = rig.connect()
    taken = take(receiver, COUNT, at_most=7)
    came = list(zip(taken.ids, taken.values, strict=True))
    assert (came if rig.ordered else sorted(came, key=lambda c: int(c[1]))) == [
        (f"id{n}", b"%d" % n) for n in range(COUNT)
    ]
    assert receiver.acknowledge(taken.handles) == Ok(COUNT)
    receiver.close()


# A group of RocketMQ waits for what comes again, ordered or not.
@pytest.mark.parametrize("rig", sweep(QUEUES, lambda name: name != "rocketmq_fifo"), indirect=True)
def test_what_is_acknowledged_is_forgotten_and_the_rest_comes_again(rig: Rig) -> None:
    rig.fill()
    first = rig.connect()
    taken = take(first, COUNT)
    assert first.acknowledge(taken.handles[:10]) == Ok(10)
    assert first.acknowledge(taken.handles[15:20]) == Ok(5)
    assert first.acknowledge(taken.handles[20:22]) == Ok(2)  # those in between are still unacknowledged
    first.close()
    first.close()
    again = rig.connect()
    expected = taken.ids[10:] if rig.goes_back else taken.ids[10:15] + taken.ids[22:]
    rest = take(again, len(expected))
    assert sorted(rest.ids, key=str) == sorted(expected, key=str)
    assert again.acknowledge(rest.handles) == Ok(len(expected))
    assert is_empty(again)
    again.close()
    last = rig.connect()
    assert is_empty(last)
    last.close()


def test_nobody_else_gets_what_is_held(rig: Rig) -> None:
    rig.fill(10)
    holder, other = rig.connect(), None
    taken = take(holder, 10)
    other = rig.connect()
    assert is_empty(other)
    holder.give_back(taken.handles[:4])
    again: list[str | None] = []
    deadline = time.monotonic() + 120
    expected = taken.ids if rig.gives_back_all else taken.ids[:4]
    while len(again) < len(expected):  # by either of the two
        assert time.monotonic() < deadline
        again += [*other.receive(10, 0.1).ids, *holder.receive(10, 0.1).ids]
    assert sorted(again, key=str) == expected
    # An old handle cannot acknowledge a message that was returned.
    assert not isinstance(holder.acknowledge(taken.handles[:1]), Ok) or not rig.gives_back_all
    holder.close()
    other.close()


def test_taking_nothing_waits_and_takes_nothing(rig: Rig) -> None:
    rig.fill(3)
    receiver = rig.connect()
    assert len(receiver.receive(0, 0.1)) == 0
    assert len(take(receiver, 3)) == 3
    receiver.close()

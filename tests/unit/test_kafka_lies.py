"""A broker that lies within well-formed frames: what cannot be read is no answer, never an error of Python."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from tests.support.lying_broker import LyingBroker, fetched

from delivered.clients.kafka import NoAnswer
from delivered.clients.kafka.channel import header_bytes, varint
from delivered.clients.kafka.consumer import Fetcher, Response, batches_before
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import describe, listed, open_in
from delivered.model.errors import DeliveredError
from delivered.model.patience import within

ALLOWED = (NoAnswer, DeliveredError)


@pytest.fixture
def broker() -> Iterator[LyingBroker]:
    made = LyingBroker()
    yield made
    made.close()


def asked(wire: Wire) -> list[Callable[[], object]]:
    return [
        lambda: wire.topic("t"),
        lambda: wire.led("t", 0),
        wire.nodes,
        lambda: wire.coordinator("x"),
        lambda: open_in(wire, [("t", 0)], {1}, time.monotonic()),
        lambda: listed(wire, lambda name: True, (), time.monotonic()),
        lambda: describe(wire, "x"),
        lambda: batches_before(wire, {("t", 0): 5}),
    ]


def test_the_truth_is_understood(broker: LyingBroker) -> None:
    wire = Wire({"bootstrap.servers": broker.bootstrap})
    topic, leader, nodes, coordinator, (found, _), names, *_ = (ask() for ask in asked(wire))
    assert (topic.name, leader.node, nodes, coordinator) == ("t", 1, [1], 1)  # type: ignore[attr-defined]
    assert [o.start for o in found] == [3] and names == {"x": "Ongoing"}  # type: ignore[attr-defined]
    wire.close()


def lies(seed: int, step: int) -> Iterator[Callable[[int, bytes], bytes]]:
    """Cut, nulls and huge counts in place of every byte, random changes."""
    dice = random.Random(seed)
    for length in range(8):
        yield lambda api, body, n=length: body[: len(body) * n // 8]  # type: ignore[misc]
    for value in (0, 0x7F, 0xFF):
        for at in range(0, 60, step):
            yield lambda api, body, v=value, i=at: body[:i] + bytes([v]) + body[i + 1 :]  # type: ignore[misc]
    for _ in range(100 // step):
        at, more = dice.randrange(60), dice.randbytes(dice.randrange(1, 9))
        yield lambda api, body, m=more, i=at: body[:i] + m + body[i + len(m) :]  # type: ignore[misc]
    yield lambda api, body: b"\xff" * 10
    yield lambda api, body: body + b"\0" * 40


STEPS = [pytest.param(1, marks=pytest.mark.matrix), 10]


@pytest.mark.parametrize("step", STEPS)
def test_no_lie_is_an_error_of_python(broker: LyingBroker, step: int) -> None:
    count = refused = 0
    for lie in lies(1, step):
        broker.lie = lambda api, body: body
        wire = Wire({"bootstrap.servers": broker.bootstrap})
        wire.channel()
        broker.lie = lie
        for ask in asked(wire):
            count += 1
            try:
                with within(0.05):
                    ask()
            except ALLOWED:
                refused += 1
        wire.close()
    assert refused > count / 4, f"{refused} of {count} were refused"


@pytest.mark.parametrize("step", STEPS)
def test_a_fetch_that_lies_is_no_answer(broker: LyingBroker, step: int) -> None:
    client = {"bootstrap.servers": broker.bootstrap}
    for lie in [lambda api, body: body, *lies(2, step)]:
        broker.lie = lambda api, body: body
        fetcher = Fetcher("owner", client, headers=True)
        assert fetcher.possible()
        fetcher._wire.led("t", 0)
        fetcher.assign(("t", 0), 0)
        broker.lie = lie
        with suppress(*ALLOWED), within(0.05):
            fetcher.fetch(5, 0.05)
        fetcher.close()


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_bytes_of_a_response(seed: int) -> None:
    dice, true = random.Random(seed), fetched(b"records")
    assert bytes(Response(memoryview(true)).records) == b"records" and Response(memoryview(true)).aborted == [(9, 0)]
    for _ in range(3000):
        changed = bytearray(true)
        for _ in range(dice.randrange(1, 4)):
            changed[dice.randrange(len(changed))] = dice.choice([0, 1, 127, 128, 255, dice.randrange(256)])
        body = memoryview(bytes(changed[: dice.choice([len(changed), dice.randrange(len(changed))])]))
        with suppress(NoAnswer):
            assert len(Response(body).records) <= len(body)
        with suppress(IndexError, ValueError):
            assert header_bytes(body, True) <= len(body)


def test_numbers_have_at_most_five_bytes() -> None:
    assert varint(memoryview(b"\xff\xff\xff\xff\x0f"), 0) == (2**32 - 1, 5)
    for data in (b"\xff\xff\xff\xff\x1f", b"\x80" * 5 + b"\0", b"\xff" * 100_000):
        with pytest.raises(ValueError, match="more than 32 bits"):
            varint(memoryview(data), 0)


def test_a_count_of_aborted_transactions_is_bounded() -> None:
    body = bytearray(fetched(b""))
    at = body.index(struct.pack(">qq", 9, 0)) - 1
    body[at : at + 1] = b"\xff\xff\xff\xff\x0f"
    with pytest.raises(NoAnswer, match="4294967294 aborted transactions in"):
        Response(memoryview(bytes(body)))

"""The source reads what is committed, in bounded ranges, whatever else of transactions lies between."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from tests.support.pulsar import batches, read, source, values
from tests.support.pulsar_transactions import Open, cluster, soon
from tests.support.servers import Pulsar

from delivered.clients.pulsar.producer import Message
from delivered.model.work import Ok


def opened(pulsar: Pulsar, topic: str, *sent: Sequence[bytes], **more: Any) -> Open:
    """A transaction with these batches of messages."""
    transaction = Open(cluster(pulsar), topic, **more)
    for batch in sent:
        transaction.send(*map(Message, batch))
    return transaction


def mixed(pulsar: Pulsar, topic: str) -> list[bytes]:
    """Fill a topic; what is committed. Transactions interleave; markers and aborted entries are everywhere."""
    first = opened(pulsar, topic, [b"c0", b"c1"])
    second = opened(pulsar, topic, [b"x0"], [b"x1", b"x2"])
    pulsar.send(topic, [b"p0", b"p1"])
    first.send(Message(b"c2"))
    second.end(commit=False)
    third = opened(pulsar, topic, [b"c3"])
    first.end(commit=True)
    third.end(commit=True)
    for _ in range(3):
        opened(pulsar, topic, [b"y"], [b"y"]).end(commit=False)
    pulsar.send(topic, [b"p2", b"p3", b"p4"], batch=3)
    return [b"c0", b"c1", b"p0", b"p1", b"c2", b"c3", b"p2", b"p3", b"p4"]


def test_a_batch_holds_committed_messages_once_wherever_it_is_cut(pulsar: Pulsar) -> None:
    topic = pulsar.topic()
    committed = mixed(pulsar, topic)
    opened(pulsar, topic, [b"z"]).end(commit=False)  # the newest entries are aborted, or markers
    src = source(pulsar, topic, startingOffsets="earliest")
    (all_at_once,) = batches(src, None)
    assert values(read(src, *all_at_once)) == committed
    for limit in (1, 2, 5):
        cuts = batches(src, limit)
        pieces = [read(src, *cut) for cut in cuts]
        assert values(pa.concat_tables(pieces)) == committed, limit
        assert all(before[1] == after[0] for before, after in pairwise(cuts))
        for cut, piece in zip(cuts, pieces, strict=True):
            assert read(source(pulsar, topic), *json.loads(json.dumps(cut))).equals(piece), "again, in another process"
    assert values(read(src, *src.driver().batch())) == committed


@pytest.mark.parametrize("commit", [True, False])
def test_a_stream_stops_before_an_open_transaction_and_goes_on_after_it(pulsar: Pulsar, commit: bool) -> None:
    topic = pulsar.topic()
    src = source(pulsar, topic, startingOffsets="earliest")
    pulsar.send(topic, [b"a"])
    transaction = opened(pulsar, topic, [b"b", b"c"])
    pulsar.send(topic, [b"d"])
    ((start, end),) = batches(src, None)
    assert values(read(src, start, end)) == [b"a"]
    assert src.driver().latest(end, None) == end, "what is open, and what lies behind it, is not there yet"
    assert src.driver().newest() == end, "nor does it count as lag"
    assert values(read(src, *src.driver().batch())) == [b"a"]
    transaction.end(commit=commit)
    ((start, end),) = batches(src, None, end)
    assert values(read(src, start, end)) == [*([b"b", b"c"] if commit else []), b"d"]


def test_a_topic_that_starts_with_an_open_transaction_is_empty(pulsar: Pulsar) -> None:
    topic = pulsar.topic()
    src = source(pulsar, topic, startingOffsets="earliest")
    transaction = opened(pulsar, topic, [b"a"])
    pulsar.send(topic, [b"b"])
    assert values(read(src, *src.driver().batch())) == []
    start = src.driver().initial()
    end = src.driver().latest(start, None)
    assert values(read(src, start, end)) == []
    transaction.end(commit=True)
    after = src.driver().latest(end, None)
    assert values(read(src, end, after)) == [b"a", b"b"]


def test_a_transaction_that_expires_is_passed(pulsar: Pulsar) -> None:
    topic = pulsar.topic()
    src = source(pulsar, topic, startingOffsets="earliest")
    transaction = opened(pulsar, topic, [b"a"], ttl_s=1.0)
    pulsar.send(topic, [b"b"])
    start, deadline = src.driver().initial(), soon()
    at, found = start, list[Any]()
    while not found:
        end = src.driver().latest(at, None)
        found += values(read(src, at, end))
        at = end
        assert time.monotonic() < deadline, "it expires"
    assert found == [b"b"]
    transaction.close()


def test_partitions_end_at_their_own_open_transactions(pulsar: Pulsar) -> None:
    """One transaction in two partitions of three."""
    topic = pulsar.topic(3)
    names = [f"{topic}-partition-{n}" for n in range(3)]
    for n, name in enumerate(names):
        pulsar.send(name, [b"a%d" % n])
    transaction = Open(cluster(pulsar), *names[:2])
    transaction.send(Message(b"t"))
    for n, name in enumerate(names):
        pulsar.send(name, [b"b%d" % n])
    src = source(pulsar, topic, startingOffsets="earliest")
    ((start, end),) = batches(src, None)
    assert sorted(values(read(src, start, end))) == [b"a0", b"a1", b"a2", b"b2"]  # type: ignore[type-var]
    transaction.close()
    assert transaction.coordinators.end(transaction.id, commit=True, deadline=soon()) == Ok(None)
    ((start, end),) = batches(src, None, end)
    assert sorted(values(read(src, start, end))) == [b"b0", b"b1", b"t", b"t"]  # type: ignore[type-var]

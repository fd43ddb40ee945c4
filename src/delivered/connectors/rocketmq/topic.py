"""Reads queues by offset at their brokers."""

from __future__ import annotations

import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.rocketmq import RocketmqSinkOptions
from delivered.connectors.rocketmq.remoting import (
    MAX_OFFSET,
    MIN_OFFSET,
    NOT_FOUND,
    OFFSET_MOVED,
    OK,
    PULL,
    QUERY_OFFSET,
    RETRY_AT_ONCE,
    Cluster,
    Peer,
    Place,
)
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Offsets, Slice
from delivered.model.errors import PromiseBroken
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.source import id_bytes

_HEAD = struct.Struct(">iiiiiqqiq")  # size, magic, checksum, queue, flag, queue offset, log offset, system flag, born
_LONG_TOPIC = -626843477  # magic of the second version, whose topic may have more than 127 bytes
_BORN_6, _STORED_6 = 0x10, 0x20
_ADDRESS, _ADDRESS_6 = 8, 20


@dataclass(frozen=True)
class Stored:
    """A message in the broker's storage format.

    Attributes:
        offset: in its queue.
        place: in the broker's log.
        half: of a committed message, the place of its half message; else 0.
    """

    offset: int
    place: int
    half: int
    body: bytes
    properties: dict[str, str]


def stored(data: bytes) -> Iterator[Stored]:
    """Parse a broker's reply to a pull. Raises struct.error, ValueError: it is none."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, magic, _, _, _, offset, place, flag, _ = _HEAD.unpack_from(data, at)
        if size <= _HEAD.size:
            raise ValueError(f"a message of {size} bytes")
        here = at + _HEAD.size
        here += (_ADDRESS_6 if flag & _BORN_6 else _ADDRESS) + 8  # who sent it, when it was stored
        here += (_ADDRESS_6 if flag & _STORED_6 else _ADDRESS) + 4  # who stored it, attempts
        half, length = struct.unpack_from(">qi", data, here)
        here += 12
        if not 0 <= length <= len(data) - here:
            raise ValueError(f"a body of {length} bytes")
        body = data[here : here + length]
        here += length
        wide = magic == _LONG_TOPIC
        named = struct.unpack_from(">h" if wide else ">b", data, here)[0]
        here += (2 if wide else 1) + named
        length = struct.unpack_from(">h", data, here)[0]
        text = data[here + 2 : here + 2 + length].decode("utf-8", "surrogateescape")
        yield Stored(offset, place, half, body, parsed(text))
        at += size


def parsed(text: str) -> dict[str, str]:
    """Parse RocketMQ's encoding of message properties."""
    pairs = (pair.split("\x01", 1) for pair in text.split("\x02"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def joined(properties: dict[str, str]) -> str:
    """Inverse of `parsed`."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


HALF_MESSAGES, _CHECKER = "RMQ_SYS_TRANS_HALF_TOPIC", "CID_RMQ_SYS_TRANS"
"""A broker's half queue is queue 0 of this topic; this is the group of its own transaction checks."""
_READER = "TOOLS_CONSUMER"
"""A group of every broker, for tools without consumer offsets."""
_SUBSCRIBES = 4
_TOGETHER = 32
_SHOWN_SOON_S = 0.02


def ends(cluster: Cluster, places: Sequence[Place]) -> dict[str, dict[int, int]]:
    """Present end of the topic's queues for readers, by broker."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for place in places:
        found[place.broker][place.queue] = _end(cluster.broker(place.broker), cluster.topic, place.queue, shown=True)
    return dict(found)


def added(cluster: Cluster, place: Place, since: int) -> Iterator[Stored]:
    """Messages of a queue from this offset to the last one stored now, including those about to become visible.

    Raises:
        PromiseBroken: the first of them no longer exist.
        Unreachable, Refused: a broker did not answer.
    """
    peer = cluster.broker(place.broker)
    until = _end(peer, cluster.topic, place.queue, shown=False)
    for at, message in _read(peer, cluster.topic, place.queue, since, until):
        if at < 0:
            raise PromiseBroken(
                "TOPIC_FORGOT", topic=cluster.topic, since=since, queue=place.queue, broker=place.broker
            )
        yield message


def kept(cluster: Cluster, place: Place, until: int) -> Iterator[Stored]:
    """The queue's retained messages before this offset. Raises Unreachable, Refused."""
    for here, message in _read(cluster.broker(place.broker), cluster.topic, place.queue, 0, until):
        if here >= 0:
            yield message


def open_half_messages(cluster: Cluster, broker: str, since: int) -> Iterator[Stored]:
    """Half messages from this offset on that the broker's transaction check has not passed yet, ended or not."""
    peer = cluster.broker(broker)
    answer = peer.ask(QUERY_OFFSET, {"consumerGroup": _CHECKER, "topic": HALF_MESSAGES, "queueId": 0})
    at = peer.number(answer, "offset") if answer.code == OK else 0
    until = _end(peer, HALF_MESSAGES, 0, shown=False)
    for here, message in _read(peer, HALF_MESSAGES, 0, max(at, since), until):
        if here >= 0:
            yield message


def _read(peer: Peer, topic: str, queue: int, at: int, until: int) -> Iterator[tuple[int, Stored]]:
    """Messages and their offsets; (-1, next existing offset) where some no longer exist."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while at < until:
        asked = {
            "consumerGroup": _READER,
            "topic": topic,
            "queueId": queue,
            "queueOffset": at,
            "maxMsgNums": _TOGETHER,
            "sysFlag": _SUBSCRIBES,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subscription": "*",
            "subVersion": 0,
            "expressionType": "TAG",
        }
        answer = peer.ask(PULL, asked)
        if answer.code in (NOT_FOUND, RETRY_AT_ONCE):  # stored, but not visible yet
            if time.monotonic() > deadline:
                raise peer.unreachable(f"queue {queue} of {topic} ends at {until}, but returns nothing from {at} on")
            time.sleep(_SHOWN_SOON_S)
            continue
        if answer.code == OFFSET_MOVED:
            first = peer.number(peer.ask(MIN_OFFSET, {"topic": topic, "queueId": queue}), "offset")
            if first <= at:
                continue
            at = first
            yield -1, Stored(at, 0, 0, b"", {})
            continue
        if answer.code != OK:
            raise peer.error_of(answer)
        try:
            messages = list(stored(answer.body))
        except (struct.error, ValueError) as error:
            raise peer.unreachable(f"it sent messages of {topic} that cannot be read: {error}") from None
        for message in messages:
            if at <= message.offset < until:
                yield message.offset, message
        following = peer.number(answer, "nextBeginOffset")
        if following <= at:
            raise peer.unreachable(f"queue {queue} of {topic} goes on at {following} after {at}")
        at = following
        deadline = time.monotonic() + REQUEST_TIMEOUT_S


def _end(peer: Peer, topic: str, queue: int, *, shown: bool) -> int:
    """End of a queue for readers; not `shown`: including stored messages that are about to become visible."""
    answer = peer.ask(MAX_OFFSET, {"topic": topic, "queueId": queue, "committed": shown})
    if answer.code != OK:
        raise peer.error_of(answer)
    return peer.number(answer, "offset")


# A scan of all messages of a transaction topic, by offset at its brokers.

_ROWS = 4_096
_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.binary()) for name in ("value", "key", "message_id")),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
    ]
)


@dataclass(frozen=True)
class RocketmqScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`."""

    options: RocketmqSinkOptions

    def schema(self) -> pa.Schema:
        return _SCHEMA

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        del since  # skips messages that the topic no longer has
        with closing(Cluster(self.options)) as cluster:
            found = ends(cluster, cluster.places())
        return [
            Slice({"broker": broker, "queue": queue, "end": end}, partition=f"{broker}/{queue}")
            for broker, queues in found.items()
            for queue, end in queues.items()
            if end
        ]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        cluster = Cluster(self.options)
        place = Place(piece.data["broker"], piece.data["queue"])
        rows: list[dict[str, object]] = []
        try:
            for message in kept(cluster, place, piece.data["end"]):
                own = message.properties.get("UNIQ_KEY", "")
                keys = [k for k in message.properties.get("KEYS", "").split(" ") if k and k != own]
                rows.append(
                    {
                        "value": message.body,
                        "key": id_bytes(" ".join(keys)) if keys else None,
                        "message_id": id_bytes(own),
                        "partition": place.queue,
                        "offset": message.offset,
                    }
                )
                if len(rows) == _ROWS:
                    yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)
                    rows = []
        finally:
            cluster.close()
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)

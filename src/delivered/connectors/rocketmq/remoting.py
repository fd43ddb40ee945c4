"""RocketMQ's remoting protocol, for what the proxies' gRPC lacks: brokers and name servers speak it.

It ends half messages by their place in a broker's log, from any process and while that log is kept, and reads a queue
from an offset. A frame is a length, a JSON header, and a body.

Closing a connection, or the death of its process, resets it: the system drops unsent data instead of delivering it
later.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from delivered.connectors.rocketmq import RocketmqSinkOptions
from delivered.contract.sink import BoundedScan, Changes, Expired
from delivered.contract.source import Offsets, Slice
from delivered.model.errors import BadRecord, DeliveredError, PromiseBroken, Refused, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, ROCKETMQ_FRAME_BYTES_MAX, ROCKETMQ_QUEUES_MAX
from delivered.model.options import resolve_secret
from delivered.model.patience import left_s
from delivered.source import id_bytes

PULL, QUERY_OFFSET, MAX_OFFSET, MIN_OFFSET, END, ROUTE, SEND = 11, 14, 30, 31, 37, 105, 310
OK, SYSTEM_ERROR, BUSY, ILLEGAL, NO_PERMISSION, NO_TOPIC = 0, 1, 2, 13, 16, 17
NOT_FOUND, RETRY_AT_ONCE, OFFSET_MOVED = 19, 20, 21
_VERSION = 399
"""Protocol version of client 4.9."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_DETAIL_MAX = 300
IN_FLIGHT_MAX = 500
"""Unanswered requests per broker. A broker rejects requests queued for 0.2 s."""
_BUSY_S = 0.05


@dataclass(frozen=True)
class Answer:
    code: int
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    remark: str = ""


Done = Callable[[Answer | None], None]
"""Called once, by the reading thread, and again with None if it raised; None: its outcome is unknown."""


class Peer:
    """One connection. `lost`: why it was lost."""

    def __init__(self, address: str, options: RocketmqSinkOptions) -> None:
        self.address = address
        self.lost: str | None = None
        self._options = options
        self._secret = None if options.secret_key is None else resolve_secret("secretKey", options.secret_key)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._waiting: dict[int, Done] = {}
        self._number = 0
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), left_s(CONNECT_TIMEOUT_S))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError, OverflowError) as error:  # a name server names brokers
            raise self.unreachable(str(error)) from None
        self._socket.settimeout(None)
        self._reader = threading.Thread(target=self._read, name=f"rocketmq {address}", daemon=True)
        self._reader.start()

    def post(self, code: int, fields: Mapping[str, Any], body: bytes, done: Done) -> None:
        """Send a request; `done` receives its answer. Never raises: a lost connection gives None."""
        texts = {k: _text(v) for k, v in fields.items() if v is not None}
        if self._options.access_key is not None and self._secret is not None:
            texts["AccessKey"] = self._options.access_key
            signed = "".join(texts[k] for k in sorted(texts)).encode() + body
            digest = hmac.new(self._secret.encode(), signed, hashlib.sha1).digest()
            texts["Signature"] = base64.b64encode(digest).decode()
        with self._lock:
            stands = self.lost is None
            if stands:
                self._number += 1
                number = self._number
                self._waiting[number] = done
        if not stands:
            done(None)
            return
        header = json.dumps(
            {"code": code, "language": "OTHER", "version": _VERSION, "opaque": number, "flag": 0, "extFields": texts},
            ensure_ascii=False,
        ).encode()
        frame = struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            self._end(str(error))

    def ask(self, code: int, fields: Mapping[str, Any]) -> Answer:
        """One request and its answer, with unchecked code. Raises Unreachable."""
        future: Future[Answer | None] = Future()
        timeout_s = left_s(CONNECT_TIMEOUT_S)
        self.post(code, fields, b"", future.set_result)
        try:
            answer = future.result(timeout_s)
        except Late:
            answer = None
        if answer is None:
            raise self.unreachable(self.lost or f"no answer within {timeout_s:.0f} s")
        return answer

    def number(self, answer: Answer, name: str) -> int:
        """A field of an answer. Raises Unreachable: it has no such number."""
        try:
            return int(answer.fields[name])
        except (LookupError, ValueError):
            raise self.unreachable(f"an answer without a number {name!r}: {str(answer.fields)[:100]}") from None

    def close(self) -> None:
        """Reset the connection, which drops unsent data. Idempotent."""
        self._end("the connection was closed")
        if threading.current_thread() is not self._reader:
            self._reader.join(CONNECT_TIMEOUT_S)  # it shares the connection

    def unreachable(self, detail: str) -> Unreachable:
        return Unreachable("ROCKETMQ_UNREACHABLE.BROKER", address=self.address, detail=detail[:_DETAIL_MAX])

    def error_of(self, answer: Answer) -> DeliveredError:
        """Translate a reply that is not OK."""
        text = f"{answer.remark[:_DETAIL_MAX]} (code {answer.code})"
        if answer.code == NO_TOPIC:
            return UsageError("TOPIC_MISSING.ROCKETMQ_BROKER", topic=self._options.topic, address=self.address)
        if answer.code == NO_PERMISSION or "AclException" in answer.remark or "Authenti" in answer.remark:
            return Refused("ROCKETMQ_CREDENTIALS", address=self.address, detail=text)
        if answer.code == ILLEGAL:
            return BadRecord("MESSAGE_TOO_LARGE.ROCKETMQ_BROKER", address=self.address, text=text)
        return self.unreachable(text)

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while len(start := stream.read(8)) == 8:
                    size, head_size = struct.unpack(">ii", start)
                    head_size &= 0xFFFFFF
                    if not 4 + head_size <= size <= ROCKETMQ_FRAME_BYTES_MAX:
                        raise ValueError(f"a frame of {size} bytes with a header of {head_size}")
                    self._take(stream.read(size - 4), head_size)
            self._end("it closed the connection")
        except Exception as error:  # a server that lies, or is none, may cause any
            self._end(f"{type(error).__name__}: {error}"[:_DETAIL_MAX])

    def _take(self, frame: bytes, head_size: int) -> None:
        head = json.loads(frame[:head_size])
        if not head["flag"] & 1:
            return  # a request of the broker's, left unanswered
        with self._lock:
            done = self._waiting.pop(head["opaque"], None)
        if done is not None:
            try:
                answer = Answer(
                    int(head["code"]), _texts(head.get("extFields")), frame[head_size:], str(head.get("remark") or "")
                )
                done(answer)
            except Exception:
                done(None)  # its outcome is unknown
                raise

    def _end(self, reason: str) -> None:
        with self._lock:
            self.lost = self.lost or reason
            waiting, self._waiting = self._waiting, {}
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        with suppress(OSError):
            self._socket.close()
        for done in waiting.values():
            done(None)


@dataclass(frozen=True, order=True)
class Place:
    """A writable queue of the topic.

    Attributes:
        broker: its name, which does not change with its address.
    """

    broker: str
    queue: int


class Cluster:
    """A topic's queues, and a connection to each broker. Not thread-safe."""

    def __init__(self, options: RocketmqSinkOptions) -> None:
        self.options = options
        self.topic = f"{options.namespace}%{options.topic}" if options.namespace else options.topic
        self._peers: dict[str, Peer] = {}
        self._addresses: dict[str, str] = {}
        self._places: list[Place] = []

    def places(self) -> list[Place]:
        """Raises Unreachable, UsageError, Refused."""
        if not self._places:
            self._route()
        return self._places

    def broker(self, name: str) -> Peer:
        """A connection to a broker, reopened if it was lost. Raises as `places`."""
        peer = self._peers.get(name)
        if peer is None or peer.lost is not None:
            if peer is not None:
                self._addresses.pop(name, None)  # its address may have changed
            if name not in self._addresses:
                self._route()
            if name not in self._addresses:
                raise Unreachable("ROCKETMQ_UNREACHABLE.NO_MASTER", name_servers=self.options.name_servers, name=name)
            peer = self._peers[name] = Peer(self._addresses[name], self.options)
        return peer

    def close(self) -> None:
        """Reset every connection. Idempotent."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _route(self) -> None:
        failure: DeliveredError | None = None
        for address in self.options.name_servers:
            try:
                peer = Peer(address, self.options)
            except Unreachable as error:
                failure = failure or error
                continue
            try:
                answer = peer.ask(ROUTE, {"topic": self.topic, "acceptStandardJsonOnly": True})
            except Unreachable as error:
                failure = failure or error
                continue
            finally:
                peer.close()
            if answer.code != OK:
                raise peer.error_of(answer)
            try:
                self._read(json.loads(answer.body))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise peer.unreachable(f"it sent no route: {type(error).__name__}: {str(error)[:100]}") from None
            return
        raise failure or UsageError("OPTION_VALUE.NAME_SERVERS")

    def _read(self, route: Mapping[str, Any]) -> None:
        masters = {b["brokerName"]: b["brokerAddrs"].get("0") for b in route["brokerDatas"]}
        for address in filter(None, masters.values()):
            _, _, port = address.rpartition(":")
            if not 0 < int(port) < 1 << 16:
                raise ValueError(f"the address {address[:80]!r}")
        writable = [q for q in route["queueDatas"] if q["perm"] & 2 and masters.get(q["brokerName"])]
        if any(q["writeQueueNums"] > ROCKETMQ_QUEUES_MAX for q in writable):
            raise ValueError(f"more than {ROCKETMQ_QUEUES_MAX} queues on a broker")
        self._addresses.update({name: address for name, address in masters.items() if address})
        self._places = [Place(q["brokerName"], n) for q in writable for n in range(q["writeQueueNums"])]
        if not self._places:
            raise UsageError("TOPIC_NOT_WRITABLE", topic=self.options.topic)


class Window:
    """Requests of one kind to one broker, many in flight. Not thread-safe.

    Args:
        request: makes fields and body of an item.
        answered: called with an item and its answer, by the reading thread. False: retry shortly, which is only safe if
            the broker reported that it had not started.
    """

    def __init__(
        self,
        peer: Peer,
        code: int,
        request: Callable[[Any], tuple[Mapping[str, Any], bytes]],
        answered: Callable[[Any, Answer], bool],
    ) -> None:
        self._peer = peer
        self._code = code
        self._request = request
        self._answered = answered
        self._changed = threading.Condition()
        self._in_flight = 0
        self._again: list[Any] = []
        self._lost = False

    def post(self, what: Any) -> None:
        """Blocks while too many are in flight. Raises Unreachable if the connection is lost, or on a time-out."""
        while self._again:
            self._repeat()
        self._go(what)

    def flush(self) -> None:
        """Wait for every answer. Raises as `post`."""
        self._wait(0)
        while self._again:
            self._repeat()
            self._wait(0)

    def _repeat(self) -> None:
        with self._changed:
            again, self._again = self._again, []
        time.sleep(_BUSY_S)
        for what in again:
            self._go(what)

    def _go(self, what: Any) -> None:
        self._wait(IN_FLIGHT_MAX - 1)
        fields, body = self._request(what)
        with self._changed:
            self._in_flight += 1
        self._peer.post(self._code, fields, body, partial(self._done, what))

    def _done(self, what: Any, answer: Answer | None) -> None:
        settled = answer is None or self._answered(what, answer)
        with self._changed:
            self._in_flight -= 1
            self._lost = self._lost or answer is None
            if not settled:
                self._again.append(what)
            self._changed.notify_all()

    def _wait(self, left: int) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._in_flight <= left or self._lost, REQUEST_TIMEOUT_S)
        if not in_time:
            self._peer.close()
            raise self._peer.unreachable(f"no answer within {REQUEST_TIMEOUT_S:.0f} s")
        if self._lost:
            raise self._peer.unreachable(self._peer.lost or "the connection was lost")


def _texts(fields: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in (fields or {}).items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    offsets: dict[str, dict[int, int]] = defaultdict(dict)
    for place in places:
        offsets[place.broker][place.queue] = _end(cluster.broker(place.broker), cluster.topic, place.queue, shown=True)
    return dict(offsets)


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


def retained(cluster: Cluster, place: Place, since: int, until: int) -> Iterator[Stored]:
    """The queue's retained messages between these offsets. Raises Unreachable, Refused."""
    for here, message in _read(cluster.broker(place.broker), cluster.topic, place.queue, since, until):
        if here >= 0:
            yield message


def first_offset(cluster: Cluster, place: Place) -> int:
    """Of the queue's retained messages. Raises Unreachable, Refused."""
    peer = cluster.broker(place.broker)
    answer = peer.ask(MIN_OFFSET, {"topic": cluster.topic, "queueId": place.queue})
    if answer.code != OK:
        raise peer.error_of(answer)
    return max(0, peer.number(answer, "offset"))


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

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        start = _offsets(since or {})
        with closing(Cluster(self.options)) as cluster:
            end = _offsets(ends(cluster, cluster.places()) if until is None else until)
        return [
            Slice(
                {"broker": broker, "queue": queue, "start": start.get((broker, queue), 0), "end": stop},
                f"{broker}/{queue}",
            )
            for (broker, queue), stop in end.items()
            if stop > start.get((broker, queue), 0)
        ]

    def position(self) -> Offsets:
        """The end of each queue for readers: what half messages become lies behind."""
        with closing(Cluster(self.options)) as cluster:
            found = ends(cluster, cluster.places())
        return {broker: {str(queue): end for queue, end in queues.items()} for broker, queues in found.items()}

    def kept(self, position: Offsets) -> Mapping[str, Any]:
        """First offsets, and the ids of the messages before the position."""
        at = _offsets(position)
        with closing(Cluster(self.options)) as cluster:
            there = [p for p in cluster.places() if (p.broker, p.queue) in at]
            end = ends(cluster, there)
            first = {f"{p.broker}/{p.queue}": first_offset(cluster, p) for p in there}
            there = [p for p in there if at[p.broker, p.queue] <= end[p.broker][p.queue]]  # reading on would wait
            return {"first": first, "last": {f"{p.broker}/{p.queue}": _id_before(cluster, p, at) for p in there}}

    def expired(self) -> Mapping[str, Expired]:
        """Nothing else moves the first offset of a queue. A full disk does, whatever the age of the records."""
        with closing(Cluster(self.options)) as cluster:
            first = {f"{p.broker}/{p.queue}": first_offset(cluster, p) for p in cluster.places()}
        return {
            name: Expired(f"queue {name}: offsets 0 to {at - 1} were removed by retention")
            for name, at in first.items()
            if at
        }

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        at, now = _offsets(position), self.kept(position)
        end = _offsets(self.position())
        expired, altered, missed = [], [], []
        for (broker, queue), until in at.items():
            name = f"{broker}/{queue}"
            low = now["first"].get(name)
            if low is None or end[broker, queue] < until:
                altered.append(f"queue {name} of {self.options.topic} was deleted or recreated")
                continue
            if min(low, until) > (was := low if before is None else before["first"].get(name, 0)):
                expired.append(f"queue {name}: offsets {was} to {min(low, until) - 1} were removed by retention")
            if low > until:
                missed.append(f"queue {name}: offsets {until} to {low - 1} were removed before an audit read them")
            last = (before or {}).get("last", {}).get(name)
            if None not in (last, now["last"].get(name)) and last != now["last"][name]:
                altered.append(f"queue {name} has another message at offset {until - 1} than before")
        return Changes(tuple(expired), tuple(altered), tuple(missed), continues=not altered)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        cluster = Cluster(self.options)
        place = Place(piece.data["broker"], piece.data["queue"])
        rows: list[dict[str, object]] = []
        try:
            for message in retained(cluster, place, piece.data["start"], piece.data["end"]):
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


def _offsets(position: Offsets) -> dict[tuple[str, int], int]:
    return {(broker, int(queue)): end for broker, queues in position.items() for queue, end in queues.items()}


def _id_before(cluster: Cluster, place: Place, at: Mapping[tuple[str, int], int]) -> str | None:
    """Of the message before a position; None: there is none any more."""
    end = at[place.broker, place.queue]
    found = next(retained(cluster, place, end - 1, end), None) if end else None
    return None if found is None else found.properties.get("UNIQ_KEY")

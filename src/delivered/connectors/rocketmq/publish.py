"""Sends messages once each, many in flight; half messages are stored by a broker, and invisible until committed."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
import uuid
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from delivered.connectors.rocketmq import TRANSACTION, RocketmqSinkOptions
from delivered.connectors.rocketmq.client import Session, library, unknown
from delivered.connectors.rocketmq.remoting import (
    BUSY,
    END,
    OK,
    SEND,
    SYSTEM_ERROR,
    Answer,
    Cluster,
    Peer,
    Place,
    Window,
    ends,
    joined,
)
from delivered.model.errors import DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.identity import Scope
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.work import Handle

# Sends messages once each, many in flight, with a receipt for each.
#
# NORMAL messages are batched, up to `BATCH_MAX` in a request. FIFO messages are sent one by one, because a proxy puts a
# batch into any queue (5.5.0), and the next of a message group waits for the previous answer.

IN_FLIGHT_MAX = 2_000
"""Unconfirmed messages per task."""
BATCH_MAX = 100
BATCH_BYTES_MAX = 256 << 10
_OVERHEAD_BYTES = 500
_GRACE_S = 5.0


@dataclass(frozen=True)
class Message:
    """
    Attributes:
        group: for a FIFO topic; "": none.
        deliver_ms: Unix time, for a DELAY topic; None: none.
    """

    id: str
    body: bytes
    keys: tuple[str, ...]
    tag: str
    group: str
    deliver_ms: int | None


class Publisher:
    """One session, ended by a rejected message. Unanswered messages stay unconfirmed and are not retried."""

    def __init__(self, options: RocketmqSinkOptions) -> None:
        self._options = options
        self._session = session = Session(options, self._describe)
        of = session.library.of
        self._kind = {"NORMAL": of.NORMAL, "FIFO": of.FIFO, "DELAY": of.DELAY, TRANSACTION: of.TRANSACTION}[
            options.kind
        ]
        self._lock = threading.Condition()
        self._in_flight = 0
        self._lost = 0
        self._error: DeliveredError | None = None
        self._waiting: dict[str, deque[list[Message]]] = {}  # by message group with a request in flight

    @property
    def unconfirmed(self) -> int:
        """Messages of unknown outcome."""
        return self._in_flight + self._lost

    @property
    def body_max(self) -> int:
        """Bytes of a message's value that the proxy accepts."""
        return int(self._session.granted.publishing.max_body_size)

    def takes(self) -> list[str]:
        """Message types that the topic accepts."""
        of = self._session.library.of
        return sorted({of.MessageType.Name(k) for q in self._session.queues for k in q.accept_message_types})

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; blocks while too many are in flight. Raises if one was rejected, or its outcome is unknown."""
        for batch in batches(messages, alone=self._options.kind != "NORMAL"):
            self._wait(IN_FLIGHT_MAX - len(batch))
            with self._lock:
                self._in_flight += len(batch)
                group = batch[0].group
                if group in self._waiting:
                    self._waiting[group].append(batch)
                    continue
                if group:
                    self._waiting[group] = deque()
            self._session.run(self._send(batch))

    def flush(self) -> None:
        """Wait until every message is confirmed. Raises as `send`."""
        self._wait(0)

    def close(self) -> None:
        """Idempotent."""
        self._session.close()

    def _describe(self, settings: Any) -> None:
        settings.client_type = library().of.PRODUCER
        topic = settings.publishing.topics.add()
        topic.name, topic.resource_namespace = self._options.topic, self._options.namespace

    async def _send(self, batch: list[Message]) -> None:
        """Send a batch, then those waiting in its group. Runs in the client's thread."""
        session, group = self._session, batch[0].group
        while True:
            try:
                proxy = self._proxy(group)
                answer = await session.call(proxy, "SendMessage", self._request(batch), REQUEST_TIMEOUT_S)
                error = None if answer.status.code == session.library.code.OK else session.error_of(answer.status)
            except session.library.grpc.RpcError as failed:
                error = session.explained(failed)
            except Exception as failed:
                error = DeliveredError("ROCKETMQ_CLIENT", error=f"{type(failed).__name__}: {failed}"[:500])
            with self._lock:
                self._in_flight -= len(batch)
                if error is not None:
                    self._lost += len(batch)
                    self._error = self._error or error
                rest = self._waiting.get(group)
                if rest and self._error is None:
                    batch = rest.popleft()
                else:
                    # After a message that may be lost, nothing of its group is sent.
                    behind = sum(map(len, rest or ()))
                    self._in_flight, self._lost = self._in_flight - behind, self._lost + behind
                    self._waiting.pop(group, None)
                    batch = []
                self._lock.notify_all()
            if not batch:
                return

    def _proxy(self, group: str) -> Any:
        proxies = self._session.proxies
        return proxies[sum(group.encode()) % len(proxies)]

    def _request(self, batch: Sequence[Message]) -> Any:
        session, of = self._session, self._session.library.of
        request = session.library.calls.SendMessageRequest()
        for message in batch:
            sent = request.messages.add(topic=session.resource(self._options.topic), body=message.body)
            system = sent.system_properties
            system.message_id, system.message_type = message.id, self._kind
            system.keys.extend(message.keys)
            system.body_encoding, system.born_host = of.IDENTITY, "delivered"
            system.born_timestamp.FromNanoseconds(time.time_ns())
            if message.tag:
                system.tag = message.tag
            if message.group:
                system.message_group = message.group
            if message.deliver_ms is not None:
                system.delivery_timestamp.FromMilliseconds(message.deliver_ms)
        return request

    def _wait(self, left: int) -> None:
        with self._lock:
            self._lock.wait_for(
                lambda: self._error is not None or self._in_flight <= left, REQUEST_TIMEOUT_S + _GRACE_S
            )
            error, late = self._error, self._in_flight > left
        if error is not None:
            # Messages in flight have an unknown outcome; a caller that gives up counts them.
            if isinstance(error, Unreachable | OutcomeUnknown):
                unknown(error, self.unconfirmed)
            raise error
        if late:
            unknown(
                DeliveredError("ROCKETMQ_LATE", request_timeout_s=REQUEST_TIMEOUT_S),
                self.unconfirmed,
            )


def batches(messages: Sequence[Message], alone: bool = False) -> Iterator[list[Message]]:
    """Split messages into requests. Args: alone: one message per request."""
    batch: list[Message] = []
    size = 0
    for message in messages:
        own = len(message.body) + _OVERHEAD_BYTES
        if batch and (alone or len(batch) >= BATCH_MAX or size + own > BATCH_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += own
    if batch:
        yield batch


# Half messages: stored by a broker, invisible until committed by their place in its log.
#
# For open half messages the broker runs transaction checks against a connected client of their producer group. No
# client ever connects with this sink's groups, so no other process ends them.

COMMIT, ROLLBACK = 8, 12
_EXPIRED = "Find prepared transaction message failed"


@dataclass(frozen=True, order=True)
class HalfMessage:
    """
    Attributes:
        place: in the broker's log.
        offset: in the broker's half queue.
    """

    place: int
    offset: int


@dataclass(frozen=True)
class HalfMessages(Handle):
    """Half messages of one writer.

    Attributes:
        name: their producer group: the sink's prefix and a part unique to the writer.
        halves: by broker, packed, in stored order.
        since: by broker and queue (its number as text), the topic's end before any of them was committed.
    """

    name: str
    halves: Mapping[str, str]
    since: Mapping[str, Mapping[str, int]]

    @property
    def by_broker(self) -> dict[str, list[HalfMessage]]:
        return {broker: unpacked(text) for broker, text in self.halves.items()}


def packed(half_messages: Iterable[HalfMessage]) -> str:
    """Delta encoding, a few bytes for each."""
    numbers = bytearray()
    place = offset = 0
    for half in half_messages:
        for step in (half.place - place, half.offset - offset):
            left = (step << 1) ^ (step >> 63)  # zigzag: small for negative steps too
            while left > 127:
                numbers.append(left & 127 | 128)
                left >>= 7
            numbers.append(left)
        place, offset = half.place, half.offset
    return base64.b85encode(zlib.compress(bytes(numbers), 9)).decode()


def unpacked(text: str) -> list[HalfMessage]:
    steps: list[int] = []
    number = shift = 0
    for byte in zlib.decompress(base64.b85decode(text)):
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            steps.append((number >> 1) ^ -(number & 1))
            number = shift = 0
    half_messages = []
    place = offset = 0
    for at in range(0, len(steps), 2):
        place, offset = place + steps[at], offset + steps[at + 1]
        half_messages.append(HalfMessage(place, offset))
    return half_messages


def producer_group(scope: Scope) -> str:
    """Prefix of the producer groups of a sink's writers, the same for every incarnation."""
    both = f"{scope.pipeline}/{scope.sink}"
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", both)[:80]
    return f"delivered_{plain}_{hashlib.sha256(both.encode()).hexdigest()[:16]}"


def new_name(scope: Scope) -> str:
    """Producer group of one writer."""
    return f"{producer_group(scope)}.{uuid.uuid4().hex}"


class HalfSender:
    """Sends one shard's half messages, many in flight. A duplicate is just never committed."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._half_messages: dict[str, list[HalfMessage]] = defaultdict(list)
        self._since: dict[str, dict[int, int]] = {}
        self._lock = threading.Lock()
        self._windows: dict[str, Window] = {}
        self._error: DeliveredError | None = None
        self._sent = 0

    def send(self, messages: Sequence[Message]) -> None:
        """Blocks while too many are in flight. Raises if one was rejected, or a broker does not answer."""
        places = self._cluster.places()
        if not self._since:
            self._since = ends(self._cluster, places)
        for message in messages:
            place = places[self._sent % len(places)]
            self._sent += 1
            window = self._windows.get(place.broker)
            if window is None:
                peer = self._cluster.broker(place.broker)
                stored = partial(self._stored, peer, place.broker)
                window = self._windows[place.broker] = Window(peer, SEND, self._request, stored)
            window.post((place, message))
            if self._error is not None:
                raise self._error

    def flush(self) -> dict[str, list[HalfMessage]]:
        """Wait until all are stored; return them by broker, in stored order. Raises as `send`."""
        for window in self._windows.values():
            window.flush()
        if self._error is not None:
            raise self._error
        return {broker: sorted(messages) for broker, messages in self._half_messages.items()}

    def handle(self) -> HalfMessages:
        """Flush, and describe them for the driver."""
        halves = {broker: packed(messages) for broker, messages in self.flush().items()}
        since = {broker: {str(queue): top for queue, top in self._since[broker].items()} for broker in halves}
        return HalfMessages(self._name, halves, since)

    def _request(self, what: tuple[Place, Message]) -> tuple[Mapping[str, Any], bytes]:
        place, message = what
        properties = {
            "UNIQ_KEY": message.id,
            "TRAN_MSG": "true",
            "PGROUP": self._name,
            **({"KEYS": " ".join(message.keys)} if message.keys else {}),
            **({"TAGS": message.tag} if message.tag else {}),
        }
        # This request abbreviates its names: group, topic, its default, queue, flags, time, properties.
        fields = {
            "a": self._name,
            "b": self._cluster.topic,
            "c": "TBW102",
            "d": 4,
            "e": place.queue,
            "f": 4,
            "g": time.time_ns() // 1_000_000,
            "h": 0,
            "i": joined(properties),
            "j": 0,
            "k": False,
            "m": False,
        }
        return fields, message.body

    def _stored(self, peer: Peer, broker: str, what: Any, answer: Answer) -> bool:
        del what
        if answer.code == BUSY:
            return False
        with self._lock:
            if answer.code != OK:
                self._error = self._error or peer.error_of(answer)
            else:
                place = int(answer.fields["msgId"][-16:], 16)
                self._half_messages[broker].append(HalfMessage(place, peer.number(answer, "queueOffset")))
        return True


class HalfPublisher:
    """Publishes half messages for `kits.queue.SendingWriter`. Unless held, they are committed once all are stored.

    Args:
        holds: leave them for the driver to commit.

    Attributes:
        handle: of the held half messages; None: none, or not flushed.
    """

    def __init__(self, cluster: Cluster, name: str, *, holds: bool) -> None:
        self._cluster = cluster
        self._name = name
        self._sender = HalfSender(cluster, name)
        self._holds = holds
        self._sent = 0
        self._ended = 0
        self.handle: HalfMessages | None = None

    @property
    def unconfirmed(self) -> int:
        return self._sent - self._ended

    def send(self, messages: Sequence[Message]) -> None:
        self._sent += len(messages)
        self._or_unknown(lambda: self._sender.send(messages))

    def flush(self) -> None:
        self._or_unknown(self._flush)

    def close(self) -> None:
        self._cluster.close()

    def _flush(self) -> None:
        if self._holds:
            self.handle = self._sender.handle()
            return
        for broker, half_messages in self._sender.flush().items():
            ending = Ending(self._cluster, broker, self._name)
            try:
                ending.end(half_messages, COMMIT)
            finally:
                self._ended += ending.ended
            if ending.expired or ending.refused:
                raise Unreachable(
                    "ROCKETMQ_UNREACHABLE.HALF_REFUSED" if ending.refused else "ROCKETMQ_UNREACHABLE.HALF_MISSING",
                    reason=ending.refused,
                )

    def _or_unknown(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Unreachable as error:
            unknown(error, self.unconfirmed)


class Ending:
    """Ends half messages of one broker, each once.

    Attributes:
        ended: number confirmed by the broker.
        expired: those no longer in its log.
        refused: the first error of another one; None: no error.
    """

    def __init__(self, cluster: Cluster, broker: str, name: str) -> None:
        self._cluster = cluster
        self._broker = broker
        self._name = name
        self._lock = threading.Lock()
        self.ended = 0
        self.expired: list[HalfMessage] = []
        self.refused: str | None = None

    def end(self, half_messages: Sequence[HalfMessage], how: int) -> None:
        """Raises Unreachable if a broker does not answer: more than `ended` may have been ended."""
        window = Window(self._cluster.broker(self._broker), END, partial(self._request, how), self._answered)
        for half in half_messages:
            window.post(half)
        window.flush()

    def _request(self, how: int, half: HalfMessage) -> tuple[Mapping[str, Any], bytes]:
        fields = {
            "topic": self._cluster.topic,
            "producerGroup": self._name,
            "tranStateTableOffset": half.offset,
            "commitLogOffset": half.place,
            "commitOrRollback": how,
            "fromTransactionCheck": False,
            "msgId": "",
            "transactionId": "",
            "bname": self._broker,
        }
        return fields, b""

    def _answered(self, half: HalfMessage, answer: Answer) -> bool:
        if answer.code == BUSY:  # dropped from the broker's queue, not processed
            return False
        with self._lock:
            if answer.code == OK:
                self.ended += 1
            elif answer.code == SYSTEM_ERROR and _EXPIRED in answer.remark:
                self.expired.append(half)
            else:
                self.refused = self.refused or f"{answer.remark} (code {answer.code})"
        return True

"""Topic and group as a queue of the contract, with their preflight check, receiver, and messages as rows of the log."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from delivered.connectors.rocketmq import RocketmqOptions
from delivered.connectors.rocketmq.client import Session, library
from delivered.contract.source import Finding, MessageBatch, Queue, Receiver
from delivered.model.errors import DeliveredError, Unreachable, UsageError
from delivered.model.limits import RECEIVE_BYTES_MAX, REQUEST_TIMEOUT_S
from delivered.model.work import Ok, Outcome, Unknown
from delivered.source import intact, micros

# Converts RocketMQ messages to rows of the log.

_GROUP_PROPERTY = "__SHARDINGKEY"
"""Also holds the message group."""
_ZLIB_OR_GZIP = 47


@dataclass(frozen=True)
class Content:
    """
    Attributes:
        id: None: no usable id.
        key: the message group, else the sender's keys separated by spaces; None: neither.
    """

    id: str | None
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes | None]]
    time_us: int | None


def content(message: Any, by_key: bool) -> Content:
    """Raises ValueError for a corrupt body, or one that cannot be decompressed."""
    system = message.system_properties
    keys = [k for k in system.keys if k != system.message_id]
    named = list(system.keys)
    key = system.message_group or " ".join(keys)
    born = system.born_timestamp
    return Content(
        id=intact((named[0] if len(named) == 1 else None) if by_key else system.message_id),
        key=key.encode() if key else None,
        value=_body(message),
        headers=_headers(message, keys),
        time_us=micros(born.seconds * 1_000_000 + born.nanos // 1_000, 1) if born.seconds else None,
    )


def _headers(message: Any, keys: Sequence[str]) -> list[tuple[str, bytes | None]]:
    system = message.system_properties
    headers: list[tuple[str, bytes | None]] = [
        (name, value.encode()) for name, value in message.user_properties.items() if name != _GROUP_PROPERTY
    ]
    own = {
        "rocketmq.message_id": system.message_id,
        "rocketmq.tag": system.tag,
        "rocketmq.keys": " ".join(keys),
        "rocketmq.message_group": system.message_group,
        "rocketmq.topic": message.topic.name,
    }
    return headers + [(name, value.encode()) for name, value in own.items() if value]


def _body(message: Any) -> bytes:
    system, of = message.system_properties, library().of
    digest, body = system.body_digest, bytes(message.body)
    checksum = {
        of.CRC32: lambda: format(zlib.crc32(body) & 0xFFFFFFFF, "08X"),
        of.MD5: lambda: hashlib.md5(body, usedforsecurity=False).hexdigest(),
        of.SHA1: lambda: hashlib.sha1(body, usedforsecurity=False).hexdigest(),
    }.get(digest.type)
    if checksum is not None and checksum().upper().lstrip("0") != digest.checksum.upper().lstrip("0"):
        raise ValueError(f"its body does not match its checksum {digest.checksum}")
    if system.body_encoding == of.GZIP:
        unpacker = zlib.decompressobj(_ZLIB_OR_GZIP)
        try:
            body = unpacker.decompress(body, RECEIVE_BYTES_MAX)
        except zlib.error as error:
            raise ValueError(f"its body cannot be decompressed: {error}") from error
        if not unpacker.eof:
            raise ValueError(f"its decompressed body is truncated or exceeds {RECEIVE_BYTES_MAX} bytes")
    elif system.body_encoding not in (of.IDENTITY, of.ENCODING_UNSPECIFIED):
        raise ValueError(f"its body has the encoding {system.body_encoding}, which this version does not support")
    return body


# Receives by long polls, holds a bounded number of messages, and renews their invisible time until acknowledged.
#
# RocketMQ redelivers a message when its invisible time expires. A slow receiver renews it in time, so its messages go
# to no other receiver; those of a dead one are redelivered.

_LOG = logging.getLogger(__name__)
_POLLS = 4
"""Concurrent long polls per broker."""
_PER_POLL = 32
"""RocketMQ's maximum per request."""
_POLL_S = 5.0
"""A proxy accepts no shorter one."""
_HEARTBEAT_S = 10.0
_ACKNOWLEDGED_AT_ONCE = 500
_CHANGED_AT_ONCE = 100
_RENEWED_BEFORE = 0.5
"""Fraction of the invisible time left when it is renewed."""
_GIVE_BACK_S = 10.0
_ORDERED_QUEUE = 999
"""In receipts of ordered groups, whichever way the broker tracks deliveries."""
MISSING = ("DELIVERED_TOPIC_MISSING", "DELIVERED_GROUP_MISSING")
"""Restarting servers also report this of existing topics and groups."""

_FORGETFUL = (
    "RocketMQ at %s can forget messages for good that arrive within five seconds after a receiver ended or was killed "
    "(13 of 120 with 5.5.0, proxy and broker in one process): its brokers run with popConsumerKVServiceEnable=false. "
    "Set popConsumerKVServiceInit=true and popConsumerKVServiceEnable=true in broker.conf; see "
    "docs/connectors/rocketmq.md"
)


@dataclass(eq=False)
class Held:
    """A received message, invisible to other receivers.

    Attributes:
        receipt: acknowledges it; changes with each renewal.
        until: when it becomes visible (monotonic), counted from before the request.
        renewal: in progress.
    """

    proxy: Any
    message_id: str
    receipt: str
    until: float
    renewal: Future[Any] | None = None


class RocketmqReceiver(Receiver):
    """Handles are `Held`."""

    def __init__(self, options: RocketmqOptions) -> None:
        self._options = options
        self._session = session = Session(options, self._describe)
        of = session.library.of
        self._sources = self._readable(session.queues)
        self.ordered = bool(session.granted.subscription.fifo)
        self.takes_fifo = any(of.FIFO in q.accept_message_types for q in session.queues)
        self._arrived: deque[tuple[Held, Content]] = deque()
        self._held: dict[Held, None] = {}
        self._polls: dict[asyncio.Task[Any] | None, None] = {}
        self._polling: Counter[str] = Counter()
        self._heartbeat_at = 0.0
        self._forgetful = False

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        session = self._session
        if count_max and session.failed is None:
            self._poll()
        with session.changed:
            session.changed.wait_for(lambda: session.failed is not None or bool(count_max and self._arrived), wait_s)
            failed = session.failed
            messages = [self._arrived.popleft() for _ in range(min(count_max, len(self._arrived)))]
        if failed is not None:  # messages that arrived are redelivered
            if isinstance(failed, UsageError | Unreachable) and failed.code not in MISSING:
                raise failed
            raise Unreachable("ROCKETMQ_UNREACHABLE", failed.message, failed.next_step)
        self._renew()
        self._heartbeat()
        return MessageBatch(
            ids=[c.id for _, c in messages],
            keys=[c.key for _, c in messages],
            values=[c.value for _, c in messages],
            headers=[c.headers for _, c in messages],
            times_us=[c.time_us for _, c in messages],
            handles=[held for held, _ in messages],
        )

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        """Ok: the broker accepted every acknowledgement."""
        if self._session.closed:
            return Unknown("the connection was closed, which requeued them")
        held_now = [h for h in handles if h in self._held]
        for held in held_now:
            if held.renewal is not None:  # else an old receipt could be sent
                with suppress(Late, DeliveredError, self._session.library.grpc.RpcError):
                    held.renewal.result(REQUEST_TIMEOUT_S)
            self._held.pop(held)
        try:
            acknowledged, detail = self._acknowledged(held_now)
        except DeliveredError as error:
            return Unknown(error.message)
        if acknowledged < len(handles):
            detail = detail or "they were requeued, or their invisible time expired"
            return Unknown(f"{len(handles) - acknowledged} of {len(handles)} were not acknowledged: {detail}")
        return Ok(acknowledged)

    def give_back(self, handles: Sequence[Any]) -> None:
        """Requeue messages. Of an ordered group all held messages, so that none overtakes an earlier one."""
        if self.ordered and any(h in self._held for h in handles):
            with self._session.changed:
                self._arrived.clear()
            handles = list(self._held)
        self._make_visible([h for h in handles if h in self._held])

    def close(self) -> None:
        self._session.close(self._requeue_all)

    def _describe(self, settings: Any) -> None:
        options = self._options
        of = library().of
        settings.client_type = of.SIMPLE_CONSUMER
        subscription = settings.subscription
        subscription.group.name, subscription.group.resource_namespace = options.group, options.namespace
        entry = subscription.subscriptions.add()
        entry.topic.name, entry.topic.resource_namespace = options.topic, options.namespace
        entry.expression.type, entry.expression.expression = of.TAG, options.filter
        subscription.long_polling_timeout.seconds = int(_POLL_S)

    def _readable(self, queues: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
        """By broker: its proxy, and one queue, which represents all of the broker's."""
        client, of = self._session.library, self._session.library.of
        readable = [q for q in reversed(queues) if q.permission in (of.READ, of.READ_WRITE)]
        return {q.broker.name: (client.RpcEndpoints(q.broker.endpoints), q) for q in readable}

    async def _follow_route(self) -> None:
        """Brokers that the topic was added to, or that were away at the start, are asked from now on."""
        with suppress(DeliveredError, TimeoutError, self._session.library.grpc.RpcError):  # polls report an outage
            sources = self._readable(await self._session.new_route())
            with self._session.changed:
                self._sources = sources

    def _poll(self) -> None:
        """Request as many as may still be held; requested ones count as held.

        Brokers take turns: one that always has messages would else take every request.
        """
        session = self._session
        with session.changed:
            room = self._options.prefetch - len(self._held) - self._polling.total() * _PER_POLL
            wanted: list[tuple[str, tuple[Any, Any], int]] = []
            while room >= _PER_POLL or (room > 0 and not wanted):
                idle = [b for b in self._sources if self._polling[b] < _POLLS]
                if not idle:
                    break
                broker = min(idle, key=lambda b: self._polling[b])
                self._sources[broker] = source = self._sources.pop(broker)  # to the end
                count = min(_PER_POLL, room)
                wanted.append((broker, source, count))
                self._polling[broker] += 1
                room -= count
        for broker, (proxy, queue), count in wanted:
            session.run(self._take(broker, proxy, queue, count))

    async def _take(self, broker: str, proxy: Any, queue: Any, count: int) -> None:
        session, options = self._session, self._options
        task = asyncio.current_task()
        self._polls[task] = None
        request = session.library.calls.ReceiveMessageRequest(
            group=session.resource(options.group), message_queue=queue, batch_size=count, auto_renew=False
        )
        request.filter_expression.type, request.filter_expression.expression = session.library.of.TAG, options.filter
        request.invisible_duration.seconds = options.invisible_s
        request.long_polling_timeout.FromMilliseconds(int(_POLL_S * 1000))
        asked = time.monotonic()
        pairs: list[tuple[Held, Content]] = []
        try:
            async for part in session.stream(proxy, "ReceiveMessage", request, _POLL_S + REQUEST_TIMEOUT_S):
                if part.HasField("message"):
                    # Invisible at the earliest since the request; but a long poll may have waited.
                    self._read(pairs, proxy, part.message, max(asked, time.monotonic() - 1.0))
                elif part.HasField("status"):
                    await self._look(part.status)
        except session.library.grpc.RpcError as error:
            session.fail(session.explained(error))
        finally:
            self._polls.pop(task, None)
            with session.changed:
                self._polling[broker] -= 1
                if not self._forgetful and any(forgetful(held.receipt) for held, _ in pairs):
                    self._forgetful = True
                    _LOG.warning(_FORGETFUL, options.endpoints)
                self._held.update((held, None) for held, _ in pairs)
                self._arrived.extend(pairs)
                session.changed.notify_all()

    def _read(self, pairs: list[tuple[Held, Content]], proxy: Any, message: Any, since: float) -> None:
        system = message.system_properties
        try:
            payload = content(message, self._options.by_key)
        except ValueError as error:
            _LOG.warning(
                "message %s is unreadable, attempt %d: %s; it is redelivered up to the group's limit of attempts",
                system.message_id, system.delivery_attempt, error,
            )  # fmt: skip
            return
        until = since + self._options.invisible_s
        pairs.append((Held(proxy, system.message_id, system.receipt_handle, until), payload))

    async def _look(self, status: Any) -> None:
        codes = self._session.library.code
        if status.code in (codes.OK, codes.MESSAGE_NOT_FOUND):
            return
        if status.code in (codes.TOO_MANY_REQUESTS, codes.PROXY_TIMEOUT):
            await asyncio.sleep(0.5)
            return
        self._session.fail(self._session.error_of(status))

    def _heartbeat(self) -> None:
        if time.monotonic() < self._heartbeat_at:
            return
        self._heartbeat_at = time.monotonic() + _HEARTBEAT_S
        session = self._session
        kind = session.library.of.SIMPLE_CONSUMER
        beat = session.library.calls.HeartbeatRequest(client_type=kind, group=session.resource(self._options.group))

        async def one_heartbeat(proxy: Any) -> None:
            try:
                answer = await session.call(proxy, "Heartbeat", beat, REQUEST_TIMEOUT_S)
            except session.library.grpc.RpcError as error:
                session.fail(session.explained(error))
                return
            if answer.status.code != session.library.code.OK:
                session.fail(session.error_of(answer.status))

        for proxy in session.proxies:
            session.run(one_heartbeat(proxy))
        session.run(self._follow_route())

    def _renew(self) -> None:
        """Renew the invisible time of messages that are about to expire."""
        soon = time.monotonic() + self._options.invisible_s * _RENEWED_BEFORE
        with self._session.changed:
            due = [h for h in self._held if h.until <= soon and h.renewal is None]
        for held in due:
            held.renewal = self._session.run(self._prolong(held))

    async def _prolong(self, held: Held) -> None:
        asked = time.monotonic()
        try:
            answer = await self._change(held, self._options.invisible_s)
        except self._session.library.grpc.RpcError as error:
            self._session.fail(self._session.explained(error))
            return
        if answer.status.code == self._session.library.code.OK:
            held.receipt, held.until = renewed(answer.receipt_handle) or held.receipt, asked + self._options.invisible_s
            held.renewal = None
        else:  # too late: it was redelivered and cannot be acknowledged; `renewal` stays set, so there is no retry
            _LOG.warning("message %s was held too long: %s", held.message_id, answer.status.message[:200])

    async def _change(self, held: Held, seconds: int) -> Any:
        session = self._session
        request = session.library.calls.ChangeInvisibleDurationRequest(
            group=session.resource(self._options.group),
            topic=session.resource(self._options.topic),
            receipt_handle=held.receipt,
            message_id=held.message_id,
        )
        request.invisible_duration.seconds = seconds
        return await session.call(held.proxy, "ChangeInvisibleDuration", request, REQUEST_TIMEOUT_S)

    def _acknowledged(self, mine: Sequence[Held]) -> tuple[int, str]:
        """Number accepted by the brokers, and why the first other one was rejected."""
        session, ok = self._session, self._session.library.code.OK
        running = []
        for proxy in dict.fromkeys(h.proxy for h in mine):
            there = [h for h in mine if h.proxy == proxy]
            for at in range(0, len(there), _ACKNOWLEDGED_AT_ONCE):
                request = session.library.calls.AckMessageRequest(
                    group=session.resource(self._options.group), topic=session.resource(self._options.topic)
                )
                for held in there[at : at + _ACKNOWLEDGED_AT_ONCE]:
                    request.entries.add(message_id=held.message_id, receipt_handle=held.receipt)
                running.append(session.run(session.call(proxy, "AckMessage", request, REQUEST_TIMEOUT_S)))
        answers = [session.wait(future, 2 * REQUEST_TIMEOUT_S) for future in running]
        statuses = [e.status for a in answers for e in a.entries]
        refused = [s for s in statuses if s.code != ok] or [a.status for a in answers if not a.entries]
        return sum(s.code == ok for s in statuses), refused[0].message[:200] if refused else ""

    def _make_visible(self, messages: Sequence[Held]) -> None:
        """Make these visible again. Best effort: otherwise they become visible when their time expires."""
        if not messages:
            return
        for held in messages:
            self._held.pop(held, None)
        gate = asyncio.Semaphore(_CHANGED_AT_ONCE)

        async def one(held: Held) -> None:
            async with gate:
                with suppress(self._session.library.grpc.RpcError):
                    await self._change(held, 0)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(h) for h in messages))

        future = self._session.run(all_of_them())
        try:
            future.result(_GIVE_BACK_S)
        except Late:
            future.cancel()

    def _requeue_all(self) -> None:
        """End the polls, then requeue all received messages."""

        async def stop() -> None:
            polls = [p for p in self._polls if p is not None]
            if self._forgetful and polls and self._session.failed is None:
                await asyncio.wait(polls, timeout=_POLL_S + 1.0)
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

        with suppress(Late):
            self._session.run(stop()).result(_POLL_S + REQUEST_TIMEOUT_S)
        if self._session.failed is None:
            self._make_visible(list(self._held))


def forgetful(receipt: str) -> bool:
    """Whether the receipt's broker may lose messages that arrive in the seconds after a receiver ended.

    A broker (5.5.0) tracks deliveries in one of two ways (decision 029). The fourth word shows which: with
    popConsumerKVServiceEnable off it cycles through several queues.
    """
    words = receipt.split(" ")
    return len(words) >= 8 and words[3].isdecimal() and 0 < int(words[3]) < _ORDERED_QUEUE


def renewed(receipt: str) -> str:
    """Correct the receipt of a renewal.

    The broker's record of a renewed message begins at the message's own offset (eighth word). A proxy in the broker's
    process (5.5.0) still returns the first delivery's offset; a request with such a receipt, even an acknowledgement,
    gets OK but has no effect, and the message is redelivered.
    """
    words = receipt.split(" ")
    if len(words) < 8 or not words[0].isdecimal() or not words[7].isdecimal():
        return receipt
    return " ".join([words[7], *words[1:]])


# Topic and group as a queue of the contract, with their preflight check.


@dataclass(frozen=True)
class RocketmqQueue(Queue):
    """
    Attributes:
        seen: not empty once topic and group were found: for a while after a restart, servers know neither.
    """

    options: RocketmqOptions
    seen: list[bool] = field(default_factory=list, compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.options.topic} ({self.options.group})"

    @property
    def id_scope(self) -> str:
        """Groups of a topic get the same messages."""
        return "/".join(x for x in (self.options.namespace, self.options.topic) if x)

    @property
    def redelivers_after_s(self) -> float:
        return self.options.invisible_s

    def assumes(self) -> tuple[str, ...]:
        options = self.options
        ids = (
            "senders set one unique key per message, and the same one when they resend it"
            if options.by_key
            else "message ids are unique, and a message resent with another id is a new one (a process forked after "
            "its client had started repeats its parent's ids: set idFrom=keys)"
        )
        return (
            ids,
            f"the group {options.group} redelivers often enough (retryMaxTimes, 16 unless set): after that, "
            "RocketMQ moves a message to the group's dead letters (%DLQ%), and it does not reach the log",
            "brokers run with popConsumerKVServiceEnable=true: else they can forget messages that arrive within five "
            "seconds after a receiver ended (seen with 5.5.0; `delivered receive` warns)",
            f"the topic {options.topic} keeps messages for longer than receivers may be down (fileReservedTime)",
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            receiver = RocketmqReceiver(self.options)
        except DeliveredError as error:
            return [Finding.refusal(error)]
        try:
            return list(self._findings(receiver))
        finally:
            receiver.close()

    def receiver(self) -> Receiver:
        try:
            receiver = RocketmqReceiver(self.options)
        except UsageError as error:
            if self.seen and error.code in MISSING:
                raise Unreachable("ROCKETMQ_UNREACHABLE", error.message, error.next_step) from error
            raise
        self.seen[:] = [True]
        return receiver

    def _findings(self, receiver: RocketmqReceiver) -> Iterator[Finding]:
        if receiver.takes_fifo and not receiver.ordered:
            yield Finding.build("GROUP_NOT_ORDERED", refuses=False, topic=self.options.topic, group=self.options.group)

"""Messages in, acknowledgements out: long polls, a bounded number held, their invisible time renewed while they are.

RocketMQ hides a message that it handed out for a time; when that is over, anybody gets it. A receiver that is slow asks
for more time before, so nothing it holds comes to another; one that is dead asks for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from delivered.connectors.rocketmq.client import Session, library
from delivered.connectors.rocketmq.message import Content, content
from delivered.connectors.rocketmq.options import RocketmqOptions
from delivered.contract.queue import MessageBatch
from delivered.model.errors import DeliveredError, Unreachable, UsageError
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.outcome import Ok, Outcome, Unknown

_LOG = logging.getLogger(__name__)
_POLLS = 4
"""Requests for messages that wait at one broker at the same time."""
_PER_POLL = 32
"""RocketMQ hands out no more at once."""
_POLL_S = 5.0
"""A proxy takes no shorter one."""
_HEARTBEAT_S = 10.0
_ACKNOWLEDGED_AT_ONCE = 500
_CHANGED_AT_ONCE = 100
_RENEWED_BEFORE = 0.5
"""Of the invisible time: this is left when it is renewed."""
_GIVE_BACK_S = 10.0
_ORDERED_QUEUE = 999
"""Of receipts of ordered groups, however the broker notes what it hands out."""
MISSING = ("DELIVERED_TOPIC_MISSING", "DELIVERED_GROUP_MISSING")
"""Of what was there before, servers that start again say this too."""

_FORGETFUL = (
    "RocketMQ at %s can forget messages for good that arrive within five seconds after a receiver ended or was killed "
    "(13 of 120 with 5.5.0, proxy and broker in one process): its brokers run with popConsumerKVServiceEnable=false. "
    "Set popConsumerKVServiceInit=true and popConsumerKVServiceEnable=true in broker.conf; see "
    "docs/connectors/rocketmq.md"
)


@dataclass(eq=False)
class Held:
    """A message that RocketMQ hides for us.

    Attributes:
        receipt: what acknowledges it; another one after each renewal.
        until: when it is hidden no more (monotonic), counted from before it was asked for.
        renewal: under way.
    """

    proxy: Any
    message_id: str
    receipt: str
    until: float
    renewal: Future[Any] | None = None


class RocketmqReceiver:
    """Handles are `Held`."""

    def __init__(self, options: RocketmqOptions) -> None:
        self._options = options
        self._session = session = Session(options, self._describe)
        of = session.library.of
        readable = [q for q in session.queues if q.permission in (of.READ, of.READ_WRITE)]
        # One queue of each broker stands for all of that broker's.
        self._sources = [(session.library.RpcEndpoints(q.broker.endpoints), q) for q in _one_each(readable)]
        self.ordered = bool(session.granted.subscription.fifo)
        self.takes_fifo = any(of.FIFO in q.accept_message_types for q in session.queues)
        self._arrived: deque[tuple[Held, Content]] = deque()
        self._held: dict[Held, None] = {}
        self._polls: dict[asyncio.Task[Any] | None, None] = {}
        self._polling = 0
        self._beat_at = 0.0
        self._forgetful = False

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        session = self._session
        if count_max and session.failed is None:
            self._poll()
        with session.changed:
            session.changed.wait_for(lambda: session.failed is not None or bool(count_max and self._arrived), wait_s)
            failed = session.failed
            taken = [self._arrived.popleft() for _ in range(min(count_max, len(self._arrived)))]
        if failed is not None:  # what arrived comes again
            if isinstance(failed, UsageError | Unreachable) and failed.code not in MISSING:
                raise failed
            raise Unreachable("ROCKETMQ_UNREACHABLE", failed.message, failed.next_step)
        self._renew()
        self._beat()
        return MessageBatch(
            ids=[c.id for _, c in taken],
            keys=[c.key for _, c in taken],
            values=[c.value for _, c in taken],
            headers=[c.headers for _, c in taken],
            times_us=[c.time_us for _, c in taken],
            handles=[held for held, _ in taken],
        )

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        """Ok: the broker took every one of them."""
        if self._session.closed:
            return Unknown("the connection was closed, which requeued them")
        mine = [h for h in handles if h in self._held]
        for held in mine:
            if held.renewal is not None:  # else an old receipt could be sent
                with suppress(Late, DeliveredError, self._session.library.grpc.RpcError):
                    held.renewal.result(REQUEST_TIMEOUT_S)
            self._held.pop(held)
        try:
            taken, said = self._acknowledged(mine)
        except DeliveredError as error:
            return Unknown(error.message)
        if taken < len(handles):
            said = said or "they were requeued, or their invisible time expired"
            return Unknown(f"{len(handles) - taken} of {len(handles)} were not acknowledged: {said}")
        return Ok(taken)

    def give_back(self, handles: Sequence[Any]) -> None:
        """Of an ordered group all that is held: what follows a message must not come before it."""
        if self.ordered and any(h in self._held for h in handles):
            with self._session.changed:
                self._arrived.clear()
            handles = list(self._held)
        self._show([h for h in handles if h in self._held])

    def close(self) -> None:
        self._session.close(self._leave)

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

    def _poll(self) -> None:
        """Ask for as many as may be held besides; what was asked for counts as held."""
        session = self._session
        with session.changed:
            room = self._options.prefetch - len(self._held) - self._polling * _PER_POLL
            wanted: list[tuple[tuple[Any, Any], int]] = []
            for source in self._sources * _POLLS:
                if self._polling < _POLLS * len(self._sources) and (room >= _PER_POLL or (room > 0 and not wanted)):
                    count = min(_PER_POLL, room)
                    wanted.append((source, count))
                    self._polling += 1
                    room -= count
        for (proxy, queue), count in wanted:
            session.run(self._take(proxy, queue, count))

    async def _take(self, proxy: Any, queue: Any, count: int) -> None:
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
        taken: list[tuple[Held, Content]] = []
        try:
            async for part in session.stream(proxy, "ReceiveMessage", request, _POLL_S + REQUEST_TIMEOUT_S):
                if part.HasField("message"):
                    # Not hidden before the request was sent; but a long poll may have waited.
                    self._read(taken, proxy, part.message, max(asked, time.monotonic() - 1.0))
                elif part.HasField("status"):
                    await self._look(part.status)
        except session.library.grpc.RpcError as error:
            session.fail(session.explained(error))
        finally:
            self._polls.pop(task, None)
            with session.changed:
                self._polling -= 1
                if not self._forgetful and any(forgetful(held.receipt) for held, _ in taken):
                    self._forgetful = True
                    _LOG.warning(_FORGETFUL, options.endpoints)
                self._held.update((held, None) for held, _ in taken)
                self._arrived.extend(taken)
                session.changed.notify_all()

    def _read(self, taken: list[tuple[Held, Content]], proxy: Any, message: Any, since: float) -> None:
        system = message.system_properties
        try:
            found = content(message, self._options.by_key)
        except ValueError as error:
            _LOG.warning(
                "message %s was not taken, attempt %d: %s; it comes again, until the group's limit of attempts",
                system.message_id, system.delivery_attempt, error,
            )  # fmt: skip
            return
        until = since + self._options.invisible_s
        taken.append((Held(proxy, system.message_id, system.receipt_handle, until), found))

    async def _look(self, status: Any) -> None:
        codes = self._session.library.code
        if status.code in (codes.OK, codes.MESSAGE_NOT_FOUND):
            return
        if status.code in (codes.TOO_MANY_REQUESTS, codes.PROXY_TIMEOUT):
            await asyncio.sleep(0.5)
            return
        self._session.fail(self._session.said(status))

    def _beat(self) -> None:
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + _HEARTBEAT_S
        session = self._session
        kind = session.library.of.SIMPLE_CONSUMER
        beat = session.library.calls.HeartbeatRequest(client_type=kind, group=session.resource(self._options.group))

        async def beaten(proxy: Any) -> None:
            try:
                answer = await session.call(proxy, "Heartbeat", beat, REQUEST_TIMEOUT_S)
            except session.library.grpc.RpcError as error:
                session.fail(session.explained(error))
                return
            if answer.status.code != session.library.code.OK:
                session.fail(session.said(answer.status))

        for proxy in session.proxies:
            session.run(beaten(proxy))

    def _renew(self) -> None:
        """Ask for more time for what is held longer than expected."""
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
        else:  # too late: it is somebody else's, and cannot be acknowledged; `renewal` stays, so nobody asks again
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
        """How many the brokers took, and why not the first that they did not."""
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

    def _show(self, given: Sequence[Held]) -> None:
        """Hide these no more. Best effort: when their time is over they are seen anyway."""
        if not given:
            return
        for held in given:
            self._held.pop(held, None)
        gate = asyncio.Semaphore(_CHANGED_AT_ONCE)

        async def one(held: Held) -> None:
            async with gate:
                with suppress(self._session.library.grpc.RpcError):
                    await self._change(held, 0)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(h) for h in given))

        future = self._session.run(all_of_them())
        try:
            future.result(_GIVE_BACK_S)
        except Late:
            future.cancel()

    def _leave(self) -> None:
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
            self._show(list(self._held))


def forgetful(receipt: str) -> bool:
    """Whether the broker that gave it may forget messages which arrive in the seconds after a receiver ended.

    A broker (5.5.0) notes what it hands out in one of two ways (decision 029); the fourth word tells: where
    popConsumerKVServiceEnable is off it goes round several queues.
    """
    words = receipt.split(" ")
    return len(words) >= 8 and words[3].isdecimal() and 0 < int(words[3]) < _ORDERED_QUEUE


def renewed(receipt: str) -> str:
    """The receipt of a renewal, as it should be.

    What the broker writes down for a renewed message begins at that message's own offset (eighth word). A proxy that
    runs in one process with its broker (5.5.0) still names the offset at which the first hand-out began, and what is
    done by such a receipt, an acknowledgement too, is answered with OK and undone: the message comes again.
    """
    words = receipt.split(" ")
    if len(words) < 8 or not words[0].isdecimal() or not words[7].isdecimal():
        return receipt
    return " ".join([words[7], *words[1:]])


def _one_each(queues: Sequence[Any]) -> list[Any]:
    return list({q.broker.name: q for q in reversed(queues)}.values())

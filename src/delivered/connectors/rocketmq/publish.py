"""Sends messages once each, many in flight, with a receipt for each.

NORMAL messages are batched, up to `BATCH_MAX` in a request. FIFO messages are sent one by one, because a proxy puts a
batch into any queue (5.5.0), and the next of a message group waits for the previous answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.connectors.rocketmq.client import Session, library, unknown
from delivered.connectors.rocketmq.options import TRANSACTION, RocketmqSinkOptions
from delivered.model.errors import DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.limits import REQUEST_TIMEOUT_S

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
                error = DeliveredError(
                    "ROCKETMQ_CLIENT",
                    f"{type(failed).__name__}: {failed}"[:500],
                    next_step="check the endpoints, and see the broker's log",
                )
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
            made = request.messages.add(topic=session.resource(self._options.topic), body=message.body)
            system = made.system_properties
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
                DeliveredError(
                    "ROCKETMQ_LATE",
                    f"no answer within {REQUEST_TIMEOUT_S:.0f} s",
                    next_step="check that the proxy is up and reachable, then start again",
                ),
                self.unconfirmed,
            )


def batches(messages: Sequence[Message], alone: bool = False) -> Iterator[list[Message]]:
    """Split messages into requests.

    Args:
        alone: one message per request.
    """
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

"""Consumes a stream from an offset, and finds a stream's first and last offset.

AMQP 0-9-1 reports neither. A consumer at `first` receives the oldest message, one at `last` the whole last chunk: after
its first message, the answer to any request on the channel arrives behind the rest of the chunk.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from delivered.connectors.rabbitmq.client import connect, explained, pika
from delivered.connectors.rabbitmq.options import Place
from delivered.connectors.rabbitmq.properties import OFFSET, stream_offset
from delivered.model.errors import Unreachable, UsageError
from delivered.model.limits import SOURCE_PATIENCE_S

FIRST, LAST = "first", "last"
_LOOK_PREFETCH = 65_535
"""More than a chunk holds, so that the whole last one arrives."""
_SILENCE_S = 1.0
"""A stream never seen to hold a message counts as empty after this time."""
_PAUSE_S = 0.3


@dataclass(frozen=True)
class Message:
    offset: int
    method: Any
    properties: Any
    body: bytes


class Follower:
    """Not thread-safe. Raises Unreachable if the connection is lost."""

    def __init__(self, place: Place, stream: str, at: int | str, prefetch: int) -> None:
        self._place = place
        self._stream = stream
        self._errors = (pika().exceptions.AMQPError, OSError)
        self._arrived: deque[Message] = deque()
        self._connection = connect(place)
        try:
            self._channel = self._connection.channel()
            self._channel.basic_qos(prefetch_count=prefetch)
            self._channel.basic_consume(stream, self._on_message, arguments={OFFSET: at})
        except self._errors as error:
            self.close()
            raise explained(error, place) from error

    def take(self, wait_s: float) -> list[Message]:
        """Received messages in offset order; waits for the first one."""
        try:
            if not self._arrived:
                self._connection.process_data_events(wait_s)
            if not self._channel.is_open:
                reason = getattr(self._channel, "_closing_reason", None) or "no reason given"
                raise Unreachable(
                    "RABBITMQ_CHANNEL_CLOSED",
                    f"RabbitMQ at {self._place.place} closed the channel: {reason}",
                    next_step="start again; if it recurs, see RabbitMQ's log for this connection",
                )
            found = list(self._arrived)
            self._arrived.clear()
            if found:  # has no effect but credit: the server sends more
                self._channel.basic_ack(found[-1].method.delivery_tag, multiple=True)
        except self._errors as error:
            raise explained(error, self._place) from error
        return found

    def settle(self) -> None:
        """Wait until the rest of a chunk has arrived."""
        try:
            self._channel.queue_declare(self._stream, passive=True)
        except self._errors as error:
            raise explained(error, self._place) from error

    def counted(self) -> int:
        """The server's message count, some seconds old."""
        try:
            return int(self._channel.queue_declare(self._stream, passive=True).method.message_count)
        except self._errors as error:
            raise explained(error, self._place) from error

    def close(self) -> None:
        """The client requeues undelivered messages, which a stream rejects by closing the connection with an error."""
        with contextlib.suppress(*self._errors):
            if self._connection.is_open:
                self._connection.close()

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        del channel
        offset = stream_offset(properties)
        if offset is None:  # not acknowledged, so it stays
            raise UsageError(
                "QUEUE_NOT_STREAM",
                f"{self._stream!r} at {self._place.place} is not a stream: its messages have no offsets.",
                next_step="use a receiver: format rabbitmq, with queue and log",
            )
        self._arrived.append(Message(offset, method, properties, body))


def first_offset(place: Place, stream: str, known: bool = False) -> int | None:
    """Offset of the oldest message; None: the stream is empty."""
    found = _look(place, stream, FIRST, 1, known)
    return found[0].offset if found else None


def end_offset(place: Place, stream: str, known: bool = False) -> int:
    """Offset after the newest message at the time of the call; 0: the stream is empty.

    Args:
        known: it held messages before.
    """
    found = _look(place, stream, LAST, _LOOK_PREFETCH, known)
    return found[-1].offset + 1 if found else 0


def message_at(place: Place, stream: str, offset: int) -> Message | None:
    """The message at an offset, or the next one. The stream must have one there or later."""
    found = _look(place, stream, offset, 1, known=True)
    return found[0] if found else None


def patiently(what: Any) -> Any:
    """Retry until the server answers, across a restart."""
    deadline = time.monotonic() + SOURCE_PATIENCE_S
    while True:
        try:
            return what()
        except Unreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _look(place: Place, stream: str, at: int | str, prefetch: int, known: bool) -> list[Message]:
    follower = Follower(place, stream, at, prefetch)
    try:
        began = time.monotonic()
        while not (found := follower.take(_SILENCE_S)):
            # The server's count lags, and is 0 for a while after a restart.
            patience = SOURCE_PATIENCE_S / 4 if known or follower.counted() else _SILENCE_S
            if time.monotonic() - began > patience:
                return []
        if at == LAST:
            follower.settle()
            found += follower.take(0)
        return found
    finally:
        follower.close()

"""One consumer of one stream, from an offset on; where a stream begins and ends.

AMQP 0-9-1 tells neither. A consumer at `first` is given the oldest message; one at `last` all of the last chunk: after
its first message, the answer to any request on the same channel comes behind the rest of it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from delivered.connectors.rabbitmq.client import connect, explained, pika
from delivered.connectors.rabbitmq.options import Place
from delivered.model.errors import Unreachable, UsageError
from delivered.model.limits import SOURCE_PATIENCE_S

FIRST, LAST = "first", "last"
_OFFSET = "x-stream-offset"
_LOOK_PREFETCH = 65_535
"""More than a chunk holds: all of the last one comes."""
_SILENCE_S = 1.0
"""So long nothing comes of a stream that was never seen to hold a message: it is taken for empty."""
_PAUSE_S = 0.3


@dataclass(frozen=True)
class Message:
    offset: int
    method: Any
    properties: Any
    body: bytes


class Follower:
    """Used by one thread. Raises Unreachable when the connection is gone."""

    def __init__(self, place: Place, stream: str, at: int | str, prefetch: int) -> None:
        self._place = place
        self._stream = stream
        self._errors = (pika().exceptions.AMQPError, OSError)
        self._arrived: deque[Message] = deque()
        self._connection = connect(place)
        try:
            self._channel = self._connection.channel()
            self._channel.basic_qos(prefetch_count=prefetch)
            self._channel.basic_consume(stream, self._on_message, arguments={_OFFSET: at})
        except self._errors as error:
            self.close()
            raise explained(error, place) from error

    def take(self, wait_s: float) -> list[Message]:
        """What came, in the order of offsets; waits for the first message."""
        try:
            if not self._arrived:
                self._connection.process_data_events(wait_s)
            if not self._channel.is_open:
                reason = getattr(self._channel, "_closing_reason", None) or "no reason given"
                raise Unreachable("RABBITMQ_CHANNEL_CLOSED", f"RabbitMQ at {self._place.place} said: {reason}")
            found = list(self._arrived)
            self._arrived.clear()
            if found:  # nothing moves by it; the server sends on
                self._channel.basic_ack(found[-1].method.delivery_tag, multiple=True)
        except self._errors as error:
            raise explained(error, self._place) from error
        return found

    def settle(self) -> None:
        """All that the server was about to send of a chunk is here when this returns."""
        try:
            self._channel.queue_declare(self._stream, passive=True)
        except self._errors as error:
            raise explained(error, self._place) from error

    def counted(self) -> int:
        """Messages in the stream as the server counted them some seconds ago."""
        try:
            return int(self._channel.queue_declare(self._stream, passive=True).method.message_count)
        except self._errors as error:
            raise explained(error, self._place) from error

    def close(self) -> None:
        """The client hands back what it did not hand out, which a stream refuses: the connection ends with an error."""
        with contextlib.suppress(*self._errors):
            if self._connection.is_open:
                self._connection.close()

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        del channel
        offset = (properties.headers or {}).get(_OFFSET)
        if offset is None:  # not acknowledged: it stays where it is
            raise UsageError(
                "QUEUE_NOT_STREAM",
                f"{self._stream!r} at {self._place.place} is not a stream: its messages have no offsets.",
                next_step="use a receiver: format rabbitmq, with queue and log",
            )
        self._arrived.append(Message(int(offset), method, properties, body))


def first_offset(place: Place, stream: str, known: bool = False) -> int | None:
    """Offset of the oldest message; None: the stream is empty."""
    found = _look(place, stream, FIRST, 1, known)
    return found[0].offset if found else None


def end_offset(place: Place, stream: str, known: bool = False) -> int:
    """Behind the newest message there was when this was called; 0: there is none.

    Args:
        known: it held messages once.
    """
    found = _look(place, stream, LAST, _LOOK_PREFETCH, known)
    return found[-1].offset + 1 if found else 0


def patiently(what: Any) -> Any:
    """Call it until the server answers, for as long as a restart may take."""
    deadline = time.monotonic() + SOURCE_PATIENCE_S
    while True:
        try:
            return what()
        except Unreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def _look(place: Place, stream: str, at: str, prefetch: int, known: bool) -> list[Message]:
    follower = Follower(place, stream, at, prefetch)
    try:
        began = time.monotonic()
        while not (found := follower.take(_SILENCE_S)):
            # The server's count lags behind, and is 0 for a while after its start.
            patience = SOURCE_PATIENCE_S / 4 if known or follower.counted() else _SILENCE_S
            if time.monotonic() - began > patience:
                return []
        if at == LAST:
            follower.settle()
            found += follower.take(0)
        return found
    finally:
        follower.close()

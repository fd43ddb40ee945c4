"""Receives messages: one connection, one subscription, individual acknowledgements, a bounded window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.options import ActivemqOptions
from delivered.contract.queue import MessageBatch
from delivered.model.errors import DeliveredError, Unreachable, UsageError
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.source.columns import intact, micros

_SUBSCRIPTION = "delivered"
_FRAME = frozenset(
    {
        *("subscription", "message-id", "ack", "destination", "content-length", "redelivered", "expires", "priority"),
        *("persistent", "timestamp", "destination-type", "ingress-timestamp", "JMSXUserID", "receipt"),
    }
)
"""Headers of the frame and the broker, which are not part of the message."""


_DIGITS_MAX = 19
"""Of a time: a Java long."""


class ActivemqReceiver:
    """Handles are (number of the connection, id for ACK), valid only on that connection."""

    def __init__(self, options: ActivemqOptions) -> None:
        self._options = options
        self._number = 0
        self._session = self._open()
        # Of two headers of one name the client keeps the first. Artemis writes its own ack, which is the message's id,
        # after a sender's header of that name.
        self._handle = "message-id" if self._session.is_artemis else "ack"

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        session = self._session
        with session.changed:
            session.changed.wait_for(lambda: session.failed is not None or bool(count_max and session.arrived), wait_s)
            failed = session.failed
            messages = [session.arrived.popleft() for _ in range(min(count_max, len(session.arrived)))]
        if failed is not None:  # these messages are redelivered, and cannot be acknowledged here
            if isinstance(failed, UsageError | Unreachable):
                raise failed
            raise Unreachable("ACTIVEMQ_UNREACHABLE", failed.message, failed.next_step)
        return self._message_batch(messages)

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        """Ok: the broker confirmed the last acknowledgement; it processes them in order."""
        session = self._session
        own = [name for number, name in handles if number == self._number]
        try:
            for name in own[:-1]:
                session.transmit(session.frames.ack, name)
            if own:
                receipt = session.receipt()
                session.transmit(session.frames.ack, own[-1], receipt=receipt)
                session.wait(lambda: receipt not in session.unconfirmed, REQUEST_TIMEOUT_S, "answer an acknowledgement")
        except DeliveredError as error:
            return Unknown(error.message)
        if len(own) < len(handles):
            return Unknown(f"{len(handles) - len(own)} messages were requeued when their connection was lost")
        return Ok(len(handles))

    def give_back(self, handles: Sequence[Any]) -> None:
        """Requeue all messages by closing the connection: Artemis treats NACK as ACK, which deletes the message."""
        if any(number == self._number for number, _ in handles):
            self._session.close()
            self._session = self._open()

    def close(self) -> None:
        self._session.close()

    def _open(self) -> Session:
        options = self._options
        session = Session(options)
        self._number += 1
        headers = {
            "consumer-window-size": str(options.prefetch_bytes),
            # If this creates the address, it must be a queue, not a topic.
            **({} if "::" in options.queue else {"subscription-type": "ANYCAST"}),
            "receipt": session.receipt(),
        }
        try:
            subscribe = session.frames.subscribe
            session.transmit(subscribe, options.queue, _SUBSCRIPTION, ack="client-individual", headers=headers)
            session.settle("answer the subscription")
        except DeliveredError:
            session.close()
            raise
        return session

    def _message_batch(self, messages: Sequence[Any]) -> MessageBatch:
        """Column by column: this dominates a receiver's CPU time per message."""
        number, options = self._number, self._options
        headers = [frame.headers for frame in messages]
        id_header, key_header = options.id_header, options.key_header
        return MessageBatch(
            ids=[None if id_header is None else intact(h.get(id_header)) for h in headers],
            keys=[None if key_header is None or (k := h.get(key_header)) is None else k.encode() for h in headers],
            values=[frame.body for frame in messages],
            headers=[[(n, v.encode()) for n, v in h.items() if n not in _FRAME] for h in headers],
            times_us=[_time_us(h.get("timestamp")) for h in headers],
            handles=[(number, h[self._handle]) for h in headers],
        )


def _time_us(text: str | None) -> int | None:
    """None: not set, or no number of milliseconds."""
    if text is None or len(text) > _DIGITS_MAX or not text.isdecimal():
        return None
    return micros(int(text), 1_000) or None

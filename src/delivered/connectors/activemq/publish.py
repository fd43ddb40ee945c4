"""Sending with receipts, many in flight: the broker's word for each message that it has it on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.options import ActivemqSinkOptions
from delivered.model.errors import DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.limits import REQUEST_TIMEOUT_S

IN_FLIGHT_MAX = 2_000
"""Messages sent and not confirmed, of one task."""


@dataclass(frozen=True)
class Message:
    body: bytes
    headers: dict[str, str]


class Publisher:
    """One connection. Any ERROR that the broker says ends it: which message it meant is not asked."""

    def __init__(self, options: ActivemqSinkOptions) -> None:
        self._queue = options.queue
        self._session = Session(options)

    @property
    def unconfirmed(self) -> int:
        """Messages sent whose fate nobody told."""
        return len(self._session.unconfirmed)

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; waits while too many are in flight. Raises when one was refused."""
        session = self._session
        try:
            for message in messages:
                if len(session.unconfirmed) >= IN_FLIGHT_MAX:
                    self._wait(IN_FLIGHT_MAX // 2)
                headers = {**message.headers, "receipt": session.receipt()}
                session.transmit(session.frames.send, self._queue, message.body, headers=headers)
        except Unreachable as error:
            raise self._unknown(error) from error

    def flush(self) -> None:
        """Wait until every message was confirmed. Raises when one was refused, or nobody can tell."""
        try:
            self._wait(0)
        except Unreachable as error:
            raise self._unknown(error) from error

    def close(self) -> None:
        """May be called again."""
        self._session.close()

    def _wait(self, left: int) -> None:
        unconfirmed = self._session.unconfirmed
        self._session.wait(lambda: len(unconfirmed) <= left, REQUEST_TIMEOUT_S, "confirm messages")

    def _unknown(self, error: DeliveredError) -> OutcomeUnknown:
        return OutcomeUnknown(
            "ACTIVEMQ_UNCONFIRMED",
            f"{self.unconfirmed} messages were sent and not confirmed: {error.message}",
            next_step="start again when the server runs; the batch is handled as its guarantee says",
        )

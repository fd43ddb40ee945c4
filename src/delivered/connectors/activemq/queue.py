"""See `delivered.contract.queue.Queue`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delivered.connectors.activemq.client import HEARTBEAT_MS, Session
from delivered.connectors.activemq.manage import findings
from delivered.connectors.activemq.options import ActivemqOptions
from delivered.connectors.activemq.receiver import ActivemqReceiver
from delivered.contract.finding import Finding
from delivered.contract.queue import Receiver
from delivered.model.errors import DeliveredError


@dataclass(frozen=True)
class ActivemqQueue:
    options: ActivemqOptions

    @property
    def name(self) -> str:
        return self.options.queue

    @property
    def without_ids(self) -> str | None:
        if self.options.id_header is not None:
            return None
        return (
            "without the option idHeader duplicates cannot be detected: ActiveMQ assigns a new id to a resent message, "
            "and its flag redelivered proves nothing"
        )

    @property
    def redelivers_after_s(self) -> float:
        """The broker closes a silent connection after two heart-beats."""
        return 2 * HEARTBEAT_MS / 1000

    def assumes(self) -> tuple[str, ...]:
        header = self.options.id_header
        again = f", and resend a message with the same {header}" if header is not None else ""
        return (
            f"senders wait until the broker has written a message (persistent, receipt or synchronous send){again}",
            f"the queue {self.options.queue} drops no messages: no expiry, ring size or delivery limit without a "
            "dead-letter address",
            "messages are bytes, or text without NUL, where STOMP truncates text",
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            session = Session(self.options)
            try:
                return list(findings(session, self.options, receives=True))
            finally:
                session.close()
        except DeliveredError as error:
            return [Finding.refusal(error)]

    def receiver(self) -> Receiver:
        return ActivemqReceiver(self.options)

"""A queue as the contract sees it, and whether it can be received from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delivered.connectors.activemq.client import Session
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
            "without the option idHeader it cannot be recognised: ActiveMQ gives it another id when it comes again, "
            "and its flag redelivered proves nothing"
        )

    def assumes(self) -> tuple[str, ...]:
        header = self.options.id_header
        again = f", and send a message again under the same {header}" if header is not None else ""
        return (
            f"senders wait until the broker has a message on disk (persistent, a receipt or a synchronous send){again}",
            f"the queue {self.options.queue} drops nothing by itself: no expiry, ring size or delivery limit without a "
            "place for dead letters",
            "messages hold bytes, or text without NUL: STOMP cuts a text there",
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

"""A queue of the contract, with its preflight check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from delivered.connectors.rabbitmq.client import Kind, kind
from delivered.connectors.rabbitmq.options import RabbitmqOptions
from delivered.connectors.rabbitmq.receiver import RabbitmqReceiver
from delivered.contract.finding import Finding
from delivered.contract.queue import Receiver
from delivered.model.errors import DeliveredError

CONSUMER_TIMEOUT_S = 1_800.0


@dataclass(frozen=True)
class RabbitmqQueue:
    options: RabbitmqOptions

    @property
    def name(self) -> str:
        return self.options.queue

    @property
    def redelivers_after_s(self) -> float:
        """RabbitMQ's consumer_timeout, unless set otherwise; sooner if the connection is lost."""
        return CONSUMER_TIMEOUT_S

    def assumes(self) -> tuple[str, ...]:
        return (
            "senders wait for publisher confirms, and resend a message with the same message_id",
            f"the queue {self.options.queue} drops no messages: no TTL, length or delivery limit without a "
            "dead-letter exchange",
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            return list(self._look())
        except DeliveredError as error:
            return [Finding.refusal(error)]

    def receiver(self) -> Receiver:
        return RabbitmqReceiver(self.options)

    def _look(self) -> Iterator[Finding]:
        queue = self.options.queue
        match kind(self.options, queue):
            case Kind.TRANSIENT:
                yield Finding(
                    "QUEUE_NOT_DURABLE",
                    f"The queue {queue!r} is not durable: it loses its messages when RabbitMQ restarts.",
                    False,
                    "declare it durable, with x-queue-type=quorum",
                )
            case Kind.STREAM:
                yield Finding(
                    "QUEUE_IS_STREAM",
                    f"{queue!r} is a stream: acknowledgements do not delete its messages.",
                    True,
                    "read it without a receiver: format rabbitmq_stream, with streams instead of queue and log",
                )
            case Kind.CLASSIC:
                yield Finding(
                    "QUEUE_CLASSIC",
                    f"{queue!r} is a classic queue on a single node, whose failure may lose its messages.",
                    False,
                    "declare it with x-queue-type=quorum",
                )

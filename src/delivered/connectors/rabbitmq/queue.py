"""A queue as the contract sees it, and whether it can be received from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.connectors.rabbitmq.client import connect, explained, pika
from delivered.connectors.rabbitmq.options import RabbitmqOptions
from delivered.connectors.rabbitmq.receiver import RabbitmqReceiver
from delivered.contract import Finding
from delivered.contract_queue import Receiver
from delivered.model.errors import DeliveredError


@dataclass(frozen=True)
class RabbitmqQueue:
    options: RabbitmqOptions

    @property
    def name(self) -> str:
        return self.options.queue

    @property
    def in_flight_max(self) -> int:
        return self.options.prefetch

    def assumes(self) -> tuple[str, ...]:
        return (
            "senders wait for publisher confirms, and send a message again under the same message_id",
            f"the queue {self.options.queue} drops nothing by itself: no TTL, length or delivery limit without a "
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
        connection = connect(self.options)
        kinds = pika().exceptions
        try:
            try:
                connection.channel().queue_declare(self.options.queue, passive=True)
            except kinds.AMQPError as error:
                raise explained(error, self.options) from error
            yield from self._kind(connection, kinds)
        finally:
            if connection.is_open:
                connection.close()

    def _kind(self, connection: Any, kinds: Any) -> Iterator[Finding]:
        """AMQP does not tell a queue's kind; but it names the first difference when it is declared as another."""
        queue = self.options.queue
        try:
            connection.channel().queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
        except kinds.ChannelClosedByBroker as error:
            said = str(error.reply_text)
            if "'durable'" in said:
                yield Finding(
                    "QUEUE_NOT_DURABLE",
                    f"The queue {queue!r} is not durable: a restart of RabbitMQ takes what nobody received yet.",
                    False,
                    "declare it durable, with x-queue-type=quorum",
                )
            elif "x-queue-type" in said and "stream" in said.rpartition("current is")[2]:
                yield Finding(
                    "QUEUE_IS_STREAM",
                    f"{queue!r} is a stream: it forgets nothing, and acknowledging moves nothing in it.",
                    True,
                    "receive from a quorum queue that is bound to the same exchange",
                )
            elif "x-queue-type" in said:
                yield Finding(
                    "QUEUE_CLASSIC",
                    f"{queue!r} is a classic queue: it lives on one node, and a failure of that node may lose what "
                    "nobody received yet.",
                    False,
                    "declare it with x-queue-type=quorum",
                )

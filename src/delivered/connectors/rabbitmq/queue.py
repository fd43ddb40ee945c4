"""A queue of the contract: its preflight check, and its receiver with manual acknowledgements and bounded prefetch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.connectors.rabbitmq import RabbitmqOptions
from delivered.connectors.rabbitmq.client import Kind, connect, explained, headers, kind, pika, routing_key
from delivered.contract.queue import MessageBatch, Queue, Receiver
from delivered.contract.source import Finding
from delivered.model.errors import DeliveredError, Unreachable, UsageError
from delivered.model.work import Ok, Outcome, Unknown
from delivered.source import id_text, micros

# Receives messages: one connection, one channel, manual acknowledgements, a bounded prefetch.


class RabbitmqReceiver(Receiver):
    """Handles are delivery tags, valid only on this connection."""

    def __init__(self, options: RabbitmqOptions) -> None:
        self._options = options
        self._errors = (pika().exceptions.AMQPError, OSError)
        self._arrived = MessageBatch()
        self._acknowledged = 0
        self._cancelled = False
        self._connection = connect(options)
        try:
            self._channel = self._connection.channel()
            self._channel.basic_qos(prefetch_count=options.prefetch)
            self._channel.add_on_cancel_callback(self._on_cancel)
            self._channel.basic_consume(options.queue, self._on_message)
        except self._errors as error:
            self.close()
            raise explained(error, options) from error

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        arrived = self._arrived
        if not self._connection.is_open:  # noticed by an acknowledgement; the client's own error has no details
            raise Unreachable("RABBITMQ_UNREACHABLE.LOST", place=self._options.place)
        try:
            self._connection.process_data_events(0 if len(arrived) and count_max else wait_s)
        except self._errors as error:
            explanation = explained(error, self._options)
            if isinstance(explanation, UsageError):
                raise explanation from error
            raise Unreachable("RABBITMQ_UNREACHABLE", explanation.message, explanation.next_step) from error
        if self._cancelled:
            raise UsageError("QUEUE_GONE.RABBITMQ", place=self._options.place, queue=self._options.queue)
        if not self._channel.is_open:  # the client does not raise if the server closed the channel
            reason = getattr(self._channel, "_closing_reason", None) or "no reason given"
            raise Unreachable("RABBITMQ_CHANNEL_CLOSED", place=self._options.place, reason=reason)
        messages, self._arrived = arrived.split(count_max)
        return messages

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        """RabbitMQ does not confirm acknowledgements. Ok: it was sent; if it is lost, the messages are redelivered."""
        first, last = handles[0], handles[-1]
        try:
            if first == self._acknowledged + 1 and last - first + 1 == len(handles):
                self._channel.basic_ack(last, multiple=True)
                self._acknowledged = last  # all up to here; only then may later ones use multiple=True
            else:
                for handle in handles:
                    self._channel.basic_ack(handle)
        except self._errors as error:
            return Unknown(str(error) or type(error).__name__)
        return Ok(len(handles))

    def give_back(self, handles: Sequence[Any]) -> None:
        with contextlib.suppress(*self._errors):
            for handle in handles:
                self._channel.basic_nack(handle, requeue=True)

    def close(self) -> None:
        with contextlib.suppress(*self._errors):
            if self._connection.is_open:
                self._connection.close()

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """Column by column, keeping none of the client's objects: this dominates a receiver's CPU time."""
        del channel
        sent, arrived = properties.timestamp, self._arrived
        arrived.ids.append(id_text(properties.message_id))
        arrived.keys.append(routing_key(method))
        arrived.values.append(body)
        arrived.headers.append(headers(properties))
        arrived.times_us.append(None if sent is None else micros(int(sent), 1_000_000))
        arrived.handles.append(method.delivery_tag)

    def _on_cancel(self, frame: Any) -> None:
        del frame
        self._cancelled = True


# A queue of the contract, with its preflight check.

CONSUMER_TIMEOUT_S = 1_800.0


@dataclass(frozen=True)
class RabbitmqQueue(Queue):
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
                yield Finding.build("QUEUE_NOT_DURABLE.RABBITMQ", refuses=False, queue=queue)
            case Kind.STREAM:
                yield Finding.build("QUEUE_IS_STREAM", refuses=True, queue=queue)
            case Kind.CLASSIC:
                yield Finding.build("QUEUE_CLASSIC", refuses=False, queue=queue)

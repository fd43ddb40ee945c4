"""RabbitMQ's queues: received from, with manual acknowledgements and a bounded prefetch, and sent to, with confirms."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from delivered.connectors.rabbitmq import RabbitmqOptions, RabbitmqSinkOptions
from delivered.connectors.rabbitmq.client import (
    Kind,
    connect,
    explained,
    headers,
    kind,
    opened,
    parameters,
    pika,
    queue_arguments,
    routing_key,
)
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Finding, MessageBatch, Queue, Receiver
from delivered.kits.queue import (
    COLUMNS,
    MessageSink,
    SendingWriter,
    ServerLimits,
    check_names,
    check_types,
    column,
    sends,
    text,
)
from delivered.ledger import Ledgers
from delivered.model.capability import Guarantee, SinkCapability
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Refused, Unreachable, UsageError
from delivered.model.identity import Work
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.rows import BYTES_MAX, check_lengths
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
        arrived.ids.append(id_text(properties.message_id or None))  # two messages with an empty id are not one
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
    def id_scope(self) -> str:
        return f"{quote(self.options.vhost, safe='')}/{self.options.queue}"

    @property
    def redelivers_after_s(self) -> float:
        """RabbitMQ's consumer_timeout, unless set otherwise; sooner if the connection is lost."""
        return CONSUMER_TIMEOUT_S

    def assumes(self) -> tuple[str, ...]:
        return (
            "senders wait for publisher confirms, and resend a message with the same message_id",
            f"the queue {self.options.queue} drops no messages: no expiry, TTL, length or delivery limit without a "
            "dead-letter exchange (RabbitMQ 4 sets a delivery limit of 20 for quorum queues)",
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
        match declared := kind(self.options, queue):
            case Kind.TRANSIENT:
                yield Finding.build("QUEUE_NOT_DURABLE.RABBITMQ", refuses=False, queue=queue)
            case Kind.STREAM:
                yield Finding.build("QUEUE_IS_STREAM", refuses=True, queue=queue)
            case Kind.CLASSIC:
                yield Finding.build("QUEUE_CLASSIC", refuses=False, queue=queue)
        if declared in (Kind.CLASSIC, Kind.QUORUM) and (
            drops := _drops(queue_arguments(self.options, queue, declared))
        ):
            yield Finding.build("QUEUE_DROPS.RABBITMQ", refuses=False, queue=queue, drops=", ".join(drops))


def _drops(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments by which a queue drops messages that nobody received, or that a receiver returned too often."""
    names = ["x-expires"]  # deletes the queue; its messages do not become dead letters
    if "x-dead-letter-exchange" not in arguments:
        names += ["x-message-ttl", "x-delivery-limit"]
        if arguments.get("x-overflow", "drop-head") == "drop-head":
            names += ["x-max-length", "x-max-length-bytes"]
    return [f"{name}={arguments[name]}" for name in names if name in arguments]


# The sink, for at_least_once and at_most_once, with an external ledger: RabbitMQ has no storage to own.

_TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
_limits = ServerLimits("rabbitmq")


def refused_rows(options: RabbitmqSinkOptions, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.contract.sink.Sink.refused_rows`.

    Publishes one message in a transaction that is rolled back: no queue gets it.
    """
    return _limits.refused(batch, (options.url, options.exchange), lambda size: _limit(options, size))


def _limit(options: RabbitmqSinkOptions, size: int) -> int | None:
    with opened(options) as connection:
        channel = connection.channel()
        try:
            channel.tx_select()
            channel.basic_publish(options.exchange, "", bytes(size))
            channel.tx_rollback()
        except pika().exceptions.AMQPError as error:
            match = _TOO_LARGE.search(str(error))
            if match is None:
                raise
            return int(match[1])
    return None


# Executor side: rows to messages, published with confirms.
#
# Many are in flight, on a connection in its own thread, driven by callbacks. The blocking client waits for each
# confirm; this one bounds the number of unconfirmed messages.

IN_FLIGHT_MAX = 2_000
"""Unconfirmed messages per task."""
ROUTE_PATIENCE_S = 5.0
"""How long messages are sent again that were routed to no queue. A stream behind an exchange takes none for up to half
a second after its server started (RabbitMQ 3.10.8, 17 of 17 restarts)."""
_ROUTE_PAUSE_S = 0.1


@dataclass(frozen=True)
class Message:
    routing_key: str
    body: bytes
    properties: Any


class Publisher:
    """One connection. Every message is mandatory: one that no queue takes is sent again, then an error, never a silent
    loss.
    """

    def __init__(self, options: RabbitmqSinkOptions) -> None:
        self._options = options
        self._changed = threading.Condition()
        self._channel: Any = None
        self._failed: DeliveredError | None = None
        self._sent = 0  # by delivery tag
        self._open_tags: dict[int, None] = {}
        self._refused = 0
        self._returned: list[Message] = []
        self._closing = False
        client = pika()
        self._connection = client.SelectConnection(
            parameters(options),
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_lost,
            on_close_callback=self._on_lost,
        )
        self._thread = threading.Thread(target=self._connection.ioloop.start, name="delivered-rabbitmq", daemon=True)
        self._thread.start()
        self._wait(lambda: self._channel is not None, 2 * CONNECT_TIMEOUT_S, "open a channel")

    @property
    def unconfirmed(self) -> int:
        """Messages neither confirmed nor rejected, and those that reached no queue: RabbitMQ confirms them as well."""
        return len(self._open_tags) + len(self._returned)

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; blocks while too many are in flight. Raises if one was rejected."""
        for at in range(0, len(messages), IN_FLIGHT_MAX // 2):
            part = messages[at : at + IN_FLIGHT_MAX // 2]
            self._wait(lambda: len(self._open_tags) <= IN_FLIGHT_MAX // 2, REQUEST_TIMEOUT_S, "confirm messages")
            if self._returned:
                self.flush()
            with self._changed:
                self._send(part)

    def flush(self) -> None:
        """Wait until every message is confirmed. Raises if one was rejected, reached no queue, or its outcome is
        unknown.
        """
        patient_until = time.monotonic() + ROUTE_PATIENCE_S
        while True:
            self._wait(lambda: not self._open_tags, REQUEST_TIMEOUT_S, "confirm the last messages")
            if not self._returned:
                return
            if time.monotonic() > patient_until:
                raise BadRecord("MESSAGE_UNROUTABLE", returned=len(self._returned), exchange=self._options.exchange)
            with self._changed:
                self._changed.wait_for(lambda: self._failed is not None, _ROUTE_PAUSE_S)
                again, self._returned = self._returned, []
                self._send(again)

    def close(self) -> None:
        """Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._connection.ioloop.add_callback_threadsafe(self._stop)
        self._thread.join(REQUEST_TIMEOUT_S)

    def _send(self, part: Sequence[Message]) -> None:
        """Called with the lock held."""
        first = self._sent + 1
        self._sent += len(part)
        self._open_tags.update(dict.fromkeys(range(first, self._sent + 1)))
        self._connection.ioloop.add_callback_threadsafe(partial(self._publish, part))

    def _stop(self) -> None:
        if self._connection.is_open:
            self._connection.close()
        else:
            self._connection.ioloop.stop()

    def _publish(self, part: Sequence[Message]) -> None:
        """Runs in the connection's thread."""
        if self._failed is not None:
            return
        exchange, channel = self._options.exchange, self._channel
        try:
            for m in part:
                channel.basic_publish(exchange, m.routing_key, m.body, m.properties, mandatory=True)
        except pika().exceptions.AMQPError as error:
            self._on_lost(None, error)

    def _on_open(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Any) -> None:
        channel.add_on_close_callback(self._on_lost)
        channel.add_on_return_callback(self._on_returned)
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._ready(channel))

    def _ready(self, channel: Any) -> None:
        with self._changed:
            self._channel = channel
            self._changed.notify_all()

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        tags = self._open_tags
        with self._changed:
            tag = method.delivery_tag
            done = [t for t in tags if t <= tag] if method.multiple else [tag]
            for tag in done:
                tags.pop(tag, None)
            if method.NAME == "Basic.Nack":
                self._refused += len(done)
            self._changed.notify_all()

    def _on_returned(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """Comes before the message's confirmation."""
        del channel
        with self._changed:
            self._returned.append(Message(method.routing_key, body, properties))

    def _on_lost(self, _: Any, error: Any) -> None:
        """The connection or channel was lost, or could not be opened."""
        with self._changed:
            if not self._closing and self._failed is None:
                explanation = explained(error, self._options)
                self._failed = explanation
                if self._sent and isinstance(explanation, Unreachable):
                    self._failed = OutcomeUnknown(
                        "RABBITMQ_UNCONFIRMED", unconfirmed=self.unconfirmed, error=explanation.message
                    )
            self._changed.notify_all()
        if not self._connection.is_open:
            self._connection.ioloop.stop()

    def _wait(self, condition: Any, timeout_s: float, what: str) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: condition() or self._failed is not None, timeout_s)
        if self._failed is not None:
            raise self._failed
        if not done:
            raise Unreachable("RABBITMQ_UNREACHABLE.BLOCKED", place=self._options.place, what=what, timeout_s=timeout_s)
        self._check()

    def _check(self) -> None:
        if self._refused:
            raise DeliveredError("MESSAGE_REFUSED.RABBITMQ", refused=self._refused)


class RabbitmqWriter(SendingWriter[RabbitmqSinkOptions, Message]):
    def _connect(self) -> Publisher:
        return Publisher(self._options)

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        make = pika().BasicProperties
        fixed = self._options.routing_key
        keys = column(rows, "key", pa.binary()) if fixed is None else [fixed] * rows.num_rows
        values, ids = (column(rows, name, pa.binary()) for name in ("value", "message_id"))
        messages = []
        for key, value, id_ in zip(keys, values, ids, strict=True):
            own = self._next_id()
            message_id = text(id_, "column 'message_id'") if id_ else own
            check_lengths("rabbitmq", key=key, message_id=message_id, value=value)
            routing_key = "" if key is None else text(key, "column 'key'")
            messages.append(Message(routing_key, value or b"", make(message_id=message_id, delivery_mode=2)))
        return messages


@dataclass(frozen=True)
class RabbitmqSink(MessageSink):
    options: RabbitmqSinkOptions
    ledgers: Ledgers

    def capability(self) -> SinkCapability:
        where = self.options.label
        return sends(
            "rabbitmq",
            mechanism="publisher confirms",
            send=f"rabbitmq {where}: mandatory, persistent, confirmed by the broker",
            assumes=(
                f"the ledger {self.options.ledger} is kept as long as the checkpoint",
                "queues behind the exchange are durable, and a stream is the only one behind its exchange",
            ),
            repeats="a replayed batch has the same message_id (unless a column message_id sets it), so that consumers "
            "can detect duplicates",
        )

    def _look(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        with opened(self.options) as connection:
            channel = connection.channel()
            if self.options.exchange:
                channel.exchange_declare(self.options.exchange, passive=True)
            elif self.options.routing_key is not None:
                channel.queue_declare(self.options.routing_key, passive=True)
        return []

    def _check_schema(self, schema: pa.Schema) -> None:
        needed = {"value"} if self.options.routing_key is not None else {"value", "key"}
        action = "select these columns; without the option routingKey, key is the routing key"
        check_names("rabbitmq", schema, needed, COLUMNS, action)
        check_types(schema)
        names = {"exchange": self.options.exchange, "routingKey": self.options.routing_key or ""}
        for option, name in names.items():
            if len(name.encode()) > BYTES_MAX["rabbitmq"]["key"]:
                raise UsageError(
                    "OPTION_VALUE.RABBITMQ_LENGTH",
                    option=option,
                    bytes=len(name.encode()),
                    bytes_max=BYTES_MAX["rabbitmq"]["key"],
                )

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        return refused_rows(self.options, batch)

    def _writer(self, work: Work, *, gives_up: bool) -> RabbitmqWriter:
        return RabbitmqWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        raise Refused("NOT_READABLE.RABBITMQ", label=self.options.label)

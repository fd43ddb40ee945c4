"""The sink, for at_least_once and at_most_once, with an external ledger: RabbitMQ has no storage to own."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from delivered.connectors.rabbitmq import RabbitmqSinkOptions
from delivered.connectors.rabbitmq.client import explained, opened, parameters, pika
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Finding
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
            message_id = own if id_ is None else text(id_, "column 'message_id'")
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

"""The sink, for at_least_once and at_most_once, with an external ledger: RabbitMQ has no storage to own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.rabbitmq.client import connect, explained, pika
from delivered.connectors.rabbitmq.options import RabbitmqSinkOptions
from delivered.connectors.rabbitmq.sizes import refused_rows
from delivered.connectors.rabbitmq.writer import RabbitmqWriter
from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan
from delivered.kits.queue.columns import COLUMNS, check_names, check_types
from delivered.kits.queue.sink import MessageSink, sends
from delivered.ledger.store import Ledgers
from delivered.model.capability import SinkCapability
from delivered.model.errors import Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.message_limits import BYTES_MAX


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
                "queues behind the exchange are durable",
            ),
            limits=(
                "a replayed batch has the same message_id (unless a column message_id sets it), so that consumers "
                "can detect duplicates",
            ),
        )

    def _look(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        connection = connect(self.options)
        try:
            channel = connection.channel()
            if self.options.exchange:
                channel.exchange_declare(self.options.exchange, passive=True)
            elif self.options.routing_key is not None:
                channel.queue_declare(self.options.routing_key, passive=True)
        except pika().exceptions.AMQPError as error:
            raise explained(error, self.options) from error
        finally:
            if connection.is_open:
                connection.close()
        return []

    def _check_schema(self, schema: pa.Schema) -> None:
        needed = {"value"} if self.options.routing_key is not None else {"value", "key"}
        way_out = "select these columns; without the option routingKey, key is the routing key"
        check_names("rabbitmq", schema, needed, COLUMNS, way_out)
        check_types(schema)
        names = {"exchange": self.options.exchange, "routingKey": self.options.routing_key or ""}
        for option, name in names.items():
            if len(name.encode()) > BYTES_MAX["rabbitmq"]["key"]:
                raise UsageError(
                    "OPTION_VALUE",
                    f"delivered_rabbitmq sink: option {option!r} has {len(name.encode())} bytes; RabbitMQ accepts at "
                    f"most {BYTES_MAX['rabbitmq']['key']}.",
                    next_step="correct the option",
                )

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """See `delivered.contract.trial.TriesRows`."""
        return refused_rows(self.options, batch)

    def _writer(self, work: Work, *, gives_up: bool) -> RabbitmqWriter:
        return RabbitmqWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        raise Refused(
            "NOT_READABLE",
            f"rabbitmq {self.options.label} cannot be read back: reading a queue removes its messages.",
            next_step="bind a second queue, write it to a log with `delivered receive`, and compare that",
        )

"""The sink: at_least_once and at_most_once. Its ledger lies elsewhere: RabbitMQ has no place that one driver owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.rabbitmq.client import connect, explained, pika
from delivered.connectors.rabbitmq.options import RabbitmqSinkOptions
from delivered.connectors.rabbitmq.writer import SendingWriter
from delivered.contract import Finding, Ledger, Resource, ShardWriter, Sink, Source
from delivered.model.capability import Commit, SinkCapability
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.work import Prepared

_TYPES = {
    "value": (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string),
    "key": (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string),
    "message_id": (pa.types.is_string, pa.types.is_large_string),
}


@dataclass(frozen=True)
class RabbitmqSink:
    """
    Attributes:
        keeper: the sink whose ledger holds what this one's driver records.
    """

    options: RabbitmqSinkOptions
    keeper: Sink

    @property
    def name(self) -> str:
        return self.options.default_name

    def capability(self) -> SinkCapability:
        where = self.options.label
        return SinkCapability(
            system="rabbitmq",
            commit=Commit.NONE,
            mechanism="publisher confirms",
            stage="not possible",
            prepare="not possible",
            decide="not possible",
            apply="not possible",
            send=f"rabbitmq {where}: mandatory, persistent, confirmed by the broker",
            batch_atomic=False,
            assumes=(
                f"the ledger {self.options.ledger} is kept as long as the checkpoint",
                "queues behind the exchange are durable",
            ),
            limits=(
                "message_id is the same when a batch runs again (unless a column message_id gives another): who "
                "receives can tell a repeat",
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        try:
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
        except DeliveredError as error:
            return [Finding.refusal(error)]
        return []

    def check_schema(self, schema: pa.Schema) -> None:
        names = set(schema.names)
        needed = {"value"} if self.options.routing_key is not None else {"value", "key"}
        if not needed <= names <= set(_TYPES):
            raise UsageError(
                "COLUMNS",
                f"delivered_rabbitmq writes the columns {', '.join(sorted(needed))}, and optionally "
                f"{', '.join(sorted(set(_TYPES) - needed))}; it was given {', '.join(schema.names)}.",
                next_step="select these columns; without the option routingKey, key is the routing key",
            )
        for field in schema:
            if not any(fits(field.type) for fits in _TYPES[field.name]):
                raise UsageError("COLUMNS", f"Column {field.name!r} is {field.type}; it must be text or binary.")

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = [n for n in _TYPES if n in batch.schema.names]
        return pa.RecordBatch.from_arrays([batch.column(n).cast(pa.binary()) for n in names], names=names)

    def shard_writer(
        self,
        work: Work,
        guarantee: Guarantee,
        schema: pa.Schema,  # noqa: ARG002 - each batch brings its own
    ) -> ShardWriter:
        return SendingWriter(self.options, work, gives_up=guarantee is Guarantee.AT_MOST_ONCE)

    def read_back(self) -> Source:
        raise Refused(
            "NOT_READABLE",
            f"rabbitmq {self.options.label} cannot be read back: to read a queue is to take from it.",
            next_step="bind a second queue, let `delivered receive` write it to a log, and compare that",
        )

    def ledger(self, scope: Scope) -> Ledger:
        return self.keeper.ledger(scope)

    def resource(self, scope: Scope) -> Resource:
        del scope
        return _Nothing()


class _Nothing:
    """There is never a participant: what is sent is visible."""

    def apply(self, work: Work, prepared: Prepared) -> Outcome[None]:
        del prepared
        return Failed(f"shard {work.shard} was sent, and cannot be held back")

    def applied(self, work: Work) -> bool:
        del work
        return False

    def abort(self, prepared: Prepared) -> Outcome[None]:
        del prepared
        return Ok(None)

    def sweep(self, keep: Sequence[Prepared]) -> Outcome[int]:
        del keep
        return Ok(0)

    def close(self) -> None:
        """Nothing is open."""

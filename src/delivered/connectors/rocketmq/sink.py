"""The sink: at_least_once and at_most_once. Its ledger lies elsewhere: RocketMQ has no place that one driver owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.rocketmq.options import RocketmqSinkOptions
from delivered.connectors.rocketmq.publish import Publisher
from delivered.connectors.rocketmq.writer import RocketmqWriter
from delivered.contract import Finding, ShardWriter, Sink, Source
from delivered.model.capability import SinkCapability
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.sending.columns import COLUMNS, TEXT, as_bytes, check_types
from delivered.sending.sink import SendingSink, sends

_NEEDED = {"NORMAL": (), "FIFO": ("message_group",), "DELAY": ("delivery_timestamp",)}


@dataclass(frozen=True)
class RocketmqSink(SendingSink):
    options: RocketmqSinkOptions
    keeper: Sink

    @property
    def name(self) -> str:
        return self.options.default_name

    def capability(self) -> SinkCapability:
        options = self.options
        order = ("the order within a message group holds within a shard",) if options.kind == "FIFO" else ()
        return sends(
            "rocketmq",
            mechanism="receipts",
            send=f"rocketmq {options.topic}: {options.kind}, with a receipt for each message, each sent once",
            assumes=(
                f"the ledger {options.ledger} is kept as long as the checkpoint",
                "brokers keep what they confirmed (flushDiskType, replicas)",
            ),
            limits=(
                "message_id, which is among the keys too, is the same when a batch runs again (unless a column "
                "message_id gives another): who receives can tell a repeat",
                *order,
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        try:
            publisher = Publisher(self.options)
        except DeliveredError as error:
            return [Finding.refusal(error)]
        try:
            takes = publisher.takes()
        finally:
            publisher.close()
        if self.options.kind in takes:
            return []
        return [
            Finding(
                "TOPIC_TYPE",
                f"The topic {self.options.topic!r} takes messages of type {', '.join(takes) or 'none'}, not "
                f"{self.options.kind}.",
                True,
                "mend the option messageType, or make a topic of that type",
            )
        ]

    def check_schema(self, schema: pa.Schema) -> None:
        names, needed = set(schema.names), {"value", *_NEEDED[self.options.kind]}
        known = {*COLUMNS, "tag", *needed}
        if not needed <= names <= known:
            raise UsageError(
                "COLUMNS",
                f"delivered_rocketmq with messageType={self.options.kind.lower()} writes the columns "
                f"{', '.join(sorted(needed))}, and optionally {', '.join(sorted(known - needed))}; it was given "
                f"{', '.join(schema.names)}.",
                next_step="select these columns; messageType=fifo takes message_group, delay takes delivery_timestamp",
            )
        check_types(pa.schema([f for f in schema if f.name in COLUMNS]))
        for field in schema:
            if field.name in ("tag", "message_group") and not any(fits(field.type) for fits in TEXT):
                raise UsageError("COLUMNS", f"Column {field.name!r} is {field.type}; it must be text.")
            if field.name == "delivery_timestamp" and not pa.types.is_timestamp(field.type):
                raise UsageError("COLUMNS", f"Column {field.name!r} is {field.type}; it must be a timestamp.")

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return as_bytes(batch)

    def _writer(self, work: Work, *, gives_up: bool) -> ShardWriter:
        return RocketmqWriter(self.options, work, gives_up)

    def read_back(self) -> Source:
        raise Refused(
            "NOT_READABLE",
            f"rocketmq {self.options.topic} cannot be read back: its client reads by no offset.",
            next_step="make a second group, let `delivered receive` write it to a log, and compare that",
        )

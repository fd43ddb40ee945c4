"""The sink, for at_least_once and at_most_once; the Python client has no transactions, so the ledger is external."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.pulsar import PulsarSinkOptions, SourceOptions
from delivered.connectors.pulsar.client import Admin
from delivered.connectors.pulsar.positions import EARLIEST, LATEST, Where, physical
from delivered.connectors.pulsar.writer import check_type
from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan
from delivered.kits.queue import TEXT, MessageSink, SendingWriter, check_names, identified, sends
from delivered.kits.schemas.values import canonical
from delivered.ledger import Ledgers
from delivered.model.capability import SinkCapability
from delivered.model.errors import UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.source import HEADERS, SourceScan

_COLUMNS = ("key", "value", "headers", "event_time", "message_id")


@dataclass(frozen=True)
class PulsarSink(MessageSink):
    options: PulsarSinkOptions
    ledgers: Ledgers

    def capability(self) -> SinkCapability:
        return sends(
            "pulsar",
            mechanism="acknowledged by the broker",
            send=f"pulsar {self.options.label}: every message acknowledged by the broker",
            assumes=(f"the ledger {self.options.ledger} is kept as long as the checkpoint",),
            limits=(
                "a replayed batch with the same rows in the same order has the same properties delivered.id, so that "
                "readers can detect duplicates",
            ),
        )

    def _look(self, guarantee: Guarantee) -> Sequence[Finding]:
        from delivered.connectors.pulsar.writer import check_connection

        options = self.options
        admin = Admin(options)
        count = admin.partitions(options.topic)
        topics = [physical((options.topic, n)) for n in (range(count) if count else (-1,))]
        known = [admin.deduplicates(topic) for topic in topics]
        known_schema = admin.schema(options.topic) if options.schema is not None else None
        check_connection(options, None if known_schema is None else (known_schema.kind, known_schema.text))
        if guarantee is Guarantee.AT_MOST_ONCE and not all(known):
            return [Finding.build("DEDUPLICATION_OFF", refuses=True, only=Guarantee.AT_MOST_ONCE, label=options.label)]
        return []

    def _check_schema(self, schema: pa.Schema) -> None:
        action = "select these columns, for example selectExpr('key', 'to_json(struct(*)) AS value')"
        check_names("pulsar", schema, {"value"}, _COLUMNS, action)
        if self.options.schema is not None:
            check_type(self.options, schema.field("value").type)
        for field in schema:
            if field.name == "value" and self.options.schema is not None:
                continue
            wanted = _wanted(field)
            if wanted is not None:
                raise UsageError("COLUMN_TYPE.PULSAR", column=field.name, type=field.type, wanted=wanted)

    def ready_target(self, schema: pa.Schema) -> None:
        """Register the rows' schema, or check them against the topic's."""
        if self.options.schema is not None:
            from delivered.connectors.pulsar.writer import register

            register(Admin(self.options), self.options, schema.field("value").type)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """key and value, a struct as text. Properties and event time are not compared: the sink adds properties."""
        batch = identified(batch, self.options.message_id_columns)
        if self.options.schema is not None:
            at = batch.schema.get_field_index("value")
            batch = batch.set_column(at, "value", canonical(batch.column(at)))
        n = batch.num_rows
        columns = [
            batch.column(c).cast(pa.binary()) if c in batch.schema.names else pa.nulls(n, pa.binary())
            for c in ("key", "value")
        ]
        # An empty key counts as none: readers cannot distinguish them.
        columns[0] = pc.if_else(pc.equal(pc.binary_length(columns[0]), 0), pa.scalar(None, pa.binary()), columns[0])
        return pa.RecordBatch.from_arrays(columns, names=["key", "value"])

    def _writer(self, work: Work, *, gives_up: bool) -> SendingWriter[Any, Any]:
        from delivered.connectors.pulsar.writer import PulsarWriter

        return PulsarWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        from delivered.connectors.pulsar.source import PulsarSource

        options = self.options
        source = PulsarSource(
            SourceOptions(
                url=options.url,
                admin_url=options.admin_url,
                token=options.token,
                trusted=options.trusted,
                certificate=options.certificate,
                key=options.key,
                topics=(options.topic,),
                starting=Where("startingOffsets", EARLIEST),
                ending=Where("endingOffsets", LATEST),
                typed=options.schema is not None,
                canonical=options.schema is not None,
            )
        )
        return SourceScan(source)


def _wanted(field: pa.Field) -> str | None:
    """The type a column must have, if it has another."""
    kind = field.type
    match field.name:
        case "key" | "value":
            tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
            return None if any(fits(kind) for fits in (*tests, pa.types.is_null)) else "text or binary"
        case "headers":
            return None if kind.equals(HEADERS.type) else "array<struct<key: string, value: binary>>"
        case "message_id":
            return None if any(fits(kind) for fits in TEXT) else "text"
    return None if pa.types.is_timestamp(kind) else "timestamp"

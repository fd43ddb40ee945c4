"""The sink: at_least_once and at_most_once. Its ledger lies elsewhere: ActiveMQ has no place that one driver owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.manage import findings
from delivered.connectors.activemq.options import DUPLICATE_ID, ActivemqSinkOptions
from delivered.connectors.activemq.writer import ActivemqWriter
from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan, Sink, Writer
from delivered.kits.queue.columns import COLUMNS, as_bytes, check_types
from delivered.kits.queue.sink import SendingSink, sends
from delivered.model.capability import SinkCapability
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work

_DROPS = (
    "Artemis drops a repeat as long as its id is among the newest that its address keeps (id-cache-size, 20,000 unless "
    "set); beyond that, and on Classic, a repeat stays"
)


@dataclass(frozen=True)
class ActivemqSink(SendingSink):
    options: ActivemqSinkOptions
    ledger_sink: Sink

    @property
    def name(self) -> str:
        return self.options.default_name

    def capability(self) -> SinkCapability:
        options = self.options
        drops = options.id_header == DUPLICATE_ID
        return sends(
            "activemq",
            mechanism="receipts",
            send=f"activemq {options.queue}: persistent, with a receipt for each message",
            assumes=(f"the ledger {options.ledger} is kept as long as the checkpoint",),
            limits=(
                f"the header {options.id_header} is the same when a batch runs again (unless a column message_id gives "
                "another): who receives can tell a repeat",
                *((_DROPS,) if drops else ()),
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        try:
            session = Session(self.options)
            try:
                return list(findings(session, self.options, receives=False))
            finally:
                session.close()
        except DeliveredError as error:
            return [Finding.refusal(error)]

    def check_schema(self, schema: pa.Schema) -> None:
        names = set(schema.names)
        known = set(COLUMNS) if self.options.key_header is not None else set(COLUMNS) - {"key"}
        if not {"value"} <= names <= known:
            raise UsageError(
                "COLUMNS",
                f"delivered_activemq writes the column value, and optionally {', '.join(sorted(known - {'value'}))}; "
                f"it was given {', '.join(schema.names)}.",
                next_step="select these columns; a column key needs the option keyHeader, the header that carries it",
            )
        check_types(schema)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return as_bytes(batch)

    def _writer(self, work: Work, *, gives_up: bool) -> Writer:
        return ActivemqWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        raise Refused(
            "NOT_READABLE",
            f"activemq {self.options.queue} cannot be read back: to read a queue is to take from it.",
            next_step="divert a copy to a second queue, let `delivered receive` write it to a log, and compare that",
        )

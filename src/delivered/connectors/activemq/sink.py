"""The sink: at_least_once and at_most_once, with an external ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.manage import findings
from delivered.connectors.activemq.options import DUPLICATE_ID, ActivemqSinkOptions
from delivered.connectors.activemq.writer import ActivemqWriter
from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan
from delivered.kits.queue.columns import COLUMNS, check_names, check_types
from delivered.kits.queue.sink import MessageSink, sends
from delivered.ledger.store import Ledgers
from delivered.model.capability import SinkCapability
from delivered.model.errors import Refused
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work

_DROPS = (
    "Artemis drops a duplicate while its id is among the newest of its address (id-cache-size, 20,000 by default); "
    "older duplicates, and all on Classic, are delivered"
)


@dataclass(frozen=True)
class ActivemqSink(MessageSink):
    options: ActivemqSinkOptions
    ledgers: Ledgers

    def capability(self) -> SinkCapability:
        options = self.options
        drops = options.id_header == DUPLICATE_ID
        return sends(
            "activemq",
            mechanism="receipts",
            send=f"activemq {options.queue}: persistent, with a receipt for each message",
            assumes=(f"the ledger {options.ledger} is kept with the checkpoint",),
            limits=(
                f"the header {options.id_header} is the same in a replayed batch (unless a column message_id "
                "overrides it), so consumers can detect duplicates",
                *((_DROPS,) if drops else ()),
            ),
        )

    def _look(self, guarantee: Guarantee) -> Iterator[Finding]:
        del guarantee
        session = Session(self.options)
        try:
            yield from findings(session, self.options, receives=False)
        finally:
            session.close()

    def _check_schema(self, schema: pa.Schema) -> None:
        known = set(COLUMNS) if self.options.key_header is not None else set(COLUMNS) - {"key"}
        way_out = "select these columns; a column key needs the option keyHeader"
        check_names("activemq", schema, {"value"}, known, way_out)
        check_types(schema)

    def _writer(self, work: Work, *, gives_up: bool) -> ActivemqWriter:
        return ActivemqWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        raise Refused(
            "NOT_READABLE",
            f"activemq {self.options.queue} cannot be read back: reading a queue removes its messages.",
            next_step="divert a copy to a second queue, write it to a log with `delivered receive`, and compare that",
        )

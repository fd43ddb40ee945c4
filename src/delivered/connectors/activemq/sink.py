"""The sink: at_least_once and at_most_once. Its ledger lies elsewhere: ActiveMQ has no place that one driver owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.manage import findings
from delivered.connectors.activemq.options import DUPLICATE_ID, ActivemqSinkOptions
from delivered.connectors.activemq.writer import SendingWriter
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

_DROPS = (
    "Artemis drops a repeat as long as its id is among the newest that its address keeps (id-cache-size, 20,000 unless "
    "set); beyond that, and on Classic, a repeat stays"
)


@dataclass(frozen=True)
class ActivemqSink:
    """
    Attributes:
        keeper: the sink whose ledger holds what this one's driver records.
    """

    options: ActivemqSinkOptions
    keeper: Sink

    @property
    def name(self) -> str:
        return self.options.default_name

    def capability(self) -> SinkCapability:
        options = self.options
        drops = options.id_header == DUPLICATE_ID
        return SinkCapability(
            system="activemq",
            commit=Commit.NONE,
            mechanism="receipts",
            stage="not possible",
            prepare="not possible",
            decide="not possible",
            apply="not possible",
            send=f"activemq {options.queue}: persistent, with a receipt for each message",
            batch_atomic=False,
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
        known = set(_TYPES) if self.options.key_header is not None else set(_TYPES) - {"key"}
        if not {"value"} <= names <= known:
            raise UsageError(
                "COLUMNS",
                f"delivered_activemq writes the column value, and optionally {', '.join(sorted(known - {'value'}))}; "
                f"it was given {', '.join(schema.names)}.",
                next_step="select these columns; a column key needs the option keyHeader, the header that carries it",
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
            f"activemq {self.options.queue} cannot be read back: to read a queue is to take from it.",
            next_step="divert a copy to a second queue, let `delivered receive` write it to a log, and compare that",
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

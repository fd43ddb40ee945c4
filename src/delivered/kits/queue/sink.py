"""A sink with an external ledger, because its system cannot hold one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.contract.sink import Committer, Writer
from delivered.kits.queue.columns import as_bytes, identified, identified_schema
from delivered.kits.queue.writer import SendingWriter
from delivered.ledger.store import Ledgers, Store
from delivered.model.capability import Commit, SinkCapability
from delivered.model.errors import DeliveredError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.prepared import Prepared


class SendingSink(ABC):
    """Driver side of such a sink; subclasses write the rows.

    Attributes:
        options: with `sink_name`.
        ledgers: hold the sink's, elsewhere.
    """

    options: Any
    ledgers: Ledgers

    @property
    def name(self) -> str:
        return str(self.options.sink_name)

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        try:
            return list(self._look(guarantee))
        except DeliveredError as error:
            return [Finding.refusal(error)]

    @abstractmethod
    def _look(self, guarantee: Guarantee) -> Iterable[Finding]:
        """Findings about the live system; raises if it is unreachable."""

    def writer(
        self,
        work: Work,
        guarantee: Guarantee,
        schema: pa.Schema,  # noqa: ARG002 - each batch brings its own
    ) -> Writer:
        return self._writer(work, gives_up=guarantee is Guarantee.AT_MOST_ONCE)

    @abstractmethod
    def _writer(self, work: Work, *, gives_up: bool) -> Writer:
        """See `kits.queue.writer`."""

    def store(self, scope: Scope) -> Store:
        return self.ledgers.store(scope)

    def committer(self, scope: Scope) -> Committer:
        del scope
        return Nothing()


class MessageSink(SendingSink):
    """A row is a message, with an id.

    Attributes:
        options: also with `message_id_columns`.
    """

    @abstractmethod
    def capability(self) -> SinkCapability: ...

    def check_schema(self, schema: pa.Schema) -> None:
        self._check_schema(identified_schema(self.capability().system, schema, self.options.message_id_columns))

    @abstractmethod
    def _check_schema(self, schema: pa.Schema) -> None:
        """As `check_schema`, of rows with a column message_id if one was requested."""

    @abstractmethod
    def _writer(self, work: Work, *, gives_up: bool) -> SendingWriter[Any, Any]: ...

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """See `delivered.contract.powers.ValidatesRows`."""
        return self._writer(Work(Scope("p", self.name, "i"), 0, 0), gives_up=False).unsendable(batch)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return as_bytes(identified(batch, self.options.message_id_columns))


def sends(
    system: str, *, mechanism: str, send: str, assumes: Sequence[str], limits: Sequence[str], **more: Any
) -> SinkCapability:
    """Capability of a sink that only sends, without two-phase commit.

    Args:
        mechanism: how delivery is confirmed.
        send: how it sends, and where to.
        more: other fields of the capability.
    """
    return SinkCapability(
        system=system,
        commit=Commit.NONE,
        mechanism=mechanism,
        stage="not possible",
        prepare="not possible",
        decide="not possible",
        apply="not possible",
        send=send,
        batch_atomic=False,
        assumes=tuple(assumes),
        limits=tuple(limits),
        **more,
    )


class Nothing(Committer):
    """Committer without participants: sent messages are visible at once."""

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        del prepared
        return Failed(f"shard {work.shard} was sent already and cannot be committed")

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        del work, prepared
        return False

    def abort(self, prepared: Prepared) -> Outcome[None]:
        del prepared
        return Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        del keep
        return Ok(0)

    def close(self) -> None:
        """Nothing to close."""

"""What a sink's connector implements: a writer, a committer, a store for a ledger.

A method that returns an `Outcome` never raises for a server's answer: Failed means that the change did not happen and
never will, Unknown that it may have happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.contract.source import Offsets, Slice
from delivered.model.capability import SinkCapability
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.work import Prepared, Promise

if TYPE_CHECKING:  # not needed on executors
    from delivered.ledger import Store


Shards = Sequence[tuple[Work, Prepared]]
"""Participants, each with its unit of work."""


class Writer(Protocol):
    """Writes one shard of one batch in one attempt. Runs on an executor, in one thread, used once."""

    def stage(self, batch: pa.RecordBatch) -> None:
        """Write rows. Blocks while the sink is behind, so memory stays bounded.

        exactly_once: invisible to readers of the sink. Otherwise they may become visible at any time; at_most_once
        never sends a row twice.
        Dies here: no row is visible (exactly_once); some may be (otherwise).
        """

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        """Make the rows durable and committable.

        `fingerprint` covers all staged rows; a sink whose prepared transactions can time out stores it in a marker
        with the rows.

        Called once, after the last `stage`, even if there were no rows. Afterwards the process may die.
        The handle identifies the rows of this writer only, never those of another with the same `Work`: Spark restarts
        attempt numbers at 0 when a batch or a stage runs again, and an earlier task may still be alive.
        exactly_once: raises if the rows cannot be prepared. at_least_once: returns once every row is acknowledged,
        else raises. at_most_once: returns once every row is acknowledged or given up. The latter two need no handle.
        """

    def abort(self) -> None:
        """Discard staged rows as far as possible. May be called at any time, repeatedly, and after an error."""


class Committer(Protocol):
    """Commits and aborts participants; the tasks that prepared them may have ended. Runs on the driver.

    A committer derives from this class and implements `commit`, `was_committed`, `abort`, `abort_orphans` and `close`.
    It inherits the rest, which then says that its system has nothing of the kind.
    """

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Make a decided participant visible. Idempotent: may be called again, by another process.

        `work.scope` names the sink of this participant.

        Ok: visible. Failed: the transaction is gone, and this call did not commit it; `was_committed` shows whether an
        earlier one did. Unknown: call again.
        """

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        """Whether these rows of the shard are visible, by evidence stored in the sink with the rows.

        `prepared` is what the decision names. Evidence of another writer of the same `Work` does not count where the
        sink can tell them apart.
        Reflects every transaction ended earlier by `abort_orphans` or `commit`.
        """

    def abort(self, prepared: Prepared) -> Outcome[None]:
        """Abort an undecided participant. Idempotent.

        Also runs in a task, if one of several sinks failed to prepare.
        """

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Abort every open participant of this pipeline and sink, of any incarnation, except those in `keep`.

        Runs at recovery, after earlier owners were fenced. Never touches transactions of others. Returns how many.
        """

    def close(self) -> None:
        """Release connections. May be called again."""

    def commit_all(self, shards: Shards) -> Sequence[Outcome[None]]:
        """`commit` for each, in fewer round trips, with the outcomes in the same order.

        May be called again. For each Unknown, `commit` is called next.
        """
        return [Unknown("not asked yet")] * len(shards)

    def targets(self) -> Mapping[str, Target]:
        """Targets by sink name; empty: they have no identity in this system, or do not exist yet.

        A target's id is constant while it exists, however the options spell its name; a recreated target has a new one.
        Called at recovery, after the claim. May be called again. Read-only.
        """
        return {}

    def set_up(self) -> None:
        """Create the topic or table of markers that tasks write, if missing.

        Claiming a ledger in the same sink creates it; called only if the ledger is in another sink, at recovery, before
        orphans are aborted. May be called again.
        """
        return

    def forget(self, batch: int) -> None:  # noqa: ARG002
        """Delete this incarnation's markers before `batch`, which are no longer needed. May be called again."""
        return

    def settle_ends(self, decided: Shards, earlier: Callable[[], Sequence[Prepared]]) -> Outcome[int]:  # noqa: ARG002
        """End transactions whose confirmed end their system lost in a crash: by evidence beside the rows, never by the
        system's word alone. Their rows stay hidden, and may get the outcome of a later one.

        Called at recovery, before orphans are aborted, and before a batch if `ends_hold` is False.

        Args:
            decided: participants of the newest decision. What no decision names is aborted.
            earlier: those of older ones, which were applied and logged; called only if something was lost.

        Returns:
            How many were lost.

        Raises:
            DeliveredError: one cannot be ended. Nothing may be written before that.
        """
        return Ok(0)

    def ends_hold(self, applied: Sequence[Prepared]) -> bool:  # noqa: ARG002
        """Whether these participants, applied since the last call, are certainly visible.

        Called before every batch, and has to be cheap.
        """
        return True

    def left_out(self) -> Mapping[str, int]:
        """Rows of this incarnation that visible batches skipped, by kind: "conflict", "constraint".

        Of conditional writes (`WriteMode.conditional`). Read-only.
        """
        return {}

    def dead_letters(self) -> Sequence[LeftOutRow]:
        """Those of the skipped rows that their database keeps. Read-only."""
        return ()


@dataclass(frozen=True)
class LeftOutRow:
    """A row that the table did not accept, kept in its database.

    Attributes:
        record: as `model.bad_row.as_json_text` writes it.
    """

    batch: int
    shard: int
    reason: str
    record: str


class BoundedScan(Protocol):
    """A one-time read of a sink's current content. Picklable; holds no connection."""

    def schema(self) -> pa.Schema:
        """The columns of `Sink.records`, plus those that the system adds (Kafka: partition and offset).

        Raises a `DeliveredError` if there is nothing to read, or reading fails.
        """

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Split the sink's content at the time of the call. Runs on the driver.

        Args:
            since: where to start, in the system's own terms ({"rowid": 5001}), if it has an order.
        """

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """Runs on an executor. Bounded memory."""


@runtime_checkable
class Sink(Protocol):
    """A sink as the user declared it: validated options, no connection. Picklable."""

    @property
    def name(self) -> str:
        """Default name of this sink in its pipeline, where names are unique."""

    def capability(self) -> SinkCapability:
        """Static: contacts no server."""

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        """Check that the live system supports the guarantee. Runs on the driver before the first batch."""

    def check_schema(self, schema: pa.Schema) -> None:
        """Raise UsageError if rows of this schema cannot be written. Runs on the driver; contacts no server."""

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows as a reader of the sink sees them: canonical columns, order and types. Input of the fingerprint."""

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        """Runs on an executor. May reuse warm clients of earlier shards in this process."""

    def scan(self) -> BoundedScan:
        """All records that a reader of this sink sees, for the audit. Raises Refused if they cannot be read back."""

    def store(self, scope: Scope) -> Store:
        """Storage for the ledger of this scope (`ledger.Ledger` adds the rules). Connects on first use."""

    def committer(self, scope: Scope) -> Committer: ...


DEAD_LETTERS = pa.schema(
    [
        pa.field("sink", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("batch", pa.int64()),
        pa.field("shard", pa.int32()),
        pa.field("row", pa.int64()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("record", pa.string()),
        pa.field("pipeline", pa.string()),
        pa.field("incarnation", pa.string()),
    ]
)
"""Columns of a dead letter: the sink that rejected the row and why, the row's position in the batch (`row` counts that
sink's rows in that shard), its source position if the row still has those columns, the row as JSON
(`model.bad_row.as_json_text`), and whose batch it was."""


SOURCE_LETTERS = "(source)"
"""Stands for the sink in a dead letter of a record that never became a row; no sink has such a name. Its `record` has
the record's key and value."""

TRANSFORM_LETTERS = "(transform)"
"""As SOURCE_LETTERS, of a row for which the transform raised. Its `record` has the columns of the source, undecoded."""

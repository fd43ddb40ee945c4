"""What a sink's connector implements: a writer, a committer, a store for a ledger. `StoreSink` makes them of parts.

A method that returns an `Outcome` never raises for a server's answer: Failed means that the change did not happen and
never will, Unknown that it may have happened.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from delivered.contract.source import Address, Finding, HeldBack, Offsets, Slice
from delivered.model.capability import Guarantee, SinkCapability
from delivered.model.errors import InvariantBroken, Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Target, Work
from delivered.model.work import Failed, Handle, Ok, Outcome, Prepared, Promise, Unknown

if TYPE_CHECKING:  # not needed on executors
    from delivered.ledger import Ledgers, Store


Shards = Sequence[tuple[Work, Prepared]]
"""Participants, each with its unit of work."""


class Writer(ABC):
    """Writes one shard of one batch in one attempt. Runs on an executor, in one thread, used once."""

    @abstractmethod
    def stage(self, batch: pa.RecordBatch) -> None:
        """Write rows. Blocks while the sink is behind, so memory stays bounded.

        exactly_once: invisible to readers of the sink. Otherwise they may become visible at any time; at_most_once
        never sends a row twice.
        Dies here: no row is visible (exactly_once); some may be (otherwise).
        """

    @abstractmethod
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
        """Discard staged rows as far as possible; `Committer.abort_orphans` removes the rest.

        May be called at any time, repeatedly, and after an error.
        """
        return


class Committer(ABC):
    """Commits and aborts participants; the tasks that prepared them may have ended. Runs on the driver.

    A committer derives from this class and implements the abstract methods. It inherits the rest, which then says that
    its system has nothing of the kind.
    """

    @abstractmethod
    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Make a decided participant visible. Idempotent: may be called again, by another process.

        `work.scope` names the sink of this participant.

        Ok: visible. Failed: there is no such transaction, and this call did not commit it; `was_committed` shows
        whether an earlier one did. Unknown: call again.
        """

    @abstractmethod
    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        """Whether these rows of the shard are visible, by evidence stored in the sink with the rows.

        `prepared` is what the decision names. Evidence of another writer of the same `Work` does not count where the
        sink can distinguish them.
        Reflects every transaction ended earlier by `abort_orphans` or `commit`.
        """

    @abstractmethod
    def abort(self, prepared: Prepared) -> Outcome[None]:
        """Abort an undecided participant. Idempotent.

        Also runs in a task, if one of several sinks failed to prepare.
        """

    @abstractmethod
    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Abort every open participant of this pipeline and sink, of any incarnation, except those in `keep`.

        Runs at recovery, after earlier owners were fenced. Never touches transactions of others. Returns how many.
        """

    def close(self) -> None:
        """Release connections. May be called again."""
        return

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

    def set_up(self, guarantee: Guarantee, *, decides: bool) -> None:  # noqa: ARG002
        """Create what tasks of the next batch need beside the rows, if missing: the topic or table of their markers.

        Called at recovery, before orphans are aborted. May be called again.

        Args:
            decides: the ledger is in this sink. Claiming it created what it shares with the markers.
        """
        return

    def forget(self, batch: int) -> None:  # noqa: ARG002
        """Delete this incarnation's markers before `batch`, which are no longer needed. May be called again."""
        return

    def visible_shards(self, batch: int) -> Sequence[int]:  # noqa: ARG002
        """Shards of this incarnation whose rows of `batch` or a later one are visible, by evidence beside the rows.

        Called at a start for a batch that the ledger does not have, after orphans were aborted: somebody committed
        prepared transactions by hand, or the ledger is an older copy than the sink. Empty: none, or nobody can tell.
        """
        return ()

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

    def skipped(self) -> Mapping[str, int]:
        """Rows of this incarnation that visible batches skipped, by kind: "conflict", "constraint".

        Of conditional writes (`WriteMode.conditional`). Read-only.
        """
        return {}

    def dead_letters(self) -> Sequence[SkippedRow]:
        """Those of the skipped rows that their database keeps. Read-only."""
        return ()

    def open_transactions(self) -> Sequence[OpenTransaction] | None:
        """Participants of this pipeline and sink, of any incarnation, that stay open in the system until they are
        committed or aborted, oldest first; None: none ever stays open. Raises Unreachable."""
        return None

    def held_back(self) -> HeldBack | None:
        """What open transactions of others hide from readers of this sink; None: none can, or it does not know.
        Read-only. Raises Unreachable."""
        return None

    def end_by_id(
        self,
        transactional_id: str,  # noqa: ARG002
        commit: bool,  # noqa: ARG002
        handle: Handle | None = None,  # noqa: ARG002
    ) -> Outcome[None]:
        """Commit or abort one of them manually.

        Args:
            handle: of the one that is meant, where a later transaction may have the same id; None: any.

        Raises UsageError if the id is not one of this package's, or has no open transaction.
        """
        return Failed("this sink keeps no transaction open")


@dataclass(frozen=True)
class SkippedRow:
    """A row that the table did not accept, kept in its database.

    Attributes:
        record: as `model.rows.as_json_text` writes it.
    """

    batch: int
    shard: int
    reason: str
    record: str


@dataclass(frozen=True)
class OpenTransaction:
    """An open transaction at a sink, for operators and for the audit.

    Attributes:
        state: in the system's own terms.
        participant: the handle that a decision names it by, if one does.
        targets: of its rows.
        started_ms: milliseconds since 1970, by the server's clock if available; None: unknown.
        timeout_s: age at which the system aborts it by itself; None: never.
        end_lost: its system reports its end, and still hides its rows and what was written behind them.
        committed: how it ended, if its end was lost; None: the system does not know any more.
    """

    transactional_id: str
    state: str
    participant: Handle
    targets: tuple[str, ...]
    started_ms: int | None
    timeout_s: float | None = None
    end_lost: bool = False
    committed: bool | None = None

    def age_s(self) -> float | None:
        """Seconds since it was opened, by this machine's clock."""
        return None if self.started_ms is None else max(0.0, time.time() - self.started_ms / 1000)


@dataclass(frozen=True)
class Changes:
    """What happened to rows that lay before a position of a sink, since facts about them were kept. Each a sentence.

    Attributes:
        expired: what the system removed as its settings say: retention, time to live.
        altered: what someone removed, changed or recreated.
        missed: what was removed, for either reason, behind the position: nobody can read it any more.
        unknown: what cannot be compared any more, and why.
        continues: `slices` from this position still returns what was added since; False: read everything.
    """

    expired: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    continues: bool = True

    @classmethod
    def deleted(cls, what: str, *, recreated: bool = False) -> Self:
        """Of the complete target: all rows of another one lie behind the position."""
        return cls(altered=(f"{what} was deleted" + " and recreated" * recreated,))


@dataclass(frozen=True)
class Expired:
    """What retention may have removed from the start of a partition.

    Attributes:
        what: a sentence.
        before_ms: only records written before this time, in ms since 1970: someone deleted younger ones; None: of any
            age.
    """

    what: str
    before_ms: int | None = None


class BoundedScan(ABC):
    """A one-time read of a sink's current content. Picklable; holds no connection."""

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of `Sink.records`, plus those that the system adds (Kafka: partition and offset).

        Raises a `DeliveredError` if there is nothing to read, or reading fails.
        """

    @abstractmethod
    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Split what lies between two positions. Runs on the driver.

        Args:
            since: where to start; None: at the first row. What was added to a target that was recreated since lies
                behind every earlier position. A partition that it does not name is read from its first record.
            until: an earlier `position`, where to stop; None: at the end of the content at the time of the call. Of a
                system without positions: None.
        """

    @abstractmethod
    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """Runs on an executor. Bounded memory."""

    def position(self) -> Offsets | None:
        """Where the sink's content ends now, as `slices` takes it: what a reader sees now lies before it, what becomes
        visible later at or behind it, also if it is staged already. None: there is no such order, and every audit reads
        everything (`SinkCapability.no_position`).

        JSON values. Read-only; contacts the server once.
        """
        return None

    def kept(self, position: Offsets) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Facts about what lies before a position, as JSON values, computed by the system: no rows are transferred, and
        the cost is bounded. Called right after `position`, compared later by `changes`. None: there are none.

        Read-only.
        """
        return None

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:  # noqa: ARG002
        """What happened since to what lay before a position.

        Args:
            before: what `kept` returned for this position.

        Read-only. Raises Unreachable.
        """
        return Changes()

    def expired(self) -> Mapping[str, Expired]:
        """What is missing from the start of partitions, as slices name them, if the system's settings let it expire.
        In such a partition, records lie in the order of their batches.

        Read-only. Raises Unreachable.
        """
        return {}

    def compacted(self) -> Sequence[str]:
        """Why records may be missing from any place, by the system's settings. Each a sentence.

        Read-only. Raises Unreachable.
        """
        return ()

    def planned(self) -> Self:
        """As `Source.planned`."""
        return self

    def address(self) -> Address | None:
        """As `Source.address`."""
        return None


KEY_BYTES = 16
"""Length of a key's hash: neither forged nor accidental collisions are feasible."""


class KeyMemory(ABC):
    """Keys of the records that decided batches delivered. Runs on executors; used by one thread.

    Recorded keys take effect in the transaction of the batch's decision, which also expires old ones. So a rerun of a
    batch gets the same answers: it never sees its own keys, nor those of an undecided batch.
    """

    @abstractmethod
    def known(self, batch: int, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        """Keys that earlier batches delivered, with the expiry of each of their records in microseconds since 1970.

        Without records that expired before this batch. Idempotent, even after the decision.
        """

    @abstractmethod
    def note(self, batch: int, keys: Sequence[bytes], times: Sequence[int], untils: Sequence[int]) -> None:
        """Record the keys of the running batch: each record's event time, and when it expires.

        Durable when it returns; called before any of the records is passed on. Another attempt may record the same
        keys again. What attempts under an earlier claim of the ledger recorded is void.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections. May be called again."""


class Sink(ABC):
    """A sink as the user declared it: validated options, no connection. Picklable.

    A sink derives from this class and implements the abstract methods. It inherits the rest, which then says that its
    system has nothing of the kind.

    Attributes:
        ledgers: hold this sink's ledger, if its connector has `external_ledger`.
    """

    ledgers: Ledgers

    @abstractmethod
    def capability(self) -> SinkCapability:
        """Static: contacts no server."""

    @abstractmethod
    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows as a reader of the sink sees them: canonical columns, order and types. Input of the fingerprint."""

    @abstractmethod
    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        """Runs on an executor. May reuse warm clients of earlier shards in this process."""

    @abstractmethod
    def committer(self, scope: Scope) -> Committer: ...

    @property
    def name(self) -> str:
        """Default name of this sink in its pipeline, where names are unique."""
        return self.capability().system

    @property
    def routed_by(self) -> str | None:
        """Column of text that says where each row is written, if it is not in `records`; `scan` returns it, too.

        Audits compare it, fingerprints do not hold it.
        """
        return None

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:  # noqa: ARG002
        """Check that the live system supports the guarantee. Runs on the driver before the first batch."""
        return ()

    def check_guarantee(self, guarantee: Guarantee) -> None:  # noqa: ARG002
        """Raise UsageError if an option contradicts the guarantee. Runs on the driver; contacts no server."""
        return

    def check_schema(self, schema: pa.Schema) -> None:
        """Raise UsageError if rows of this schema cannot be written. Runs on the driver; contacts no server."""
        self.records(pa.RecordBatch.from_pylist([], schema))

    def target_check(self) -> Callable[[pa.Schema], None] | None:
        """What the target that is there takes: raises UsageError for rows of a schema that a start would refuse.

        Asks the system once, on the driver, and changes nothing; the result asks nobody. A column of type null has an
        unknown type, which fits. None: there is no target, or it takes whatever `check_schema` does.
        """
        return None

    def scan(self) -> BoundedScan:
        """All records that a reader of this sink sees, for the audit. Raises Refused if they cannot be read back."""
        raise Refused("NOT_READABLE.SINK", name=self.name)

    def store(self, scope: Scope) -> Store:
        """Storage for the ledger of this scope (`ledger.Ledger` adds the rules). Connects on first use."""
        return self.ledgers.store(scope)

    def check_ledger(self, scope: Scope) -> Sequence[Finding]:  # noqa: ARG002
        """Settings of the place of the ledger, or of the markers, under which decisions may be lost.

        Read-only. Raises Unreachable.
        """
        return ()

    def checked_target(self) -> Sequence[str]:
        """What preflight looked at in a target whose definition may change what is written: triggers, rules, types.

        One line per target, for the plan. Called after a preflight without refusals. Changes nothing.
        """
        return ()

    def ready_target(self, schema: pa.Schema) -> None:  # noqa: ARG002
        """Create the target if the options request it, and validate the schema against it.

        Needed where the target stores the ledger, or only targets created here have an identity. Runs on the driver
        before a start's first claim. May be called again, and by two drivers concurrently. Changes no rows. Raises
        UsageError if rows of this schema cannot be written to the target.
        """
        return

    def add_columns(self, schema: pa.Schema) -> None:  # noqa: ARG002
        """Add nullable columns that the target lacks, if the options request it.

        Runs on the driver after a start's recovery, under its claim, before a row is staged: recovery ends prepared
        transactions, which would block it. May be called again, and by a fenced driver. Changes no rows. Raises
        UsageError if rows of this schema cannot be written to the target.
        """
        return

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:  # noqa: ARG002
        """The reason for each invalid row, null for valid ones; None: all rows are valid (`SinkCapability.validates`).

        Runs on an executor. Deterministic; contacts no server.
        """
        return None

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:  # noqa: ARG002
        """As `invalid_rows`, of rows that are valid, for reasons that only its server or library knows.

        Asks it, and changes nothing there. Runs on an executor, only if bad rows do not stop the query. Constraints
        are not tried. May be called for rows that are not written.
        """
        return None

    def key_memory(self, scope: Scope) -> KeyMemory:
        """The keys of a dedup, next to the ledger of the deciding sink (`SinkCapability.remembers`).

        Runs on an executor, after the ledger of this scope was claimed.
        """
        raise InvariantBroken("DEDUP_MEMORY.NO_KEYS", sink=scope.sink)

    @property
    def schema_columns(self) -> Sequence[str]:
        """Columns whose records name a registered schema.

        Their bytes depend on the schema's id, so a batch that runs again after its decision is written with the same.
        """
        return ()

    def check_rows(self, schema: pa.Schema) -> None:  # noqa: ARG002
        """Raise UsageError if the registry has no schema that rows of `schema` fit, or would refuse a declared one.

        Runs on the driver; changes nothing. Raises Unreachable.
        """
        return

    def settled(self, schema: pa.Schema) -> Self:  # noqa: ARG002
        """A copy that names the schemas to write rows with, as the registry has them now; a declared one is registered.

        Runs on the driver at a start's first batch. Raises UsageError if the registry refuses the schema, or rows do
        not fit it; Unreachable.
        """
        return self

    def schema_ids(self) -> Mapping[str, int]:
        """Ids of the schemas that a settled copy names, by column."""
        return {}

    def by_ids(self, ids: Mapping[str, int]) -> Self:  # noqa: ARG002
        """As `settled`, with the schemas of these ids. Raises UsageError: the registry no longer has one."""
        return self


class Parts:
    """The parts of a connector, each as "module:name" in its folder.

    Imported on first use, so that tasks load no driver code, and a missing client library is reported by the part that
    needs it.

    Args:
        needs: raises MissingExtra if writer or store cannot be imported.
    """

    def __init__(self, folder: str, needs: Callable[[], None] = lambda: None, **names: str) -> None:
        self.folder = folder
        self._needs = needs
        self._names = names

    def __getitem__(self, what: str) -> Any:
        if what in ("writer", "store"):
            self._needs()
        module, _, name = self._names[what].partition(":")
        return getattr(import_module(f"{self.folder}.{module}"), name)


class StoreSink(Sink):
    """Base of sinks whose own transaction carries the decision: dataclasses with the field `options`. Holds no
    connection; secrets are pickled as references.

    Attributes:
        parts: each called with the options and the arguments of the contract.
    """

    options: Any
    parts: ClassVar[Parts]

    @property
    def name(self) -> str:
        return str(self.options.sink_name)

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        findings: Sequence[Finding] = self.parts["preflight"](self.options, guarantee)
        return findings

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        writer: Writer = self.parts["writer"](self.options, work, guarantee, schema)
        return writer

    def scan(self) -> BoundedScan:
        scan: BoundedScan = self.parts["scan"](self.options)
        return scan

    def store(self, scope: Scope) -> Store:
        store: Store = self.parts["store"](self.options, scope)
        return store

    def committer(self, scope: Scope) -> Committer:
        committer: Committer = self.parts["committer"](self.options, scope)
        return committer


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
"""Columns of a dead letter: the sink that rejected the row (or `model.rows.Origin`) and why, the row's position in the
batch (`row` counts that sink's rows in that shard), its source position if known, the row as JSON
(`model.rows.as_json_text`), and whose batch it was."""

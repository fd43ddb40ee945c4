"""Optional protocols of sinks, committers and sources, checked with `isinstance`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar, runtime_checkable

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.contract.queue import DedupWindow, ReceiverReport
from delivered.contract.sink import Sink
from delivered.contract.source import Offsets
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.model.outcome import Outcome
from delivered.model.work import Handle

S = TypeVar("S")


@runtime_checkable
class NeedsTarget(Protocol):
    """A sink whose target must exist before the first claim: it stores the ledger, or only targets created here have an
    identity (`KnowsTarget`)."""

    def ready_target(self, schema: pa.Schema) -> None:
        """Create the target if the options request it, and validate the schema against it.

        Runs on the driver before a start's first claim. May be called again, and by two drivers concurrently. Changes
        no rows. Raises UsageError if rows of this schema cannot be written to the target.
        """


def ready_target(sink: Sink, schema: pa.Schema) -> None:
    """Prepare the target of any sink, before a claim."""
    if isinstance(sink, NeedsTarget):
        sink.ready_target(schema)


@runtime_checkable
class AddsColumns(Protocol):
    """A sink whose target can take new columns, but not while transactions hold it."""

    def add_columns(self, schema: pa.Schema) -> None:
        """Add nullable columns that the target lacks, if the options request it.

        Runs on the driver after a start's recovery, under its claim, before a row is staged: recovery ends prepared
        transactions, which would block it. May be called again, and by a fenced driver. Changes no rows. Raises
        UsageError if rows of this schema cannot be written to the target.
        """


def add_columns(sink: Sink, schema: pa.Schema) -> None:
    """Extend the target of any sink, after recovery."""
    if isinstance(sink, AddsColumns):
        sink.add_columns(schema)


@runtime_checkable
class ChecksTarget(Protocol):
    """A sink whose target's definition may change what is written: triggers, rules, types."""

    def checked_target(self) -> Sequence[str]:
        """What preflight looked at there, one line per target, for the plan; empty: there is no target yet.

        Called after a preflight without refusals. Changes nothing.
        """


@runtime_checkable
class ValidatesRows(Protocol):
    """A sink that can detect invalid rows before it writes them."""

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """The reason for each invalid row, null for valid ones; None: all rows are valid.

        Runs on an executor. Deterministic; contacts no server.
        """


@runtime_checkable
class ChecksGuarantee(Protocol):
    def check_guarantee(self, guarantee: Guarantee) -> None:
        """Raise UsageError if an option contradicts the guarantee. Runs on the driver; contacts no server."""


@runtime_checkable
class Planned(Protocol):
    def planned(self) -> Self:
        """A copy with the current columns fixed; itself if they are fixed already.

        Runs on the driver, once per query, before `schema`. Queries the system; raises UsageError if it has no columns.
        """


def planned(source: S) -> S:
    """Fix the columns of any source or scan, before a query is built on it."""
    return source.planned() if isinstance(source, Planned) else source


KEY_BYTES = 16
"""Length of a key's hash: neither forged nor accidental collisions are feasible."""


class KeyMemory(Protocol):
    """Keys of the records that decided batches delivered. Runs on executors; used by one thread.

    Noted keys take effect in the transaction of the batch's decision, which also expires old ones. So a rerun of a
    batch gets the same answers: it never sees its own keys, nor those of an undecided batch.
    """

    def known(self, batch: int, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        """Keys that earlier batches delivered, with the expiry of each of their records in microseconds since 1970.

        Records that expired before this batch are left out. Idempotent, even after the decision.
        """

    def note(self, batch: int, keys: Sequence[bytes], times: Sequence[int], untils: Sequence[int]) -> None:
        """Note the keys of the running batch: each record's event time, and when it expires.

        Durable when it returns; called before any of the records is passed on. Another attempt may note the same keys
        again. Notes of attempts under an earlier claim of the ledger are void.
        """

    def close(self) -> None:
        """Release connections. May be called again."""


@runtime_checkable
class Remembers(Protocol):
    """A sink that can keep a `KeyMemory` next to its ledger. Used only for the deciding sink."""

    def key_memory(self, scope: Scope) -> KeyMemory:
        """Runs on an executor, after the ledger of this scope was claimed."""


@runtime_checkable
class HasOffsetMetadata(Protocol):
    """A source whose offsets hold metadata that other connectors to the same system cannot read.

    Spark's offset log gets the offsets without it; the checkpoint sidecar keeps it, and restores it before the driver
    sees the offsets again.
    """

    @property
    def offset_metadata(self) -> frozenset[str]:
        """Top-level keys of the metadata."""

    @property
    def lasting_metadata(self) -> frozenset[str]:
        """Keys that stay valid for later offsets until they change; the others belong to one offset."""


@runtime_checkable
class MeasuresRate(Protocol):
    """A log that knows how fast it grows."""

    def rate(self) -> float | None:
        """Records per second of the busiest partition, over its last appends. None: too few to tell.

        Raises DeliveredError if the log cannot be read.
        """


@runtime_checkable
class ListsReceivers(Protocol):
    """A log in which receivers report themselves."""

    def receivers(self) -> Sequence[ReceiverReport]:
        """Those that did not leave: they run, or died. Read-only. Raises DeliveredError if the log cannot be read."""


@runtime_checkable
class HasDedupWindow(Protocol):
    """A log that recognises messages for a while."""

    def dedup_window(self) -> DedupWindow | None:
        """None: too few appends to tell, or messages without ids. Read-only. Raises DeliveredError."""


@runtime_checkable
class DatesRecords(Protocol):
    """A source driver that can tell when the records were written that wait."""

    def waiting_since(self, start: Offsets, end: Offsets) -> Mapping[str, int]:
        """Partition, named as by `source.lag`, -> when its first record of [start, end) was written, in milliseconds
        since 1970; a partition without one is absent. Read-only. Raises Unreachable."""


class OpenTransaction(Protocol):
    """One open transaction at a sink, for display and for the audit."""

    @property
    def transactional_id(self) -> str: ...

    @property
    def state(self) -> str:
        """In the system's own terms."""

    @property
    def participant(self) -> Handle:
        """The handle that a decision names it by, if one does."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets of its rows."""

    def age_s(self) -> float | None: ...

    def timeout_s(self) -> float | None:
        """Age at which the system aborts it by itself. None: never."""


@runtime_checkable
class OrdersOffsets(Protocol):
    """A source whose positions are not numbers."""

    def earlier(self, end: Offsets, until: Offsets) -> Offsets:
        """Per partition, the earlier of two positions; only partitions that `until` names. Pure."""


@dataclass(frozen=True)
class Resumption:
    """Where another reader stopped.

    Attributes:
        offsets: as `SourceDriver.initial` gives them.
        partitions: source partition -> (offset of the next record, its current lag in records).
        notes: what was assumed.
    """

    offsets: Offsets
    partitions: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...] = ()


class Adopter(Protocol):
    """Finds where another reader of a source stopped. Runs on the driver; read-only.

    Its methods raise Refused if records would be skipped or may have been read, and Unreachable.
    """

    def of_offsets(self, offsets: Offsets) -> Resumption:
        """From the offsets in a checkpoint of Spark's own source."""

    def of_group(self, group: str) -> Resumption:
        """From a consumer group; Refused while it has members."""

    def of_time(self, ms: int) -> Resumption:
        """From the first record of each partition at or after this time, in milliseconds since 1970."""


@runtime_checkable
class Adopts(Protocol):
    """A source that can start where another reader stopped."""

    def adopter(self) -> Adopter: ...


@dataclass(frozen=True)
class Address:
    """Where a sink writes, or a source reads.

    Attributes:
        system: "kafka".
        servers: as the options spell them.
        names: of topics or tables; None: each row, or a pattern, says which.
    """

    system: str
    servers: frozenset[str]
    names: frozenset[str] | None

    def meets(self, other: Address) -> bool:
        """Whether one reads what the other writes."""
        if self.system != other.system or not self.servers & other.servers:
            return False
        return self.names is None or other.names is None or bool(self.names & other.names)

    def __str__(self) -> str:
        names = "topics or tables by row" if self.names is None else ", ".join(sorted(self.names))
        return f"{self.system} {names} at {', '.join(sorted(self.servers))}"


@runtime_checkable
class HasAddress(Protocol):
    """A source, or a sink's bounded scan: whether one pipeline reads what another one wrote."""

    def address(self) -> Address | None:
        """Where this reads; contacts no server. None: not known."""


def address_of(reader: object) -> Address | None:
    return reader.address() if isinstance(reader, HasAddress) else None


@runtime_checkable
class HoldsBackWal(Protocol):
    """A source that keeps its server from removing what the pipeline has not passed yet."""

    def wal_held_back(self) -> int | None:
        """In bytes; None: nothing is held back. Read-only. Raises Unreachable."""


@runtime_checkable
class HoldsTransactions(Protocol):
    """Implemented by a `Committer` whose participants stay open in the system until committed or aborted."""

    def open_transactions(self) -> Sequence[OpenTransaction]:
        """Those of this pipeline and sink, of any incarnation, oldest first. Raises Unreachable."""

    def end_by_id(self, transactional_id: str, commit: bool) -> Outcome[None]:
        """Commit or abort one manually.

        Raises UsageError if the id is not one of this package's, or has no open transaction.
        """


@runtime_checkable
class ChecksLedger(Protocol):
    """Implemented by a `Sink` that creates a place of its own for its ledger, or for its markers."""

    def check_ledger(self, scope: Scope) -> Sequence[Finding]:
        """Settings of that place under which decisions may be lost. Read-only. Raises Unreachable."""


def check_ledger(sink: object, scope: Scope) -> Sequence[Finding]:
    return sink.check_ledger(scope) if isinstance(sink, ChecksLedger) else ()

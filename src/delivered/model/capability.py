"""What a pipeline may ask for: a guarantee, as a reader of the sink can observe it; a mode of writing; a dedup. And
what a connector supports of it: all that the planner knows about one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from delivered.model.errors import UsageError
from delivered.model.options import duration


class Guarantee(StrEnum):
    """What a pipeline guarantees about its records in a sink. There is no default."""

    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"
    EXACTLY_ONCE = "exactly_once"

    @classmethod
    def parse(cls, text: str | Guarantee | None) -> Guarantee:
        """Read a guarantee from an option's value. Raises UsageError: `text` is missing or names none of the three."""
        known = ", ".join(g.value for g in cls)
        if text is None:
            raise UsageError("GUARANTEE_MISSING", known=known)
        try:
            return cls(str(text).strip().lower())
        except ValueError:
            raise UsageError("GUARANTEE_UNKNOWN", text=text, known=known) from None

    @property
    def may_lose(self) -> bool:
        return self is Guarantee.AT_MOST_ONCE

    @property
    def may_duplicate(self) -> bool:
        return self is Guarantee.AT_LEAST_ONCE


class Commit(StrEnum):
    """How a sink commits a batch."""

    TWO_PHASE = "two_phase"
    """Tasks prepare; one record decides; then each participant is applied."""
    ONE_TRANSACTION = "one_transaction"
    """Tasks prepare by staging; rows and ledger row become visible in one transaction of the sink."""
    NONE = "none"
    """Rows are visible as soon as they are written."""


class OnConflict(StrEnum):
    """What happens to a row that the table rejects."""

    FAIL = "fail"
    """The query stops; nothing of the batch is visible."""
    SKIP = "skip"
    """The row is skipped and counted, in the transaction of its batch."""
    DEAD_LETTER = "dead_letter"
    """As skip, and the row is kept as a dead letter in the same transaction."""


CHANGES_ROWS = "its batches change rows that earlier ones wrote"


@dataclass(frozen=True)
class WriteMode:
    """How rows are written to a table.

    Attributes:
        keys: of an upsert; empty: rows are appended.
        version: column that orders the rows of one key.
        delete: boolean column whose rows delete their key.
        replaces: columns; a batch replaces the table's rows that have the same values in them.
        complete: a batch replaces every row of the table.
        insert: the first row of a key wins; later ones are conflicts.
        expected: column with the version that the stored row must have (null: no such row); else it is a conflict.
        on_conflict: only with insert or expected.
        on_constraint: for rows that violate a constraint; FAIL or DEAD_LETTER.
    """

    keys: tuple[str, ...] = ()
    version: str | None = None
    delete: str | None = None
    replaces: tuple[str, ...] = ()
    complete: bool = False
    insert: bool = False
    expected: str | None = None
    on_conflict: OnConflict = OnConflict.FAIL
    on_constraint: OnConflict = OnConflict.FAIL

    @property
    def upserts(self) -> bool:
        """Whether rows are written by key."""
        return bool(self.keys)

    @property
    def conditional(self) -> bool:
        """Whether writes depend on the table's content or constraints."""
        return self.insert or self.expected is not None or self.on_constraint is not OnConflict.FAIL

    @property
    def only_adds(self) -> bool:
        """Whether no batch changes or removes a row that is there."""
        replaces = self.complete or bool(self.replaces) or self.expected is not None
        return not replaces and (self.insert or not self.upserts)

    @property
    def no_position(self) -> str:
        """See `SinkCapability.no_position`."""
        return "" if self.only_adds else CHANGES_ROWS

    @property
    def keeps_all(self) -> bool:
        """Whether every row of a key is applied in order, not only the last one."""
        return self.insert or self.expected is not None

    @property
    def says(self) -> str:
        """What decides which rows remain, for display; equal for equal modes."""
        kind = "complete" if self.complete else "insert" if self.insert else "upsert" if self.upserts else "append"
        by = {
            "by": self.keys_text,
            "newest": self.version,
            "deletes": self.delete,
            "replacing": ", ".join(self.replaces),
            "expecting": self.expected,
        }
        return " ".join([kind, *(f"{word} {columns}" for word, columns in by.items() if columns)])

    @property
    def merges(self) -> bool:
        """Whether staged rows need more than an INSERT."""
        return self.upserts or self.conditional

    @property
    def keys_text(self) -> str:
        return ", ".join(self.keys)


APPEND = WriteMode()


@dataclass(frozen=True)
class SourceCapability:
    """
    Attributes:
        system: display name: "kafka", "log".
        replayable: reading the same offsets again gives the same records.
        why_not: why it is not replayable; empty: it is.
        repeats: why it may hold a message twice; empty: it does not.
        sent_twice: records that a producer sent twice appear twice.
        local: it uses files on one machine.
        consumed: why what a pipeline was delivered cannot be read again by another one; empty: it can.
        records: by which of several clients records are read, and why, for the plan; empty: there is one.
        assumes: what the guarantee assumes of this source.
        received: receivers fill it, and recognise messages that are redelivered.
        decodes: it decodes records, and can go on after one that it cannot decode.
        offset_metadata: top-level keys of offsets that other connectors to the system cannot read. Spark's offset log
            gets the offsets without them; the checkpoint sidecar keeps them, and restores them before the driver sees
            the offsets again.
        lasting_metadata: those of them that stay valid for later offsets until they change; the others belong to one.
    """

    system: str
    replayable: bool
    why_not: str = ""
    repeats: str = ""
    sent_twice: bool = False
    local: bool = False
    consumed: str = ""
    records: str = ""
    assumes: tuple[str, ...] = ()
    received: bool = False
    decodes: bool = False
    offset_metadata: frozenset[str] = frozenset()
    lasting_metadata: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SinkCapability:
    """
    Attributes:
        system: display name: "kafka", "sqlite".
        commit: the mechanism that this sink offers for exactly_once.
        mechanism: its name within a sentence: "two-phase commit".
        stage, prepare, decide, apply: what these steps do at this sink, for the plan.
        batch_atomic: readers see a complete batch, or nothing of it.
        can_disable_retries: the sink can send without retries (needed for at_most_once).
        local: it uses files on one machine.
        prepared_timeout_s: seconds after which the sink drops a prepared participant; None: never.
        remembers: it can keep dedup's keys next to its ledger (`Sink.key_memory`).
        validates: it detects invalid rows before it writes them (`Sink.invalid_rows`).
        write: whether records are appended or replace others.
        adds_columns: it may have added columns to its table, which earlier rows read back as null.
        no_position: why an audit reads all of this sink each time (`BoundedScan.position`); empty: it continues where
            the last one stopped.
        records: as of a source, how they are written.
        assumes: what exactly_once assumes of the sink and its readers; of a sink without it, what any guarantee does.
        limits: bounds of every guarantee, to print with the plan.
        transaction_limits: bounds of exactly_once alone.
        repeats: how readers detect a record that at_least_once wrote twice; empty: they cannot.
    """

    system: str
    commit: Commit
    mechanism: str
    stage: str
    prepare: str
    decide: str
    apply: str
    send: str
    batch_atomic: bool
    local: bool = False
    can_disable_retries: bool = True
    prepared_timeout_s: float | None = None
    remembers: bool = False
    validates: bool = False
    write: WriteMode = APPEND
    adds_columns: bool = False
    no_position: str = "its records have no order that lasts"
    records: str = ""
    assumes: tuple[str, ...] = ()
    limits: tuple[str, ...] = field(default=())
    transaction_limits: tuple[str, ...] = ()
    repeats: str = ""

    def assumed_under(self, guarantee: Guarantee) -> tuple[str, ...]:
        return self.assumes if guarantee is Guarantee.EXACTLY_ONCE or self.commit is Commit.NONE else ()

    def limits_under(self, guarantee: Guarantee) -> tuple[str, ...]:
        match guarantee:
            case Guarantee.EXACTLY_ONCE:
                return (*self.transaction_limits, *self.limits)
            case Guarantee.AT_LEAST_ONCE:
                return (*((self.repeats,) if self.repeats else ()), *self.limits)
            case _:
                return self.limits

    def why_read_again(self, *, dedup: bool) -> str:
        """Why every audit reads all of this sink; empty: it continues where the last one stopped.

        Args:
            dedup: the pipeline drops repeats.
        """
        if self.no_position:
            return self.no_position
        if dedup:
            return "the pipeline drops repeats, and which records must be in the sink depends on all batches"
        if not self.write.only_adds or self.write.conditional:
            return "which rows its table accepted depends on all batches"
        return ""


@dataclass(frozen=True)
class LedgerPlace:
    """Which sink holds a plan's ledger. Independent of the guarantee, so that a pipeline can change it.

    Attributes:
        sink: index of that sink in the plan.
        carries_rows: the transaction of the decision also makes this sink's rows visible. Otherwise every sink
            commits after the decision.
    """

    sink: int
    carries_rows: bool

    @classmethod
    def among(cls, sinks: Sequence[SinkCapability]) -> LedgerPlace:
        """The first sink that cannot prepare, as its own transaction must carry the decision; else the first sink."""
        for place, sink in enumerate(sinks):
            if sink.commit is Commit.ONE_TRANSACTION:
                return cls(place, carries_rows=True)
        return cls(0, carries_rows=False)


# Which records of a source are duplicates, and how long their keys are kept.

BY_WATERMARK = "watermark"
"""Keys are kept in Spark's state, bounded by a watermark."""

IN_TABLE = "table"
"""Keys are kept in a table in the deciding sink's database, updated in the deciding transaction."""


@dataclass(frozen=True)
class Dedup:
    """
    Attributes:
        by: SQL over the source's columns; records with equal values are duplicates. A record with a null among them
            duplicates nothing.
        within_ms: a duplicate is recognised if it is at most this much later than its key's first record.
        time: SQL over the source's columns, a timestamp.
        drops_late: the user accepts that records older than the newest one by more than `within_ms` are dropped,
            duplicate or not.
        kind: where keys are kept: `BY_WATERMARK` or `IN_TABLE`.
    """

    by: tuple[str, ...]
    within_ms: int
    time: str = "timestamp"
    drops_late: bool = False
    kind: str = BY_WATERMARK

    @property
    def in_table(self) -> bool:
        """Keys are kept in a table, not in Spark's state."""
        return self.kind == IN_TABLE

    @property
    def by_text(self) -> str:
        return ", ".join(self.by)

    @property
    def within(self) -> str:
        """As displayed, and as Spark accepts it: "1 hour 30 minutes"."""
        return duration(self.within_ms)

    @property
    def says(self) -> str:
        """One line for display."""
        return f"by {self.by_text} within {self.within} of {self.time}" + ", in a table" * self.in_table

    def to_json(self) -> dict[str, Any]:
        """Only what determines the state: `drops_late` does not."""
        return {"kind": self.kind, "by": list(self.by), "within_ms": self.within_ms, "time": self.time}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Dedup:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        if data["kind"] not in (BY_WATERMARK, IN_TABLE):
            raise ValueError(f"kind {data['kind']!r}")
        return cls(tuple(str(b) for b in data["by"]), int(data["within_ms"]), str(data["time"]), kind=data["kind"])

    def remembers_as(self, other: Dedup | None) -> bool:
        """Whether the other one's state can be reused."""
        return other is not None and self.to_json() == other.to_json()

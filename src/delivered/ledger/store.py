"""What a store of a ledger implements: read, and write atomically under a claim. The rules are in `ledger.Ledger`.

A store makes decisions durable: in a Kafka topic, database tables, the log of a Delta table, the metadata of an Iceberg
table, a folder, memory. It contains no rules: it passes the `Head` to a rule, and writes the returned `Change` if
nobody claimed or decided in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from delivered.model.identity import OtherLedger, Scope
from delivered.model.outcome import Outcome
from delivered.model.work import Begun, Decision, LedgerState, Owner, Prepared


@dataclass(frozen=True)
class Head:
    """What the next write of a scope depends on.

    Attributes:
        owner: the last one to claim; None: nobody yet.
        epoch: of that claim; 0: there is none.
        batch: the newest decided batch of this incarnation; None: none.
        last: reads its decision. Only called if the batch number is not enough.
        begun: reads this incarnation's last begun batch.
    """

    owner: Owner | None
    epoch: int
    batch: int | None
    last: Callable[[], Decision | None]
    begun: Callable[[], Begun | None]


@dataclass(frozen=True)
class Swap:
    """Two tables to swap: `new` gets the name of the sink's table, whose rows stay as `kept`.

    Attributes:
        new, kept: without schema, not quoted.
    """

    new: str
    kept: str


@dataclass(frozen=True)
class Change:
    """What one write stores atomically: a begun batch or a decision.

    Attributes:
        swap: of tables, in the same transaction (`SwapsTables`).
        move: participants whose staged rows this write makes visible. Empty if, by the plan, every sink commits its
            prepared rows after the decision.
    """

    begun: Begun | None = None
    decision: Decision | None = None
    move: tuple[Prepared, ...] = ()
    swap: Swap | None = None


@runtime_checkable
class SwapsTables(Protocol):
    """Implemented by a `Store` in the database of the sink's table, if its transactions can rename tables."""

    def has_swapped(self, swap: Swap) -> bool:
        """Whether the tables have changed places. Read-only."""

    def cannot_swap(self) -> str | None:
        """Why another table cannot take the place of the sink's; None: it can. Read-only."""


class Store(Protocol):
    """One scope's ledger store. Runs on the driver, in two processes of one owner; used by one thread.

    A call that raises `DeliveredError` wrote nothing. Calls that may have written return an `Outcome`.
    """

    @property
    def where(self) -> str:
        """The ledger's location, for errors: "in topic 'orders-ledger'"."""

    def read(self) -> LedgerState:
        """Everything committed before this call. Raises if records that an owner needs are missing."""

    def peek(self) -> LedgerState:
        """As `read`, for a process without a claim; empty if there is no ledger yet. Writes nothing."""

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """Try once to become the owner; return the claim's epoch.

        Calls `successor` for the owner that follows the head it read; this may raise, and may be called again. After
        Ok, no write of an earlier claim succeeds, not even one in flight. Forgets what `ledger.outdated` returns.
        Failed, Unknown: another owner claimed meanwhile, or there was no answer; retriable.
        """

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        """Call `rule` for the change to this head, and write it; None: nothing to write, Ok.

        `rule` raises if the claim is outdated. It may be called again with a newer head, but never after a change with
        unknown outcome was sent (P19). The same write makes the rows of `Change.move` visible, and reaches the crash
        points of `commit.apply` once for each; Failed if staged rows of one are gone.
        """

    def history(self) -> Iterable[Decision]:
        """Kept decisions of this incarnation, oldest first; at most about `limits.LEDGER_HISTORY_BATCHES`."""

    def others(self) -> Sequence[OtherLedger]:
        """Ledgers of other pipelines and sinks in the same place."""

    def close(self) -> None:
        """Release connections. May be called again."""


class Ledgers(Protocol):
    """A place of ledgers, for sinks whose system cannot hold one. Picklable."""

    def store(self, scope: Scope) -> Store:
        """Storage for the ledger of this scope. Connects on first use."""

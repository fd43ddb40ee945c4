"""What a store of a ledger implements: read, and write atomically under a claim. The rules are in `ledger.Ledger`.

A store lies where decisions are durable: a Kafka topic, tables of a database, the log of a Delta table, the metadata
of an Iceberg table, a folder, memory. It decides nothing: it shows a rule the `Head`, and writes the `Change` that the
rule returns if nobody claimed or decided in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from delivered.model.identity import OtherLedger
from delivered.model.outcome import Outcome
from delivered.model.work import Begun, Decision, LedgerState, Owner, Prepared


@dataclass(frozen=True)
class Head:
    """What the next write depends on, of one scope.

    Attributes:
        owner: who claimed last; None: nobody yet.
        epoch: of that claim; 0: there is none.
        batch: the newest decided batch of this incarnation; None: none was decided.
        last: reads its decision. Asked only if the batch number alone does not tell.
        begun: reads the batch that this incarnation began last.
    """

    owner: Owner | None
    epoch: int
    batch: int | None
    last: Callable[[], Decision | None]
    begun: Callable[[], Begun | None]


@dataclass(frozen=True)
class Change:
    """What one write puts into the store, all or nothing: a begun batch, or a decision.

    Attributes:
        move: participants whose staged rows become visible by this very write, where the store's transaction reaches
            them. A store whose sink commits in two phases leaves them alone.
    """

    begun: Begun | None = None
    decision: Decision | None = None
    move: tuple[Prepared, ...] = ()


class Store(Protocol):
    """One scope of a ledger. Runs on the driver, in two processes of one owner; used by one thread.

    What raises a `DeliveredError` did not write anything. What may have written says so by its `Outcome`.
    """

    @property
    def where(self) -> str:
        """Where the ledger lies, for errors: "in topic 'orders-ledger'"."""

    def read(self) -> LedgerState:
        """All that was committed before this call. Raises if what must be there for an owner is gone."""

    def peek(self) -> LedgerState:
        """The same for a process that owns nothing; empty where there is no ledger yet. Writes nothing."""

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """One try to become the owner; return the epoch of the claim.

        Asks `successor` who owns the ledger after the head that it read; that may raise, and may be asked again. After
        Ok, no write of an earlier claim gets in, whatever was under way. Forgets what `history.outdated` names.
        Failed, Unknown: somebody else claimed meanwhile, or there was no answer; it may be tried again.
        """

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        """Ask `rule` for the change to this head, and write it; None: there is nothing to write, Ok.

        `rule` raises if the claim is outdated. It may be asked again for a newer head, but never once a change was
        sent whose outcome is unknown (P19). Rows of `Change.move` become visible by the same write, which reaches the
        crash points of `commit.apply` once for each; Failed if staged rows of one are gone.
        """

    def history(self) -> Iterable[Decision]:
        """Decisions of this incarnation that are still kept, oldest first, at most about
        `limits.LEDGER_HISTORY_BATCHES`."""

    def others(self) -> Sequence[OtherLedger]:
        """Ledgers of other pipelines and sinks in the same place."""

    def close(self) -> None:
        """Give connections back. May be called again."""

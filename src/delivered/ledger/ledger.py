"""The rules of a ledger: one owner at a time, one decision per batch, and no write of an earlier claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from delivered.ledger.store import Change, Head, Store
from delivered.model.archive import Archived
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken, Unreachable
from delivered.model.guarantee import Guarantee
from delivered.model.identity import OtherLedger, Scope
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_INCARNATIONS, OWNERS_REMEMBERED
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.work import Begun, Decision, LedgerState, Owner


class Ledger:
    """Where decisions are durable: one writer at a time. Runs on the driver, in two processes of one owner.

    It works under one claim, its own or the other process's; a later claim, even of the same owner, voids it.

    Args:
        carries_rows: the write of a decision makes rows visible too, as the plan says (`LedgerPlace`).
    """

    def __init__(self, store: Store, scope: Scope, *, carries_rows: bool = False) -> None:
        self._store = store
        self._scope = scope
        self._carries_rows = carries_rows
        self._claim: tuple[str, int] | None = None

    def claim(self, owner: Owner) -> LedgerState:
        """Become the only owner, fence all others, and return what the ledger holds.

        After it returns, nothing in flight can be written any more: no `begin` or `decide` of an earlier owner, and
        none of this owner's whose outcome is unknown. May be called again by the same owner.

        Raises:
            Fenced: this owner was superseded before, or another one claimed right after.
            Unreachable: others keep claiming it.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            match self._store.take(lambda head: self._successor(owner, head)):
                case Ok(epoch):
                    break
                case Failed(reason) | Unknown(reason):
                    if time.monotonic() > deadline:
                        raise self._contended(reason)
        state = self._store.read()
        if state.owner is None or (state.owner.id, state.epoch) != (owner.id, epoch):
            raise self._fenced(owner.id, state.owner)
        self._claim = (owner.id, epoch)
        return state

    def resume(self, owner_id: str) -> LedgerState:
        """Continue as the owner that claimed before, perhaps in another process; fences nobody.

        Raises:
            Fenced: another owner has the ledger now.
        """
        state = self._store.read()
        if state.owner is None or state.owner.id != owner_id:
            raise self._fenced(owner_id, state.owner)
        self._claim = (owner_id, state.epoch)
        return state

    def look(self) -> LedgerState:
        """What the ledger holds now. Claims, fences and writes nothing: for the planner and the audit.

        May be called by any process, with or without an owner, while a driver runs.
        """
        return self._store.peek()

    def begin(self, begun: Begun) -> Outcome[None]:
        """Record durably that a batch may send records from now on, if this owner still owns the ledger.

        Runs before the batch's tasks. May be called again for the same batch. Failed: this owner was fenced.
        """

        claim = self._claim

        def rule(head: Head) -> Change | None:
            self._check_claim(claim, head)
            return None if head.begun() == begun else Change(begun=begun)

        return self._write(rule)

    def decide(self, decision: Decision) -> Outcome[None]:
        """Record the decision durably, if this owner still owns the ledger.

        If the ledger carries rows, those that its own sink staged become visible with it. Participants of other
        sinks are recorded, not touched. A later revision of a batch replaces the earlier one.
        Failed: it is not written and never will be. Unknown: `claim` again, then look.
        """
        text = decision.to_json()
        carries_rows = self._carries_rows and decision.guarantee is Guarantee.EXACTLY_ONCE
        claim = self._claim  # of this call: a late write is judged by the claim under which it was sent
        move = tuple(p for p in decision.to_move if p.handle) if carries_rows else ()

        def rule(head: Head) -> Change | None:
            if head.batch is not None and head.batch >= decision.batch:
                last = head.last()
                if last is not None and last.to_json() == text:
                    return None
                self._check_claim(claim, head)
                if last is None or not _revises(decision, last):
                    raise InvariantBroken(
                        "DECIDED_OTHERWISE",
                        f"Batch {decision.batch} of {self._scope}, or a later one, is already decided {self._where}. "
                        "What is visible stays; nothing was added.",
                        next_step="stop every other driver on this checkpoint, then start the pipeline again",
                    )
            self._check_claim(claim, head)
            return Change(decision=decision, move=move)

        return self._write(rule)

    def history(self) -> Iterable[Decision]:
        """The decisions of this incarnation that are still kept, oldest first."""
        return self._store.history()

    def others(self) -> Sequence[OtherLedger]:
        """Ledgers of other pipelines and sinks in the same place."""
        return self._store.others()

    def close(self) -> None:
        """Release connections. May be called again."""
        self._store.close()

    def _write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        try:
            return self._store.write(rule)
        except DeliveredError as error:  # before anything was sent
            return Failed(str(error))

    def _successor(self, owner: Owner, head: Head) -> Owner:
        """The owner after this head, with those that must never claim again."""
        before = head.owner
        if before is None:
            return replace(owner, superseded=())
        if owner.id in before.superseded:
            raise self._fenced(owner.id, before)
        former = before.superseded if before.id == owner.id else (before.id, *before.superseded)
        return replace(owner, superseded=former[:OWNERS_REMEMBERED])

    def _check_claim(self, claim: tuple[str, int] | None, head: Head) -> None:
        if head.owner is None or claim != (head.owner.id, head.epoch):
            raise self._fenced(claim[0] if claim else "none", head.owner)

    @property
    def _where(self) -> str:
        return self._store.where

    def _fenced(self, owner_id: str, current: Owner | None) -> Fenced:
        other = "nobody" if current is None else f"{current.id} (process {current.process} on {current.host!r})"
        return Fenced(
            "FENCED",
            f"Driver {owner_id} no longer owns the ledger of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} {self._where}; it belongs to {other}, or to a later start.",
            next_step="nothing, if the later start is running; otherwise start the pipeline again",
        )

    def _contended(self, reason: str) -> Unreachable:
        return Unreachable(
            "LEDGER_CONTENDED",
            f"The ledger of sink {self._scope.sink!r} of pipeline {self._scope.pipeline!r} {self._where} could not be "
            f"claimed within {CONNECT_TIMEOUT_S:.0f} s: {reason}",
            next_step="check whether another driver of this pipeline keeps restarting; then start again",
        )


def _revises(decision: Decision, last: Decision) -> bool:
    """Only the next revision of a decided batch may replace it."""
    return last.batch == decision.batch and last.revision < decision.revision


def state_of(
    scope: Scope,
    owner: Owner | None,
    epoch: int,
    decisions: Iterable[Decision],
    begun: Mapping[str, Begun],
    archived: Callable[[str], Archived | None],
) -> LedgerState:
    """A ledger's state, from the records that its store holds.

    Args:
        decisions: the newest of each incarnation, in any order.
        begun: incarnation -> its last begun batch, oldest first.
        archived: finds the archived entry of an incarnation.
    """
    newest = {d.scope.incarnation: d for d in decisions}
    last = newest.pop(scope.incarnation, None)
    return LedgerState(
        owner=owner,
        last=last,
        begun=begun.get(scope.incarnation),
        earlier=tuple(sorted(newest.values(), key=lambda d: d.decided_at_ms, reverse=True)),
        earlier_begun=tuple(
            (i, b) for i, b in reversed([*begun.items()]) if i != scope.incarnation and i not in newest
        ),
        epoch=epoch,
        archived=archived(scope.incarnation) if last is None else None,
    )


@dataclass(frozen=True)
class Outdated:
    """
    Attributes:
        incarnations: whose records are deleted, except for their entries in the archive.
        entries: what is kept of them permanently.
    """

    incarnations: tuple[str, ...]
    entries: tuple[Archived, ...]


def outdated(state: LedgerState) -> Outdated:
    """Which incarnations a claim forgets: those beyond the newest ones, but never this checkpoint's."""
    decided, begun = state.earlier[LEDGER_INCARNATIONS:], state.earlier_begun[LEDGER_INCARNATIONS:]
    return Outdated(
        (*(d.scope.incarnation for d in decided), *(i for i, _ in begun)),
        (*(d.archived for d in decided), *(Archived.begun(i) for i, _ in begun)),
    )

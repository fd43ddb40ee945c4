"""The rules of a ledger, once: one owner at a time, one decision per batch, no write under an earlier claim.

`Ledger` has the rules, on top of a `Store`, which only reads, and writes atomically under a claim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken, LedgerAhead, LedgerBehind, Unreachable
from delivered.model.identity import OtherLedger, Scope
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_INCARNATIONS, OUTAGE_PATIENCE_S, OWNERS_REMEMBERED
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Archived, Decision, Failed, LedgerState, Ok, Outcome, Owner, Prepared, Started, Unknown


class Ledger:
    """Durable decisions with a single writer. Runs on the driver, in two processes of one owner.

    Works under one claim, its own or the other process's; a later claim, even of the same owner, voids it.

    Args:
        carries_rows: writing a decision also makes rows visible, as planned (`LedgerPlace`).
    """

    def __init__(self, store: Store, scope: Scope, *, carries_rows: bool = False) -> None:
        self._store = store
        self._scope = scope
        self._carries_rows = carries_rows
        self._claim: tuple[str, int] | None = None

    def claim(self, owner: Owner, batch: int | None = None) -> LedgerState:
        """Become the only owner, fence all others, and return the ledger's state.

        Once it returns, no write in flight can succeed: no `begin` or `decide` of an earlier owner, and none of this
        owner's with unknown outcome. May be called again by the same owner.

        Args:
            batch: that the owner is about to run. If a later one is decided, its own checkpoint is outdated, and the
                owner that decided it must not be fenced.

        Raises:
            Fenced: this owner was superseded earlier, or another one claimed right after.
            LedgerAhead: a later batch is decided. Nothing was claimed.
            Unreachable: others keep claiming.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            match self._store.take(lambda head: self._successor(owner, head, batch)):
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

    def resume(self, owner_id: str, since: int | None = None) -> LedgerState:
        """Continue under this owner's claim, perhaps made in another process; fences nobody.

        Args:
            since: epoch of a claim known to be in the ledger. A state from before it, which a replica that was just
                promoted may still show, is read again for up to 120 s.

        Raises:
            Fenced: another owner has claimed the ledger.
        """
        state = self._read_since(since or 0)
        if state.owner is None or state.owner.id != owner_id:
            raise self._fenced(owner_id, state.owner)
        self._claim = (owner_id, state.epoch)
        return state

    def look(self) -> LedgerState:
        """The ledger's current state, for the planner and the audit. Claims, fences and writes nothing.

        May be called by any process, with or without an owner, while a driver runs.
        """
        return self._store.peek()

    def check_claim(self) -> None:
        """Read-only. Raises Fenced: this process's claim is no longer the newest."""
        state = self._store.peek()
        if state.owner is None or self._claim != (state.owner.id, state.epoch):
            raise self._fenced(self._claim[0] if self._claim else "none", state.owner)

    def begin(self, started: Started) -> Outcome[None]:
        """Record durably that a batch may send records from now on, if this owner is not fenced.

        Runs before the batch's tasks. May be called again for the same batch. Failed: this owner was fenced.
        """

        claim = self._claim

        def rule(head: Head) -> Change | None:
            self._check_claim(claim, head)
            return None if head.started() == started else Change(started=started)

        return self._write(rule)

    def decide(self, decision: Decision, swap: Swap | None = None, after: int = -1) -> Outcome[None]:
        """Record the decision durably, if this owner is not fenced.

        If the ledger carries rows, its own sink's staged rows become visible with it. Participants of other sinks are
        only recorded. A later revision of a batch replaces the earlier one. A swap of tables happens with it, if the
        store is a `SwapsTables`. Nothing is written if the ledger has lost batch `after`, which was decided before.
        Failed: it was not and never will be written. Unknown: `claim` again, then `look`.
        """
        text = decision.to_json()
        carries_rows = self._carries_rows and decision.guarantee is Guarantee.EXACTLY_ONCE
        claim = self._claim  # captured: a late write is checked against the claim it was sent under
        move = tuple(p for p in decision.to_move if p.handle) if carries_rows else ()

        def rule(head: Head) -> Change | None:
            if head.batch is not None and head.batch >= decision.batch:
                last = head.last()
                if last is not None and last.to_json() == text:
                    return None
                self._check_claim(claim, head)
                if last is None or not _revises(decision, last):
                    raise InvariantBroken(
                        "DECIDED_OTHERWISE", batch=decision.batch, scope=self._scope, where=self._where
                    )
            self._check_claim(claim, head)
            if (-1 if head.batch is None else head.batch) < after:
                raise LedgerBehind(
                    "LEDGER_BEHIND.DECISION",
                    lost_batch=after,
                    scope=self._scope,
                    where=self._where,
                    batch=decision.batch,
                )
            return Change(decision=decision, move=move, swap=swap)

        return self._write(rule)

    def history(self) -> Iterable[Decision]:
        """The decisions of this incarnation that are still kept, oldest first."""
        return self._store.history()

    def others(self) -> Sequence[OtherLedger]:
        """Ledgers of other pipelines and sinks in the same place."""
        return self._store.others()

    def last_seal(self, sink: str) -> str | None:
        """The newest seal of the audits of a sink; None: it was never audited."""
        return self._store.last_seal(sink)

    def seals(self, sink: str, first: int = 0) -> Iterable[str]:
        """The seals of a sink from this number on, in order."""
        return self._store.seals(sink, first)

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        """Append a seal, without a claim: an audit fences nobody, and no claim voids it. May be called again.

        Failed: another audit has sealed meanwhile, and there is a seal `number`; or it may not be written.
        Unknown: call it again, or see whether `last_seal` is it.
        """
        reach(StepId.AUDIT_SEAL, Moment.BEFORE)
        try:
            outcome = self._store.add_seal(sink, number, text)
        except DeliveredError as error:  # before anything was sent
            outcome = Failed(str(error))
        reach(StepId.AUDIT_SEAL, Moment.AFTER)
        return outcome

    def close(self) -> None:
        """Release connections. May be called again."""
        self._store.close()

    def _read_since(self, epoch: int) -> LedgerState:
        deadline, pause = time.monotonic() + OUTAGE_PATIENCE_S, 0.01
        while (state := self._store.read()).epoch < epoch and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)
        return state

    def _write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        try:
            return self._store.write(rule)
        except DeliveredError as error:  # before anything was sent
            return Failed(str(error))

    def _successor(self, owner: Owner, head: Head, batch: int | None) -> Owner:
        """The owner that follows this head, with the owners that must never claim again."""
        if batch is not None and head.batch is not None and head.batch > batch:
            raise LedgerAhead(
                "LEDGER_AHEAD.CLAIM",
                sink=self._scope.sink,
                pipeline=self._scope.pipeline,
                where=self._where,
                ledger_batch=head.batch,
                batch=batch,
            )
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
            "FENCED.OWNER",
            owner_id=owner_id,
            sink=self._scope.sink,
            pipeline=self._scope.pipeline,
            where=self._where,
            other=other,
        )

    def _contended(self, reason: str) -> Unreachable:
        return Unreachable(
            "LEDGER_CONTENDED",
            sink=self._scope.sink,
            pipeline=self._scope.pipeline,
            where=self._where,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            reason=reason,
        )


def _revises(decision: Decision, last: Decision) -> bool:
    """Whether it is a later revision of the same batch, which alone may replace it."""
    return last.batch == decision.batch and last.revision < decision.revision


def state_of(
    scope: Scope,
    owner: Owner | None,
    epoch: int,
    decisions: Iterable[Decision],
    started: Mapping[str, Started],
    archived: Callable[[str], Archived | None],
) -> LedgerState:
    """A ledger's state, from the records that its store holds.

    The ledger's order is that of sequences. Records without one, of an earlier release, precede all others; among
    themselves they keep the order in which they are passed.

    Args:
        decisions: the newest of each incarnation; oldest first, by the store's own order, or if it has none, by time
            (`by_time`).
        started: incarnation -> its last started batch; ordered in the same way.
        archived: finds an incarnation's archive entry.
    """
    newest = {d.scope.incarnation: d for d in sorted(decisions, key=lambda d: d.sequence)}
    followed = [*reversed(newest)].index(scope.incarnation) if scope.incarnation in newest else 0
    last = newest.pop(scope.incarnation, None)
    started = dict(sorted(started.items(), key=lambda item: item[1].sequence))
    return LedgerState(
        owner=owner,
        last=last,
        started=started.get(scope.incarnation),
        earlier=tuple(reversed(newest.values())),
        earlier_started=tuple(
            (i, b) for i, b in reversed([*started.items()]) if i != scope.incarnation and i not in newest
        ),
        epoch=epoch,
        archived=archived(scope.incarnation) if last is None else None,
        followed=followed,
    )


def by_time(decisions: Iterable[Decision]) -> list[Decision]:
    """Oldest first by the drivers' clocks, which may differ: only for records without a sequence, in a store without an
    order of its own."""
    return sorted(decisions, key=lambda d: d.decided_at_ms)


@dataclass(frozen=True)
class Outdated:
    """
    Attributes:
        incarnations: whose records are deleted, except for their entries in the archive.
        entries: their archive entries, kept permanently.
    """

    incarnations: tuple[str, ...]
    entries: tuple[Archived, ...]


def outdated(state: LedgerState) -> Outdated:
    """The incarnations that a claim forgets: the oldest ones beyond the limit, never this checkpoint's."""
    decided, started = state.earlier[LEDGER_INCARNATIONS:], state.earlier_started[LEDGER_INCARNATIONS:]
    return Outdated(
        (*(d.scope.incarnation for d in decided), *(i for i, _ in started)),
        (*(d.archived for d in decided), *(Archived.started(i) for i, _ in started)),
    )


# What a store of a ledger implements.


@dataclass(frozen=True)
class Head:
    """What the next write of a scope depends on.

    Attributes:
        owner: the last one to claim; None: nobody yet.
        epoch: of that claim; 0: there is none.
        batch: the newest decided batch of this incarnation; None: none.
        last: reads its decision. Only called if the batch number is not enough.
        started: reads this incarnation's last started batch.
    """

    owner: Owner | None
    epoch: int
    batch: int | None
    last: Callable[[], Decision | None]
    started: Callable[[], Started | None]


@dataclass(frozen=True)
class Swap:
    """Two tables to swap: `new` gets the name of the sink's table, whose rows stay as `kept`.

    Attributes:
        new, kept: without schema, not quoted.
        retries: ledger of retried dead letters, and its newest batch when both tables were compared; None: they were
            not.
    """

    new: str
    kept: str
    retries: tuple[Scope, int] | None = None


@dataclass(frozen=True)
class Change:
    """What one write stores atomically: a started batch or a decision.

    Attributes:
        swap: of tables, in the same transaction (`SwapsTables`).
        move: participants whose staged rows this write makes visible. Empty if, by the plan, every sink commits its
            prepared rows after the decision.
    """

    started: Started | None = None
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


def not_next(sink: str, number: int, last: int) -> Failed:
    """Of a seal whose number does not follow the greatest one; -1: there is none."""
    if number <= last:
        return Failed(f"seal {number} of sink {sink!r} exists: another audit has sealed meanwhile")
    return Failed(f"seal {number} of sink {sink!r} does not follow: the last one is {last if last >= 0 else 'none'}")


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
        points of `commit.apply` once for each; Failed if staged rows of one are missing.
        """

    def history(self) -> Iterable[Decision]:
        """Kept decisions of this incarnation, oldest first; at most about `limits.LEDGER_HISTORY_BATCHES`."""

    def others(self) -> Sequence[OtherLedger]:
        """Ledgers of other pipelines and sinks in the same place."""

    def last_seal(self, sink: str) -> str | None:
        """The seal with the greatest number of this pipeline's audits of a sink, of any checkpoint; None: none yet."""

    def seals(self, sink: str, first: int = 0) -> Iterable[str]:
        """The seals of a sink whose numbers are at least `first`, in order. They are never deleted."""

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        """Store a seal durably, if none has this number: of two audits, one wins. The same text again: Ok.

        Needs no claim, and fences nobody. A store whose tables are of an earlier version adds what seals need.

        Args:
            number: follows the greatest one; 0: it is the first.

        Failed: another seal has the number, or it does not follow (`not_next`). Unknown: it may still appear.
        """

    def close(self) -> None:
        """Release connections. May be called again."""


class Ledgers(Protocol):
    """A place of ledgers, for sinks whose system cannot hold one. Picklable."""

    def store(self, scope: Scope) -> Store:
        """Storage for the ledger of this scope. Connects on first use."""

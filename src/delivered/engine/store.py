"""The ledger's store, at one sink, for all sinks.

A change of sinks may change which ledger decides, and another one may change it back. Until the deciding ledger has the
newest decision of this checkpoint, the ledgers of the other sinks count: their state is read, projected to the deciding
ledger's sink, and carried over. Their owners are fenced, as a driver may still be running with the previous sinks.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from delivered.contract.sink import Sink
from delivered.ledger import Change, Head, Ledger, Store, state_of
from delivered.model.errors import DeliveredError
from delivered.model.identity import OtherLedger, Scope
from delivered.model.outcome import Ok, Outcome
from delivered.model.work import Decision, LedgerState, Owner

FORGET_EVERY = 64
"""Interval, in batches, at which markers of other sinks are deleted."""

log = logging.getLogger(__name__)


class SharedStore:
    """See `delivered.ledger.Store`."""

    def __init__(self, scope: Scope, deciding: Store, others: Sequence[tuple[Sink, Scope]]) -> None:
        self._scope = scope
        self._deciding = deciding
        self._others = others
        self._ledgers = [Ledger(sink.store(theirs), theirs) for sink, theirs in others]
        self._decides = not others
        """The deciding ledger has this incarnation's newest decision, and no ledger one of another incarnation that
        followed it; since a claim, no other one can."""

    @property
    def where(self) -> str:
        return self._deciding.where

    def read(self) -> LedgerState:
        return self._carried_on(self._deciding.read())

    def peek(self) -> LedgerState:
        return self._carried_on(self._deciding.peek())

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """Claims the deciding ledger first: a driver superseded there fences nobody elsewhere."""
        owners: list[Owner] = []
        self._decides = not self._ledgers

        def noted(head: Head) -> Owner:
            owners.append(successor(head))
            return owners[-1]

        outcome = self._deciding.take(noted)
        if isinstance(outcome, Ok) and self._ledgers and self._deciding.read().epoch == outcome.value:
            for ledger in self._ledgers:
                if ledger.look().owner is not None:
                    ledger.claim(owners[-1])
        return outcome

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        decided: list[int] = []

        def noted(head: Head) -> Change | None:
            change = rule(head)
            decided[:] = [] if change is None or change.decision is None else [change.decision.batch]
            return change

        outcome = self._deciding.write(noted)
        if isinstance(outcome, Ok) and decided and decided[0] % FORGET_EVERY == 0:
            self._forget(decided[0])
        return outcome

    def history(self) -> Iterable[Decision]:
        return self._deciding.history()

    def others(self) -> Sequence[OtherLedger]:
        """All but those of this pipeline's sinks."""
        own = {scope.sink for _, scope in self._others}
        found = self._deciding.others()
        return [o for o in found if not (o.pipeline == self._scope.pipeline and o.sink in own)]

    def close(self) -> None:
        self._deciding.close()
        for ledger in self._ledgers:
            ledger.close()

    def _carried_on(self, state: LedgerState) -> LedgerState:
        if self._decides:
            return state
        states = [state, *(ledger.look() for ledger in self._ledgers)]
        name = self._scope.sink
        begun = max((s.begun for s in states if s.begun is not None), key=lambda b: b.batch, default=None)
        merged = replace(state_of(self._scope, None, 0, _merged(states, name), {}, lambda _: None), begun=begun)
        self._decides = state.last is not None and merged.last == state.last and not merged.followed
        carried = -1 if state.last is None else state.last.batch
        return replace(
            state, last=merged.last, begun=begun, earlier=merged.earlier, followed=merged.followed, carried=carried
        )

    def _forget(self, batch: int) -> None:
        """Delete markers of batches before a decided one, which are visible everywhere."""
        for sink, scope in self._others:
            committer = sink.committer(scope)
            try:
                committer.forget(batch)
            except DeliveredError as error:
                log.warning("sink %s: markers before batch %d were not forgotten: %s", scope.sink, batch, error)
            finally:
                committer.close()


def _merged(states: Sequence[LedgerState], sink: str) -> list[Decision]:
    """The newest decision of each incarnation in any of the ledgers, as the sink's own, oldest first.

    Sequences increase across the ledgers, as a claim reads all of them. Records of an earlier release, which lack them,
    keep the order of their ledger; those of different ledgers are merged by time.
    """
    newest: dict[str, Decision] = {}
    for d in heapq.merge(
        *(s.oldest_first for s in states), key=lambda d: (d.sequence, d.decided_at_ms * (not d.sequence))
    ):
        known = newest.get(d.scope.incarnation)
        if known is None or (known.batch, known.revision) < (d.batch, d.revision):
            newest.pop(d.scope.incarnation, None)
            newest[d.scope.incarnation] = d.for_sink(sink)
    return [*newest.values()]

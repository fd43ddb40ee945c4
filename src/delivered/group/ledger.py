"""The deciding sink's ledger, for all sinks.

A change of sinks may change which ledger decides. Until the new one holds a decision of this checkpoint, the ledgers of
the other sinks count: their state is read, projected to the new ledger's sink, and carried over. Their owners are
fenced: a driver may still run with the previous sinks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from delivered.contract.powers import KnowsOthers, SetsUp
from delivered.contract.sink import Ledger, Member
from delivered.model.errors import DeliveredError
from delivered.model.identity import OtherLedger, Scope
from delivered.model.outcome import Ok, Outcome
from delivered.model.work import Begun, Decision, LedgerState, Owner

FORGET_EVERY = 64
"""How often, in batches, the markers of other sinks are deleted."""

log = logging.getLogger(__name__)


class GroupLedger:
    """See `delivered.contract.sink.Ledger`."""

    def __init__(self, scope: Scope, deciding: Ledger, others: Sequence[tuple[Member, Scope]]) -> None:
        self._scope = scope
        self._deciding = deciding
        self._others = others
        self._ledgers = [member.sink.ledger(theirs) for member, theirs in others]

    def claim(self, owner: Owner) -> LedgerState:
        """The deciding ledger first, so that a driver superseded there fences nobody elsewhere."""
        state = self._deciding.claim(owner)
        for ledger in self._ledgers:
            if ledger.look().owner is not None:
                ledger.claim(owner)
        return self._carried_on(state)

    def resume(self, owner_id: str) -> LedgerState:
        return self._carried_on(self._deciding.resume(owner_id))

    def look(self) -> LedgerState:
        return self._carried_on(self._deciding.look())

    def begin(self, begun: Begun) -> Outcome[None]:
        return self._deciding.begin(begun)

    def decide(self, decision: Decision) -> Outcome[None]:
        outcome = self._deciding.decide(decision)
        if isinstance(outcome, Ok) and decision.batch % FORGET_EVERY == 0:
            self._forget(decision.batch)
        return outcome

    def history(self) -> Iterable[Decision]:
        return self._deciding.history()

    def others(self) -> Sequence[OtherLedger]:
        """See `delivered.contract.powers.KnowsOthers`: next to the deciding ledger, except this group's own."""
        if not isinstance(self._deciding, KnowsOthers):
            return ()
        own = {scope.sink for _, scope in self._others}
        found = self._deciding.others()
        return [o for o in found if not (o.pipeline == self._scope.pipeline and o.sink in own)]

    def close(self) -> None:
        for ledger in (self._deciding, *self._ledgers):
            ledger.close()

    def _carried_on(self, state: LedgerState) -> LedgerState:
        if state.last is not None:
            return state
        states = [state, *(ledger.look() for ledger in self._ledgers)]
        name = self._scope.sink
        lasts = [s.last.for_sink(name) for s in states if s.last is not None]
        earlier: dict[str, Decision] = {}
        for d in (d.for_sink(name) for s in states for d in s.earlier):
            known = earlier.get(d.scope.incarnation)
            if known is None or (known.batch, known.revision) < (d.batch, d.revision):
                earlier[d.scope.incarnation] = d
        return replace(
            state,
            last=max(lasts, key=lambda d: (d.batch, d.revision), default=None),
            begun=max((s.begun for s in states if s.begun is not None), key=lambda b: b.batch, default=None),
            earlier=tuple(sorted(earlier.values(), key=lambda d: d.decided_at_ms, reverse=True)),
        )

    def _forget(self, batch: int) -> None:
        """All batches before a decided one are visible everywhere: their markers are no longer needed."""
        for member, scope in self._others:
            committer = member.sink.committer(scope)
            try:
                if isinstance(committer, SetsUp):
                    committer.forget(batch)
            except DeliveredError as error:
                log.warning("sink %s: markers before batch %d were not forgotten: %s", member.name, batch, error)
            finally:
                committer.close()

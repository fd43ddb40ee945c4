"""Open transactions of a pipeline, for an operator: list, abort or apply them by hand. For sinks whose committer
holds transactions open."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from delivered.checkpoint import read_logged
from delivered.contract.sink import Committer, OpenTransaction
from delivered.engine.context import is_running, open_shared_ledger
from delivered.model.errors import DeliveredError, OutcomeUnknown, Refused, UsageError
from delivered.model.identity import Scope
from delivered.model.limits import OPEN_TRANSACTION_OLD_S
from delivered.model.work import Failed, LedgerState, Ok, Unknown
from delivered.operate.dead_letters import retry_queues
from delivered.operate.replay import unfinished
from delivered.pipeline.definition import Definition
from delivered.pipeline.spec import NO_INCARNATION


@dataclass(frozen=True)
class Open:
    """
    Attributes:
        decided: the ledger's newest decision names it: it must be applied, never aborted.
        targets: where its rows go.
        timeout_s: age at which its server aborts it; None: never.
        hanging: its server reports its end, and still hides its rows and what was written behind them.
    """

    id: str
    state: str
    age_s: float | None
    decided: bool
    targets: tuple[str, ...]
    timeout_s: float | None = None
    hanging: bool = False

    @property
    def old(self) -> bool:
        """Whether it has been open long enough to harm its sink, or for half the time that its server gives it."""
        limit = OPEN_TRANSACTION_OLD_S if self.timeout_s is None else self.timeout_s / 2
        return self.age_s is not None and self.age_s > limit

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "targets": list(self.targets), "old": self.old}


_CLOCKS_S = 5.0
"""By which the clocks of two machines may differ. Beyond it, what is shown is wrong, and nothing else: an undecided
transaction that is aborted is written again."""


def is_current(age_s: float | None, lives: bool | None, decided_age_s: float | None) -> bool:
    """Whether an undecided transaction may be of the batch that a driver writes now. Batches follow each other: one
    opened before the newest decision, which does not name it, has no batch left.

    Args:
        lives: the driver's process; None: it is on another machine.
        decided_age_s: seconds since the newest decision; None: there is none.
    """
    if lives is False:
        return False
    return age_s is None or decided_age_s is None or age_s <= decided_age_s + _CLOCKS_S


def open_transactions(pipeline: Definition) -> list[Open]:
    """This pipeline's open transactions at its sinks, oldest first per sink. Claims nothing and fences nobody.

    Raises:
        UsageError: none of its sinks has transactions that stay open.
        Unreachable: a server did not answer.
    """
    transactions: list[Open] = []
    for _, open_there, state in _held(pipeline):
        for t in open_there:
            decided = _is_decided(t, state)
            transactions.append(
                Open(t.transactional_id, t.state, t.age_s(), decided, t.targets, t.timeout_s, hanging=t.end_lost)
            )
    return transactions


def end_transaction(pipeline: Definition, transaction: str, *, commit: bool, force: bool = False) -> None:
    """Commit or abort one by hand.

    Raises:
        Refused: the ledger contradicts, or it is of the batch that a driver writes now, and `force` is not set.
        UsageError: no such transaction.
        OutcomeUnknown: the server did not confirm the outcome.
    """
    for committer, transactions, state in _held(pipeline):
        handle = next((t for t in transactions if t.transactional_id == transaction), None)
        if handle is None:
            continue
        # Ids are reused batch after batch: only the complete handle identifies a transaction.
        decided = _is_decided(handle, state)
        if decided != commit and not force:
            raise _against_the_ledger(transaction, commit)
        if not decided and not commit and not force:
            _refuse_current(handle, state)
        match committer.end_by_id(transaction, commit, handle.participant):
            case Ok():
                return
            case Failed(reason):
                raise DeliveredError("TRANSACTION_NOT_ENDED", transaction=transaction, reason=reason)
            case Unknown(reason):
                raise OutcomeUnknown("TRANSACTION_UNKNOWN", transaction=transaction, reason=reason)
    raise UsageError("TRANSACTION_NOT_OPEN.PIPELINE", pipeline=pipeline.name, transaction=transaction)


def _refuse_current(transaction: OpenTransaction, state: LedgerState) -> None:
    owner, last = state.owner, state.last
    if owner is None or transaction.end_lost:
        return
    decided_age_s = None if last is None else max(0.0, time.time() - last.decided_at_ms / 1000)
    if is_current(transaction.age_s(), is_running(owner), decided_age_s):
        raise Refused(
            "TRANSACTION_CURRENT", transaction=transaction.transactional_id, process=owner.process, host=owner.host
        )


def _against_the_ledger(transaction: str, commit: bool) -> Refused:
    if commit:
        return Refused("TRANSACTION_UNDECIDED", transaction=transaction)
    return Refused("TRANSACTION_DECIDED", transaction=transaction)


def _held(pipeline: Definition) -> Iterator[tuple[Committer, Sequence[OpenTransaction], LedgerState]]:
    """By sink that holds transactions open: those of the pipeline, those of retries of its dead letters, then those of
    its replays and rebuilds that were killed, or are running."""
    holds = False
    for held in _held_by(pipeline):
        holds = True
        yield held
    for queue in retry_queues(pipeline) if holds else ():
        with closing(open_shared_ledger(queue.sinks, queue.scope)) as ledger:
            state = ledger.look()
        for member in queue.sinks.members:
            with closing(member.sink.committer(replace(queue.scope, sink=member.name))) as committer:
                yield committer, committer.open_transactions() or (), _projected(member.name, state)
    for derived in unfinished(pipeline) if holds else ():
        yield from _held_by(derived)
    if not holds:
        systems = ", ".join(e.system for e in pipeline.all_sinks)
        raise UsageError("NO_TRANSACTIONS", pipeline=pipeline.name, systems=systems)


def _held_by(pipeline: Definition) -> Iterator[tuple[Committer, Sequence[OpenTransaction], LedgerState]]:
    incarnation, _ = read_logged(pipeline.checkpoint)
    spec = pipeline.spec
    sinks = spec.open()
    with closing(open_shared_ledger(sinks, spec.scope(sinks, incarnation))) as ledger:
        state = ledger.look()
    for endpoint in pipeline.all_sinks:
        sink = endpoint.sink()
        scope = Scope(pipeline.name, endpoint.name or sink.name, incarnation or NO_INCARNATION)
        with closing(sink.committer(scope)) as committer:
            if (transactions := committer.open_transactions()) is not None:
                yield committer, transactions, _projected(scope.sink, state)


def _projected(sink: str, state: LedgerState) -> LedgerState:
    last = state.last.projected(sink) if state.last is not None else None
    return replace(state, last=last, earlier=tuple(d.projected(sink) for d in state.earlier))


def _is_decided(transaction: OpenTransaction, state: LedgerState) -> bool:
    """Only what was decided was ever committed."""
    if transaction.committed is not None:
        return transaction.committed
    decisions = [d for d in (state.last, *state.earlier) if d is not None]
    return any(transaction.participant.names(p) for d in decisions for p in d.participants if p.handle)

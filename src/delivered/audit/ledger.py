"""What an audit learns from the ledger and a sink's open transactions, before it reads the sink itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from delivered.audit.history import History, check_history
from delivered.contract.powers import CountsLeftOut, HoldsTransactions, OpenTransaction
from delivered.contract.sink import Committer, Sink, SinkGroup
from delivered.engine.context import open_ledger
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.work import Decision


@dataclass
class LedgerAccount:
    """The ledger before the sink is read.

    Attributes:
        visible: the newest decision whose rows a reader sees; None: none.
        left_out: rows that visible batches did not write because the table rejects them, by kind.
        ends: (batch, offsets) of the decisions that the ledger keeps, oldest first, as far as they are visible.
    """

    history: History
    visible: Decision | None
    transactions: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    ends: tuple[tuple[int, str], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


def read_ledger(
    sink: Sink,
    scope: Scope,
    guarantee: Guarantee,
    decided_by: tuple[str, Sink | SinkGroup] | None = None,
    dead_letters: str | None = None,
) -> LedgerAccount:
    """Read the ledger and the state of its newest decision. Claims nothing and fences nobody."""
    name, ledger_sink = decided_by or (scope.sink, sink)
    ledger = open_ledger(ledger_sink, replace(scope, sink=name))
    ends: list[tuple[int, str]] = []
    try:
        last = ledger.look().last if dead_letters is not None else None
        history = check_history(_noting(ends, (d.projected(scope.sink) for d in ledger.history())))
    finally:
        ledger.close()
    found = LedgerAccount(history, history.last, ends=tuple(ends))
    if last is not None and dead_letters is not None:
        count = last.projected(dead_letters).total.count
        found.notes.append(
            f"{count:,} rows that a sink refused are in the dead letters {dead_letters!r}, by the ledger"
        )
    if history.last is None or guarantee is not Guarantee.EXACTLY_ONCE:
        return found
    committer = sink.committer(scope)
    try:
        still_open = _still_open(committer)
        hidden = _hidden(committer, history.last, still_open)
        if isinstance(committer, CountsLeftOut):
            found.left_out = committer.left_out()
    finally:
        committer.close()
    found.transactions = tuple(_shown(t) for t in still_open or ())
    if hidden:
        found.visible = history.before
        found.ends = found.ends[:-1]
        found.notes.append(
            f"batch {history.last.batch} is decided and shards {hidden} of it are not visible yet; the next start of "
            "the pipeline makes them visible. Its records count as in progress."
        )
    return found


def _noting(ends: list[tuple[int, str]], decisions: Iterable[Decision]) -> Iterator[Decision]:
    for decision in decisions:
        ends.append((decision.batch, decision.offsets))
        yield decision


def _still_open(committer: Committer) -> list[OpenTransaction] | None:
    """This pipeline's open transactions at this sink; None: the sink has no transactions."""
    return list(committer.open_transactions()) if isinstance(committer, HoldsTransactions) else None


def _shown(transaction: OpenTransaction) -> str:
    age = transaction.age_s()
    since = "" if age is None else f", for {age:.0f} s"
    return f"{transaction.transactional_id}, {transaction.state}{since}: {', '.join(transaction.targets)}"


def _hidden(committer: Committer, decision: Decision, still_open: list[OpenTransaction] | None) -> list[int]:
    """Shards that are decided but not visible: the pipeline stopped between decide and apply."""
    prepared = [p for p in decision.participants if p.handle]
    if still_open:
        # The evidence among the rows lies behind open transactions; these alone are sufficient.
        return [p.shard for p in prepared if any(t.participant.names(p) for t in still_open)]
    return [
        p.shard
        for p in prepared
        if not committer.was_committed(Work(decision.scope, decision.batch, p.shard, p.attempt))
    ]

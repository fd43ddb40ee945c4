"""What an audit learns from the ledger and a sink's open transactions, before it reads the sink itself.

The ledger's history is a chain of decisions that must be consistent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from delivered.contract.sink import Committer, OpenTransaction, Sink
from delivered.engine.context import open_shared_ledger
from delivered.engine.sinks import Sinks
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.work import Decision

SHOWN_MAX = 20


@dataclass(frozen=True)
class BatchLine:
    """One decided batch, for the report."""

    batch: int
    decided_at_ms: int
    shards: int
    records: int
    given_up: int
    fingerprint: str
    revision: int


@dataclass(frozen=True)
class History:
    """
    Attributes:
        batches: decided batches that the ledger still keeps.
        lines: the newest of them, oldest first; bounded.
        faults: where a decision does not follow from the previous one; each means that the ledger was tampered
            with, restored from a copy, or written by two owners.
        ends: (batch, offsets) of each, oldest first.
        last, before: the newest decision and its predecessor.
    """

    batches: int = 0
    lines: tuple[BatchLine, ...] = ()
    faults: tuple[str, ...] = ()
    ends: tuple[tuple[int, str], ...] = ()
    last: Decision | None = None
    before: Decision | None = None

    def to_json(self) -> dict[str, Any]:
        return {"batches": self.batches, "faults": list(self.faults), "lines": [asdict(line) for line in self.lines]}


def check_history(decisions: Iterable[Decision], lines_max: int = SHOWN_MAX) -> History:
    """Walk the chain once. Memory is bounded: `lines_max` lines and a limited list of faults.

    Args:
        decisions: of one incarnation, oldest first; the first one kept need not be batch 0.
    """
    lines: deque[BatchLine] = deque(maxlen=lines_max)
    faults: list[str] = []
    ends: list[tuple[int, str]] = []
    before: Decision | None = None
    last: Decision | None = None
    for decision in decisions:
        given_up = decision.given_up.count - (last.given_up.count if last else 0)
        if last is not None:
            faults.extend(_faults(last, decision))
        elif decision.batch == 0 and decision.total != decision.fingerprint:
            faults.append(
                f"batch 0: its total {decision.total} differs from its own fingerprint {decision.fingerprint}"
            )
        lines.append(
            BatchLine(
                batch=decision.batch,
                decided_at_ms=decision.decided_at_ms,
                shards=len(decision.participants),
                records=decision.fingerprint.count,
                given_up=given_up if last is not None or decision.batch == 0 else 0,
                fingerprint=str(decision.fingerprint),
                revision=decision.revision,
            )
        )
        ends.append((decision.batch, decision.offsets))
        before, last = last, decision
        if len(ends) > 2 * LEDGER_HISTORY_BATCHES:
            # A ledger that keeps everything must not make the audit run forever.
            faults.append(f"the ledger keeps more than {2 * LEDGER_HISTORY_BATCHES} batches; the rest was not checked")
            break
    return History(len(ends), tuple(lines), tuple(faults[:SHOWN_MAX]), tuple(ends), last, before)


def _faults(last: Decision, decision: Decision) -> list[str]:
    faults = []
    if decision.batch <= last.batch:
        faults.append(f"batch {decision.batch} follows batch {last.batch}")
    elif last.total + decision.fingerprint != decision.total:
        if decision.batch > last.batch + 1:
            # Spark's repartition of state leaves a gap in the numbers, and none in the totals.
            faults.append(f"batches {last.batch + 1} to {decision.batch - 1} are missing")
        else:
            faults.append(
                f"batch {decision.batch}: its total {decision.total} is not the previous total {last.total} plus its "
                f"own fingerprint {decision.fingerprint}"
            )
    if decision.given_up.count < last.given_up.count:
        faults.append(f"batch {decision.batch}: the count of given-up records decreased")
    return faults


@dataclass
class LedgerAccount:
    """The ledger before the sink is read.

    Attributes:
        incarnation: whose batches these are.
        visible: the newest decision whose rows a reader sees; None: none.
        transactions: this pipeline's open ones at the sink.
        skipped: rows that visible batches did not write because the table rejects them, by kind.
    """

    incarnation: str
    history: History
    visible: Decision | None
    transactions: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[tuple[int, str], ...]:
        """(batch, offsets) of the visible decisions that the ledger keeps, oldest first."""
        return self.history.ends if self.visible is self.history.last else self.history.ends[:-1]


def read_ledger(
    sink: Sink,
    scope: Scope,
    guarantee: Guarantee,
    decided_by: Sinks | None = None,
    dead_letters: str | None = None,
) -> LedgerAccount:
    """Read the ledger and the state of its newest decision. Claims nothing and fences nobody."""
    sinks = decided_by or Sinks.one(sink, scope.sink)
    ledger = open_shared_ledger(sinks, replace(scope, sink=sinks.decider.name))
    try:
        last = ledger.look().last if dead_letters is not None else None
        history = check_history(d.projected(scope.sink) for d in ledger.history())
    finally:
        ledger.close()
    account = LedgerAccount(scope.incarnation, history, history.last)
    if last is not None and dead_letters is not None:
        count = last.projected(dead_letters).total.count
        account.notes.append(f"{count:,} dead letters are in {dead_letters!r}, by the ledger")
    if history.last is None or guarantee is not Guarantee.EXACTLY_ONCE:
        return account
    committer = sink.committer(scope)
    try:
        still_open = list(committer.open_transactions() or ())
        hidden = _hidden_shards(committer, history.last, still_open)
        account.skipped = committer.left_out()
    finally:
        committer.close()
    account.transactions = tuple(map(_describe, still_open))
    account.notes += [_describe_lost(t) for t in still_open if t.end_lost]
    if hidden:
        account.visible = history.before
        account.notes.append(
            f"batch {history.last.batch} is decided and shards {hidden} of it are not visible yet; the next start of "
            "the pipeline makes them visible. Its records count as in progress."
        )
    return account


def _describe(transaction: OpenTransaction) -> str:
    age = transaction.age_s()
    since = "" if age is None else f", for {age:.0f} s"
    return f"{transaction.transactional_id}, {transaction.state}{since}: {', '.join(transaction.targets)}"


def _describe_lost(transaction: OpenTransaction) -> str:
    return (
        f"{transaction.transactional_id} was ended, but its brokers lost the end: it hides its own and all later "
        f"records of {', '.join(transaction.targets)} from read_committed readers. A start of the pipeline ends "
        "it, and so does delivered transactions apply|abort"
    )


def _hidden_shards(committer: Committer, decision: Decision, still_open: list[OpenTransaction]) -> list[int]:
    """Shards that are decided but not visible: the pipeline stopped between decide and apply."""
    prepared = [p for p in decision.participants if p.handle]
    if still_open:
        # The evidence among the rows lies behind open transactions; these alone are sufficient.
        return [p.shard for p in prepared if any(t.participant.names(p) for t in still_open)]
    return [
        p.shard
        for p in prepared
        if not committer.was_committed(Work(decision.scope, decision.batch, p.shard, p.attempt), p)
    ]

"""What an audit goes by: damages, where they lie, and what each guarantee allows; what the ledger and a sink's open
transactions say before the sink itself is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from delivered.contract.sink import Committer, OpenTransaction, Sink
from delivered.contract.source import Slice
from delivered.engine import Sinks, read_dead_letters
from delivered.engine.context import open_shared_ledger
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import DEAD_LETTERS, DEAD_RECORDS, Scope, Work
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.work import Account, Decision


class Damage(StrEnum):
    """In the order of the report.

    Records are identified by id. A record that the source holds twice is expected twice.
    """

    LOST = "lost"
    """Sent, but not in the sink."""
    DUPLICATED = "duplicated"
    """In the sink more often than it was sent."""
    ALTERED = "altered"
    """In the sink under its id, but with another value."""
    UNEXPECTED = "unexpected"
    """In the sink under an id that was never sent."""
    REORDERED = "reordered"
    """First seen in the sink after a record of the same key that was sent later. No guarantee covers order."""


class Verdict(StrEnum):
    """False beats unknown beats true."""

    HELD = "held"
    BROKEN = "broken"
    UNKNOWN = "unknown"

    @property
    def exit_code(self) -> int:
        return {Verdict.HELD: 0, Verdict.BROKEN: 1, Verdict.UNKNOWN: 3}[self]


@dataclass(frozen=True)
class Counts:
    """Numbers of records; never of offsets, which leave gaps.

    Attributes:
        sent: the transform's output for the source range, all batches of which are decided.
        delivered: everything that the sink holds.
        in_progress: delivered before the decision, by batches that have started and are not decided yet.
        earlier: delivered by batches that ran with another transform and cannot be recomputed, as far as the ledger
            accounts for them; or by those of which the sink's retention may have removed records; or by sealed ones,
            after their seal.
    """

    sent: int = 0
    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    unexpected: int = 0
    reordered: int = 0
    in_progress: int = 0
    earlier: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def of(self, damage: Damage) -> int:
        return int(getattr(self, damage.value))

    @property
    def damaged(self) -> bool:
        return any(self.of(damage) for damage in Damage)

    @property
    def adds_up(self) -> bool:
        """Whether every record of both sides was put into exactly one class.

        An altered record is one that was sent and one that was delivered; the others are on one side only.
        """
        more = self.duplicated + self.unexpected + self.in_progress + self.earlier
        return self.delivered == self.sent - self.lost + more


def breaches(guarantee: Guarantee, counts: Counts, given_up: int) -> list[str]:
    """What the guarantee forbids in `counts`, as sentences; empty if it held.

    Args:
        given_up: records that the ledger counts as given up. Under at_most_once, losses up to this number are within
            the guarantee: it is an upper bound, because some may have been sent before the crash. Under the others they
            are losses, even if the source no longer has the records either.
    """
    sentences: list[str] = []
    if given_up and not guarantee.may_lose:
        sentences.append(f"{given_up} records were given up, according to the ledger; {guarantee.value} promises none")
    if counts.lost and not guarantee.may_lose:
        sentences.append(f"{counts.lost} records are lost; {guarantee.value} promises none")
    if guarantee.may_lose and counts.lost > given_up:
        sentences.append(
            f"{counts.lost} records are lost but only {given_up} were recorded as given up; the other "
            f"{counts.lost - given_up} are unaccounted for"
        )
    if counts.duplicated and not guarantee.may_duplicate:
        sentences.append(f"{counts.duplicated} records are duplicated; {guarantee.value} promises none")
    if counts.altered:
        sentences.append(f"{counts.altered} records have a value other than the one sent")
    if counts.unexpected:
        sentences.append(f"{counts.unexpected} records in the sink were never sent")
    return sentences


SHOWN_LENGTH = 64
"""Characters of a key in a report."""

ROUTE = " in "
"""Between the id of a record and the place that its row names (`Sink.routed_by`)."""


@dataclass(frozen=True)
class Sample:
    """One damaged record, by id. Its value stays in the cluster.

    Attributes:
        id: from the audit's `id` expression, or a hash of the record.
        key: as text, shortened to `SHOWN_LENGTH`.
        source, sink: partition and position, as in `orders-0 @ 17`; None: not there.
        sent, delivered: copies under this id.
    """

    damage: Damage
    id: str
    key: str | None
    source: str | None
    sink: str | None
    sent: int
    delivered: int


@dataclass(frozen=True)
class PartitionLine:
    """One partition of the source.

    Attributes:
        partition: its name; `-` for records that were never sent.
        sent_fingerprint, delivered_fingerprint: of what came from this partition.
    """

    partition: str
    counts: Counts
    sent_fingerprint: Fingerprint
    delivered_fingerprint: Fingerprint

    def __add__(self, other: PartitionLine) -> PartitionLine:
        """Both together, under this one's name."""
        return PartitionLine(
            self.partition,
            self.counts + other.counts,
            self.sent_fingerprint + other.sent_fingerprint,
            self.delivered_fingerprint + other.delivered_fingerprint,
        )


@dataclass(frozen=True)
class Fingerprints:
    """Three accounts of the same records. Look for the fault where one differs from the other two.

    Attributes:
        sent: reread from the source, through the transform.
        ledger: what the tasks handed to the sink, summed over all decided batches; None: no ledger was read.
        given_up: what at_most_once gave up, from the ledger.
        delivered: read back from the sink.
    """

    sent: Fingerprint
    ledger: Fingerprint | None
    given_up: Fingerprint
    delivered: Fingerprint

    @property
    def says(self) -> str:
        if self.ledger is None:
            return "source and sink agree" if self.sent == self.delivered else "source and sink differ"
        accounted = self.ledger + self.given_up
        if self.sent == accounted:
            if self.delivered == self.ledger:
                return "source, ledger and sink agree"
            return "source and ledger agree, the sink differs"
        if self.delivered == self.ledger:
            return (
                "ledger and sink agree, the source differs: the transform is not deterministic, or the source's "
                "records have changed or expired since"
            )
        if self.delivered == self.sent:
            return "source and sink agree, the ledger differs"
        return "source, ledger and sink all differ"

    def to_json(self) -> dict[str, Any]:
        return {
            "sent": str(self.sent),
            "ledger": str(self.ledger) if self.ledger is not None else None,
            "given_up": str(self.given_up),
            "delivered": str(self.delivered),
            "says": self.says,
        }


@dataclass(frozen=True)
class DedupCounts:
    """What the audit of a pipeline with dedup found in the source range.

    Attributes:
        records: of the source, in the range.
        deduplicated: of these, duplicates that must not be in the sink.
        judged: keys that must be in the sink once.
        unclear: keys for which the source alone does not show how often they must be there.
        late: of these, keys that may have been dropped as late.
        unlike: ids whose copies differ in the sink's columns; one of them was checked to be there.
        unlike_unclear: ids whose copies do not even yield the same number of records; they were not judged.
    """

    records: int = 0
    deduplicated: int = 0
    judged: int = 0
    unclear: int = 0
    late: int = 0
    unlike: int = 0
    unlike_unclear: int = 0


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
        accounts: the running totals after each, in the same order.
        last, before: the newest decision and its predecessor.
        decided_ms: when each was decided, in ms since 1970, in the same order.
    """

    batches: int = 0
    lines: tuple[BatchLine, ...] = ()
    faults: tuple[str, ...] = ()
    ends: tuple[tuple[int, str], ...] = ()
    accounts: tuple[Account, ...] = ()
    last: Decision | None = None
    before: Decision | None = None
    decided_ms: tuple[int, ...] = ()

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
    accounts: list[Account] = []
    decided_ms: list[int] = []
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
        accounts.append(Account(decision.total, decision.given_up))
        decided_ms.append(decision.decided_at_ms)
        before, last = last, decision
        if len(ends) > 2 * LEDGER_HISTORY_BATCHES:
            # A ledger that keeps everything must not make the audit run forever.
            faults.append(f"the ledger keeps more than {2 * LEDGER_HISTORY_BATCHES} batches; the rest was not checked")
            break
    return History(
        batches=len(ends),
        faults=tuple(faults[:SHOWN_MAX]),
        lines=tuple(lines),
        ends=tuple(ends),
        accounts=tuple(accounts),
        last=last,
        before=before,
        decided_ms=tuple(decided_ms),
    )


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
        dead_letters: of all sinks.
    """

    incarnation: str
    history: History
    visible: Decision | None
    transactions: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    skipped: Mapping[str, int] = field(default_factory=dict)
    dead_letters: int = 0

    @property
    def ends(self) -> tuple[tuple[int, str], ...]:
        """(batch, offsets) of the visible decisions that the ledger keeps, oldest first."""
        return self.history.ends if self.visible is self.history.last else self.history.ends[:-1]

    def account_at(self, batch: int) -> Account | None:
        """The running totals after a batch; None: the ledger no longer keeps its decision."""
        found = (a for (b, _), a in zip(self.history.ends, self.history.accounts, strict=True) if b == batch)
        return next(found, None)


def read_ledger(
    sink: Sink,
    scope: Scope,
    guarantee: Guarantee,
    decided_by: Sinks | None = None,
    dead_letters: str | None = None,
) -> LedgerAccount:
    """Read the ledger and the state of its newest decision. Claims nothing and fences nobody.

    Args:
        guarantee: the pipeline's; a batch that was decided under another one is finished under that one.
    """
    sinks = decided_by or Sinks.one(sink, scope.sink)
    ledger = open_shared_ledger(sinks, replace(scope, sink=sinks.decider.name))
    try:
        last = ledger.look().last if dead_letters is not None else None
        others: dict[Guarantee, int] = {}
        history = check_history(_projected(ledger.history(), scope.sink, guarantee, others))
    finally:
        ledger.close()
    account = LedgerAccount(scope.incarnation, history, history.last)
    account.notes += [
        f"the guarantee has changed: batch {batch} was decided under {other.value}, perhaps with others before it. "
        f"What they repeated or gave up is judged by {guarantee.value}"
        for other, batch in others.items()
    ]
    if last is not None and dead_letters is not None:
        account.dead_letters = count = last.projected(dead_letters).total.count
        account.notes.append(f"{count:,} dead letters are in {dead_letters!r}, by the ledger")
    if history.last is None or Guarantee.EXACTLY_ONCE not in (guarantee, history.last.guarantee):
        return account
    committer = sink.committer(scope)
    try:
        still_open = list(committer.open_transactions() or ())
        hidden = _hidden_shards(committer, history.last, still_open)
        account.skipped = committer.skipped()
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


def _projected(
    decisions: Iterable[Decision], sink: str, guarantee: Guarantee, others: dict[Guarantee, int]
) -> Iterator[Decision]:
    """One sink's share of each. Args: others: set to the newest batch of each guarantee but the pipeline's."""
    for decision in decisions:
        if decision.guarantee is not guarantee:
            others[decision.guarantee] = decision.batch
        yield decision.projected(sink)


def count_open(sinks: Sinks, scope: Scope, ledger: LedgerAccount) -> int:
    """How many dead letters at most are rows that a sink still lacks: without those in the dead-letter sink that name
    another sink, and without as many as retries wrote to it."""
    others: set[tuple[Any, ...]] = set()
    names = {m.name for m in sinks.members if not m.dead_letters} - {scope.sink}
    newest = ledger.history.last.batch if ledger.history.last is not None else -1
    if names:
        (letters,) = (m.sink for m in sinks.members if m.dead_letters)
        with suppress(Exception):  # what cannot be read narrows nothing
            for letter in read_dead_letters(letters, scope.pipeline, scope.incarnation):
                if letter["sink"] in names and letter["batch"] <= newest:
                    others.add(tuple(letter[name] for name in ("sink", "batch", "shard", "row")))
    return max(0, ledger.dead_letters - len(others) - count_retried(sinks, scope)[0])


def count_retried(sinks: Sinks, scope: Scope) -> tuple[int, int]:
    """Rows that retries of dead letters wrote to a sink, by their ledgers: those that it had refused, and those of the
    source's records."""
    (member,) = (m for m in sinks.members if m.name == scope.sink)
    every = Sinks.of([(m.name, m.sink, m.route) for m in sinks.members if not m.dead_letters])
    counts = []
    for group, suffix in ((Sinks.one(member.sink, member.name), DEAD_LETTERS), (every, DEAD_RECORDS)):
        with closing(open_shared_ledger(group, replace(scope, sink=group.decider.name).retries(suffix))) as ledger:
            last = ledger.look().last
        counts.append(0 if last is None else last.projected(scope.sink).total.count)
    return counts[0], counts[1]


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


NOBODY = "-"
"""The partition of records that were never sent."""
ROW_BITS = 33
"""The bits of a position that count rows, as Spark's `monotonically_increasing_id` does; the slot is in those above."""


class Places:
    """Where records lie, as one number each: the slot of the slice that a record was read from, then its row.

    The slots of positions: for each slice, the partition of the source or the sink that it was read from.

    Rows of a slot are in order, and so are the slots of a partition.
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def add(self, names: Sequence[str]) -> int:
        """Slots for slices of these partitions, behind those of earlier calls. Returns the first one."""
        first = len(self._names)
        self._names += names
        return first

    def __len__(self) -> int:
        return len(self._names)

    def name(self, slot: int | None) -> str:
        """The partition of a slot; None: of records that were never sent."""
        return NOBODY if slot is None else self._names[slot] if slot < len(self._names) else "?"

    def shown(self, at: int | None, position: int | None = None) -> str | None:
        if at is None:
            return None
        return f"{self.name(at >> ROW_BITS)} @ {at & ((1 << ROW_BITS) - 1) if position is None else position}"

    def partitions(self) -> list[int]:
        """For each slot the index of its partition: of its first slot."""
        first: dict[str, int] = {}
        return [first.setdefault(name, i) for i, name in enumerate(self._names)]


def source_partitions(slices: Sequence[Slice]) -> list[str]:
    return [s.partition or f"slice {i}" for i, s in enumerate(slices)]


def locating_column(stored: Sequence[str], records: Sequence[str]) -> str | None:
    """The column that a sink's system adds and that locates a record for users; None: the order of reading does.

    Args:
        stored: all columns of the sink.
        records: those of what was sent.
    """
    return next((c for c in ("offset", "rowid") if c in stored and c not in records), None)


def sink_partitions(slices: Sequence[Slice], located_by: str | None) -> list[str]:
    """An offset counts in its partition, everything else through all rows."""
    return [s.partition if located_by == "offset" else "rows" for s in slices]

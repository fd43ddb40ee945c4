"""How an audit continues a chain of seals: where it starts, what must be true of that, the seals that it adds. Pure.

A seal says where its audit stopped in source and sink. In the source, that is the end of its last batch. In the sink,
batches and positions meet only while nothing is decided: see `is_firm`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from delivered.audit.evidence import NOBODY, Counts, LedgerAccount, Verdict
from delivered.audit.judge import Result
from delivered.audit.report import AuditReport
from delivered.audit.request import BatchRange, Earlier, Positions, clip, parsed, until
from delivered.audit.seal import Seal, State, Sums
from delivered.contract.sink import Changes
from delivered.contract.source import Offsets
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Account, Decision


@dataclass(frozen=True)
class Chain:
    """The seals of a sink that an audit continues.

    Attributes:
        next: number of the next seal.
        digest: hash of the newest one.
        base: this audit compares the batches after this seal's; None: all batches of the checkpoint.
    """

    next: int = 0
    digest: str = ""
    base: Seal | None = None

    @classmethod
    def after(cls, seal: Seal) -> Self:
        return cls(seal.number + 1, seal.digest, seal)

    def own(self, scope: Scope) -> Seal | None:
        """`base`, if it is of this checkpoint."""
        return self.base if self.base is not None and self.base.scope.incarnation == scope.incarnation else None


@dataclass(frozen=True)
class Cut:
    """Where an audit stops.

    Attributes:
        ledger: what must be in the sink.
        position: of the sink. All rows of batches up to `settled` lie before it, all rows of later batches than those
            of `ledger` at or behind it. None: the sink has no positions, or batches followed each other too fast.
        until: where reading stops: all rows of `ledger` lie before it. None: at the sink's end.
        settled: -1: none.
        kept: facts about what lies before `position`.
    """

    ledger: LedgerAccount
    position: Offsets | None = None
    until: Offsets | None = None
    settled: int = -1
    kept: Mapping[str, Any] | None = None

    @property
    def is_sharp(self) -> bool:
        """Whether what is read holds no rows of later batches."""
        return self.position is not None and self.until == self.position


def is_firm(guarantee: Guarantee, after: LedgerAccount, started: int) -> bool:
    """Whether all rows of later batches than those of `after` lie at or behind a position that was read before it.

    Under exactly_once, rows become visible after their batch is decided. Under the other guarantees, at any time once
    it has started; so may those of a batch that started before the guarantee became exactly_once.

    Args:
        after: the ledger, read after the position.
        started: the newest batch by the checkpoint, read after the position and before `after`.
    """
    visible, newest = after.visible, after.history.last
    if visible is None or newest is None or visible.batch != newest.batch:
        return False
    return {guarantee, newest.guarantee} == {Guarantee.EXACTLY_ONCE} or started <= visible.batch


def check_ledger(base: Seal, ledger: LedgerAccount, sink: str) -> None:
    """
    Args:
        base: a seal of this checkpoint.

    Raises:
        DeliveredError: the ledger is not the one that was sealed.
    """
    visible = ledger.visible
    if visible is None or visible.batch < base.last:
        newest = "none" if visible is None else visible.batch
        raise DeliveredError("AUDIT_SEAL.AHEAD", number=base.number, sink=sink, last=base.last, batch=newest)
    known = ledger.account_at(base.last)
    ended = dict(ledger.ends).get(base.last)
    if known is not None and (known != base.account or ended != base.end):
        raise DeliveredError(
            "AUDIT_SEAL.LEDGER",
            number=base.number,
            sink=sink,
            last=base.last,
            sealed=base.account.total.count,
            counted=known.total.count,
        )


def first_readable(
    base: tuple[int, Positions], ends: Sequence[tuple[int, Positions]], is_readable: Callable[[Positions], bool]
) -> tuple[int, Positions]:
    """The earliest end of a batch from which on the sources still have all records.

    Args:
        base: the last batch before those that are audited, and its end.
        ends: of the batches that the ledger keeps, oldest first.
    """
    bounds = [base, *((batch, end) for batch, end in ends if batch > base[0])]
    return bounds[first_index(len(bounds) - 1, lambda at: is_readable(bounds[at][1]))]


def first_index(count: int, holds: Callable[[int], bool]) -> int:
    """The first of so many indices for which it holds, as for all behind it; `count`: for none."""
    if not count or holds(0):  # mostly, everything is there
        return 0
    return bisect_left(range(count), True, lo=1, key=holds)


EXPIRED_IN_SINK = "the sink's retention removed records before an audit compared them"
"""Start of the reason of batches whose rows may be missing from the sink."""


@dataclass(frozen=True)
class Unaudited:
    """Batches that were not compared, before those that were.

    Attributes:
        scope: whose.
        first, last, start, end: as of a seal.
        handed: their share of the ledger's totals.
        account: the ledger's totals after them.
    """

    scope: Scope
    first: int
    last: int
    start: str
    end: str
    handed: Account
    account: Account
    reason: str

    @property
    def expired(self) -> bool:
        """Whether the sink's retention may have removed rows of them."""
        return self.reason.startswith(EXPIRED_IN_SINK)


def replaced_checkpoint(base: Seal, last: Decision | None, sink: str) -> Unaudited | None:
    """The batches of an earlier checkpoint that were decided after its last seal; None: there are none.

    Args:
        last: the newest decision of that checkpoint.
    """
    if last is None or last.batch <= base.last:
        return None
    account = last.account(sink)
    reason = "their checkpoint was replaced before they were audited"
    handed = account - base.account
    return Unaudited(base.scope, base.last + 1, last.batch, base.end, last.offsets, handed, account, reason)


def is_behind(seal: Seal) -> bool:
    """Whether the rows of batches that were not compared lie behind the position from which the sink is read next: the
    audit that sealed them was stopped before it sealed what it compared."""
    return not seal.audited and seal.sink_start == seal.sink_end and seal.settled < seal.first


def continuable(seals: Iterable[Seal]) -> list[Seal]:
    """Of the seals of a checkpoint, oldest first, those that an audit may continue.

    Not those whose batches a later audit compared again, and did not prove: its finding would be lost. Nor those of
    audits that read all of the sink and could not say where they stopped: to continue, that must be known.
    """
    found: list[Seal] = []
    for seal in seals:
        if seal.keys is not None:
            continue
        if seal.state is not State.HELD:
            found = [s for s in found if s.last < seal.first]
        if is_placed(seal):
            found.append(seal)
    return found


def is_placed(seal: Seal) -> bool:
    """Whether it says where its audit stopped in the sink, if it compared batches."""
    return not seal.audited or seal.sink_end is not None or seal.sink_read is not None


def unaudited_by(seal: Seal) -> Unaudited:
    return Unaudited(
        scope=seal.scope,
        first=seal.first,
        last=seal.last,
        start=seal.start,
        end=seal.end,
        handed=seal.sums.ledger,
        account=seal.account,
        reason=next(iter(seal.unknowns), ""),
    )


def earlier_of(unaudited: Unaudited, *, counted: bool) -> Earlier:
    batches = _batches(unaudited.first, unaudited.last)
    clause = f"batches {batches} were not compared: {unaudited.reason}"
    if counted:  # hashed with another key
        count = Fingerprint(unaudited.handed.total.count)
        return Earlier(batches, count, clauses=(clause,), counted=True, expired=unaudited.expired)
    handed = unaudited.handed
    return Earlier(batches, handed.total, handed.given_up, clauses=(clause,), expired=unaudited.expired)


def _batches(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


@dataclass(frozen=True)
class Start:
    """Where an audit starts.

    Attributes:
        reads_all: why every audit of this sink reads all of it; empty: it continues.
        after: the last batch of this checkpoint that is not compared any more; -1: none.
        account: the ledger's totals after it.
        behind: batches that were not compared, whose rows lie behind where reading the sink starts.
        replaced: of these, those of an earlier checkpoint that no seal names yet.
        unread: why nothing can be compared; empty: it can.
        changes: of what the sink held before the position where it starts.
    """

    chain: Chain = Chain()
    reads_all: str = ""
    after: int = -1
    account: Account = Account()
    behind: tuple[Unaudited, ...] = ()
    replaced: Unaudited | None = None
    unread: str = ""
    changes: Changes = Changes()

    @property
    def base(self) -> Seal | None:
        return self.chain.base

    def own(self, scope: Scope) -> Seal | None:
        return self.chain.own(scope)


@dataclass(frozen=True)
class Compared:
    """What an audit compared, for its seal.

    Attributes:
        first: batch; the last one is that of the cut's ledger.
        start: in the source.
        before: the ledger's totals there.
        skipped: batches before the first one that could not be compared.
        rest: other batches that could not be, among those that were.
    """

    first: int
    start: str
    before: Account
    result: Result
    skipped: tuple[Unaudited, ...] = ()
    rest: bool = False


@dataclass(frozen=True)
class Auditor:
    """Who seals, and when by its clock."""

    name: str
    now_ms: int


def never_audited(chain: Chain, unaudited: Unaudited, by: Auditor, report: AuditReport | None = None) -> Seal:
    """The seal of batches that were not compared. It says nothing new of the sink.

    Args:
        report: what the sink holds of their rows, by count.
    """
    base = chain.base
    earlier = report.earlier if report is not None else None
    theirs = max(0, unaudited.handed.total.count - earlier.missing) if earlier is not None else 0
    broken = report.earlier_breaches if report is not None else []
    own = chain.own(unaudited.scope)
    return Seal(
        scope=unaudited.scope,
        number=chain.next,
        before=chain.digest,
        first=unaudited.first,
        last=unaudited.last,
        start=unaudited.start,
        end=unaudited.end,
        verdict=Verdict.BROKEN if broken else Verdict.UNKNOWN,
        sums=Sums(Counts(delivered=theirs, earlier=theirs), ledger=unaudited.handed),
        total=own.total if own is not None else Sums(),
        account=unaudited.account,
        settled=own.settled if own is not None else -1,
        settled_end=own.settled_end if own is not None else unaudited.start,
        sink_start=base.sink_end if base is not None else None,
        sink_end=base.sink_end if base is not None else None,
        sink_read=base.sink_read if base is not None else None,
        sink_kept=base.sink_kept if base is not None else None,
        audited=False,
        breaches=tuple(broken),
        unknowns=(unaudited.reason,),
        unproved=own.unproved_until if own is not None else (),
        sealed_at_ms=by.now_ms,
        auditor=by.name,
    )


def ended_unaudited(
    chain: Chain, unaudited: Unaudited, cut: Cut, by: Auditor, report: AuditReport | None = None
) -> Seal:
    """The seal of batches that were not compared, and are the last ones: the next audit continues from the cut."""
    return _ended(never_audited(chain, unaudited, by, report), cut, chain.base)


def audited(
    chain: Chain,
    scope: Scope,
    compared: Compared,
    behind: Sequence[Unaudited],
    cut: Cut,
    report: AuditReport,
    transform: str,
    by: Auditor,
) -> Seal:
    """The seal of batches that were compared.

    Args:
        behind: batches that were not, whose rows were read as well.
        report: on these batches alone.
        transform: fingerprint of the one that they were recomputed with.
    """
    visible = cut.ledger.visible
    if visible is None:
        raise ValueError("no batch is visible")
    base = chain.own(scope)
    account = Account(visible.total, visible.given_up)
    found, late = report.counts, report.late
    others_found = found.earlier - late
    delivered = found.delivered - found.in_progress - others_found
    counts = replace(found, delivered=delivered, in_progress=0, earlier=late)
    result = compared.result
    unmatched = next((p for p in result.partitions if p.partition == NOBODY), None)
    others = sum((u.handed.total for u in behind if not u.expired), Fingerprint())
    if unmatched is not None and behind and unmatched.counts.unexpected == others_found:
        others = unmatched.delivered_fingerprint  # as it is now: the table may have got columns since
    sums = Sums(counts, result.sent, account - compared.before, result.delivered - others)
    seal = Seal(
        scope=scope,
        number=chain.next,
        before=chain.digest,
        first=compared.first,
        last=visible.batch,
        start=compared.start,
        end=visible.offsets,
        verdict=report.verdict,
        sums=sums,
        total=(base.total if base is not None else Sums()) + sums,
        account=account,
        settled=-1,
        settled_end=compared.start,
        sink_start=chain.base.sink_end if chain.base is not None else None,
        breaches=tuple(report.breaches),
        unknowns=report.unknowns,
        notes=report.notes,
        unproved=base.unproved_until if base is not None else (),
        transform=transform,
        sealed_at_ms=by.now_ms,
        auditor=by.name,
    )
    return _ended(seal, cut, chain.base)


def shared(
    chain: Chain, scope: Scope, start: str, ledger: LedgerAccount, report: AuditReport, transform: str, by: Auditor
) -> Seal:
    """The seal of a share of the keys, of all batches. It says nothing of positions in the sink.

    Args:
        chain: `base` is the newest seal of all keys.
        start: of batch 0, in the source.
        report: with `keys`.
    """
    visible, own = ledger.visible, chain.own(scope)
    if visible is None or report.keys is None:
        raise ValueError("no batch is visible, or all keys were compared")
    return Seal(
        scope=scope,
        number=chain.next,
        before=chain.digest,
        first=0,
        last=visible.batch,
        start=start,
        end=visible.offsets,
        verdict=report.verdict,
        sums=Sums(report.counts),
        total=own.total if own is not None else Sums(),
        account=Account(visible.total, visible.given_up),
        settled=-1,
        settled_end=start,
        breaches=tuple(report.breaches),
        unknowns=report.unknowns,
        notes=report.notes,
        unproved=own.unproved_until if own is not None else (),
        transform=transform,
        sealed_at_ms=by.now_ms,
        auditor=by.name,
        keys=report.keys.to_json(),
        full=-1 if chain.base is None else chain.base.number,
    )


def _ended(seal: Seal, cut: Cut, base: Seal | None) -> Seal:
    """The seal, with where its audit stopped in the sink."""
    if cut.position is None:
        if base is None:
            return replace(seal, sink_read=cut.until)
        return replace(
            seal,
            settled=base.settled if base.scope == seal.scope else -1,
            settled_end=base.settled_end if base.scope == seal.scope else seal.settled_end,
            sink_end=base.sink_end,
            sink_read=cut.until,
            sink_kept=base.sink_kept,
        )
    ends = dict(cut.ledger.ends)
    return replace(
        seal,
        settled=cut.settled,
        settled_end=ends.get(cut.settled, seal.settled_end),
        sink_end=cut.position,
        sink_read=cut.until,
        sink_kept=cut.kept,
    )


def repeated(ranges: Sequence[BatchRange], base: Seal) -> list[BatchRange]:
    """The sealed batches whose rows may lie behind the position where the sink is read from.

    Args:
        ranges: of all batches of the checkpoint, that can be recomputed.
    """
    if base.settled >= base.last:
        return []
    sealed = until(ranges, base.last, parsed(base.end))
    return clip(sealed, base.settled, parsed(base.settled_end), Account()) if base.settled >= 0 else sealed

"""Sealed batches compared once more, as far as source and sink still have them. Seals nothing. No Spark.

A seal says where its batches lie in the source, and between which positions of the sink. What is compared is that part
of the sink: it may also hold rows of sealed batches before them (`Seal.settled`), and of the batches that followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from delivered.audit.account import Comparing, Comparison, Progress, Ranges, reason, split_slices
from delivered.audit.continuation import first_index, is_behind
from delivered.audit.evidence import Counts, Verdict
from delivered.audit.request import AuditRequest, BadExpression, NeedsSpark, Positions, SourceRange, id_sql, parsed
from delivered.audit.seal import Seal, Sums, current
from delivered.checkpoint import read_view
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Slice
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import batches_text

ALONE_MAX = 20
"""Of a range that differs, so many seals are compared one by one; and so many of shares of the keys are named."""


class Again(StrEnum):
    """What came of comparing sealed batches once more."""

    VERIFIED = "verified again"
    SOURCE = "source verified again"
    """The source yields what was sealed; the sink has no order by which a part of it can be read."""
    EXPIRED = "expired"
    """Source or sink no longer has the records."""
    DIFFERS = "differs"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Rechecked:
    """
    Attributes:
        seals: numbers of the first and the last one.
        batches: of the first and the last one, of one checkpoint.
        says: why, or how it differs.
    """

    outcome: Again
    seals: tuple[int, int]
    batches: tuple[int, int]
    says: str = ""

    def __str__(self) -> str:
        return f"{batches_text(*self.batches)}: {self.outcome.value}" + (f": {self.says}" if self.says else "")


@dataclass(frozen=True)
class Chosen:
    """Which seals are rechecked: those of a file, of some batches of the newest checkpoint.

    Attributes:
        first, last: their numbers.
        batches: None: all, of any checkpoint.
    """

    first: int
    last: int
    batches: range | None
    incarnation: str

    def __call__(self, seal: Seal) -> bool:
        if not self.first <= seal.number <= self.last:
            return False
        return self.batches is None or (
            seal.scope.incarnation == self.incarnation
            and seal.last >= self.batches.start
            and seal.first < self.batches.stop
        )


@dataclass(frozen=True)
class _Group:
    """Seals that follow each other.

    Attributes:
        before: the last one before them whose audit read the sink; None: there is none.
        unaudited: records of batches in between that were not compared: their rows lie among those of the group.
        after: the one behind them; None: they are the newest.
    """

    before: Seal | None
    unaudited: int
    seals: tuple[Seal, ...]
    after: Seal | None

    @property
    def sums(self) -> Sums:
        return sum((s.sums for s in self.seals), Sums())

    def found(self, outcome: Again, says: str = "") -> Rechecked:
        first, last = self.seals[0], self.seals[-1]
        return Rechecked(outcome, (first.number, last.number), (first.first, last.last), says)


def recheck(
    request: AuditRequest,
    comparing: Comparing,
    seals: Sequence[Seal],
    wanted: Callable[[Seal], bool],
    say: Progress,
) -> list[Rechecked]:
    """Compare sealed batches once more, and the result with their seals. Oldest first.

    Args:
        seals: all of this sink, oldest first; of batches that were compared several times, the newest counts.
        wanted: which of them.

    Raises:
        BadExpression: the audit's id, key or condition `own` is invalid.
        NeedsSpark: `comparing` does without, and cannot.
    """
    found: list[Rechecked] = []
    if request.write_mode.upserts:
        request = replace(request, id=id_sql(request.write_mode), key=None)
    for group in _groups(seals, wanted):
        if (why := _why_not(group.seals[0], request)) is not None:
            found.append(group.found(Again.NOT_COMPARED, why))
            continue
        say(f"comparing {batches_text(group.seals[0].first, group.seals[-1].last)} once more")
        found += _compare_all(request, comparing, group)
    return found + _of_shares(seals, wanted)


def not_compared(seals: Sequence[Seal], wanted: Callable[[Seal], bool], why: str) -> list[Rechecked]:
    """If a pipeline's records cannot be accounted for one by one."""
    return [group.found(Again.NOT_COMPARED, why) for group in _groups(seals, wanted)] + _of_shares(seals, wanted)


def _of_shares(seals: Sequence[Seal], wanted: Callable[[Seal], bool]) -> list[Rechecked]:
    """The newest seals of shares of the keys: comparing one again is an audit of its share."""
    shares = [seal for seal in seals if seal.keys is not None and wanted(seal)][-ALONE_MAX:]
    return [
        Rechecked(
            Again.NOT_COMPARED,
            (seal.number, seal.number),
            (seal.first, seal.last),
            f"{seal.share}: delivered audit --keys '#{seal.keys['share']}/{seal.keys['of']}'",
        )
        for seal in shares
        if seal.keys is not None
    ]


def _why_not(seal: Seal, request: AuditRequest) -> str | None:
    """Why batches cannot be compared at all; None: they can. Of one group, all seals have the same answer."""
    if not seal.audited:
        return "they were never audited"
    if seal.verdict is Verdict.UNKNOWN:
        return "they could not be judged when they were sealed"
    if _recomputed(seal):
        return "they were recomputed as one range: delivered audit --recompute"
    if request.dedup is not None:
        return "the pipeline drops repeats, and what must be in the sink depends on all batches: delivered audit --full"
    if request.transform_version and seal.transform not in ("", request.transform_version):
        return "they ran with another transform"
    return None


def _recomputed(seal: Seal) -> bool:
    """Whether it has counts, and no fingerprint."""
    return seal.sums.sent.count != seal.sums.counts.sent


def _groups(seals: Sequence[Seal], wanted: Callable[[Seal], bool]) -> list[_Group]:
    """Seals with one scope, transform and state, that follow each other."""
    kept = current(seals)
    groups: list[_Group] = []
    before: Seal | None = None
    unaudited = 0
    for number, seal in enumerate(kept):
        after = kept[number + 1] if number + 1 < len(kept) else None
        if wanted(seal):
            last = groups[-1].seals[-1] if groups else None
            if last is not None and number and kept[number - 1] is last and _alike(last, seal):
                groups[-1] = replace(groups[-1], seals=(*groups[-1].seals, seal), after=after)
            else:
                groups.append(_Group(before, unaudited, (seal,), after))
        if is_behind(seal):
            unaudited += seal.sums.ledger.total.count
        else:
            before, unaudited = seal, 0
    return groups


def _alike(one: Seal, other: Seal) -> bool:
    def facts(seal: Seal) -> tuple[object, ...]:
        judged = seal.verdict is not Verdict.UNKNOWN
        return (seal.scope, seal.audited, judged, _recomputed(seal), seal.transform, seal.sink_read is not None)

    # A seal that was read from the sink's start is not continued by the one before it.
    return facts(one) == facts(other) and (other.sink_start == one.sink_end)


def _compare_all(request: AuditRequest, comparing: Comparing, group: _Group) -> list[Rechecked]:
    """One comparison of the seals whose source is still there; if it differs, one of each."""
    scan = request.sink.scan()
    try:
        with comparing(request, group.seals[0].scope, scan) as comparison:
            expired, rest = _readable(group, comparison)
            found = [expired.found(Again.EXPIRED, "the source has dropped records of them")] if expired else []
            if rest is None:
                return found
            one = _compare(request, rest, scan, comparison)
    except (BadExpression, NeedsSpark):
        raise
    except Exception as error:  # what cannot be read is not compared
        return [group.found(Again.NOT_COMPARED, reason(error))]
    if one.outcome is Again.DIFFERS and 1 < len(rest.seals) <= ALONE_MAX:
        return found + [each for alone in _alone(rest) for each in _compare_all(request, comparing, alone)]
    return [*found, one]


def _alone(group: _Group) -> list[_Group]:
    """A group for each of the seals."""
    after = [*group.seals[1:], group.after]
    groups = [replace(group, seals=(group.seals[0],), after=after[0])]
    for (before, seal), behind in zip(pairwise(group.seals), after[1:], strict=True):
        groups.append(_Group(before, 0, (seal,), behind))
    return groups


def _readable(group: _Group, comparison: Comparison) -> tuple[_Group | None, _Group | None]:
    """The seals whose source records have expired, and the others. A source drops the oldest first."""
    seals = group.seals
    first = first_index(len(seals), lambda at: comparison.sources.is_readable(parsed(seals[at].start)))
    if not first:
        return None, group
    expired = replace(group, seals=seals[:first])
    if first == len(seals):
        return expired, None
    return expired, _Group(seals[first - 1], 0, seals[first:], group.after)


def _compare(request: AuditRequest, group: _Group, scan: BoundedScan, comparison: Comparison) -> Rechecked:
    first, last, before = group.seals[0], group.seals[-1], group.before
    start, end = parsed(first.start), parsed(last.end)
    slices, again = _slices(scan, group)
    comparison.read(slices, group.sums.counts.sent, again)
    planned = end if last.sink_read == last.sink_end and last.settled == last.last else _after(request, group, end)
    repeated: list[tuple[Positions, Positions]] = []
    if again and before is not None and before.scope == first.scope and before.settled < before.last:
        repeated.append((parsed(before.settled_end), parsed(before.end)))
    read = SourceRange(start, end, planned)
    result = comparison.compare(Ranges(read, [(start, end)], (), repeated)).result
    sealed = group.sums
    if result.sent != sealed.sent:
        if result.sent.count < sealed.sent.count and (why := comparison.sources.compacted()):
            return group.found(Again.EXPIRED, "; ".join(why))
        return group.found(Again.DIFFERS, _of_source(sealed.sent, result.sent))
    if last.sink_read is None:
        return group.found(Again.SOURCE, "the sink has no positions: delivered audit --full")
    differs = _of_sink(sealed.counts, result.counts, group.unaudited + sealed.counts.earlier)
    if not differs:
        return group.found(Again.VERIFIED)
    changes = scan.changes(last.sink_end, last.sink_kept) if last.sink_end is not None else None
    if changes is not None and changes.expired and not changes.altered:
        return group.found(Again.EXPIRED, "; ".join(changes.expired))
    fewer = replace(sealed.counts, lost=max(sealed.counts.lost, result.counts.lost))
    if (compacted := scan.compacted()) and not _of_sink(fewer, result.counts, group.unaudited + sealed.counts.earlier):
        return group.found(Again.EXPIRED, "; ".join(compacted))
    return group.found(Again.DIFFERS, "; ".join([differs, *(changes.altered if changes is not None else ())]))


def _slices(scan: BoundedScan, group: _Group) -> tuple[list[Slice], int]:
    """What is read of the sink; and how many of the slices, the first ones, hold rows of the seals before as well."""
    first, last, before = group.seals[0], group.seals[-1], group.before
    if last.sink_read is None:
        return [], 0
    # A seal that was read from the sink's start does not continue the one before it.
    read = before.sink_read if before is not None and first.sink_start == before.sink_end else None
    return split_slices(scan, first.sink_start, read, last.sink_read)


def _after(request: AuditRequest, group: _Group, end: Positions) -> Positions:
    """Where the last batch ends in the source whose rows may lie among those of the group."""
    after = group.after
    # Under the other guarantees, rows may show before their batch is decided, and the next seal may not name it.
    if after is not None and after.scope == group.seals[-1].scope and request.guarantee is Guarantee.EXACTLY_ONCE:
        return parsed(after.end)
    view = read_view(request.checkpoint)
    return parsed(view.offsets) if view.incarnation == group.seals[-1].scope.incarnation else end


def _of_source(sealed: Fingerprint, found: Fingerprint) -> str:
    if sealed.count == found.count:
        return f"the source yields {found.count:,} records, as sealed, but other ones"
    return f"the source yields {found.count:,} records, and {sealed.count:,} were sealed"


def _of_sink(sealed: Counts, found: Counts, unaudited: int) -> str:
    """How the sink differs from what was sealed; empty: it does not."""
    # A copy of a record of earlier batches is unexpected here, and was a duplicate for the audit, which looked for it.
    more = found.duplicated + found.unexpected
    kinds = {
        "lost": (sealed.lost, found.lost),
        "altered": (sealed.altered, found.altered),
        "duplicated or unexpected": (sealed.duplicated + sealed.unexpected, max(0, more - unaudited)),
    }
    return "; ".join(
        f"{now:,} records are {what}, and {was:,} were sealed" for what, (was, now) in kinds.items() if was != now
    )

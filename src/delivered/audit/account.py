"""Account for every record of one sink: what is read in which order, what must be there, and the report. No Spark.

An audit may run while the pipeline runs, and after a crash. Decided batches must be in the sink; batches that started
later may be. For that to hold, the ledger is read first, then the sink, then the checkpoint: the sink is never newer
than what it is compared with. An audit that continues from a seal also cuts the sink where no batch is in flight
(`sealing.find_cut`), so that the next one knows where to go on.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from importlib.metadata import version
from itertools import islice
from typing import Self

import pyarrow as pa

from delivered.audit.continuation import (
    EXPIRED_IN_SINK,
    Compared,
    Cut,
    Start,
    Unaudited,
    earlier_of,
    first_index,
    first_readable,
    repeated,
)
from delivered.audit.evidence import DedupCounts, LedgerAccount, count_open, count_retried
from delivered.audit.judge import (
    Result,
    account_for_compaction,
    account_for_dead_letters,
    account_for_dedup,
    account_for_earlier,
    account_for_late,
    account_for_removed,
    account_for_retries,
    account_for_skipped,
    account_for_upserts,
    contradictions,
    judge,
    report_of_ledger,
    report_of_result,
)
from delivered.audit.report import AuditReport, unknown_report
from delivered.audit.request import (
    AuditRequest,
    BadExpression,
    BatchRange,
    Earlier,
    KeyCheck,
    NeedsSpark,
    Positions,
    SourceRange,
    SourceSet,
    as_text,
    check_write_mode,
    clip,
    find_earlier,
    id_sql,
    join_adjacent,
    parsed,
    plain,
    split_by_transform,
    until,
)
from delivered.audit.seal import Seal
from delivered.audit.sealing import Seals, find_cut, read_account
from delivered.checkpoint import batch_metadata, read_logged, read_view
from delivered.checkpoint.sidecar import read_modes
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Offsets, Slice
from delivered.model.capability import APPEND
from delivered.model.errors import DeliveredError, OutcomeUnknown, Refused
from delivered.model.identity import Scope, batches_text
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Account
from delivered.source import backwards

_ERROR_LENGTH_MAX = 2_000
NOT_READABLE = "DELIVERED_NOT_READABLE"
"""Error code of a sink that cannot be read back at all."""

_OTHER_TRANSFORM = "they ran with another transform and cannot be recomputed with this one"
_START_WRONG = "the checkpoint sidecar records another start than that of its batch 0"

Progress = Callable[[str], None]
_Spans = list[tuple[Positions, Positions]]


@dataclass(frozen=True)
class Ranges:
    """What is compared with the rows of a sink.

    Attributes:
        read: the source range from the first batch to the last one that started.
        must: the source ranges whose rows must be in the sink, in order.
        ends: (batch, its end) as far as the ledger keeps them, oldest first.
        again: source ranges before those, sealed, whose rows may be among the slices that were read again.
        before: sealed source ranges: further rows of the sink that are theirs are duplicates.
        sealed: slices of the sink before those that were read. Rows of `before` that were not there may be further rows
            of now, and are in progress then; None: all of them were there.
        optional: source ranges before `must`, whose rows may be in the sink and need not be.
    """

    read: SourceRange
    must: Sequence[tuple[Positions, Positions]]
    ends: Sequence[tuple[int, Positions]]
    again: Sequence[tuple[Positions, Positions]] = ()
    before: Sequence[tuple[Positions, Positions]] = ()
    sealed: Sequence[Slice] | None = None
    optional: Sequence[tuple[Positions, Positions]] = ()


@dataclass(frozen=True)
class Findings:
    """
    Attributes:
        ordered: source partition and order of each record are known.
        undeleted: of the unexpected records, those whose keys this pipeline deleted.
        unclear: of upserts, keys that are not judged; None: the sink does not keep one row per key.
        dedup: None: the pipeline has none.
        selected: where rows of other shares of the keys were dropped.
        excluded: lost records for which the condition `own` is not true; it does not identify this pipeline's records.
    """

    result: Result
    ordered: bool = True
    undeleted: int = 0
    unclear: int | None = None
    dedup: DedupCounts | None = None
    excluded: int = 0
    selected: str = ""


class Comparison(ABC):
    """Reads a sink and the sources of one audit, and compares their rows. Used by one thread."""

    sources: SourceSet

    @abstractmethod
    def read(self, slices: Sequence[Slice], expected: int, again: int = 0) -> tuple[int, int]:
        """Read the sink, once, before `compare`: number of its rows, and how many of them belong to other writers.

        Args:
            slices: of its scan.
            expected: rows of the sources that they will be compared with, about.
            again: so many of the slices, the first ones, were compared by an earlier audit. Of their rows, only those
                count that share an id with a row that must or may be in the sink.
        """

    @abstractmethod
    def compare(self, ranges: Ranges) -> Findings:
        """Classify every row of the sink and of these ranges. May be called again, with other ranges.

        Raises:
            DeliveredError: a range cannot be read.
            BadExpression: the id, key or condition `own` is invalid.
        """

    def combines(self) -> Sequence[str]:
        """Operations of the transform that put rows of several sources together: ["Join"]; empty: none."""
        return ()


Comparing = Callable[[AuditRequest, Scope, BoundedScan], AbstractContextManager[Comparison]]
"""Opens a comparison with what a scan reads."""


def guarded(request: AuditRequest, run: Callable[[], AuditReport], versions: Mapping[str, str]) -> AuditReport:
    """The report of an audit. What cannot be read yields the verdict `unknown`, not an exception.

    Args:
        versions: of the packages that ran it.

    Raises:
        UsageError: the id or key expression is invalid.
        NeedsSpark: `run` does without, and cannot.
    """
    started = time.monotonic()
    try:
        if read_logged(request.checkpoint)[1] is None:
            raise OutcomeUnknown("CHECKPOINT_MISSING.AUDIT", location=request.checkpoint, file="FILE")
        report = run()
    except (BadExpression, NeedsSpark):
        raise
    except Exception as error:
        # A failed audit proves nothing.
        report = unknown_report(request.pipeline, request.named_sink, request.guarantee, reason(error))
    return replace(report, seconds=time.monotonic() - started, versions={"delivered": version("delivered"), **versions})


def reason(error: Exception) -> str:
    """Why an audit could not run, for the report."""
    text = str(error) if isinstance(error, DeliveredError) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _ERROR_LENGTH_MAX else f"{text[:_ERROR_LENGTH_MAX]} ..."


def account(request: AuditRequest, comparing: Comparing, say: Progress) -> AuditReport:
    """Account for every record, of all batches or of those after the last seal."""
    mode = request.write_mode
    check_write_mode(mode, dedup=request.dedup is not None)
    if mode.upserts:
        request = replace(request, id=id_sql(mode), key=None)
    say("reading checkpoint, ledger and seals")
    scope = Scope(request.pipeline, request.named_sink, read_view(request.checkpoint).incarnation)
    seals = Seals(request, scope) if request.sealing is not None else None
    ledger = read_account(request, scope)
    try:
        scan = request.sink.scan()
    except Refused as error:
        if error.code != NOT_READABLE:
            raise
        return report_of_ledger(request, ledger, reason(error))
    if seals is None or request.keys is not None:
        report, compared, _ = _compare(request, scope, scan, Cut(ledger), Start(), comparing, say)
        return report if seals is None or compared is None else seals.seal_share(report, ledger, compared.start)
    start = seals.start(scan, ledger)
    if start.unread:
        return seals.from_now(scan, start)
    report, compared, cut = _compare(request, scope, scan, None, start, comparing, say)
    return seals.seal(report, compared, cut, start)


def _compare(
    request: AuditRequest,
    scope: Scope,
    scan: BoundedScan,
    cut: Cut | None,
    start: Start,
    comparing: Comparing,
    say: Progress,
) -> tuple[AuditReport, Compared | None, Cut]:
    """The report; what was compared, None if nothing could be; and where it stopped."""
    mode, base = request.write_mode, start.own(scope)
    with comparing(request, scope, scan) as comparison:
        say("reading the sink")
        if cut is None:
            cut = find_cut(request, scope, scan, positions=not start.reads_all)
        ledger, visible = cut.ledger, cut.ledger.visible
        # Before the checkpoint is read: no batch in the sink is newer than the checkpoint's latest.
        expected = visible.total.count if visible is not None else 0
        slices, again = _slices(scan, request.sink_from, start, cut)
        _, foreign = comparison.read(slices, expected - start.account.total.count, again)
        reach(StepId.AUDIT_READ, Moment.AFTER)
        view = read_view(request.checkpoint)
        begin, unsure = comparison.sources.start()
        every = split_by_transform(visible, begin) if visible is not None else []
        if base is not None:
            begin, unsure = parsed(base.end), ""
        unsure = unsure or written_otherwise(request, scope, start.after)
        end = parsed(visible.offsets) if visible is not None else None
        ends = [(batch, parsed(text)) for batch, text in ledger.ends]
        # Behind a sharp cut, nothing of a later batch was read.
        read = SourceRange(begin, end, end if end is not None and cut.is_sharp else parsed(view.offsets))
        begins = base.end if base is not None else as_text(begin)
        skipped = (
            _skipped(request, scope, comparison.sources, start, ledger, begins, every, ends)
            if visible is not None
            else ()
        )
        at, account_at, before = start.after, start.account, begin
        if skipped:
            at, account_at, before = skipped[-1].last, skipped[-1].account, parsed(skipped[-1].end)
        current, others = find_earlier(clip(every, at, before, account_at), request.transform_version)
        behind = [earlier_of(one, counted=one.scope != scope) for one in (*start.behind, *skipped)]
        every_other = [*behind, *([others] if others is not None else [])]
        earlier = reduce(Earlier.__add__, every_other) if every_other else None
        why = _why_incomparable(request, read, unsure, earlier, comparison)
        if why is not None:
            report = replace(report_of_ledger(request, ledger, why), range_from=json.dumps(plain(begin)))
            return report, None, cut
        say("reading the source range and comparing")
        sealed = find_earlier(every, request.transform_version)[0] if base is not None else []
        twice = join_adjacent(repeated(sealed, base)) if base is not None and again else []
        ranges = Ranges(read, join_adjacent(current), ends, twice)
        findings = comparison.compare(ranges)
        expired = None
        if start.base is None and earlier is None and findings.result.counts.lost and visible is not None:
            expired = _expired(request, scope, scan, begin, ledger, comparing, say)
        if expired is not None:
            skipped, at, account_at = (expired,), expired.last, expired.account
            current, _ = find_earlier(clip(every, at, parsed(expired.end), account_at), request.transform_version)
            optional = [(parsed(expired.start), parsed(expired.end))]
            findings = comparison.compare(replace(ranges, must=join_adjacent(current), optional=optional))
        late, first = 0, findings.result.counts
        lacks = base is not None and _may_lack(request, start, base)
        # Where sealed rows were moved or replaced, a second copy may be the only one.
        if base is not None and (first.unexpected or (first.duplicated and lacks)) and not start.changes.altered:
            say("looking for the unexpected records in sealed batches")
            if known := _readable_before(base, sealed, ends, comparison.sources):
                ranges = replace(ranges, before=join_adjacent(known))
                findings = comparison.compare(ranges)
            if known and findings.result.counts.duplicated and lacks:
                say("looking for their first copies in the sealed part of the sink")
                findings = comparison.compare(replace(ranges, sealed=scan.slices(None, base.sink_end)))
                late = findings.result.counts.in_progress - first.in_progress
        compacted = comparison.sources.compacted() if findings.result.counts.damaged else []
        unexcused = 0
        if request.guarantee.may_lose and mode == APPEND and earlier is None and expired is None:
            gave_up, complete = _by_given_up(ledger, at, before, account_at)
            if findings.result.counts.lost and gave_up and complete and request.dedup is None:
                say("comparing the batches that gave up nothing")
                optional = [*ranges.optional, *gave_up]
                unexcused = comparison.compare(replace(ranges, must=complete, optional=optional)).result.counts.lost
                if unexcused and ledger.dead_letters and request.decided_by is not None:
                    unexcused = max(0, unexcused - count_open(request.decided_by, scope, ledger))
    if findings.excluded:
        unsure = unsure or (
            f"{request.own!r} is not true for {findings.excluded:,} records that this pipeline sent: it does not "
            "identify its records"
        )
    result = findings.result
    handed_before = start.account if expired is None else expired.account
    report = report_of_result(request, ledger, read, view.batch, result, findings.ordered, handed_before)
    report = replace(report, own=request.own or "", foreign=foreign, undeleted=findings.undeleted, unexcused=unexcused)
    if earlier is not None:
        report = replace(report, given_up=report.given_up - earlier.given_up.count)
        report = account_for_earlier(report, earlier, request.sink.capability().adds_columns)
    if late:
        report = account_for_late(
            report, late, expired=bool(start.changes.expired or scan.expired() or scan.compacted())
        )
    report = replace(report, unknowns=(*report.unknowns, *contradictions(report)))
    if expired is not None:
        report = _account_for_expired(report, expired, read)
    if unsure:
        report = replace(report, judged=False, unknowns=(unsure, *report.unknowns))
    if request.dedup is not None and findings.dedup is not None:
        report = account_for_dedup(report, request.dedup, findings.dedup)
    if findings.unclear is not None:
        report = account_for_upserts(report, mode, findings.unclear)
    if request.keys is not None:
        report = replace(report, keys=KeyCheck.of_counts(request.keys, report.counts, findings.selected))
    if mode.conditional:
        report = account_for_skipped(report, mode, ledger)
    if mode == APPEND and request.keys is None:
        report = account_for_removed(report)
    if report.counts.damaged and ledger.dead_letters and request.decided_by is not None:
        still_open = count_open(request.decided_by, scope, ledger)
        report = account_for_dead_letters(report, still_open, by_row=mode == APPEND)
        report = account_for_retries(report, sum(count_retried(request.decided_by, scope)))
    if report.counts.damaged:
        report = account_for_compaction(report, compacted, scan.compacted())
    known_versions = bool(request.transform_version) and all(r.transform for r in current)
    report = judge(report, versions_known=known_versions)
    begins = skipped[-1].end if skipped else begins
    return report, Compared(at + 1, begins, account_at, result, skipped, others is not None), cut


def _slices(scan: BoundedScan, since: Offsets | None, start: Start, cut: Cut) -> tuple[list[Slice], int]:
    """What is read of the sink; and how many of the slices, the first ones, were read before."""
    if since is not None or start.base is None:
        slices = scan.slices(since) if cut.until is None else scan.slices(since, cut.until)
        return list(slices), 0
    return split_slices(scan, start.base.sink_end, start.base.sink_read, cut.until)


def split_slices(
    scan: BoundedScan, start: Offsets | None, read: Offsets | None, until: Offsets | None
) -> tuple[list[Slice], int]:
    """What lies between two positions of a sink; and how many of the slices, the first ones, were read before.

    Args:
        read: the position where an earlier audit that began at `start` stopped reading; None: there was none.
    """
    if read is None or read == start:
        return list(scan.slices(start, until)), 0
    before = scan.slices(start, read)
    return [*before, *scan.slices(read, until)], len(before)


def _skipped(
    request: AuditRequest,
    scope: Scope,
    sources: SourceSet,
    start: Start,
    ledger: LedgerAccount,
    begins: str,
    every: Sequence[BatchRange],
    ends: Sequence[tuple[int, Positions]],
) -> tuple[Unaudited, ...]:
    """The first batches, if they cannot be compared: a source has dropped records of theirs, or they ran with another
    transform."""
    if request.sealing is None or start.reads_all or ledger.visible is None:
        return ()
    skipped: list[Unaudited] = []
    at, end, account = start.after, begins, start.account
    texts = dict(ledger.ends)

    def skip(last: int, to: Positions, until: Account, why: str) -> None:
        nonlocal at, end, account
        text = texts.get(last, as_text(to))
        skipped.append(Unaudited(scope, at + 1, last, end, text, until - account, until, why))
        at, end, account = last, text, until

    if not sources.unknown:
        last, to = first_readable((at, parsed(begins)), ends, sources.is_readable)
        if last > at and (until_there := ledger.account_at(last)) is not None:
            skip(last, to, until_there, "the source had dropped their records")
    for r in clip(every, at, parsed(end), account):
        if find_earlier([r], request.transform_version)[1] is None:
            break
        skip(r.last, r.end, account + r.decided, _OTHER_TRANSFORM)
    return tuple(skipped)


@dataclass(frozen=True)
class _FirstRows(BoundedScan):
    """A scan of which each slice has one row."""

    scan: BoundedScan

    def schema(self) -> pa.Schema:
        return self.scan.schema()

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        return self.scan.slices(since, until)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        yield from (batch.slice(0, 1) for batch in islice(filter(len, self.scan.read(piece)), 1))

    def planned(self) -> Self:
        return replace(self, scan=self.scan.planned())


def _expired(
    request: AuditRequest,
    scope: Scope,
    scan: BoundedScan,
    begin: Positions,
    ledger: LedgerAccount,
    comparing: Comparing,
    say: Progress,
) -> Unaudited | None:
    """The batches of which the sink's retention may have removed records; None: it removed none.

    In a partition of the sink, records lie in the order of batches, and retention removes the first ones. So it reached
    no batch behind the newest one among the first records that are left, and none that is younger than it. Where a
    partition has none left, or its first one is not of this pipeline, all batches that are old enough may be concerned.
    """
    visible, ends = ledger.visible, ledger.ends
    if visible is None or request.dedup is not None or request.write_mode.upserts or request.sink_from is not None:
        return None
    started_ms = _started_ms(request.checkpoint, ledger)
    reached = {
        name: (expired.what, at)
        for name, expired in scan.expired().items()
        if (at := _newest_before(started_ms, expired.before_ms)) >= 0
    }
    if not reached:
        return None
    newest = max(at for _, at in reached.values())
    say("looking for the batches that the sink's retention reached")
    first: dict[str, Slice] = {}
    for piece in scan.slices():
        first.setdefault(piece.partition, piece)
    slices = [piece for name, piece in first.items() if name in reached]
    with comparing(request, scope, _FirstRows(scan)) as comparison:
        comparison.read(slices, 0)

        def found(index: int) -> int:
            """How many of these records batches up to this one sent."""
            end = parsed(ends[index][1])
            counts = comparison.compare(Ranges(SourceRange(begin, end, end), [(begin, end)], ())).result.counts
            return counts.sent - counts.lost - counts.altered

        every = len(slices) == len(reached) and found(newest) == len(reached)
        at = first_index(newest, lambda index: found(index) == len(reached)) if every else newest
    batch, end = ends[at]
    account = ledger.account_at(batch) or Account(visible.total, visible.given_up)
    why = f"{EXPIRED_IN_SINK}: {'; '.join(what for what, _ in reached.values())}"
    return Unaudited(scope, 0, batch, as_text(begin), end, account, account, why)


def _started_ms(checkpoint: str, ledger: LedgerAccount) -> list[int]:
    """When each batch that the ledger keeps started, at the earliest, in ms since 1970; 0: unknown. Oldest first.

    A batch starts once the one before it is decided.
    """
    oldest = batch_metadata(checkpoint, ledger.ends[0][0]) or {}
    return [int(oldest.get("batchTimestampMs", 0)), *ledger.history.decided_ms][: len(ledger.ends)]


def _newest_before(started_ms: Sequence[int], ms: int | None) -> int:
    """The last index of a batch that started before a time; -1: none did. None: of any time."""
    return max((at for at, start in enumerate(started_ms) if ms is None or start < ms), default=-1)


def _account_for_expired(report: AuditReport, expired: Unaudited, read: SourceRange) -> AuditReport:
    """The report on a sink whose retention removed records of the first batches, which were compared as records that
    may be there."""
    counts = report.counts
    if read.undecided is None:  # else some of them are of the batch in flight
        counts = replace(counts, in_progress=0, earlier=counts.in_progress)
    batches = batches_text(expired.first, expired.last)
    handed = expired.account.total.count
    unknown = f"{expired.reason} ({batches}, {handed:,} records, of which {counts.earlier:,} are there)"
    return replace(report, counts=counts, unknowns=(*report.unknowns, unknown))


def _readable_before(
    base: Seal, sealed: Sequence[BatchRange], ends: Sequence[tuple[int, Positions]], sources: SourceSet
) -> list[BatchRange]:
    """The sealed batches whose records the sources still have."""
    until_base = [(batch, end) for batch, end in ends if batch <= base.last]
    last, end = first_readable((-1, sources.first), until_base, sources.is_readable)
    return clip(until(sealed, base.last, parsed(base.end)), last, end, Account())


def _by_given_up(ledger: LedgerAccount, after: int, start: Positions, account: Account) -> tuple[_Spans, _Spans]:
    """The source ranges of batches that gave up records, and of those that gave up none.

    Args:
        after, start, account: the batch before them, where it ends in the source, and the ledger's totals after it.
    """
    gave_up: list[BatchRange] = []
    others: list[BatchRange] = []
    for (batch, text), total in zip(ledger.ends, ledger.history.accounts, strict=False):
        if batch > after:
            end, gives_up = parsed(text), total.given_up.count > account.given_up.count
            (gave_up if gives_up else others).append(BatchRange(batch, batch, start, end))
            start, account = end, total
    return join_adjacent(gave_up), join_adjacent(others)


def _may_lack(request: AuditRequest, start: Start, base: Seal) -> bool:
    """Whether sealed batches may have rows that were not in the sink: a copy may be the first one."""
    if start.behind or base.sink_end is None:  # what lies behind the position is accounted for otherwise
        return False
    return bool(base.unproved_until) or request.rejects or request.guarantee.may_lose


def written_otherwise(request: AuditRequest, scope: Scope, after: int = -1) -> str:
    """Why rows of batches after `after` may have been replaced, or not, otherwise than the sink writes now; empty: they
    were not."""
    batch, mode = read_modes(request.checkpoint).changed.get(scope.sink, (-1, ""))
    if batch <= after:
        return ""
    if not mode:
        return f"the pipeline did not have this sink up to batch {batch}, or for a time: it need not hold their rows"
    return (
        f"the sink wrote in another mode up to batch {batch} ({mode}; now {request.write_mode.says}): which rows of "
        "these batches it must hold is not known"
    )


def _why_incomparable(
    request: AuditRequest, read: SourceRange, unsure: str, earlier: Earlier | None, comparison: Comparison
) -> str | None:
    """Why source and sink cannot be compared at all; None: they can."""
    if (wrong := backwards(plain(read.start), plain(read.end or read.planned))) is not None:
        return f"the source range ends before it starts ({wrong}): {unsure or _START_WRONG}"
    if earlier is not None and (request.dedup is not None or request.write_mode.upserts):
        return (
            f"batches {earlier.batches} ran with another transform; the final row of a key depends on all batches, so "
            "this transform cannot recompute it"
        )
    if len(request.sources) > 1 and (beyond := comparison.combines()):
        return (
            f"the transform puts rows of several sources together ({', '.join(beyond)}): which of them met depends on "
            "watermarks and on where batches ended, so the sources alone do not say what the sink must hold"
        )
    return None

"""Account for every record of one sink: what is read in which order, what must be there, and the report. No Spark.

An audit may run while the pipeline runs, and after a crash. Decided batches must be in the sink; batches that started
later may be. For that to hold, the ledger is read first, then the sink, then the checkpoint: the sink is never newer
than what it is compared with.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.metadata import version

from delivered.audit.evidence import DedupCounts, read_ledger
from delivered.audit.judge import (
    Result,
    account_for_dedup,
    account_for_earlier,
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
    Earlier,
    Positions,
    SourceRange,
    SourceSet,
    check_write_mode,
    find_earlier,
    id_sql,
    join_adjacent,
    parsed,
    plain,
    split_by_transform,
)
from delivered.checkpoint.folder import read_view
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Slice
from delivered.model.errors import DeliveredError, Refused
from delivered.model.identity import Scope
from delivered.source import backwards

_ERROR_LENGTH_MAX = 2_000
NOT_READABLE = "DELIVERED_NOT_READABLE"
"""Error code of a sink that cannot be read back at all."""

_START_WRONG = "the checkpoint sidecar records another start than that of its batch 0"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Ranges:
    """What is compared with the rows of a sink.

    Attributes:
        read: the source range from the first batch to the last one that started.
        must: the source ranges whose rows must be in the sink, in order.
        ends: (batch, its end) as far as the ledger keeps them, oldest first.
    """

    read: SourceRange
    must: Sequence[tuple[Positions, Positions]]
    ends: Sequence[tuple[int, Positions]]


@dataclass(frozen=True)
class Findings:
    """
    Attributes:
        ordered: source partition and order of each record are known.
        undeleted: of the unexpected records, those whose keys this pipeline deleted.
        unclear: of upserts, keys that are not judged; None: the sink does not keep one row per key.
        dedup: None: the pipeline has none.
        excluded: lost records for which the condition `own` is not true; it does not identify this pipeline's records.
    """

    result: Result
    ordered: bool = True
    undeleted: int = 0
    unclear: int | None = None
    dedup: DedupCounts | None = None
    excluded: int = 0


class Comparison(ABC):
    """Reads a sink and the sources of one audit, and compares their rows. Used by one thread."""

    sources: SourceSet

    @abstractmethod
    def read(self, slices: Sequence[Slice], expected: int) -> tuple[int, int]:
        """Read the sink, once, before `compare`: number of its rows, and how many of them belong to other writers.

        Args:
            slices: of its scan.
            expected: rows of the sources that they will be compared with, about.
        """

    @abstractmethod
    def compare(self, ranges: Ranges) -> Findings:
        """Classify every row of the sink and of these ranges.

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
    """
    started = time.monotonic()
    try:
        report = run()
    except BadExpression:
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
    """Account for every record."""
    mode = request.write_mode
    check_write_mode(mode, dedup=request.dedup is not None)
    if mode.upserts:
        request = replace(request, id=id_sql(mode), key=None)
    say("reading checkpoint and ledger")
    scope = Scope(request.pipeline, request.named_sink, read_view(request.checkpoint).incarnation)
    ledger = read_ledger(request.sink, scope, request.guarantee, request.decided_by, request.dead_letters)
    try:
        scan = request.sink.scan()
    except Refused as error:
        if error.code != NOT_READABLE:
            raise
        return report_of_ledger(request, ledger, reason(error))
    say("reading the sink")
    with comparing(request, scope, scan) as comparison:
        visible = ledger.visible
        # Before the checkpoint is read: no batch in the sink is newer than the checkpoint's latest.
        expected = visible.total.count if visible is not None else 0
        _, foreign = comparison.read(scan.slices(request.sink_from), expected)
        view = read_view(request.checkpoint)
        start, unsure = comparison.sources.start()
        read = SourceRange(start, parsed(visible.offsets) if visible is not None else None, parsed(view.offsets))
        ranges = split_by_transform(visible, start) if visible is not None else []
        current, earlier = find_earlier(ranges, request.transform_version)
        why = _why_incomparable(request, read, unsure, earlier, comparison)
        if why is not None:
            return replace(report_of_ledger(request, ledger, why), range_from=json.dumps(plain(start)))
        say("reading the source range and comparing")
        ends = [(batch, parsed(text)) for batch, text in ledger.ends]
        findings = comparison.compare(Ranges(read, join_adjacent(current), ends))
    if findings.excluded:
        unsure = unsure or (
            f"{request.own!r} is not true for {findings.excluded:,} records that this pipeline sent: it does not "
            "identify its records"
        )
    report = report_of_result(request, ledger, read, view.batch, findings.result, findings.ordered)
    report = replace(report, own=request.own or "", foreign=foreign, undeleted=findings.undeleted)
    if earlier is not None:
        report = replace(report, given_up=report.given_up - earlier.given_up.count)
        report = account_for_earlier(report, earlier, request.sink.capability().adds_columns)
    report = replace(report, unknowns=(*report.unknowns, *contradictions(report)))
    if unsure:
        report = replace(report, judged=False, unknowns=(unsure, *report.unknowns))
    if request.dedup is not None and findings.dedup is not None:
        report = account_for_dedup(report, request.dedup, findings.dedup)
    if findings.unclear is not None:
        report = account_for_upserts(report, mode, findings.unclear)
    if mode.conditional:
        report = account_for_skipped(report, mode, ledger)
    return judge(report, versions_known=bool(request.transform_version) and all(r.transform for r in current))


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

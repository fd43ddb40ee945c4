"""The outcome of an audit: from Spark's counts, or from the ledger alone if no comparison is possible. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from delivered.audit.classes import Counts, Fingerprints, PartitionLine, Sample
from delivered.audit.ledger import LedgerAccount
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest
from delivered.audit.sources import Positions, parsed, plain
from delivered.audit.versions import VersionRange
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.work import CheckpointView


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        null_ids: records whose id expression gave null; they are identified by their whole content instead.
        partitions_left_off: source partitions beyond `PARTITIONS_MAX`; they are in `counts`.
    """

    counts: Counts
    partitions: tuple[PartitionLine, ...]
    samples: tuple[Sample, ...]
    sent: Fingerprint
    delivered: Fingerprint
    null_ids: int
    partitions_left_off: int = 0


def of_result(
    request: AuditRequest,
    incarnation: str,
    ledger: LedgerAccount,
    view: CheckpointView,
    start: Positions,
    end: Positions | None,
    planned: Positions,
    result: Result,
    ordered: bool,
) -> AuditReport:
    visible = ledger.visible
    given_up = visible.given_up if visible is not None else Fingerprint()
    prints = Fingerprints(result.sent, visible.total if visible is not None else None, given_up, result.delivered)
    notes = list(ledger.notes)
    if planned != end:
        notes.append(f"batch {view.batch} began and is not decided; its records may be in the sink and need not be")
    if not ordered:
        notes.append("the transform moves rows between partitions: source partitions and order are not told")
    if result.null_ids:
        notes.append(f"{result.null_ids} records have no id; they are identified by their whole content")
    if result.partitions_left_off:
        notes.append(f"{result.partitions_left_off} more source partitions are in the totals alone")
    return AuditReport(
        pipeline=request.pipeline,
        sink=request.named_sink,
        guarantee=request.guarantee,
        incarnation=incarnation,
        range_from=json.dumps(plain(start)),
        range_to=json.dumps(plain(end)) if end is not None else "",
        counts=result.counts,
        given_up=given_up.count,
        partitions=result.partitions,
        samples=result.samples,
        fingerprints=prints,
        history=ledger.history,
        transactions=ledger.transactions,
        unknowns=tuple(_unknowns(request, ledger, result)),
        notes=tuple(notes),
        id_says=f"`{request.id}`" if request.id else "the whole record",
    )


def _unknowns(request: AuditRequest, ledger: LedgerAccount, result: Result) -> list[str]:
    reasons = []
    if ledger.visible is None:
        reasons.append("the ledger holds no decided batch of this checkpoint: nothing was promised yet")
    if request.guarantee is Guarantee.AT_MOST_ONCE and ledger.history.faults and result.counts.lost:
        reasons.append("the count of what was given up comes from a ledger whose batches do not follow each other")
    return reasons


def contradictions(report: AuditReport) -> list[str]:
    """Why the audit itself must be wrong, whatever the pipeline did."""
    reasons = []
    counts, prints = report.counts, report.fingerprints
    if not counts.adds_up:
        reasons.append(f"the audit contradicts itself: {counts} do not add up")
    clean = counts == Counts(sent=counts.sent, delivered=counts.sent, reordered=counts.reordered)
    if clean and prints is not None and prints.sent != prints.delivered:
        reasons.append("the audit contradicts itself: no record differs, and the fingerprints do")
    return reasons


def by_ledger(request: AuditRequest, incarnation: str, ledger: LedgerAccount, why: str) -> AuditReport:
    """If source and sink cannot be compared: the pipeline's own account, which proves nothing."""
    visible = ledger.visible
    total, given_up = (visible.total.count, visible.given_up.count) if visible is not None else (0, 0)
    note = f"the ledger says that {total:,} rows were delivered and {given_up:,} given up; nobody looked"
    return AuditReport(
        pipeline=request.pipeline,
        sink=request.named_sink,
        guarantee=request.guarantee,
        incarnation=incarnation,
        range_to=json.dumps(plain(parsed(visible.offsets))) if visible is not None else "",
        given_up=given_up,
        history=ledger.history,
        transactions=ledger.transactions,
        unknowns=(why,),
        notes=(*ledger.notes, note),
    )


def offsets_of(ranges: Sequence[VersionRange], start: Positions) -> list[tuple[Positions, Positions]]:
    """The ranges as offsets; adjacent ones are merged."""
    found: list[tuple[Positions, Positions]] = []
    for r in ranges:
        begin, end = parsed(r.start) if r.start else start, parsed(r.end)
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found

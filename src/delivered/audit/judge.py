"""What the counts of an audit prove, together with the ledger: from a job's result to the report. Pure.

A lost or duplicated record is sufficient evidence. One that matches nothing that was sent is not: another writer may
use the sink, or the source side may be recomputed with a transform other than the one that ran. The ledger's record of
what the tasks handed to the sink tells these apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from delivered.audit.caveats import Caveat
from delivered.audit.evidence import Counts, Damage, DedupCounts, Fingerprints, PartitionLine, Sample
from delivered.audit.ledger import LedgerAccount
from delivered.audit.ranges import Earlier, SourceRange, parsed, plain
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest
from delivered.model.capability import WriteMode
from delivered.model.dedup import Dedup
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee

NOBODY = "-"
"""The partition of records that were never sent."""


@dataclass(frozen=True)
class Result:
    """What a job counted.

    Attributes:
        null_ids: records whose id expression gave null; they are identified by all their columns instead.
        partitions_left_off: source partitions beyond `PARTITIONS_MAX`; they are in `counts`.
    """

    counts: Counts
    partitions: tuple[PartitionLine, ...] = ()
    samples: tuple[Sample, ...] = ()
    sent: Fingerprint = Fingerprint()
    delivered: Fingerprint = Fingerprint()
    null_ids: int = 0
    partitions_left_off: int = 0


def report_of_ledger(request: AuditRequest, ledger: LedgerAccount, why: str) -> AuditReport:
    """If source and sink cannot be compared: the pipeline's own account, which proves nothing."""
    visible = ledger.visible
    total, given_up = (visible.total.count, visible.given_up.count) if visible is not None else (0, 0)
    note = f"the ledger says that {total:,} rows were delivered and {given_up:,} given up; nobody looked"
    return AuditReport(
        pipeline=request.pipeline,
        sink=request.named_sink,
        guarantee=request.guarantee,
        incarnation=ledger.incarnation,
        range_to=json.dumps(plain(parsed(visible.offsets))) if visible is not None else "",
        given_up=given_up,
        history=ledger.history,
        transactions=ledger.transactions,
        unknowns=(why,),
        notes=(*ledger.notes, note),
    )


def report_of_result(
    request: AuditRequest, ledger: LedgerAccount, read: SourceRange, newest_batch: int, result: Result, ordered: bool
) -> AuditReport:
    """
    Args:
        newest_batch: that started, by the checkpoint.
        ordered: the source partition and the order of each record are known.
    """
    visible = ledger.visible
    given_up = visible.given_up if visible is not None else Fingerprint()
    notes, unknowns = list(ledger.notes), []
    if read.undecided is not None:
        notes.append(f"batch {newest_batch} started and is not decided; its records may be in the sink and need not be")
    if not ordered:
        notes.append("the transform moves rows between partitions: source partitions and order are not reported")
    if result.null_ids:
        notes.append(f"{result.null_ids} records have no id; they are identified by all their columns")
    if result.partitions_left_off:
        notes.append(f"{result.partitions_left_off} more source partitions are in the totals alone")
    if visible is None:
        unknowns.append("the ledger holds no decided batch of this checkpoint: nothing was promised yet")
    if request.guarantee is Guarantee.AT_MOST_ONCE and ledger.history.faults and result.counts.lost:
        unknowns.append("the count of what was given up comes from a ledger whose batches do not follow each other")
    return AuditReport(
        pipeline=request.pipeline,
        sink=request.named_sink,
        guarantee=request.guarantee,
        incarnation=ledger.incarnation,
        range_from=json.dumps(plain(read.start)),
        range_to=json.dumps(plain(read.end)) if read.end is not None else "",
        counts=result.counts,
        given_up=given_up.count,
        partitions=result.partitions,
        samples=result.samples,
        fingerprints=Fingerprints(
            result.sent, visible.total if visible is not None else None, given_up, result.delivered
        ),
        history=ledger.history,
        transactions=ledger.transactions,
        unknowns=tuple(unknowns),
        notes=tuple(notes),
        id_says=f"`{request.id}`" if request.id else "all columns",
    )


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


def judge(report: AuditReport, *, versions_known: bool) -> AuditReport:
    """The report, with what its counts cannot prove.

    Args:
        versions_known: every recomputed batch is known to have run with the transform used here.
    """
    counts = report.counts
    if report.handed_all and report.breaches:
        one_for_one = not counts.duplicated and counts.lost == counts.unexpected
        if not versions_known or one_for_one:
            why = (
                "the transform is not deterministic, or the source's records changed"
                if versions_known
                else "the ledger does not record which transform the batches ran with; it may not be this one"
            )
            unknown = (
                "the sink holds exactly what the tasks handed to it, by count and fingerprint, but the source, reread "
                f"through the transform, yields other records: {why}"
            )
            return replace(report, judged=False, unknowns=(*report.unknowns, unknown))
    unexplained = counts.unexpected - report.undeleted
    if not unexplained or report.all_own:
        return report
    unknown = (
        f"{unexplained:,} records match nothing that was sent, and the ledger does not account for them: possibly "
        "foreign. If others write to this sink, set audit: own to SQL that is true for this pipeline's records; if "
        "nobody else does, set own: 'true'"
    )
    return replace(report, unknowns=(*report.unknowns, unknown))


def account_for_earlier(report: AuditReport, earlier: Earlier, adds_columns: bool = False) -> AuditReport:
    """The report on a sink that also holds records of batches that cannot be recomputed.

    The ledger has their count and fingerprint. That many unmatched records are theirs; and since all others are known,
    the sink holds all of theirs if the sums agree.

    Args:
        adds_columns: the sink may have added columns since: then their rows have other fingerprints than the ledger's.
    """
    counts, handed = report.counts, earlier.handed.count
    unexpected = min(counts.unexpected, handed)
    # A record of theirs may equal a recomputed one: the source held it twice.
    repeated = min(counts.duplicated, handed - unexpected)
    theirs = unexpected + repeated
    counts = replace(
        counts, unexpected=counts.unexpected - unexpected, duplicated=counts.duplicated - repeated, earlier=theirs
    )
    prints = report.fingerprints
    if prints is not None:
        prints = replace(prints, sent=prints.sent + earlier.handed + earlier.given_up)
    clean = counts == Counts(counts.sent, counts.sent + theirs, reordered=counts.reordered, earlier=theirs)
    differs = clean and theirs == handed and prints is not None and prints.delivered != prints.sent
    explained = [d for d in (Damage.UNEXPECTED, Damage.DUPLICATED) if not counts.of(d)]
    evidence = "all of them by count and fingerprint" if clean and theirs == handed and not differs else "by count"
    reason = (
        f"batches {earlier.batches} ran with another transform and cannot be recomputed with this one. According to "
        f"the ledger, they handed {handed:,} records to the sink; it holds {theirs:,}, {evidence}"
    )
    if differs and adds_columns:
        differs = False
        reason += " alone: with mergeSchema, rows may have columns that the ledger's fingerprints lack"

    def without_theirs(line: PartitionLine) -> PartitionLine:
        if line.partition != NOBODY:
            return line
        own = min(unexpected, line.counts.unexpected)
        return replace(line, counts=replace(line.counts, unexpected=line.counts.unexpected - own, earlier=own))

    return replace(
        report,
        counts=counts,
        partitions=tuple(map(without_theirs, report.partitions)),
        samples=tuple(s for s in report.samples if s.damage not in explained),
        fingerprints=prints,
        earlier=replace(earlier, missing=handed - theirs, differs=differs),
        unknowns=(*report.unknowns, reason),
    )


def account_for_dedup(report: AuditReport, dedup: Dedup, counts: DedupCounts) -> AuditReport:
    """The report on a pipeline that drops the source's duplicates."""
    notes = [
        *report.notes,
        f"the pipeline drops repeats, {dedup.says}: of {counts.records:,} records in the source "
        f"{counts.deduplicated:,} repeat another one and must not be in the sink as well; source partitions "
        "and order are not reported",
    ]
    if counts.unclear and dedup.in_table:
        notes.append(
            f"{counts.unclear:,} keys may be in the sink as often as in the source, or less often: their records lie "
            f"further apart than {dedup.within}, or the first ones had expired before the last came"
        )
    elif counts.unclear:
        notes.append(
            f"{counts.unclear:,} keys may be in the sink as often as in the source, or less often, or not at all: "
            f"{counts.late:,} of them may have been dropped as late, the others' records lie further apart than "
            f"{dedup.within}"
        )
    if counts.unlike:
        notes.append(
            f"{counts.unlike:,} ids have copies that differ: that exactly one of them is there was checked, not which"
        )
    if counts.unlike_unclear:
        notes.append(f"{counts.unlike_unclear:,} ids have copies that the transform turns into more records or fewer")
    unknowns = report.unknowns
    if counts.records and not counts.judged:
        unknown = f"of none of the {counts.unclear:,} keys in the source it is certain that it must be in the sink"
        unknowns = (*unknowns, unknown)
    # Ledger and sink include uncertain records, the source does not.
    uncertain = counts.unclear or counts.unlike or counts.unlike_unclear
    prints = None if uncertain else report.fingerprints
    return replace(report, dedup=counts, notes=tuple(notes), unknowns=unknowns, fingerprints=prints)


def account_for_upserts(report: AuditReport, mode: WriteMode, unclear: int) -> AuditReport:
    """The report on a sink that keeps one row per key."""
    notes = [
        *report.notes,
        f"the sink keeps one row of each key ({mode.keys_text}): compared is the row with the greatest {mode.version} "
        "of the source range, without keys whose last row deletes; rows in between are in the ledger's total alone",
    ]
    if unclear:
        notes.append(f"{unclear} keys are not judged: deleted and perhaps brought back by an older row, or in progress")
    prints = report.fingerprints
    return replace(report, notes=tuple(notes), fingerprints=replace(prints, ledger=None) if prints else None)


def account_for_skipped(report: AuditReport, mode: WriteMode, ledger: LedgerAccount) -> AuditReport:
    """The report on a table that decides which rows are written: rows that it rejected are not lost.

    The counts come from the transactions that wrote the rows. They excuse that many differences, and no more.
    """
    if ledger.visible is None:
        return report
    counts, handed = report.counts, ledger.visible.total.count
    conflict, constraint = ledger.skipped.get("conflict", 0), ledger.skipped.get("constraint", 0)
    # With insert: keys of which no row was written. Such a key existed before, or violated a constraint.
    excused = max(counts.sent - (handed - conflict - constraint), 0) if mode.insert else constraint
    lost = min(counts.lost, constraint, excused)
    altered = min(counts.altered, excused - lost)
    note = f"the table allowed all but {conflict + constraint:,} rows, by the ledger: {conflict:,} conflicts, "
    notes = [f"{note}{constraint:,} broken constraints"]
    if mode.insert:
        notes.append(
            f"compared is the first row of each key ({mode.keys_text}); of keys in several source partitions, any"
        )
    if altered:
        notes.append(f"{altered:,} keys hold another row than was sent: it stood there before, by the ledger's count")
    if lost:
        notes.append(f"{lost:,} rows are missing because they broke a constraint, by the ledger's count")
    explained = {Damage.LOST: counts.lost == lost, Damage.ALTERED: counts.altered == altered}
    return replace(
        report,
        counts=replace(counts, sent=counts.sent - lost, lost=counts.lost - lost, altered=counts.altered - altered),
        samples=tuple(s for s in report.samples if not explained.get(s.damage)),
        notes=(*report.notes, *notes),
        fingerprints=None if lost or altered else report.fingerprints,
    )


def account_for_recompute(
    report: AuditReport,
    caveats: Iterable[Caveat],
    columns: Sequence[tuple[str, int]],
    identified: str,
    ran: str,
) -> AuditReport:
    """The report, with only the caveats that explain damage found.

    Args:
        columns: how many rows differ in a column.
        identified: what identifies a row.
        ran: how it was recomputed: "in 12 batches".
    """
    counts = report.counts
    weighty = [c for c in caveats if c.weighs(counts)]
    uncertain = tuple(damage for damage in Damage if any(damage in c.damage for c in weighty))
    notes = [*report.notes, f"recomputed {ran}; rows are compared by {identified}, with decimals compared exactly"]
    if columns:
        notes.append("rows differ in: " + ", ".join(f"{name} ({count:,})" for name, count in columns))
    unknowns = [*report.unknowns, *(f"a recomputation cannot tell: {c.why}" for c in weighty)]
    if counts.unexpected and not report.own and Damage.UNEXPECTED not in uncertain:
        unknowns.append(
            f"{counts.unexpected:,} rows have keys that the source does not yield: possibly foreign. If others write "
            "to this table, set audit: own to SQL that is true for this pipeline's rows; if nobody else does, set "
            "own: 'true'"
        )
    return replace(report, notes=tuple(notes), unknowns=tuple(unknowns), uncertain=uncertain)

"""What the counts of an audit prove, together with the ledger. Pure.

A lost or duplicated record is sufficient evidence. One that matches nothing that was sent is not: another writer may
use the sink, or the source side may be recomputed with a transform other than the one that ran. The ledger's record of
what the tasks handed to the sink tells these apart.
"""

from __future__ import annotations

from dataclasses import replace

from delivered.audit.classes import Counts, Damage, PartitionLine
from delivered.audit.report import AuditReport
from delivered.audit.versions import Earlier

NOBODY = "-"
"""The partition of records that were never sent."""


def judged(report: AuditReport, *, versions_known: bool) -> AuditReport:
    """The report, with what its counts cannot prove.

    Args:
        versions_known: every recomputed batch is known to have run with the transform used here.
    """
    counts = report.counts
    unknowns = list(report.unknowns)
    if report.handed_all and report.breaches:
        one_for_one = not counts.duplicated and counts.lost == counts.unexpected
        if not versions_known or one_for_one:
            why = (
                "the transform is not deterministic, or the source's records changed"
                if versions_known
                else "the ledger does not record which transform the batches ran with; it may not be this one"
            )
            unknowns.append(
                "the sink holds exactly what the tasks handed to it, by count and fingerprint, but the source, reread "
                f"through the transform, yields other records: {why}"
            )
            return replace(report, judged=False, unknowns=tuple(unknowns))
    unexplained = counts.unexpected - report.undeleted
    if unexplained and not report.all_own:
        unknowns.append(
            f"{unexplained:,} records match nothing that was sent, and the ledger does not account for them: "
            "possibly foreign. If others write to this sink, set audit: own to SQL that is true for this pipeline's "
            "records; if nobody else does, set own: 'true'"
        )
    return replace(report, unknowns=tuple(unknowns))


def with_earlier(report: AuditReport, earlier: Earlier, adds_columns: bool = False) -> AuditReport:
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
        counts,
        unexpected=counts.unexpected - unexpected,
        duplicated=counts.duplicated - repeated,
        earlier=theirs,
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
    return replace(
        report,
        counts=counts,
        partitions=tuple(_of_partition(line, unexpected) for line in report.partitions),
        samples=tuple(s for s in report.samples if s.damage not in explained),
        fingerprints=prints,
        earlier=replace(earlier, missing=handed - theirs, differs=differs),
        unknowns=(*report.unknowns, reason),
    )


def _of_partition(line: PartitionLine, theirs: int) -> PartitionLine:
    if line.partition != NOBODY:
        return line
    own = min(theirs, line.counts.unexpected)
    return replace(line, counts=replace(line.counts, unexpected=line.counts.unexpected - own, earlier=own))

"""Dedup in an audit: the source range cut where batches ended, and the report on the source's duplicates. Pure.

`delivered.audit.spark.dedup`, which queries Spark, explains what is certain about a key, and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from delivered.audit.classes import DedupCounts
from delivered.audit.report import AuditReport
from delivered.audit.sources import Positions, SourceSet
from delivered.contract.source import Slice
from delivered.model.dedup import Dedup

STRETCHES_MAX = 200
"""Maximum number of parts of the source range. With more batches, several are merged into one part."""


@dataclass(frozen=True)
class Stretch:
    """A part of the source range: what one batch read, or several batches as one."""

    start: Positions
    end: Positions
    several: bool


def stretches(start: Positions, ends: Sequence[tuple[int, Positions]], end: Positions) -> list[Stretch]:
    """The range cut where batches ended, at most `STRETCHES_MAX` of them.

    Args:
        ends: (batch, its end) as far as the ledger keeps them, oldest first.
    """
    found: list[Stretch] = []
    at, before = start, -1
    for batch, until in dict(ends).items():
        found.append(Stretch(at, until, several=batch > before + 1))
        at, before = until, batch
    if at != end:
        found.append(Stretch(at, end, several=True))
    size = math.ceil(len(found) / STRETCHES_MAX) or 1
    parts = [found[i : i + size] for i in range(0, len(found), size)]
    return [Stretch(p[0].start, p[-1].end, len(p) > 1 or p[0].several) for p in parts]


def cut(sources: SourceSet, parts: Sequence[Stretch]) -> tuple[list[Slice], list[int]]:
    """Slices of the source, and the number of the stretch that each belongs to."""
    slices: list[Slice] = []
    numbers: list[int] = []
    for number, part in enumerate(parts):
        pieces = sources.slices(part.start, part.end) if part.start != part.end else []
        slices += pieces
        numbers += [number] * len(pieces)
    return slices, numbers


def of_dedup(report: AuditReport, dedup: Dedup, counts: DedupCounts) -> AuditReport:
    """The report on a pipeline that drops the source's duplicates."""
    notes = [
        *report.notes,
        f"the pipeline drops repeats, {dedup.says}: of {counts.records:,} records in the source "
        f"{counts.deduplicated:,} repeat another one and must not be in the sink as well; source partitions "
        "and order are not told",
    ]
    if counts.unclear and dedup.in_table:
        notes.append(
            f"{counts.unclear:,} keys may be in the sink as often as in the source, or less often: their records lie "
            f"further apart than {dedup.within}, or the first ones were over before the last came"
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
        notes.append(f"{counts.unlike_unclear:,} ids have copies of which the transform makes more records or fewer")
    unknowns = list(report.unknowns)
    if counts.records and not counts.judged:
        unknowns.append(
            f"of none of the {counts.unclear:,} keys in the source it is certain that it must be in the sink"
        )
    prints = report.fingerprints
    if prints is not None and (counts.unclear or counts.unlike or counts.unlike_unclear):
        prints = None  # ledger and sink include uncertain records, the source does not
    return replace(report, dedup=counts, notes=tuple(notes), unknowns=tuple(unknowns), fingerprints=prints)

"""What one batch over the source range cannot show about a query that ran in many batches. Pure.

A query's result may depend on more than its input: on where its batches ended, on the clock, on the order of rows. Each
such dependency is a doubt, with the damage that it explains as well as a fault would. Damage that a doubt explains is
never a breach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from delivered.audit.classes import Damage
from delivered.audit.report import AuditReport
from delivered.model.capability import WriteMode

FLOAT_TOLERANCE = 1e-9
"""Relative: sums of floating-point numbers depend on the order of the rows. Decimals are compared exactly."""

ALL = (Damage.LOST, Damage.DUPLICATED, Damage.ALTERED, Damage.UNEXPECTED)
GONE = (Damage.LOST, Damage.ALTERED)

_EXACT = frozenset(
    {
        *("Aggregate", "CTERelationDef", "CTERelationRef", "Distinct", "EventTimeWatermark", "Expand", "Filter"),
        *("Generate", "MapInArrow", "MapInPandas", "Project", "PythonMapInArrow", "Sort", "StreamingRelationV2"),
        *("SubqueryAlias", "Union", "View", "WithCTE"),
    }
)
"""Operators whose result is the same in one batch and in many. Any other may differ."""
_CLOCK = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now|unix_timestamp)\s*\(", re.I)
_LINE = re.compile(r"^[\s:+~!'-]*([A-Za-z]\w*)")
"""An operator of a plan; ~ marks those over a stream."""
_ABOVE = ("Filter", "MapInArrow", "MapInPandas", "PythonMapInArrow", "Generate")


@dataclass(frozen=True)
class Recompute:
    """
    Attributes:
        output_mode: of the query.
        keys: columns that identify a row of the result; empty: unknown.
        changing: functions in the transform whose value changes between runs.
        deterministic: as declared; None: not declared.
    """

    output_mode: str
    keys: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    deterministic: bool | None = None


@dataclass(frozen=True)
class Doubt:
    """A reason why a batch may find `damage` where nothing is wrong."""

    why: str
    damage: tuple[Damage, ...] = ALL


def doubts(how: Recompute, plan: str, mode: WriteMode) -> list[Doubt]:
    """Doubts known before a row is read; how late records were is not.

    Args:
        plan: Spark's analyzed logical plan of the query, as text.
        mode: of the sink.
    """
    found: list[Doubt] = []
    names = operators(plan)
    if how.changing or how.deterministic is False:
        said = ", ".join(how.changing) or "a function declared deterministic: false"
        found.append(Doubt(f"the transform calls {said}, whose value changes between runs"))
    if clocks := sorted({c.lower() for c in _CLOCK.findall(plan)} - {c.rstrip("()") for c in how.changing}):
        found.append(Doubt(f"the transform calls {', '.join(c + '()' for c in clocks)}, which has another value now"))
    others = sorted(set(names) - _EXACT) if names else ["no operator that is known"]
    if others:
        found.append(
            Doubt(
                f"the transform's plan has {', '.join(others)}: what it gives depends on where batches end, on the "
                "order of rows, or on tables as they were then"
            )
        )
    if names.count("Aggregate") > 1:
        found.append(Doubt("the transform aggregates aggregates, batch by batch"))
    if how.output_mode == "update" and _filtered(names):
        found.append(
            Doubt(
                "rows are filtered after the aggregation: a key that no longer passes keeps its last row in the table",
                (Damage.UNEXPECTED,),
            )
        )
    if how.output_mode == "update" and mode.version is not None and not _counts(plan, mode.version):
        found.append(
            Doubt(
                f"a row replaces another one only if its {mode.version} is greater: of equal ones the first stays",
                (Damage.ALTERED,),
            )
        )
    return found


def operators(plan: str) -> list[str]:
    """The plan's operators, from the result down."""
    return [m.group(1) for line in plan.splitlines() if (m := _LINE.match(line)) and not line.startswith("==")]


def _filtered(names: Sequence[str]) -> bool:
    return "Aggregate" in names and any(n in _ABOVE for n in names[: names.index("Aggregate")])


def _counts(plan: str, column: str) -> bool:
    """Whether the column is a count(*), which grows with every row of its key."""
    return re.search(rf"\bcount\(1\) AS {re.escape(column)}#", plan) is not None


def of_recomputed(
    report: AuditReport, found: Iterable[Doubt], columns: Sequence[tuple[str, int]], identified: str
) -> AuditReport:
    """The report, with only the doubts that explain damage found.

    Args:
        columns: how many rows differ in a column.
        identified: what identifies a row.
    """
    counts = report.counts
    weighty = [d for d in found if any(counts.of(damage) for damage in d.damage)]
    uncertain = tuple(damage for damage in Damage if any(damage in d.damage for d in weighty))
    notes = [
        *report.notes,
        f"recomputed as one batch; rows are compared by {identified}, with decimals compared exactly",
    ]
    if columns:
        notes.append("rows differ in: " + ", ".join(f"{name} ({count:,})" for name, count in columns))
    unknowns = [*report.unknowns, *(f"a recomputation cannot tell: {d.why}" for d in weighty)]
    foreign = counts.unexpected and not report.own and Damage.UNEXPECTED not in uncertain
    if foreign:
        unknowns.append(
            f"{counts.unexpected:,} rows have keys that the source does not yield: possibly foreign. If others write "
            "to this table, set audit: own to SQL that is true for this pipeline's rows; if nobody else does, set "
            "own: 'true'"
        )
    return replace(report, notes=tuple(notes), unknowns=tuple(unknowns), uncertain=uncertain)

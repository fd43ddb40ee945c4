"""What a recomputation cannot show about a query that ran in many batches. Pure.

There are two ways. One batch over the whole source range is cheap, and gives what the query gave if its result
depends on the rows alone. A replay runs the transform as a stream again, in the batches that the ledger keeps. A result
may depend on more than either repeats: on the clock, on the order of rows, on tables as they were. Each such dependency
is a doubt, with the damage that it explains as well as a fault would. Damage that a doubt explains is never a breach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from delivered.audit.classes import Counts, Damage
from delivered.audit.report import AuditReport
from delivered.model.capability import OnConflict, WriteMode

FLOAT_TOLERANCE = 1e-9
"""Relative: sums of floating-point numbers depend on the order of the rows. Decimals are compared exactly."""

ALL = (Damage.LOST, Damage.DUPLICATED, Damage.ALTERED, Damage.UNEXPECTED)
GONE = (Damage.LOST, Damage.ALTERED)

_ONE_BATCH = frozenset(
    {
        *("Aggregate", "CTERelationDef", "CTERelationRef", "Distinct", "EventTimeWatermark", "Expand", "Filter"),
        *("Generate", "MapInArrow", "MapInPandas", "OneRowRelation", "Project", "PythonMapInArrow", "Range", "Sort"),
        *("StreamingRelationV2", "SubqueryAlias", "Union", "View", "WithCTE"),
    }
)
"""Operators whose result is the same in one batch and in many."""
_FUNCTIONS = frozenset(
    {
        *("FlatMapGroupsInPandasWithState", "FlatMapGroupsWithState", "TransformWithState"),
        "TransformWithStateInPySpark",
    }
)
_DEDUPS = frozenset({"Deduplicate", "DeduplicateWithinWatermark"})
_REPLAYED = _ONE_BATCH | _FUNCTIONS | _DEDUPS | {"Join", "LocalRelation", "Repartition", "RepartitionByExpression"}
"""Operators whose result is the same whenever the batches are."""
_TABLES = frozenset({"HiveTableRelation", "InMemoryRelation", "LocalRelation", "LogicalRDD", "Relation", "RelationV2"})
_CLOCK = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now)\s*\(", re.I)
_BY_ORDER = re.compile(
    r"\b(rand|randn|randstr|uuid|shuffle|monotonically_increasing_id|spark_partition_id|first|first_value|last|last_value|"
    r"any_value|collect_list|collect_set|listagg)\s*\(",
    re.I,
)
_LINE = re.compile(r"^[\s:+~!'-]*([A-Za-z]\w*)(.*)")
"""An operator of a plan; ~ marks those over a stream."""
_ABOVE = ("Filter", "MapInArrow", "MapInPandas", "PythonMapInArrow", "Generate")
_PROCESSING_TIME = re.compile(r"\bProcessingTime(Timeout)?\b")


class Way(Enum):
    ONE_BATCH = "one batch"
    REPLAY = "a replay"


@dataclass(frozen=True)
class Recompute:
    """
    Attributes:
        output_mode: of the query.
        keys: columns that identify a row of the result; empty: unknown.
        changing: functions in the transform whose value changes between runs.
        deterministic: as declared; None: not declared.
        sql: the transform is SQL: what it names by value is the same at every start.
    """

    output_mode: str
    keys: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    deterministic: bool | None = None
    sql: bool = False


@dataclass(frozen=True)
class Doubt:
    """A reason why a recomputation may find `damage` where nothing is wrong."""

    why: str
    damage: tuple[Damage, ...] = ALL
    always: bool = False
    """Also if no damage was found: the recomputation is not what ran."""

    def weighs(self, counts: Counts) -> bool:
        return self.always or any(counts.of(damage) for damage in self.damage)


def doubts(how: Recompute, plan: str, mode: WriteMode, way: Way) -> list[Doubt]:
    """Doubts known before a row is read.

    Args:
        plan: Spark's analyzed logical plan of the query, as text.
        mode: of the sink.
    """
    found = [*_of_values(how, plan), *_of_tables(how, plan), *_of_conditions(mode)]
    names, batches = operators(plan), way is Way.ONE_BATCH
    exact = _ONE_BATCH | ({"Join"} if _joins_everything(plan, names) else frozenset()) if batches else _REPLAYED
    others = sorted(set(names) - exact - _TABLES) if names else ["no operator that is known"]
    if others:
        depends = "on where batches ended" if batches else "on more than its input"
        found.append(Doubt(f"the transform's plan has {', '.join(others)}: what it gives depends {depends}"))
    if not batches:
        if _FUNCTIONS.intersection(names) and how.deterministic is not True:
            found.append(
                Doubt(
                    "a function with state may depend on the order of a key's rows within a batch; if this one does "
                    "not, declare deterministic: true"
                )
            )
        return found
    if names.count("Aggregate") > 1:
        found.append(Doubt("the transform aggregates aggregates, batch by batch"))
    if how.output_mode == "update" and not mode.upserts:
        found.append(Doubt("each batch delivers the rows that it changed"))
    if mode.expected is not None:
        found.append(Doubt(f"a row is written only if the stored row has its {mode.expected} at that moment"))
    if mode.replaces:
        found.append(Doubt(f"each batch replaces the rows of its values in {', '.join(mode.replaces)}"))
    if how.output_mode == "update" and _filtered(names):
        found.append(
            Doubt(
                "rows are filtered after the aggregation: a key that no longer passes keeps its last row in the table",
                (Damage.UNEXPECTED,),
            )
        )
    greatest = mode.version if mode.expected is None else None
    if how.output_mode == "update" and greatest is not None and not _counts(plan, greatest):
        found.append(
            Doubt(
                f"a row replaces another one only if its {greatest} is greater: of equal ones the first stays",
                (Damage.ALTERED,),
            )
        )
    return found


def _of_values(how: Recompute, plan: str) -> list[Doubt]:
    found: list[Doubt] = []
    if how.changing or how.deterministic is False:
        calls = ", ".join(how.changing) or "a function declared deterministic: false"
        found.append(Doubt(f"the transform calls {calls}, whose value changes between runs"))
    known = {c.rstrip("()") for c in how.changing}
    if how.deterministic is None and (by_order := sorted({c.lower() for c in _BY_ORDER.findall(plan)} - known)):
        called = ", ".join(f"{c}()" for c in by_order)
        found.append(Doubt(f"the transform calls {called}, whose value changes between runs"))
    if clocks := sorted({c.lower() for c in _CLOCK.findall(plan)} - known):
        found.append(Doubt(f"the transform calls {', '.join(c + '()' for c in clocks)}, which has another value now"))
    if _PROCESSING_TIME.search(plan):
        found.append(Doubt("timers of processing time fire at another time now"))
    return found


def _of_tables(how: Recompute, plan: str) -> list[Doubt]:
    tables = {m[1] for m in _lines(plan) if m[1] in _TABLES and "<empty>" not in m[2]}
    if not tables - ({"LocalRelation"} if how.sql else set()):
        return []
    return [Doubt("the transform reads a table that is not a stream: it may have held other rows when the batches ran")]


def _of_conditions(mode: WriteMode) -> list[Doubt]:
    found: list[Doubt] = []
    if mode.insert:
        found.append(Doubt("a row that stood in the table before stays", (Damage.ALTERED,)))
    if mode.on_constraint is not OnConflict.FAIL:
        found.append(Doubt("rows that broke a constraint are not written", GONE))
    return found


def _lines(plan: str) -> list[re.Match[str]]:
    return [m for line in plan.splitlines() if (m := _LINE.match(line)) and not line.startswith("==")]


def operators(plan: str) -> list[str]:
    """The plan's operators, from the result down."""
    return [m[1] for m in _lines(plan)]


def _joins_everything(plan: str, names: Sequence[str]) -> bool:
    """Whether joins find each pair of rows, whenever these came."""
    kinds = {m[2].split(",")[0].strip() for m in _lines(plan) if m[1] == "Join"}
    return kinds <= {"Inner", "Cross"} and "EventTimeWatermark" not in names


def keeps_first(plan: str) -> bool:
    """Whether of several rows the first one stays."""
    return not _DEDUPS.isdisjoint(operators(plan))


def _filtered(names: Sequence[str]) -> bool:
    return "Aggregate" in names and any(n in _ABOVE for n in names[: names.index("Aggregate")])


def _counts(plan: str, column: str) -> bool:
    """Whether the column is a count(*), which grows with every row of its key."""
    return re.search(rf"\bcount\(1\) AS {re.escape(column)}#", plan) is not None


def of_recomputed(
    report: AuditReport,
    found: Iterable[Doubt],
    columns: Sequence[tuple[str, int]],
    identified: str,
    ran: str,
) -> AuditReport:
    """The report, with only the doubts that explain damage found.

    Args:
        columns: how many rows differ in a column.
        identified: what identifies a row.
        ran: how it was recomputed: "in 12 batches".
    """
    counts = report.counts
    weighty = [d for d in found if d.weighs(counts)]
    uncertain = tuple(damage for damage in Damage if any(damage in d.damage for d in weighty))
    notes = [
        *report.notes,
        f"recomputed {ran}; rows are compared by {identified}, with decimals compared exactly",
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

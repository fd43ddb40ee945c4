"""What a recomputation cannot show about a query that ran in many batches. Pure.

There are two methods. One batch over the complete source range is cheap, and gives what the query gave if its result
depends on the rows alone. A replay runs the transform as a stream again, in the batches that the ledger keeps. A result
may depend on more than either repeats: the clock, the order of rows, tables as they were. Each such dependency is a
caveat, with the damage that it explains as well as a fault would. Damage that a caveat explains is never a breach.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from delivered.audit.evidence import Counts, Damage
from delivered.audit.request import Recompute
from delivered.model.capability import OnConflict, WriteMode

ALL = (Damage.LOST, Damage.DUPLICATED, Damage.ALTERED, Damage.UNEXPECTED)
MISSING = (Damage.LOST, Damage.ALTERED)

_ONE_BATCH = frozenset(
    {
        *("Aggregate", "CTERelationDef", "CTERelationRef", "Distinct", "EventTimeWatermark", "Expand", "Filter"),
        *("Generate", "MapInArrow", "MapInPandas", "OneRowRelation", "Project", "PythonMapInArrow", "Range", "Sort"),
        *("StreamingRelationV2", "SubqueryAlias", "Union", "View", "WithCTE"),
    }
)
"""Operators whose result is the same in one batch and in many."""
_FUNCTIONS = frozenset(
    ("FlatMapGroupsInPandasWithState", "FlatMapGroupsWithState", "TransformWithState", "TransformWithStateInPySpark")
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


class Method(Enum):
    ONE_BATCH = "one batch"
    REPLAY = "a replay"


@dataclass(frozen=True)
class Caveat:
    """A reason why a recomputation may find `damage` where nothing is wrong."""

    why: str
    damage: tuple[Damage, ...] = ALL
    always: bool = False
    """Also if no damage was found: the recomputation is not what ran."""

    def weighs(self, counts: Counts) -> bool:
        return self.always or any(counts.of(damage) for damage in self.damage)


def find_caveats(how: Recompute, plan: str, mode: WriteMode, method: Method) -> list[Caveat]:
    """Caveats known before a row is read.

    Args:
        plan: Spark's analyzed logical plan of the query, as text.
        mode: of the sink.
    """
    by_method = _of_one_batch if method is Method.ONE_BATCH else _of_replay
    return [*_of_values(how, plan), *_of_tables(how, plan), *_of_conditions(mode), *by_method(how, plan, mode)]


def _of_values(how: Recompute, plan: str) -> Iterator[Caveat]:
    if how.changing or how.deterministic is False:
        calls = ", ".join(how.changing) or "a function declared deterministic: false"
        yield Caveat(f"the transform calls {calls}, whose value changes between runs")
    known = {c.rstrip("()") for c in how.changing}
    if how.deterministic is None and (by_order := sorted({c.lower() for c in _BY_ORDER.findall(plan)} - known)):
        called = ", ".join(f"{c}()" for c in by_order)
        yield Caveat(f"the transform calls {called}, whose value changes between runs")
    if clocks := sorted({c.lower() for c in _CLOCK.findall(plan)} - known):
        yield Caveat(f"the transform calls {', '.join(c + '()' for c in clocks)}, which has another value now")
    if _PROCESSING_TIME.search(plan):
        yield Caveat("timers of processing time fire at another time now")


def _of_tables(how: Recompute, plan: str) -> Iterator[Caveat]:
    tables = {m[1] for m in _lines(plan) if m[1] in _TABLES and "<empty>" not in m[2]}
    if tables - ({"LocalRelation"} if how.sql else set()):
        yield Caveat(
            "the transform reads a table that is not a stream: it may have held other rows when the batches ran"
        )


def _of_conditions(mode: WriteMode) -> Iterator[Caveat]:
    if mode.insert:
        yield Caveat("a row that stood in the table before stays", (Damage.ALTERED,))
    if mode.on_constraint is not OnConflict.FAIL:
        yield Caveat("rows that broke a constraint are not written", MISSING)


def _of_operators(plan: str, exact: frozenset[str], depends: str) -> Iterator[Caveat]:
    names = operators(plan)
    others = sorted(set(names) - exact - _TABLES) if names else ["no operator that is known"]
    if others:
        yield Caveat(f"the transform's plan has {', '.join(others)}: what it gives depends {depends}")


def _of_replay(how: Recompute, plan: str, mode: WriteMode) -> Iterator[Caveat]:  # noqa: ARG001  (as _of_one_batch)
    yield from _of_operators(plan, _REPLAYED, "on more than its input")
    if not _FUNCTIONS.isdisjoint(operators(plan)) and how.deterministic is not True:
        yield Caveat(
            "a function with state may depend on the order of a key's rows within a batch; if this one does not, "
            "declare deterministic: true"
        )


def _of_one_batch(how: Recompute, plan: str, mode: WriteMode) -> Iterator[Caveat]:
    names, update = operators(plan), how.output_mode == "update"
    joins = {"Join"} if _joins_everything(plan, names) else set()
    yield from _of_operators(plan, _ONE_BATCH | joins, "on where batches ended")
    if names.count("Aggregate") > 1:
        yield Caveat("the transform aggregates aggregates, batch by batch")
    if update and not mode.upserts:
        yield Caveat("each batch delivers the rows that it changed")
    if mode.expected is not None:
        yield Caveat(f"a row is written only if the stored row has its {mode.expected} at that moment")
    if mode.replaces:
        yield Caveat(f"each batch replaces the rows of its values in {', '.join(mode.replaces)}")
    if update and "Aggregate" in names and any(n in _ABOVE for n in names[: names.index("Aggregate")]):
        yield Caveat(
            "rows are filtered after the aggregation: a key that no longer passes keeps its last row in the table",
            (Damage.UNEXPECTED,),
        )
    greatest = mode.version if mode.expected is None else None
    # A count(*) grows with every row of its key.
    if update and greatest is not None and not re.search(rf"\bcount\(1\) AS {re.escape(greatest)}#", plan):
        yield Caveat(
            f"a row replaces another one only if its {greatest} is greater: of equal ones the first stays",
            (Damage.ALTERED,),
        )


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

"""Audit by recomputing: the transform over the whole source range, against the rows of the sink.

As one batch, if that gives what the query's batches gave; else, and if the two differ, as a replay of its batches
(`delivered.audit.spark.replay`). `delivered.audit.recompute` lists what neither can show. Rows are joined by key, and
compared column by column. Conditional writes (`expectedVersion`) are judged in order of arrival: which rows met the
version that they expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.window import Window

from delivered.audit.ledger import LedgerAccount, read_ledger
from delivered.audit.outcome import Result, by_ledger, of_result
from delivered.audit.recompute import (
    ALL,
    GONE,
    Doubt,
    Way,
    keeps_first,
    of_recomputed,
    operators,
)
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest
from delivered.audit.sources import Positions, parsed
from delivered.audit.spark.compared import compared
from delivered.audit.spark.doubts import Query, closed, of_copies, of_watermark, recorded
from delivered.audit.spark.replay import AT, BATCH, Script, replayed
from delivered.audit.spark.sent import expressions, final_state, sent_range
from delivered.audit.versions import earlier, version_ranges
from delivered.checkpoint.folder import read_view
from delivered.kits.sql.merge import CONFLICT
from delivered.model.capability import WriteMode
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import SOURCE, Scope
from delivered.model.ranges import backquoted
from delivered.spark.frames import keeps_partitions, kept_plain, logical_plan, shuffles_fit_for, slice_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column, DataFrame, SparkSession


_COPY, _RANK, _UNLIKE = (f"__delivered_{n}" for n in ("copy", "rank", "unlike"))
_TRIES = 3
_UNDECIDED = "the ledger holds no decided batch of this checkpoint: nothing was promised yet"
_DEDUP = "dedup drops repeats batch by batch, and a recomputation is one batch; audit without --recompute"


@dataclass(frozen=True)
class _Expected:
    """Recomputed rows that must be in the sink.

    Attributes:
        ran: how, for the report.
        doubts: about this way.
        further: doubts that take a job to find: only asked for if there is damage.
    """

    rows: DataFrame
    ran: str
    doubts: Sequence[Doubt]
    further: Callable[[], Sequence[Doubt]]


def recomputed(spark: SparkSession, request: AuditRequest, say: Callable[[str], None]) -> AuditReport:
    """Recompute the rows of all decided batches, and compare them with the sink's."""
    how, mode = request.recompute, request.sink.capability().write
    if how is None:
        raise DeliveredError(
            "AUDIT_RECOMPUTE",
            "The request is for an audit that accounts for records.",
            next_step="leave recompute out, or declare a result that can be recomputed: docs/audit.md#recompute",
        )
    scope = Scope(request.pipeline, request.named_sink, read_view(request.checkpoint).incarnation)
    scan = request.sink.scan()
    with sent_range(request) as sent, kept_plain(spark), ExitStack() as held:
        say("reading the sink and the ledger")
        ledger, found, rows = held.enter_context(
            _still(request, scope, lambda: slice_frame(spark, scan, scan.slices(request.sink_from)))
        )
        visible = ledger.visible
        if visible is None or request.dedup is not None:
            return by_ledger(request, scope.incarnation, ledger, _UNDECIDED if visible is None else _DEDUP)
        view = read_view(request.checkpoint)
        start, unsure = sent.start()
        end, planned = _named(parsed(visible.offsets), request), _named(parsed(view.offsets), request)
        ends = [(batch, _named(parsed(text), request)) for batch, text in ledger.ends]
        stream = sent.query(spark)
        query = Query(
            request, how, mode, sent, stream, logical_plan(stream), start, end, ends, visible, ledger.left_out
        )
        script, impossible = _script(query)
        ways = _ways(spark, query, script, say)
        if not ways:
            return by_ledger(request, scope.incarnation, ledger, f"its batches cannot be replayed: {impossible}")
        held.enter_context(shuffles_fit_for(spark, rows + visible.total.count))
        stored, foreign = _own(found, request)
        found_doubts, replay = _of_ledger(request, ledger, unsure, planned != end), query.doubts(Way.REPLAY)
        for number, way in enumerate(ways, 1):
            with way() as expected, compared(request, how, mode, expected.rows, stored) as (both, says):
                counts, columns = both.counts()
                mistaken = [*expected.doubts, *(expected.further() if counts.damaged else ())]
                last = number == len(ways) or not any(d.weighs(counts) and d not in replay for d in mistaken)
                if last:
                    samples = both.samples(counts, request.samples_max)
            if last:
                break
        if script is None and any(d.weighs(counts) for d in mistaken):
            mistaken.append(Doubt(f"its batches cannot be replayed: {impossible}"))
    nothing = Fingerprint()
    result = Result(counts, (), samples, nothing, nothing, 0)
    report = of_result(request, scope.incarnation, ledger, view, start, end, planned, result, ordered=True)
    own = request.own or ("true" if mode.complete else "")
    report = replace(report, fingerprints=None, id_says=says, own=own, foreign=foreign)
    return of_recomputed(report, [*found_doubts, *mistaken], columns, says, expected.ran)


def _named(positions: Positions, request: AuditRequest) -> Positions:
    """Offsets by the pipeline's names. A stream joined with itself is several sources to Spark, which read the same."""
    read = list(positions.values())
    if list(request.sources) == [SOURCE] and SOURCE not in positions and all(p == read[0] for p in read):
        return {SOURCE: read[0]}
    return positions


def _script(query: Query) -> tuple[Script | None, str]:
    """The batches to replay; or None, and why they cannot be."""
    names = set(query.request.sources)
    for batch, end in query.ends:
        if end.keys() != names:
            return None, f"batch {batch} read the sources {', '.join(end)}, and the pipeline has {', '.join(names)}"
    if not query.ends:
        return None, "the ledger holds none of them"
    return Script(query.start, [end for _, end in query.ends], [batch for batch, _ in query.ends]), ""


def _ways(
    spark: SparkSession, query: Query, script: Script | None, say: Callable[[str], None]
) -> list[Callable[[], AbstractContextManager[_Expected]]]:
    """The cheap way first, unless it cannot tell anything; then the exact one."""
    replay = query.doubts(Way.REPLAY)
    found: list[Callable[[], AbstractContextManager[_Expected]]] = []
    if not any(d.damage == ALL and d not in replay for d in query.doubts(Way.ONE_BATCH)):
        found.append(partial(_one_batch, spark, query, say))
    if script is not None:
        found.append(partial(_replay, spark, query, script, say))
    return found


@contextmanager
def _one_batch(spark: SparkSession, query: Query, say: Callable[[str], None]) -> Iterator[_Expected]:
    say("recomputing the source range as one batch and comparing")
    how, mode, parts = query.how, query.mode, query.parts
    slices, numbers = query.sent.cut(parts)
    with recorded("withWatermark") as calls:
        frame = query.sent.frame(spark, slices)
    found, names = query.doubts(Way.ONE_BATCH), operators(query.plan)
    complete = closed(query) if how.output_mode == "append" else None
    if complete is not None:
        frame = frame.where(complete)
    elif how.output_mode == "append" and "Aggregate" in names:
        found.append(Doubt("rows that the watermark has not closed are not delivered yet", GONE))
    single = numbers if len(query.request.sources) == 1 else ()
    further: list[Callable[[], Sequence[Doubt]]] = [partial(of_watermark, calls, single, parts, query)]
    rows = frame
    if mode.upserts and mode.version is not None:
        state = final_state(frame, mode, None)
        rows = state.rows
        if mode.delete is not None:
            further.append(partial(_if_any, state.unclear, _BACK))
    elif mode.upserts:
        if how.output_mode == "append" or "Aggregate" not in names:
            twice = frame.groupBy(*map(backquoted, mode.keys)).count().where("count > 1")
            further.append(partial(_if_any, twice, _several(mode)))
        rows = _without_deleted(frame, mode)
    yield _Expected(rows, "as one batch", found, lambda: [d for each in further for d in each()])


@contextmanager
def _replay(spark: SparkSession, query: Query, script: Script, say: Callable[[str], None]) -> Iterator[_Expected]:
    count, first = len(script.ends), script.batches[0]
    say(f"replaying {count:,} batches and comparing")
    request, found = query.request, query.doubts(Way.REPLAY)
    if first > 0:
        found.append(
            Doubt(f"the ledger no longer keeps batches 0 to {first - 1}, which were replayed together with {first}")
        )
    several, at = operators(query.plan).count("EventTimeWatermark") > 1, request.checkpoint
    run = replayed(spark, query.sent.transformed, request.sources, at, script, query.how.output_mode, several, say)
    with run as (frame, differs):
        if differs:
            found.append(Doubt(differs))
        if query.mode.expected is not None:
            rows, unmet, unclear = met(spark, frame, query)
            found += unmet
            why = _several(query.mode)
        else:
            rows, unclear, why = _last(frame.drop(AT), query.mode)
        further = [*([partial(_if_any, unclear, why)] if unclear is not None else [])]
        if keeps_first(query.plan):
            further.append(partial(of_copies, spark, query))
        yield _Expected(
            rows, f"in the ledger's {count:,} batches", found, lambda: [d for each in further for d in each()]
        )


_BACK = Doubt("a deleted key comes back with an older version, depending on the order of batches")


def _several(mode: WriteMode) -> Doubt:
    return Doubt(f"several rows have the same {mode.keys_text}, and the last one by arrival stays")


def _if_any(rows: DataFrame, doubt: Doubt) -> list[Doubt]:
    return [doubt] if rows.take(1) else []


def _without_deleted(frame: DataFrame, mode: WriteMode) -> DataFrame:
    if mode.delete is None:
        return frame
    gone = F.coalesce(F.col(backquoted(mode.delete)), F.lit(False))
    return frame.where(~gone).drop(mode.delete)


def _last(frame: DataFrame, mode: WriteMode) -> tuple[DataFrame, DataFrame | None, Doubt]:
    """Of rows with the number of their batch, those that stay; and rows whose order within a batch would decide."""
    rows, doubt = frame.drop(BATCH), _several(mode)
    if mode.replaces:
        newest = Window.partitionBy(*map(backquoted, mode.replaces))
        kept = frame.withColumn(_COPY, F.max(BATCH).over(newest)).where(F.col(BATCH) == F.col(_COPY))
        return kept.drop(BATCH, _COPY), None, doubt
    if not mode.upserts:
        return rows, None, doubt
    if mode.version is not None and mode.delete is not None:
        state = final_state(rows, mode, None)
        return state.rows, state.unclear, _BACK
    order = [F.col(BATCH).asc() if mode.insert else F.col(BATCH).desc()]
    if mode.version is not None:  # of equal ones the first stays
        order = [F.col(backquoted(mode.version)).desc(), F.col(BATCH).asc()]
    keys = [*map(backquoted, mode.keys)]
    by_key = Window.partitionBy(*keys).orderBy(*order)
    best = frame.withColumns({_COPY: F.row_number().over(by_key), _RANK: F.rank().over(by_key)}).where(f"{_RANK} = 1")
    row = F.xxhash64(F.to_json(F.struct(*map(backquoted, rows.columns))))
    unclear = best.groupBy(*keys).agg((F.min(row) != F.max(row)).alias(_UNLIKE)).where(_UNLIKE)
    kept = best.where(f"{_COPY} = 1").drop(BATCH, _COPY, _RANK)
    return _without_deleted(kept, mode), unclear, doubt


@contextmanager
def _still(
    request: AuditRequest, scope: Scope, frame: Callable[[], DataFrame]
) -> Iterator[tuple[LedgerAccount, DataFrame, int]]:
    """The sink's persisted rows, with a ledger that did not change while they were read; and their number."""
    for _ in range(_TRIES):
        before = read_ledger(request.sink, scope, request.guarantee, request.decided_by, request.dead_letters)
        found = frame().persist(StorageLevel.DISK_ONLY)
        try:
            rows = found.count()
            after = read_ledger(request.sink, scope, request.guarantee, request.decided_by, request.dead_letters)
            if before.visible == after.visible:
                yield after, found, rows
                return
        finally:
            found.unpersist()
    raise DeliveredError(
        "AUDIT_MOVING",
        f"The pipeline decided a batch during each of {_TRIES} reads of the sink, whose rows replace each other.",
        next_step="stop the pipeline, or audit it while its source is quiet",
    )


def _own(found: DataFrame, request: AuditRequest) -> tuple[DataFrame, int]:
    """This pipeline's rows, and how many belong to other writers."""
    if request.own is None:
        return found, 0
    with expressions(request):
        own = F.coalesce(F.expr(request.own).cast("boolean"), F.lit(False))
        return found.where(own), found.where(~own).count()


def _of_ledger(request: AuditRequest, ledger: LedgerAccount, unsure: str, underway: bool) -> list[Doubt]:
    found: list[Doubt] = []
    visible = ledger.visible
    if visible is None:
        return found
    if unsure:
        found.append(Doubt(unsure))
    if ledger.history.last is not None and ledger.history.last.batch != visible.batch:
        found.append(Doubt(f"batch {ledger.history.last.batch} is decided, and not all of its rows are visible yet"))
    elif underway and request.guarantee is not Guarantee.EXACTLY_ONCE:
        found.append(Doubt("a batch began and is not decided; some of its rows may be in the sink"))
    if visible.given_up.count:
        found.append(Doubt(f"{visible.given_up.count:,} rows were given up ({request.guarantee.value})", GONE))
    _, others = earlier(version_ranges(visible), request.transform_version)
    if others is not None:
        found.append(Doubt(f"batches {others.batches} ran with another transform"))
    return found


_HELD, _MISSED, _WAS, _NOW = (f"__delivered_{n}" for n in ("held", "missed", "was", "now"))


def met(spark: SparkSession, frame: DataFrame, query: Query) -> tuple[DataFrame, list[Doubt], DataFrame | None]:
    """What a table that was empty holds after all batches.

    The ledger counts the rows that missed their version. If the recomputation counts none and neither does the ledger,
    every row was written, whatever others did to the table.

    Args:
        frame: rows with their places.

    Returns:
        the rows, doubts about them, and keys whose rows may have come in another order; None: there are none.
    """
    mode, name = query.mode, str(query.mode.expected)
    keys = [*map(backquoted, mode.keys)]
    version = F.col(backquoted(str(mode.version)))
    kind = frame.schema[str(mode.version)].dataType
    row = F.struct(BATCH, AT, F.col(backquoted(name)).cast(kind).alias(_WAS), version.alias(_NOW))
    empty = _state(F.lit(None).cast(kind), F.lit(None).cast("int"), F.lit(None).cast("bigint"), F.lit(0))
    held = F.aggregate(F.array_sort(F.collect_list(row)), empty, _after).alias(_HELD)
    by_key = frame.groupBy(*keys).agg(held).select(f"{_HELD}.*")
    missed = int(by_key.agg(F.coalesce(F.sum(_MISSED), F.lit(0))).collect()[0][0])
    rows = frame.join(by_key.where(F.col(BATCH).isNotNull()).select(BATCH, AT), [BATCH, AT]).drop(BATCH, AT, name)
    counted, found = query.left_out.get(CONFLICT, 0), []
    if counted != missed:
        found.append(
            Doubt(
                f"the ledger counts {counted:,} rows that did not find their {name} in the table, the recomputation "
                f"{missed:,}: others wrote to the table, or it held rows before",
                always=True,
            )
        )
    elif counted:
        found.append(Doubt(f"{counted:,} rows did not find their {name} in the table: others may have written to it"))
    several = frame.groupBy(*keys, BATCH).count().where("count > 1")
    slices, _ = query.sent.cut(query.parts)
    return rows, found, None if keeps_partitions(query.sent.frame(spark, slices)) else several


def _state(now: Column, batch: Column, at: Column, missed: Column) -> Column:
    """The version that stands, the place of its row (null: no row), and how many rows missed theirs."""
    return F.struct(now.alias(_NOW), batch.alias(BATCH), at.alias(AT), missed.alias(_MISSED))


def _after(held: Column, row: Column) -> Column:
    found = F.coalesce(held[_NOW] == row[_WAS], F.lit(False))
    return F.when(
        F.when(row[_WAS].isNull(), held[BATCH].isNull()).otherwise(found),
        _state(row[_NOW], row[BATCH], row[AT], held[_MISSED]),
    ).otherwise(_state(held[_NOW], held[BATCH], held[AT], held[_MISSED] + 1))

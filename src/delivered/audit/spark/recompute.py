"""Audit by recomputing: the transform over the complete source range, against the rows of the sink.

As one batch, if that gives what the query's batches gave; else, and if the two differ, as a replay of its batches
(`delivered.audit.spark.replay`). `delivered.audit.judge` lists what neither can show, and `_of_watermark` and
`_of_copies` what takes a job to find. Rows are joined by key, and compared column by column. Conditional writes
(`expectedVersion`) are judged in order of arrival: which rows found the version that they expect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.types import DecimalType, DoubleType, FloatType, StructType, TimestampType
from pyspark.sql.window import Window

from delivered.audit.account import written_otherwise
from delivered.audit.continuation import Cut
from delivered.audit.evidence import Counts, Damage, LedgerAccount, Sample, count_open
from delivered.audit.judge import (
    ALL,
    MISSING,
    Caveat,
    Method,
    Result,
    account_for_dead_letters,
    account_for_recompute,
    find_caveats,
    keeps_first,
    operators,
    report_of_ledger,
    report_of_result,
)
from delivered.audit.report import AuditReport
from delivered.audit.request import (
    AuditRequest,
    BatchRange,
    KeyCheck,
    Positions,
    Recompute,
    SourceRange,
    as_text,
    find_earlier,
    id_sql,
    parsed,
    split_by_batch,
    split_by_transform,
)
from delivered.audit.sealing import Seals, read_account, unchanged_cut, why_read_again
from delivered.audit.spark.reconcile import by_partition
from delivered.audit.spark.replay import AT, BATCH, Script, replay
from delivered.audit.spark.slices import keeps_partitions, kept_plain, shuffles_fit_for, slice_frame
from delivered.audit.spark.source import (
    FROM_SOURCE,
    SentRows,
    SharedKeys,
    expressions,
    final_state,
    record_columns,
    shared_keys,
)
from delivered.checkpoint import batch_metadata, read_view
from delivered.contract.sink import BoundedScan
from delivered.kits.sql.merge import CONFLICT
from delivered.model.capability import Guarantee, WriteMode
from delivered.model.errors import DeliveredError
from delivered.model.identity import SOURCE, Scope
from delivered.model.rows import backquoted
from delivered.model.work import Decision
from delivered.spark.internals import EVENT_TIME, WINDOW_END, frame_class, from_arrow, logical_plan

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


_COPY, _RANK, _DIFFERS, _ROW, _RANGE, _TIME, _STATE, _MISSED, _WAS, _NOW = (
    f"__delivered_{n}" for n in ("copy", "rank", "differs", "row", "range", "time", "state", "missed", "was", "now")
)
_TRIES = 3
_UNDECIDED = "the ledger holds no decided batch of this checkpoint: nothing was promised yet"
_DEDUP = "dedup drops repeats batch by batch, and a recomputation is one batch; audit without --recompute"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Query:
    """What is recomputed.

    Attributes:
        stream: the transform over streams without rows.
        plan: its plan.
        read: the source range.
        ends: (batch, its end) as far as the ledger keeps them, oldest first.
        visible: the newest decision that must be in the sink.
        skipped: rows that the table rejected, by kind, as the ledger counts them.
    """

    spark: SparkSession
    request: AuditRequest
    how: Recompute
    mode: WriteMode
    source: SentRows
    stream: DataFrame
    plan: str
    read: SourceRange
    ends: Sequence[tuple[int, Positions]]
    visible: Decision
    skipped: Mapping[str, int]

    @property
    def keys(self) -> SharedKeys | None:
        return self.source.keys

    @property
    def ranges(self) -> list[BatchRange]:
        return split_by_batch(self.read.start, self.ends)

    def caveats(self, method: Method) -> list[Caveat]:
        return find_caveats(self.how, self.plan, self.mode, method)

    def rows(self) -> tuple[DataFrame, list[int]]:
        """The rows of all batches, and for each Spark partition of the sources the index of its range."""
        slices, indices = self.source.sources.slices_by_range(self.ranges)
        return self.source.rows(slices), indices


@dataclass(frozen=True)
class _Expected:
    """Recomputed rows that must be in the sink.

    Attributes:
        ran: how, for the report.
        caveats: of this method.
        further: those that take a job to find: only asked for if there is damage.
    """

    rows: DataFrame
    ran: str
    caveats: Sequence[Caveat]
    further: Sequence[Callable[[], Sequence[Caveat]]]

    def find_caveats(self, *, damaged: bool) -> list[Caveat]:
        return [*self.caveats, *(c for find in self.further if damaged for c in find())]


def recompute(spark: SparkSession, request: AuditRequest, say: Progress) -> AuditReport:
    """Recompute the rows of all decided batches, and compare them with the sink's."""
    how, mode = request.recompute, request.write_mode
    if how is None:
        raise DeliveredError("AUDIT_RECOMPUTE")
    scope = Scope(request.pipeline, request.named_sink, read_view(request.checkpoint).incarnation)
    scan = request.sink.scan()
    with closing(SentRows(spark, request)) as source, kept_plain(spark), ExitStack() as context:
        say("reading the sink and the ledger")
        probe = source.rows()
        names, _ = _key(request, how, mode, probe.columns)
        source.keys = shared_keys(request, names, probe, from_arrow(scan.schema()))

        def there() -> DataFrame:
            return source.shared(slice_frame(spark, scan, scan.slices(request.sink_from)))

        cut, stored, rows = context.enter_context(_read_unchanged(request, scope, scan, there))
        ledger, visible = cut.ledger, cut.ledger.visible
        if visible is None or request.dedup is not None:
            return report_of_ledger(request, ledger, _UNDECIDED if visible is None else _DEDUP)
        view = read_view(request.checkpoint)
        start, unsure = source.sources.start()
        unsure = unsure or written_otherwise(request, scope)
        read = SourceRange(start, _named(parsed(visible.offsets), request), _named(parsed(view.offsets), request))
        ends = [(batch, _named(parsed(text), request)) for batch, text in ledger.ends]
        stream = source.stream()
        query = Query(
            spark, request, how, mode, source, stream, logical_plan(stream), read, ends, visible, ledger.skipped
        )
        impossible = _why_no_replay(query)
        methods = _methods(query, replayable=not impossible, say=say)
        if not methods:
            return report_of_ledger(request, ledger, f"its batches cannot be replayed: {impossible}")
        selected = source.selected
        share = request.keys.of if request.keys is not None and selected == FROM_SOURCE else 1
        context.enter_context(shuffles_fit_for(spark, rows + visible.total.count // share))
        own_rows, foreign = _own_rows(stored, request)
        inherent = query.caveats(Method.REPLAY)
        for number, method in enumerate(methods, 1):
            with (
                method() as expected,
                compare(request, how, mode, expected.rows, own_rows, source.keys) as comparison,
            ):
                counts, columns = comparison.counts()
                caveats = expected.find_caveats(damaged=counts.damaged)
                if number == len(methods) or not any(c.weighs(counts) and c not in inherent for c in caveats):
                    samples = comparison.samples(counts, request.samples_max)
                    break
        removed = [*map(Caveat, source.sources.compacted())] if counts.damaged else []
        if impossible and any(c.weighs(counts) for c in caveats):
            caveats.append(Caveat(f"its batches cannot be replayed: {impossible}"))
    report = report_of_result(request, ledger, read, view.batch, Result(counts, samples=samples), ordered=True)
    own = request.own or ("true" if mode.complete else "")
    report = replace(report, fingerprints=None, id_says=comparison.identified_by, own=own, foreign=foreign)
    if request.keys is not None:
        report = replace(report, keys=KeyCheck.of_counts(request.keys, counts, selected))
    all_caveats = [*_of_ledger(request, ledger, read, unsure), *removed, *caveats]
    report = account_for_recompute(report, all_caveats, columns, comparison.identified_by, expected.ran)
    if counts.damaged and ledger.dead_letters and request.decided_by is not None:
        report = account_for_dead_letters(report, count_open(request.decided_by, scope, ledger), by_row=False)
    if request.sealing is None:
        return report
    seals = Seals(request, scope)
    if request.keys is not None:
        return seals.seal_share(report, ledger, as_text(start))
    return seals.seal_all(report, cut, start)


def _named(positions: Positions, request: AuditRequest) -> Positions:
    """Offsets by the pipeline's names. A stream joined with itself is several sources to Spark, which read the same."""
    read = list(positions.values())
    if list(request.sources) == [SOURCE] and SOURCE not in positions and all(p == read[0] for p in read):
        return {SOURCE: read[0]}
    return positions


def _why_no_replay(query: Query) -> str:
    """Why the query's batches cannot be replayed; empty: they can."""
    names = set(query.request.sources)
    for batch, end in query.ends:
        if end.keys() != names:
            return f"batch {batch} read the sources {', '.join(end)}, and the pipeline has {', '.join(names)}"
    return "" if query.ends else "the ledger holds none of them"


def _methods(query: Query, *, replayable: bool, say: Progress) -> list[Callable[[], AbstractContextManager[_Expected]]]:
    """The cheap method first, unless it shows nothing; then the exact one."""
    inherent = query.caveats(Method.REPLAY)
    methods: list[Callable[[], AbstractContextManager[_Expected]]] = []
    if not any(c.damage == ALL and c not in inherent for c in query.caveats(Method.ONE_BATCH)):
        methods.append(partial(_one_batch, query, say))
    if replayable:
        methods.append(partial(_replay, query, say))
    return methods


@contextmanager
def _one_batch(query: Query, say: Progress) -> Iterator[_Expected]:
    say("recomputing the source range as one batch and comparing")
    how, mode = query.how, query.mode
    with _recorded("withWatermark") as calls:
        frame, indices = query.rows()
    caveats, names = query.caveats(Method.ONE_BATCH), operators(query.plan)
    complete = _closed(query) if how.output_mode == "append" else None
    if complete is not None:
        frame = frame.where(complete)
    elif how.output_mode == "append" and "Aggregate" in names:
        caveats.append(Caveat("rows that the watermark has not closed are not delivered yet", MISSING))
    single = indices if len(query.request.sources) == 1 else ()
    further: list[Callable[[], Sequence[Caveat]]] = [partial(_of_watermark, calls, single, query)]
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
    yield _Expected(rows, "as one batch", caveats, further)


@contextmanager
def _replay(query: Query, say: Progress) -> Iterator[_Expected]:
    count, (first, _) = len(query.ends), query.ends[0]
    say(f"replaying {count:,} batches and comparing")
    request, caveats = query.request, query.caveats(Method.REPLAY)
    if first > 0:
        caveats.append(
            Caveat(f"the ledger no longer keeps batches 0 to {first - 1}, which were replayed together with {first}")
        )
    script = Script(
        request.sources,
        request.checkpoint,
        query.read.start,
        [end for _, end in query.ends],
        [batch for batch, _ in query.ends],
        query.how.output_mode,
        several_watermarks=operators(query.plan).count("EventTimeWatermark") > 1,
        rejects=request.rejects,
    )
    # A condition on the input of a watermark would move it.
    first_shared = "EventTimeWatermark" not in operators(query.plan)

    def transform(frames: Mapping[str, DataFrame]) -> DataFrame:
        rows = query.source.transform(frames)
        return query.source.shared(rows) if first_shared else rows

    with replay(query.spark, transform, script, say) as (frame, differs):
        frame = query.source.shared(frame)
        if differs:
            caveats.append(Caveat(differs))
        if query.mode.expected is not None:
            rows, of_versions, unclear = _met(frame, query)
            caveats += of_versions
            caveat = _several(query.mode)
        else:
            rows, unclear, caveat = _last(frame.drop(AT), query.mode)
        further: list[Callable[[], Sequence[Caveat]]] = []
        if unclear is not None:
            further.append(partial(_if_any, unclear, caveat))
        if keeps_first(query.plan):
            further.append(partial(_of_copies, query))
        yield _Expected(rows, f"in the ledger's {count:,} batches", caveats, further)


_BACK = Caveat("a deleted key comes back with an older version, depending on the order of batches")


def _several(mode: WriteMode) -> Caveat:
    return Caveat(f"several rows have the same {mode.keys_text}, and the last one by arrival stays")


def _if_any(rows: DataFrame, caveat: Caveat) -> list[Caveat]:
    return [caveat] if rows.take(1) else []


def _without_deleted(frame: DataFrame, mode: WriteMode) -> DataFrame:
    if mode.delete is None:
        return frame
    deleted = F.coalesce(F.col(backquoted(mode.delete)), F.lit(False))
    return frame.where(~deleted).drop(mode.delete)


def _last(frame: DataFrame, mode: WriteMode) -> tuple[DataFrame, DataFrame | None, Caveat]:
    """Of rows with the number of their batch, those that stay; and rows whose order within a batch would decide."""
    rows, caveat = frame.drop(BATCH), _several(mode)
    if mode.replaces:
        newest = Window.partitionBy(*map(backquoted, mode.replaces))
        kept = frame.withColumn(_COPY, F.max(BATCH).over(newest)).where(F.col(BATCH) == F.col(_COPY))
        return kept.drop(BATCH, _COPY), None, caveat
    if not mode.upserts:
        return rows, None, caveat
    if mode.version is not None and mode.delete is not None:
        state = final_state(rows, mode, None)
        return state.rows, state.unclear, _BACK
    order = [F.col(BATCH).asc() if mode.insert else F.col(BATCH).desc()]
    if mode.version is not None:  # of equal ones the first stays
        order = [F.col(backquoted(mode.version)).desc(), F.col(BATCH).asc()]
    keys = [*map(backquoted, mode.keys)]
    by_key = Window.partitionBy(*keys).orderBy(*order)
    best = frame.withColumns({_COPY: F.row_number().over(by_key), _RANK: F.rank().over(by_key)}).where(f"{_RANK} = 1")
    row = F.xxhash64(_json(map(backquoted, rows.columns)))
    unclear = best.groupBy(*keys).agg((F.min(row) != F.max(row)).alias(_DIFFERS)).where(_DIFFERS)
    kept = best.where(f"{_COPY} = 1").drop(BATCH, _COPY, _RANK)
    return _without_deleted(kept, mode), unclear, caveat


@contextmanager
def _read_unchanged(
    request: AuditRequest, scope: Scope, scan: BoundedScan, frame: Callable[[], DataFrame]
) -> Iterator[tuple[Cut, DataFrame, int]]:
    """The sink's persisted rows, with a ledger that did not change while they were read; and their number."""
    continues = request.sealing is not None and not why_read_again(request)
    for _ in range(_TRIES):
        before = read_account(request, scope)
        position = scan.position() if continues else None
        started = read_view(request.checkpoint).batch
        stored = frame().persist(StorageLevel.DISK_ONLY)
        try:
            rows = stored.count()
            after = read_account(request, scope)
            if before.visible == after.visible:
                yield unchanged_cut(request.guarantee, after, position, started, scan), stored, rows
                return
        finally:
            stored.unpersist()
    raise DeliveredError("AUDIT_MOVING", tries=_TRIES)


def _own_rows(stored: DataFrame, request: AuditRequest) -> tuple[DataFrame, int]:
    """This pipeline's rows, and how many belong to other writers."""
    if request.own is None:
        return stored, 0
    with expressions(request):
        own = F.coalesce(F.expr(request.own).cast("boolean"), F.lit(False))
        return stored.where(own), stored.where(~own).count()


def _of_ledger(request: AuditRequest, ledger: LedgerAccount, read: SourceRange, unsure: str) -> Iterator[Caveat]:
    visible, last = ledger.visible, ledger.history.last
    if visible is None:
        return
    if unsure:
        yield Caveat(unsure)
    if last is not None and last.batch != visible.batch:
        yield Caveat(f"batch {last.batch} is decided, and not all of its rows are visible yet")
    elif read.undecided is not None and request.guarantee is not Guarantee.EXACTLY_ONCE:
        yield Caveat("a batch started and is not decided; some of its rows may be in the sink")
    if visible.given_up.count:
        yield Caveat(f"{visible.given_up.count:,} rows were given up ({request.guarantee.value})", MISSING)
    _, earlier = find_earlier(split_by_transform(visible, read.start), request.transform_version)
    if earlier is not None:
        yield Caveat(f"batches {earlier.batches} ran with another transform")


def _closed(query: Query) -> Column | None:
    """Whether the newest batch's watermark has closed a row of an aggregation; None: no column shows it."""
    times = {f.name: f for f in query.stream.schema.fields if EVENT_TIME in (f.metadata or {})}
    ends = WINDOW_END.findall(query.plan.splitlines()[0])
    logged = batch_metadata(query.request.checkpoint, query.visible.batch)
    if len({*times, *ends}) != 1 or logged is None or "Aggregate" not in operators(query.plan):
        return None
    column = F.col(backquoted([*times, *ends][0]))
    if times and isinstance(next(iter(times.values())).dataType, StructType):
        column = column["end"]
    return column <= F.timestamp_millis(F.lit(int(logged["batchWatermarkMs"])))


def _of_watermark(calls: Sequence[_Call], indices: Sequence[int], query: Query) -> list[Caveat]:
    """Whether a record may have been dropped as late: no newer than the newest one of earlier batches, minus the delay.

    Output mode complete drops none.
    """
    if "EventTimeWatermark" not in operators(query.plan) or query.how.output_mode == "complete":
        return []
    if len(calls) != 1 or not indices or not keeps_partitions(calls[0].frame):
        return [Caveat("records may have been dropped as late, depending on where batches ended", MISSING)]
    below, column, delay = calls[0].frame, calls[0].arguments["eventTime"], calls[0].arguments["delayThreshold"]
    spans = (
        below.select(by_partition(indices).alias(_RANGE), F.col(column).cast(TimestampType()).alias(_TIME))
        .groupBy(_RANGE)
        .agg(
            F.unix_micros(F.min(_TIME)).alias("low"),
            F.unix_micros(F.max(_TIME) - F.expr(f"INTERVAL '{delay}'")).alias("mark"),
        )
    )
    ranges, mark, late = query.ranges, 0, 0
    for row in sorted(spans.where("low IS NOT NULL").collect(), key=lambda r: int(r[_RANGE])):
        after = max(mark, row["mark"])
        late += row["low"] <= (after if ranges[row[_RANGE]].several else mark)
        mark = after
    if not late:
        return []
    return [Caveat(f"{late} of {len(ranges)} batches hold records that may have been dropped as late", MISSING)]


def _of_copies(query: Query) -> list[Caveat]:
    """Whether a batch holds rows of one key that differ: which of them dropDuplicates keeps depends on their order."""
    with _recorded("dropDuplicates", "dropDuplicatesWithinWatermark") as calls:
        _, indices = query.rows()
    if not calls or not all(keeps_partitions(c.frame) for c in calls):
        return [Caveat("which of several rows with one key stays depends on their order within a batch")]
    differing = 0
    for call in calls:
        subset = call.arguments.get("subset") or call.frame.columns
        row = F.xxhash64(_json(map(backquoted, call.frame.columns)))
        by_key = call.frame.select(by_partition(indices).alias(_RANGE), *map(backquoted, subset), row.alias(_ROW))
        grouped = by_key.groupBy(_RANGE, *map(backquoted, subset)).agg((F.min(_ROW) != F.max(_ROW)).alias(_COPY))
        differing += grouped.where(_COPY).count()
    if not differing:
        return []
    return [Caveat(f"{differing:,} keys have rows in one batch that differ: which one stays depends on their order")]


@dataclass(frozen=True)
class _Call:
    """A call of a DataFrame's method in a transform."""

    frame: DataFrame
    arguments: dict[str, Any]


@contextmanager
def _recorded(*methods: str) -> Iterator[list[_Call]]:
    """Record calls of these methods of a DataFrame while the context is open: of a batch, Spark drops watermarks from
    the plan."""
    calls: list[_Call] = []
    with ExitStack() as undo:
        for connect in (False, True):
            try:
                owner: Any = frame_class(connect=connect)
            except ImportError:  # without grpcio
                continue
            for method in methods:
                original = getattr(owner, method)

                def record(self: Any, *args: Any, then: Any = original, **kwargs: Any) -> Any:
                    arguments = dict(inspect.signature(then).bind(self, *args, **kwargs).arguments)
                    calls.append(_Call(arguments.pop("self"), arguments))
                    return then(self, *args, **kwargs)

                setattr(owner, method, record)
                undo.callback(setattr, owner, method, original)
        yield calls


def _met(frame: DataFrame, query: Query) -> tuple[DataFrame, list[Caveat], DataFrame | None]:
    """What a table that was empty holds after all batches.

    The ledger counts the rows that missed their version. If the recomputation counts none and neither does the ledger,
    every row was written, whatever others did to the table.

    Args:
        frame: rows with their places.

    Returns:
        the rows, caveats, and keys whose rows may have come in another order; None: there are none.
    """
    mode, name = query.mode, str(query.mode.expected)
    keys = [*map(backquoted, mode.keys)]
    version = F.col(backquoted(str(mode.version)))
    kind = frame.schema[str(mode.version)].dataType
    row = F.struct(BATCH, AT, F.col(backquoted(name)).cast(kind).alias(_WAS), version.alias(_NOW))
    empty = _state(F.lit(None).cast(kind), F.lit(None).cast("int"), F.lit(None).cast("bigint"), F.lit(0))
    held = F.aggregate(F.array_sort(F.collect_list(row)), empty, _after).alias(_STATE)
    by_key = frame.groupBy(*keys).agg(held).select(f"{_STATE}.*")
    missed = int(by_key.agg(F.coalesce(F.sum(_MISSED), F.lit(0))).collect()[0][0])
    rows = frame.join(by_key.where(F.col(BATCH).isNotNull()).select(BATCH, AT), [BATCH, AT]).drop(BATCH, AT, name)
    counted, caveats = query.skipped.get(CONFLICT, 0), []
    if query.keys is not None and missed <= counted:
        if counted:
            caveats.append(
                Caveat(f"the ledger counts the {counted:,} rows that did not find their {name} for all keys")
            )
    elif counted != missed:
        caveats.append(
            Caveat(
                f"the ledger counts {counted:,} rows that did not find their {name} in the table, the recomputation "
                f"{missed:,}: others wrote to the table, or it held rows before",
                always=True,
            )
        )
    elif counted:
        caveats.append(
            Caveat(f"{counted:,} rows did not find their {name} in the table: others may have written to it")
        )
    several = frame.groupBy(*keys, BATCH).count().where("count > 1")
    return rows, caveats, None if keeps_partitions(query.rows()[0]) else several


def _state(now: Column, batch: Column, at: Column, missed: Column) -> Column:
    """The version that stands, the place of its row (null: no row), and how many rows missed theirs."""
    return F.struct(now.alias(_NOW), batch.alias(BATCH), at.alias(AT), missed.alias(_MISSED))


def _after(held: Column, row: Column) -> Column:
    as_expected = F.coalesce(held[_NOW] == row[_WAS], F.lit(False))
    return F.when(
        F.when(row[_WAS].isNull(), held[BATCH].isNull()).otherwise(as_expected),
        _state(row[_NOW], row[BATCH], row[AT], held[_MISSED]),
    ).otherwise(_state(held[_NOW], held[BATCH], held[AT], held[_MISSED] + 1))


FLOAT_TOLERANCE = 1e-9
"""Relative: sums of floating-point numbers depend on the order of the rows. Decimals are compared exactly."""

_ID, _MUST, _THERE = (f"__delivered_{n}" for n in ("id", "must", "there"))


def _typed(frame: DataFrame, written: StructType, like: StructType | None = None) -> DataFrame:
    """Rows in comparable form: decimals with all their digits, everything else as the sink stores it.

    Args:
        written: columns before the sink took them: a sink may store decimals as text.
        like: the other side's resulting columns; None: this is the first side.
    """
    columns = []
    for field in frame.schema.fields:
        column, kind = F.col(backquoted(field.name)), field.dataType
        before = written[field.name].dataType if field.name in written.names else None
        if isinstance(before, DecimalType):
            kind = DecimalType(38, 38 - (before.precision - before.scale))
        elif "map<" in kind.simpleString():
            column = _json([column])  # maps have no order
        elif like is not None:
            kind = like[field.name].dataType
        columns.append((column if kind == field.dataType else column.try_cast(kind)).alias(field.name))
    return frame.select(*columns)


def _identity(request: AuditRequest, how: Recompute, mode: WriteMode, columns: Sequence[str]) -> tuple[str | None, str]:
    """SQL that identifies a row, and its name in a report; None: all columns do."""
    names, expression = _key(request, how, mode, columns)
    if names:
        keys = WriteMode(keys=names)
        return id_sql(keys), f"key ({keys.keys_text})"
    return (None, "all columns") if expression is None else (expression, f"`{expression}`")


def _key(
    request: AuditRequest, how: Recompute, mode: WriteMode, columns: Sequence[str]
) -> tuple[tuple[str, ...], str | None]:
    """The columns that identify a row, or the expression; neither: all columns do."""
    if mode.upserts:
        return mode.keys, None
    if request.id is not None:
        return (), request.id
    return (how.keys if set(how.keys) <= set(columns) else ()), None


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        joined: rows of both sides, by id.
        schema: the columns that are compared.
        identified_by: what identifies a row, for the report.
    """

    joined: DataFrame
    schema: StructType
    identified_by: str

    def counts(self) -> tuple[Counts, list[tuple[str, int]]]:
        """Rows by what is wrong with them, and by column how many differ in it."""
        both = F.col(_MUST).isNotNull() & F.col(_THERE).isNotNull()
        (row,) = self.joined.agg(
            F.count(_MUST).alias("sent"),
            F.count(_THERE).alias("delivered"),
            *[F.count_if(condition).alias(damage.value) for damage, condition in _damage(self.schema).items()],
            *[
                F.count_if(both & _differs(name, self.schema)).alias(f"column {i}")
                for i, name in enumerate(self.schema.names)
            ],
        ).collect()
        counts = Counts(**{k: int(v) for k, v in row.asDict().items() if not k.startswith("column ")})
        columns = [(name, int(row[f"column {i}"])) for i, name in enumerate(self.schema.names)]
        return counts, [(name, count) for name, count in columns if count]

    def samples(self, counts: Counts, samples_max: int) -> tuple[Sample, ...]:
        sides = [F.col(side).isNotNull().cast("int").alias(side) for side in (_MUST, _THERE)]
        return tuple(
            Sample(damage, row[_ID], None, None, None, row[_MUST], row[_THERE])
            for damage, condition in _damage(self.schema).items()
            if counts.of(damage)
            for row in self.joined.where(condition).orderBy(_ID, _COPY).limit(samples_max).select(_ID, *sides).collect()
        )


@contextmanager
def compare(
    request: AuditRequest,
    how: Recompute,
    mode: WriteMode,
    expected: DataFrame,
    stored: DataFrame,
    keys: SharedKeys | None = None,
) -> Iterator[Comparison]:
    """Both sides, joined and persisted while the context is open.

    Args:
        keys: of the rows, those that are wanted; None: all.
    """
    schema = record_columns(request, expected, stored.columns)
    records = request.sink.records

    def canonical(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield records(batch)

    must = _typed(expected.mapInArrow(canonical, from_arrow(schema)), expected.schema)
    there = _typed(stored.select(*map(backquoted, schema.names)), expected.schema, must.schema)
    identity, identified_by = _identity(request, how, mode, schema.names)
    with expressions(request):
        joined = _joined(must, there, identity, keys).persist(StorageLevel.DISK_ONLY)
    try:
        yield Comparison(joined, must.schema, identified_by)
    finally:
        joined.unpersist()


def _json(columns: Iterable[Column | str]) -> Column:
    """Of the same text, if all values are the same; Spark's own texts of times end with milliseconds."""
    formats = {"timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS"}
    return F.to_json(F.struct(*columns), formats)


def _joined(must: DataFrame, there: DataFrame, identity: str | None, keys: SharedKeys | None) -> DataFrame:
    """Rows of both sides by id; copies of one id are numbered."""
    content = _json(map(backquoted, must.columns))

    def side(frame: DataFrame, name: str) -> DataFrame:
        id_ = F.coalesce(F.expr(identity).cast("string"), content) if identity else content
        columns = [*map(backquoted, frame.columns)]
        copies = Window.partitionBy(_ID).orderBy(F.xxhash64(*columns))
        row = frame.select(id_.alias(_ID), F.struct(*columns).alias(name), *columns)
        row = row if keys is None else keys.identified(row, _ID)
        return row.select(_ID, name, F.row_number().over(copies).alias(_COPY))

    return side(must, _MUST).join(side(there, _THERE), [_ID, _COPY], "full_outer")


def _differs(name: str, schema: StructType) -> Column:
    sent, stored = (F.col(side)[name] for side in (_MUST, _THERE))
    differs = ~sent.eqNullSafe(stored)
    if isinstance(schema[name].dataType, FloatType | DoubleType):
        near = F.abs(sent - stored) <= FLOAT_TOLERANCE * F.greatest(F.abs(sent), F.abs(stored))
        differs = differs & ~F.coalesce(near, F.lit(False))
    return differs


def _damage(schema: StructType) -> dict[Damage, Column]:
    must, there = F.col(_MUST).isNotNull(), F.col(_THERE).isNotNull()
    differs = F.lit(False)
    for name in schema.names:
        differs = differs | _differs(name, schema)
    return {
        Damage.LOST: must & ~there,
        Damage.DUPLICATED: there & ~must & (F.col(_COPY) > 1),
        Damage.ALTERED: must & there & differs,
        Damage.UNEXPECTED: there & ~must & (F.col(_COPY) == 1),
    }

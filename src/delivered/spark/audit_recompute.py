"""Audit by recomputing: the transform over the whole source range, as one batch, against the rows of the sink.

For queries whose rows replace each other: output modes update and complete, and upserts. Rows are joined by key, and
compared column by column. `delivered.audit.recompute` lists what one batch cannot show about many; how late a record
may have been is determined here, from the batches that the ledger keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DecimalType, DoubleType, FloatType, StructType, TimestampType
from pyspark.sql.window import Window

from delivered.audit.classes import Counts, Damage, Sample
from delivered.audit.dedup import Stretch, stretches
from delivered.audit.ledger import LedgerAccount, read_ledger
from delivered.audit.outcome import Result, by_ledger, of_result
from delivered.audit.recompute import FLOAT_TOLERANCE, GONE, Doubt, Recompute, doubts, of_recomputed, operators
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest
from delivered.audit.sources import parsed
from delivered.audit.upserts import id_sql
from delivered.audit.versions import earlier, version_ranges
from delivered.checkpoint.folder import read, read_view
from delivered.model.capability import WriteMode
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.spark.audit_sent import expressions, final_state, record_columns, sent_range
from delivered.spark.frames import keeps_partitions, kept_plain, logical_plan, shuffles_fit_for, slice_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column, DataFrame, SparkSession

_ID, _COPY, _MUST, _THERE, _STRETCH, _TIME = (
    f"__delivered_{n}" for n in ("id", "copy", "must", "there", "stretch", "time")
)
_WATERMARK = "spark.watermarkDelayMs"
"""Spark's, in the metadata of a column: it is event time, or the window of one."""
_WINDOW_END = re.compile(r"#\d+-T\d+ms\.end AS ([^#,]+)#")
"""In Spark's plan: a column that is the end of an event-time window."""
_TRIES = 3
_UNDECIDED = "the ledger holds no decided batch of this checkpoint: nothing was promised yet"
_DEDUP = "dedup drops repeats batch by batch, and a recomputation is one batch; audit without --recompute"


def recomputed(spark: SparkSession, request: AuditRequest, say: Callable[[str], None]) -> AuditReport:
    """Recompute the rows of all decided batches, and compare them with the sink's."""
    how, mode = request.recompute, request.sink.capability().write
    if how is None:
        raise DeliveredError("AUDIT_RECOMPUTE", "The request is for an audit that accounts for records.")
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
        end, planned = parsed(visible.offsets), parsed(view.offsets)
        parts = stretches(start, [(batch, parsed(text)) for batch, text in ledger.ends], end)
        slices, numbers = sent.cut(parts)
        query = sent.query(spark)
        plan = logical_plan(query)
        with _watermarks() as watermarks:
            frame = sent.frame(spark, slices)
        held.enter_context(shuffles_fit_for(spark, rows + visible.total.count))
        say("recomputing the source range and comparing")
        mine, foreign = _own(found, request)
        found_doubts = [
            *doubts(how, plan, mode),
            *_of_ledger(request, ledger, unsure, planned != end),
            *_of_watermark(watermarks, numbers if len(request.sources) == 1 else (), parts, how),
        ]
        closed = _closed(query, plan, request.checkpoint, visible.batch) if how.output_mode == "append" else None
        frame, more = _expected(frame if closed is None else frame.where(closed), how, mode, operators(plan), closed)
        found_doubts += more
        schema = record_columns(request, frame, found.columns)
        records = request.sink.records

        def canonical(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield records(batch)

        must = _typed(frame.mapInArrow(canonical, from_arrow_schema(schema)), frame.schema)
        there = _typed(mine.select(*map(_quoted, schema.names)), frame.schema, must.schema)
        identity, says = _identity(request, how, mode, schema.names)
        with expressions(request):
            joined = _joined(must, there, identity).persist(StorageLevel.DISK_ONLY)
        held.callback(joined.unpersist)
        counts, columns = _counted(joined, must.schema)
        samples = _samples(joined, must.schema, counts, request.samples_max)
    nothing = Fingerprint()
    result = Result(counts, (), samples, nothing, nothing, 0)
    report = of_result(request, scope.incarnation, ledger, view, start, end, planned, result, ordered=True)
    own = request.own or ("true" if mode.complete else "")
    report = replace(report, fingerprints=None, id_says=says, own=own, foreign=foreign)
    return of_recomputed(report, found_doubts, columns, says)


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


def _expected(
    frame: DataFrame, how: Recompute, mode: WriteMode, names: Sequence[str], closed: Column | None
) -> tuple[DataFrame, list[Doubt]]:
    """The recomputed rows that must be in the sink.

    Args:
        names: operators of the query.
    """
    found: list[Doubt] = []
    if mode.replaces:
        found.append(Doubt(f"each batch replaces the rows of its values in {', '.join(mode.replaces)}"))
    if how.output_mode == "append" and "Aggregate" in names and closed is None:
        found.append(Doubt("rows that the watermark has not closed are not delivered yet", GONE))
    if not mode.upserts:
        return frame, found
    if mode.version is not None:
        state = final_state(frame, mode, None)
        if mode.delete is not None and state.unclear.take(1):
            found.append(Doubt("a deleted key comes back with an older version, depending on the order of batches"))
        return state.rows, found
    if how.output_mode == "append" or "Aggregate" not in names:
        one_each = frame.groupBy(*map(_quoted, mode.keys)).count().where("count > 1").take(1)
        if one_each:
            found.append(Doubt(f"several rows have the same {mode.keys_text}, and the last one by arrival stays"))
    if mode.delete is not None:
        gone = F.coalesce(F.col(_quoted(mode.delete)), F.lit(False))
        frame = frame.where(~gone).drop(mode.delete)
    return frame, found


def _closed(query: DataFrame, plan: str, checkpoint: str, batch: int) -> Column | None:
    """Whether the watermark of `batch` has closed a row of an aggregation; None: no column shows it."""
    times = {f.name: f for f in query.schema.fields if _WATERMARK in (f.metadata or {})}
    ends = _WINDOW_END.findall(plan.splitlines()[0])
    header = (read(checkpoint, f"offsets/{batch}") or b"").decode().splitlines()
    if len({*times, *ends}) != 1 or len(header) < 2 or "Aggregate" not in operators(plan):
        return None
    column = F.col(_quoted([*times, *ends][0]))
    if times and isinstance(next(iter(times.values())).dataType, StructType):
        column = column["end"]
    return column <= F.timestamp_millis(F.lit(int(json.loads(header[1])["batchWatermarkMs"])))


Watermarks = list[tuple["DataFrame", str, str]]
"""The rows below each withWatermark of a transform, its column and its delay."""


@contextmanager
def _watermarks() -> Iterator[Watermarks]:
    """Record the calls of withWatermark while the context is open: Spark drops them from the plan of a batch."""
    found: Watermarks = []
    with ExitStack() as undo:
        for kind in ("classic", "connect"):
            try:
                owner = import_module(f"pyspark.sql.{kind}.dataframe").DataFrame
            except ImportError:  # without grpcio
                continue
            original = owner.withWatermark

            def noted(self: Any, eventTime: str, delayThreshold: str, *, then: Any = original) -> Any:  # noqa: N803
                found.append((self, eventTime, delayThreshold))
                return then(self, eventTime, delayThreshold)

            owner.withWatermark = noted
            undo.callback(setattr, owner, "withWatermark", original)
        yield found


def _of_watermark(
    watermarks: Watermarks, numbers: Sequence[int], parts: Sequence[Stretch], how: Recompute
) -> list[Doubt]:
    """Whether a record may have been dropped as late: no newer than the newest one of earlier batches, minus the delay.

    Output mode complete drops none.
    """
    if not watermarks or how.output_mode == "complete":
        return []
    below, column, delay = watermarks[0]
    if len(watermarks) > 1 or not numbers or not keeps_partitions(below):
        return [Doubt("records may have been dropped as late, depending on where batches ended", GONE)]
    stretch = F.element_at(F.array(*map(F.lit, numbers)), F.spark_partition_id() + 1).alias(_STRETCH)
    spans = (
        below.select(stretch, F.col(column).cast(TimestampType()).alias(_TIME))
        .groupBy(_STRETCH)
        .agg(
            F.unix_micros(F.min(_TIME)).alias("low"),
            F.unix_micros(F.max(_TIME) - F.expr(f"INTERVAL '{delay}'")).alias("mark"),
        )
    )
    mark, late = 0, 0
    for row in sorted(spans.where("low IS NOT NULL").collect(), key=lambda r: int(r[_STRETCH])):
        after = max(mark, row["mark"])
        late += row["low"] <= (after if parts[row[_STRETCH]].several else mark)
        mark = after
    if not late:
        return []
    return [Doubt(f"{late} of {len(parts)} batches hold records that may have been dropped as late", GONE)]


def _typed(frame: DataFrame, given: StructType, like: StructType | None = None) -> DataFrame:
    """Rows in comparable form: decimals with all their digits, everything else as the sink stores it.

    Args:
        given: columns before the sink took them: a sink may store decimals as text.
        like: the other side's resulting columns; None: this is the first side.
    """
    columns = []
    for field in frame.schema.fields:
        column, kind = F.col(_quoted(field.name)), field.dataType
        before = given[field.name].dataType
        if isinstance(before, DecimalType):
            kind = DecimalType(38, 38 - (before.precision - before.scale))
        elif "map<" in kind.simpleString():
            column = F.to_json(F.struct(column))  # maps have no order
        elif like is not None:
            kind = like[field.name].dataType
        columns.append((column if kind == field.dataType else column.try_cast(kind)).alias(field.name))
    return frame.select(*columns)


def _identity(request: AuditRequest, how: Recompute, mode: WriteMode, columns: Sequence[str]) -> tuple[str | None, str]:
    """SQL that identifies a row, and its name in a report; None: the whole row does."""
    if mode.upserts:
        return id_sql(mode), f"key ({mode.keys_text})"
    if request.id is not None:
        return request.id, f"`{request.id}`"
    if how.keys and set(how.keys) <= set(columns):
        keys = WriteMode(keys=how.keys)
        return id_sql(keys), f"key ({keys.keys_text})"
    return None, "the whole row"


def _joined(must: DataFrame, there: DataFrame, identity: str | None) -> DataFrame:
    """Rows of both sides by id; copies of one id are numbered."""
    whole = F.to_json(F.struct(*map(_quoted, must.columns)))

    def side(frame: DataFrame, name: str) -> DataFrame:
        id_ = F.coalesce(F.expr(identity).cast("string"), whole) if identity else whole
        copies = Window.partitionBy(_ID).orderBy(F.xxhash64(*map(_quoted, frame.columns)))
        row = frame.select(
            id_.alias(_ID), F.struct(*map(_quoted, frame.columns)).alias(name), *map(_quoted, frame.columns)
        )
        return row.select(_ID, name, F.row_number().over(copies).alias(_COPY))

    return side(must, _MUST).join(side(there, _THERE), [_ID, _COPY], "full_outer")


def _differs(name: str, schema: StructType) -> Column:
    sent, found = (F.col(side)[name] for side in (_MUST, _THERE))
    differs = ~sent.eqNullSafe(found)
    if isinstance(schema[name].dataType, FloatType | DoubleType):
        near = F.abs(sent - found) <= FLOAT_TOLERANCE * F.greatest(F.abs(sent), F.abs(found))
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


def _counted(joined: DataFrame, schema: StructType) -> tuple[Counts, list[tuple[str, int]]]:
    both = F.col(_MUST).isNotNull() & F.col(_THERE).isNotNull()
    (row,) = joined.agg(
        F.count(_MUST).alias("sent"),
        F.count(_THERE).alias("delivered"),
        *[F.count_if(condition).alias(damage.value) for damage, condition in _damage(schema).items()],
        *[F.count_if(both & _differs(name, schema)).alias(f"column {i}") for i, name in enumerate(schema.names)],
    ).collect()
    counts = Counts(**{k: int(v) for k, v in row.asDict().items() if not k.startswith("column ")})
    columns = [(name, int(row[f"column {i}"])) for i, name in enumerate(schema.names)]
    return counts, [(name, count) for name, count in columns if count]


def _samples(joined: DataFrame, schema: StructType, counts: Counts, samples_max: int) -> tuple[Sample, ...]:
    sides = [F.col(side).isNotNull().cast("int").alias(side) for side in (_MUST, _THERE)]
    return tuple(
        Sample(damage, row[_ID], None, None, None, row[_MUST], row[_THERE])
        for damage, condition in _damage(schema).items()
        if counts.of(damage)
        for row in joined.where(condition).orderBy(_ID, _COPY).limit(samples_max).select(_ID, *sides).collect()
    )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"

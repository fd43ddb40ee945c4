"""DataFrame operations between source and sinks: dedup, the transform, and the projection of each sink.

Dedup by Spark's state: helper columns hold the key and the time. Spark's `dropDuplicatesWithinWatermark` keeps one row
of state per key in the checkpoint, until the watermark has passed the first record's time by `within`. The watermark is
the newest time of the earlier batches, minus `within`.

Dedup by a table in the database of the sink that decides: all records of a key meet in one task, before the transform.
It looks up which keys earlier batches delivered, records the new ones, and passes their records on; see
`delivered.engine.keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException

from delivered.contract.sink import KEY_BYTES, Sink
from delivered.contract.source import COORDINATES, Source
from delivered.engine.keys import AT, HELPERS, KEY, TIE, drop_seen
from delivered.engine.keys import TIME as SEEN_AT
from delivered.engine.sinks import Columns
from delivered.engine.transform import ArrowTransform, decode, encode, run_isolated, with_rejected
from delivered.model.dedup import Dedup
from delivered.model.errors import BadRecord, InvariantBroken, UsageError
from delivered.model.identity import Scope
from delivered.model.ranges import backquoted
from delivered.pipeline.endpoint import Projection, plan_routes
from delivered.pipeline.transform import Transform
from delivered.spark.internals import from_arrow, pickle_by_value, to_arrow
from delivered.spark.task import arm, running_batch, running_task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BY = "__delivered_dedup_by_"
ALONE = "__delivered_dedup_alone"
TIME = "__delivered_dedup_time"
_AS_TEXT = ("boolean", "tinyint", "smallint", "int", "bigint", "date")


class Failing(Enum):
    """What becomes of a row for which the transform's function raises."""

    FAIL = auto()
    """It fails the task."""
    SKIP = auto()
    KEEP = auto()
    """It goes on as a rejected one."""


def apply_transform(
    transform: Transform, spark: SparkSession, sources: Mapping[str, Source | None], *, failing: Failing = Failing.FAIL
) -> Callable[[Mapping[str, DataFrame]], DataFrame]:
    """The transform as a function of a DataFrame for each source, by its name.

    Args:
        sources: by name; None: one of Spark's own.
        failing: of rows for which a function over Arrow batches raises. Other transforms fail the query.
    """
    _send_own_module(transform)
    match transform.kind:
        case "sql":

            def query(frames: Mapping[str, DataFrame]) -> DataFrame:
                for name, frame in frames.items():
                    frame.createOrReplaceTempView(name)
                return spark.sql(transform.sql)

            return query
        case "python":
            function = transform.function
            if function is None:
                raise UsageError("TRANSFORM_MISSING.NOT_GIVEN")
            call: Callable[..., DataFrame] = function
            return lambda frames: call(**frames) if len(frames) > 1 else call(*frames.values())
        case "arrow":
            (source,) = sources.values()
            return _map_in_arrow(arrow_transform(transform), source, failing)
        case _:
            return _only


@contextmanager
def own_views(transform: Transform, spark: SparkSession, sources: Iterable[str]) -> Iterator[None]:
    """SQL over the sources may create their views here. Afterwards the session has the views that it had before.

    Start or resolve the query inside: Spark Connect resolves it only then.
    """
    names = sources if transform.kind == "sql" else ()
    before = {n: spark.table(n) if _is_view(spark, n) else None for n in names}
    try:
        yield
    finally:
        for name, frame in before.items():
            if frame is not None:
                frame.createOrReplaceTempView(name)
            else:
                spark.catalog.dropTempView(name)


def _is_view(spark: SparkSession, name: str) -> bool:
    return spark.catalog.tableExists(name) and spark.catalog.getTable(name).isTemporary


def arrow_transform(transform: Transform) -> ArrowTransform:
    _send_own_module(transform)
    return ArrowTransform(transform.select, transform.function)


def _only(frames: Mapping[str, DataFrame]) -> DataFrame:
    (frame,) = frames.values()
    return frame


def _map_in_arrow(
    transform: ArrowTransform, source: Source | None, failing: Failing
) -> Callable[[Mapping[str, DataFrame]], DataFrame]:
    failing = failing if transform.function is not None else Failing.FAIL

    def apply(frames: Mapping[str, DataFrame]) -> DataFrame:
        frame = _only(frames)
        rows = source.schema() if source is not None else to_arrow(frame.schema)
        columns = transform(pa.RecordBatch.from_pylist([], schema=rows)).schema
        schema = with_rejected(columns) if failing is Failing.KEEP else columns

        def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                if failing is Failing.FAIL:
                    yield transform(batch)
                else:
                    yield from (encode(part, schema) for part in run_isolated(transform, decode(batch), columns))

        return frame.mapInArrow(each, from_arrow(schema))

    return apply


def _send_own_module(transform: Transform) -> None:
    """Pickle the functions of the user's module by value: executors do not have it installed."""
    if (module := transform.own_module) is not None:
        pickle_by_value(module)


def routed(
    frame: DataFrame, projections: Sequence[Projection], keep: Sequence[str] = ()
) -> tuple[DataFrame, Sequence[Columns | None]]:
    """The frame with the columns of all sinks, and which of them each sink gets. See `plan_routes`.

    Raises:
        UsageError: an expression is not SQL over the frame's columns, returns more or fewer rows than it gets, or a
            condition is not boolean.
    """
    if all(p.is_all for p in projections):
        return frame, [None] * len(projections)
    routing = plan_routes(projections, frame.columns, keep)
    frame = _with_columns(frame, {n: f"CASE WHEN {routing.guard} THEN ({sql}) END" for n, sql in routing.where.items()})
    types: dict[str, Any] = dict(frame.dtypes)
    for name, sql in routing.where.items():
        if types[name] != "boolean":
            raise UsageError("WHERE_VALUE", where=sql, kind=types[name])
    frame = _with_columns(frame, routing.computed)
    return frame.select(*map(backquoted, routing.columns)), routing.routes


def projected(frame: DataFrame, projection: Projection) -> DataFrame:
    """The rows and columns of a frame that one sink gets."""
    routed_frame, (route,) = routed(frame, [projection])
    if route is None:
        return frame
    if route.where is not None:
        routed_frame = routed_frame.where(backquoted(route.where))
    return routed_frame.selectExpr(*[f"{backquoted(column)} AS {backquoted(name)}" for name, column in route.take])


def _with_columns(frame: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    if not columns:
        return frame
    try:
        return frame.selectExpr("*", *[f"({sql}) AS {backquoted(name)}" for name, sql in columns.items()])
    except (AnalysisException, ParseException) as error:
        raise UsageError("SINK_EXPRESSION", error=str(error).splitlines()[0]) from None


def key_columns(dedup: Dedup) -> list[str]:
    """The helper columns that are equal for duplicates, and only for them."""
    return [*(f"{_BY}{i}" for i in range(len(dedup.by))), ALONE]


def helper_columns(dedup: Dedup) -> list[str]:
    return [*key_columns(dedup), TIME]


def is_placed(frame: DataFrame) -> bool:
    """Whether the frame has the columns of a record's position in the source."""
    return all(c in frame.columns for c in COORDINATES)


def with_keys(frame: DataFrame, dedup: Dedup) -> DataFrame:
    """The frame with the columns `helper_columns`; rows are neither added nor moved.

    Records without a key are not duplicates of each other: each is keyed by its position in the source. If the source
    has no such columns, they fail the query.

    Raises:
        UsageError: an expression is not SQL over one row of the source, or the time is not a timestamp.
    """
    placed = is_placed(frame)
    missing = " OR ".join(f"{c} IS NULL" for c in key_columns(dedup)[:-1])
    no_key = f"CAST(raise_error('{BadRecord('DEDUP_KEY_NULL')}') AS STRING)"
    own = "concat_ws('-', `topic`, `partition`, `offset`)" if placed else no_key
    # CASE rules out generators and aggregates.
    texts = {**dict(zip(key_columns(dedup), dedup.by, strict=False)), TIME: dedup.time}
    try:
        keyed = frame.selectExpr("*", *[f"CASE WHEN true THEN ({sql}) END AS `{name}`" for name, sql in texts.items()])
        keyed = keyed.selectExpr("*", f"CASE WHEN {missing} THEN {own} END AS `{ALONE}`")
        types: Mapping[str, str] = dict(keyed.dtypes)  # Spark Connect analyses the frame only here
    except (AnalysisException, ParseException) as error:
        raise UsageError(
            "DEDUP_EXPRESSION",
            by_text=dedup.by_text,
            time=dedup.time,
            error=str(error).splitlines()[0],
            columns=", ".join(frame.columns),
        ) from None
    if types[TIME] != "timestamp":
        raise UsageError("DEDUP_TIME", time=dedup.time, type=types[TIME])
    return keyed


def without_repeats(frame: DataFrame, dedup: Dedup) -> DataFrame:
    """The stream without duplicates; columns unchanged. Raises as `with_keys`."""
    keyed = with_keys(frame, dedup).withWatermark(TIME, dedup.within)
    return keyed.dropDuplicatesWithinWatermark(key_columns(dedup)).drop(*helper_columns(dedup))


def without_seen_repeats(frame: DataFrame, dedup: Dedup, sink: Sink, scope: Scope, shards: int) -> DataFrame:
    """The stream without duplicates; columns unchanged. Raises as `with_keys`.

    Args:
        sink: the sink that decides.
        scope: of that sink, still without an incarnation.
        shards: number of partitions that the keys are hashed to; for two_phase, the same when a batch runs again.
    """
    schema = frame.schema
    columns = [f"`{c.replace('`', '``')}`" for c in frame.columns]
    keyed = with_keys(frame, dedup)
    types = dict(keyed.dtypes)
    parts = [f"coalesce({_text(dedup.by[i], types[n], n)}, '')" for i, n in enumerate(key_columns(dedup)[:-1])]
    missing = " OR ".join(f"`{n}` IS NULL" for n in key_columns(dedup)[:-1])
    digest = f"unhex(substr(sha2(CAST(concat_ws(',', {', '.join(parts)}) AS BINARY), 256), 1, {2 * KEY_BYTES}))"
    if is_placed(frame):
        at, tie = "`offset`", "xxhash64(`topic`, `partition`, `offset`)"
    else:
        plain = [c for c, (_, kind) in zip(columns, frame.dtypes, strict=True) if "map<" not in kind]
        at, tie = "0", f"xxhash64({', '.join(plain)})"
    keyed = keyed.selectExpr(
        *columns,
        f"CASE WHEN {missing} THEN NULL ELSE {digest} END AS {KEY}",
        f"unix_micros({TIME}) AS {SEEN_AT}",
        f"CAST({at} AS BIGINT) AS {AT}",
        f"{tie} AS {TIE}",
    )
    # Records without a key are never duplicates, so they can go to any partition.
    meeting = keyed.selectExpr("*", f"coalesce({KEY}, unhex(hex({TIE}))) AS __delivered_seen_meet")
    meeting = meeting.repartition(shards, "__delivered_seen_meet").drop("__delivered_seen_meet")
    task = _Task(sink, scope, dedup.within_ms * 1_000)
    return meeting.select(*columns, *HELPERS).mapInArrow(task, schema)


def _text(value: str, kind: str, column: str) -> str:
    """A text unique per value, whatever the session's time zone; null stays null."""
    if kind in ("string", "binary"):
        return f"hex(`{column}`)"
    if kind in _AS_TEXT or kind.startswith("decimal"):
        return f"CAST(`{column}` AS STRING)"
    if kind == "timestamp":
        return f"CAST(unix_micros(`{column}`) AS STRING)"
    raise UsageError("DEDUP_KEY_TYPE", value=value, kind=kind)


@dataclass(frozen=True)
class _Task:
    """Picklable; holds no connection."""

    sink: Sink
    scope: Scope
    within_us: int

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arm(self.scope.pipeline)
        query, batch = running_batch(running_task())
        if batch is None or query is None:
            raise InvariantBroken("NO_TASK.DEDUP")
        with closing(self.sink.key_memory(replace(self.scope, incarnation=query))) as memory:
            yield from drop_seen(memory, int(batch), self.within_us, rows)

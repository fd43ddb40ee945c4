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
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException

from delivered.contract.sink import Sink
from delivered.contract.source import Source
from delivered.engine import Columns
from delivered.engine.keys import HELPERS, KEY, TIE
from delivered.engine.transform import ArrowTransform, decode, encode, run_isolated, with_rejected
from delivered.model.capability import Dedup
from delivered.model.errors import UsageError
from delivered.model.identity import Scope
from delivered.model.rows import backquoted
from delivered.pipeline.endpoint import Projection, plan_routes
from delivered.pipeline.transform import TIME, Transform, alone_sql, helper_columns, key_columns, key_sql, seen_sql
from delivered.spark.internals import from_arrow, pickle_by_value, to_arrow
from delivered.spark.writers import DedupTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
    isolates = transform.function is not None and failing is not Failing.FAIL

    def apply(frames: Mapping[str, DataFrame]) -> DataFrame:
        frame = _only(frames)
        rows = source.schema() if source is not None else to_arrow(frame.schema)
        columns = transform(pa.RecordBatch.from_pylist([], schema=rows)).schema
        schema = with_rejected(columns) if isolates and failing is Failing.KEEP else columns

        def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                if isolates:
                    yield from (encode(part, schema) for part in run_isolated(transform, decode(batch), columns))
                else:
                    yield transform(batch)

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
    try:
        return _with(frame, columns) if columns else frame
    except (AnalysisException, ParseException) as error:
        raise UsageError("SINK_EXPRESSION", error=str(error).splitlines()[0]) from None


def _with(frame: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    return frame.selectExpr("*", *[f"({sql}) AS {backquoted(name)}" for name, sql in columns.items()])


def with_keys(frame: DataFrame, dedup: Dedup) -> DataFrame:
    """The frame with the columns `helper_columns`; rows are neither added nor moved.

    Raises:
        UsageError: an expression is not SQL over one row of the source, or the time is not a timestamp.
    """
    try:
        keyed = _with(frame, key_sql(dedup))
        keyed = _with(keyed, alone_sql(dedup, frame.columns))
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
    columns, keyed = [*map(backquoted, frame.columns)], with_keys(frame, dedup)
    seen = seen_sql(dedup, dict(frame.dtypes), dict(keyed.dtypes))
    keyed = keyed.selectExpr(*columns, *(f"{sql} AS {name}" for name, sql in seen.items()))
    # Records without a key are never duplicates, so they can go to any partition.
    meeting = keyed.selectExpr("*", f"coalesce({KEY}, unhex(hex({TIE}))) AS __delivered_seen_meet")
    meeting = meeting.repartition(shards, "__delivered_seen_meet").drop("__delivered_seen_meet")
    task = DedupTask(sink, scope, dedup.within_ms * 1_000)
    return meeting.select(*columns, *HELPERS).mapInArrow(task, frame.schema)

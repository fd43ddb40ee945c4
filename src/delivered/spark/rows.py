"""DataFrame operations between source and sinks: the transform, and the projection of each sink."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from delivered.contract.sink import Sink
from delivered.contract.source import Source
from delivered.engine.dead_letters import validated
from delivered.engine.in_band import REJECTED, decode, encode, with_rejected
from delivered.engine.sinks import Columns
from delivered.engine.transform import ArrowTransform, isolated
from delivered.model.errors import UsageError
from delivered.model.ranges import backquoted
from delivered.model.rows import Rows
from delivered.pipeline.endpoint import Projection
from delivered.pipeline.transform import Transform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OWN = "__delivered_sink_"


class Failing(Enum):
    """What becomes of a row for which the transform's function raises."""

    FAIL = auto()
    """It fails the task."""
    LEAVE_OUT = auto()
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
    _travel_by_value(transform)
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
                raise UsageError(
                    "TRANSFORM_MISSING",
                    "The transform is a function, but none was given.",
                    next_step="pass the function to delivered.Pipeline, or write it as module:function in the file",
                )
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
    _travel_by_value(transform)
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
        rows = source.schema() if source is not None else to_arrow_schema(frame.schema, timezone="UTC")
        columns = transform(pa.RecordBatch.from_pylist([], schema=rows)).schema
        schema = with_rejected(columns) if failing is Failing.KEEP else columns

        def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                if failing is Failing.FAIL:
                    yield transform(batch)
                else:
                    yield from (encode(part, schema) for part in isolated(transform, decode(batch), columns))

        return frame.mapInArrow(each, from_arrow_schema(schema))

    return apply


def _travel_by_value(transform: Transform) -> None:
    """Pickle the functions of the user's module by value: executors do not have it installed."""
    name = getattr(transform.function, "__module__", None)
    module: ModuleType | None = sys.modules.get(name) if name else None
    file = getattr(module, "__file__", None)
    if module is None or file is None or name == "__main__":
        return
    installed = [sysconfig.get_path(p) for p in ("purelib", "platlib", "stdlib")]
    if not any(file.startswith(str(folder)) for folder in installed):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def routed(
    frame: DataFrame, projections: Sequence[Projection], keep: Sequence[str] = ()
) -> tuple[DataFrame, list[Columns | None]]:
    """The frame with the columns of all sinks, and which of them each sink gets. Rows are neither added nor moved.

    Args:
        keep: columns to keep in addition, if the frame has them: where a row came from.

    Raises:
        UsageError: an expression is not SQL over the frame's columns, returns more or fewer rows than it gets, or a
            condition is not boolean.
    """
    if all(p.is_all for p in projections):
        return frame, [None] * len(projections)
    names = [c for c in frame.columns if c != REJECTED.name]
    # Expressions are for rows; what the transform rejected is null.
    row = f"{REJECTED.name} IS NULL" if REJECTED.name in frame.columns else "true"
    where = {f"{_OWN}{i}": p.where for i, p in enumerate(projections) if p.where is not None}
    frame = _with_columns(frame, {n: f"CASE WHEN {row} THEN ({sql}) END" for n, sql in where.items()})
    _check_conditions(frame, projections)
    made: dict[str, str] = {}
    routes: list[Columns | None] = []
    used = [c for c in (*keep, REJECTED.name) if c in frame.columns]
    for number, projection in enumerate(projections):
        own = f"{_OWN}{number}" if projection.where is not None else None
        take = []
        for item in projection.columns(names):
            column = item.name
            if item.sql is not None:
                column = f"{_OWN}{number}_{item.name}"
                # CASE evaluates it only for the sink's own rows, and rules out generators and aggregates.
                made[column] = f"CASE WHEN {row} AND {backquoted(own) if own else 'true'} THEN ({item.sql}) END"
            elif column not in names:
                raise UsageError(
                    "SELECT_COLUMN",
                    f"A sink's select names the column {column!r}; the rows have {', '.join(names)}.",
                    next_step="name a column of the rows, or add it to the transform",
                )
            take.append((item.name, column))
        used += [c for _, c in take] + ([own] if own else [])
        routes.append(None if projection.is_all else Columns(tuple(take), own))
    frame = _with_columns(frame, made)
    if any(r is None for r in routes):
        used += names
        routes = [r or Columns(tuple((n, n) for n in names)) for r in routes]
    return frame.select(*[backquoted(c) for c in dict.fromkeys(used)]), routes


def accepted(frame: DataFrame, sink: Sink) -> DataFrame:
    """The valid rows of a frame, as the sink validates them."""
    if not sink.capability().validates:
        return frame

    def pick(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield validated(sink, Rows(batch)).good

    return frame.mapInArrow(pick, frame.schema)


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
        raise UsageError(
            "SINK_EXPRESSION",
            f"A sink's select or where is invalid: {str(error).splitlines()[0]}",
            next_step="write SQL over single rows of the transform's result; aggregate in the transform",
        ) from None


def _check_conditions(frame: DataFrame, projections: Sequence[Projection]) -> None:
    types: dict[str, Any] = dict(frame.dtypes)
    for number, projection in enumerate(projections):
        kind = types.get(f"{_OWN}{number}", "boolean")
        if kind != "boolean":
            raise UsageError(
                "WHERE_VALUE",
                f"A sink's where is {projection.where!r}, of type {kind}; it must be boolean.",
                next_step="write a condition, as in amount > 0",
            )

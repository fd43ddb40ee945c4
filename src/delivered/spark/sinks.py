"""The sinks of a pipeline: opened as one for the engine, and the rows routed to each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from delivered.contract.powers import ValidatesRows
from delivered.contract.sink import Sink, SinkGroup
from delivered.engine.dead_letters import validated
from delivered.group import Columns, Group
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import UsageError
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.projection import Projection
from delivered.pipeline.registry import find_sink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from delivered.spark.pipeline import Pipeline

OPTION = "delivered.sinks"
"""Of the internal format `delivered_sinks`: what each sink of the group is, as JSON. `Pipeline` sets it."""

FORMAT = "sinks"
COORDINATES = ("topic", "partition", "offset")
_OWN = "__delivered_sink_"
_ASYNC = "asyncprogress"


def without_async(endpoint: Endpoint) -> Endpoint:
    """Options of Spark's asynchronous progress stand beside the sink's, and are not the connector's."""
    return endpoint.keeping({k: v for k, v in endpoint.options.items() if not k.lower().startswith(_ASYNC)})


def is_group(pipeline: Pipeline) -> bool:
    return len(pipeline.sinks) > 1 or pipeline.on_bad_row is not OnBadRow.FAIL


def opened(pipeline: Pipeline) -> tuple[str, Sink | SinkGroup]:
    """The sinks of a pipeline without their routes, for ledger and committer, and the name they decide under.

    Raises:
        UsageError: bad options, or two sinks of one name.
    """
    plain = [without_async(e) for e in pipeline.sinks]
    if not is_group(pipeline):
        sink = plain[0].sink()
        return plain[0].name or sink.name, sink
    dead_letter = without_async(pipeline.dead_letter) if pipeline.dead_letter is not None else None
    group = Group.of(
        [(e.name, e.sink(), None) for e in plain],
        pipeline.on_bad_row,
        (dead_letter.name, dead_letter.sink()) if dead_letter is not None else None,
    )
    return group.name, group


def packed(pipeline: Pipeline, routes: Sequence[Columns | None]) -> str:
    """For the option `OPTION`."""
    sinks = [
        {
            **_endpoint(e),
            "take": r.take if r is not None else None,
            "where": r.where if r is not None else None,
        }
        for e, r in zip(pipeline.sinks, routes, strict=True)
    ]
    dead_letter = _endpoint(pipeline.dead_letter) if pipeline.dead_letter is not None else None
    return json.dumps({"sinks": sinks, "on_bad_row": pipeline.on_bad_row.value, "dead_letter": dead_letter})


def _endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return {"format": endpoint.system, "name": endpoint.name, "options": dict(without_async(endpoint).options)}


def unpacked(options: Mapping[str, str]) -> Group:
    """The sinks that an option holds.

    Raises:
        UsageError: the format was not used by `Pipeline`, or has options of its own.
    """
    text = options.get(OPTION)
    if text is None or len(options) > 1:
        raise UsageError(
            "SINKS_OPTION",
            f"The format delivered_{FORMAT} is what a pipeline with several sinks uses; it was given the options "
            f"{sorted(options)}.",
            next_step="name several sinks in delivered.Pipeline(sinks=[...]) or in a pipeline file",
        )
    told = json.loads(text)
    made: list[tuple[str | None, Sink, Columns | None]] = []
    for said in told["sinks"]:
        take = said["take"]
        route = Columns(tuple((n, c) for n, c in take), said["where"]) if take is not None else None
        made.append((said["name"], find_sink(said["format"], said["options"]), route))
    dead_letter = told["dead_letter"]
    dead_letter = (
        (dead_letter["name"], find_sink(dead_letter["format"], dead_letter["options"]))
        if dead_letter is not None
        else None
    )
    return Group.of(made, OnBadRow(told["on_bad_row"]), dead_letter)


def plain_routes(projections: Sequence[Projection]) -> list[Columns | None]:
    """Routes of projections that only pick columns."""
    return [None if p.is_all else Columns(tuple((i.name, i.name) for i in p.items)) for p in projections]


def routed(
    frame: DataFrame, projections: Sequence[Projection], keep: Sequence[str] = ()
) -> tuple[DataFrame, list[Columns | None]]:
    """The frame with the columns that every sink needs, and how each finds its own. No row is added or moved.

    Args:
        keep: columns of the frame, if it has them, that are kept beside: where a row came from.

    Raises:
        UsageError: an expression is no SQL over the frame's columns, gives more or fewer rows than it gets, or a
            condition is not true or false.
    """
    if all(p.is_all for p in projections):
        return frame, [None] * len(projections)
    given = list(frame.columns)
    frame = _with_columns(frame, {f"{_OWN}{i}": p.where for i, p in enumerate(projections) if p.where is not None})
    _check_conditions(frame, projections)
    made: dict[str, str] = {}
    routes: list[Columns | None] = []
    used = [c for c in keep if c in given]
    for number, projection in enumerate(projections):
        where = f"{_OWN}{number}" if projection.where is not None else None
        take = []
        for item in projection.items:
            column = item.name
            if item.sql is not None:
                column = f"{_OWN}{number}_{item.name}"
                # Within CASE: only for the sink's own rows, and nothing that gives more rows or one for many.
                made[column] = f"CASE WHEN {_quoted(where) if where else 'true'} THEN ({item.sql}) END"
            elif column not in given:
                raise UsageError(
                    "SELECT_COLUMN", f"A sink's select names the column {column!r}; the rows have {', '.join(given)}."
                )
            take.append((item.name, column))
        take = take or [(n, n) for n in given]
        used += [c for _, c in take] + ([where] if where else [])
        routes.append(None if projection.is_all else Columns(tuple(take), where))
    frame = _with_columns(frame, made)
    if any(r is None for r in routes):
        used += given
        routes = [r or Columns(tuple((n, n) for n in given)) for r in routes]
    return frame.select(*[_quoted(c) for c in dict.fromkeys(used)]), routes


def taken(frame: DataFrame, sink: Sink) -> DataFrame:
    """The rows of a frame that a sink does not refuse for themselves."""
    if not isinstance(sink, ValidatesRows):
        return frame

    def pick(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield validated(sink, batch)[0]

    return frame.mapInArrow(pick, frame.schema)


def projected(frame: DataFrame, projection: Projection) -> DataFrame:
    """What one sink gets of a frame, as a frame."""
    routed_frame, (route,) = routed(frame, [projection])
    if route is None:
        return frame
    if route.where is not None:
        routed_frame = routed_frame.where(_quoted(route.where))
    return routed_frame.selectExpr(*[f"{_quoted(column)} AS {_quoted(name)}" for name, column in route.take])


def _with_columns(frame: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    from pyspark.errors import AnalysisException, ParseException

    if not columns:
        return frame
    try:
        return frame.selectExpr("*", *[f"({sql}) AS {_quoted(name)}" for name, sql in columns.items()])
    except (AnalysisException, ParseException) as error:
        raise UsageError(
            "SINK_EXPRESSION",
            f"A sink's select or where cannot be used: {str(error).splitlines()[0]}",
            next_step="write SQL over one row of what the transform gives; what needs more rows belongs into the "
            "transform",
        ) from None


def _check_conditions(frame: DataFrame, projections: Sequence[Projection]) -> None:
    types: dict[str, Any] = dict(frame.dtypes)
    for number, projection in enumerate(projections):
        kind = types.get(f"{_OWN}{number}", "boolean")
        if kind != "boolean":
            raise UsageError(
                "WHERE_VALUE",
                f"A sink's where is {projection.where!r}, of type {kind}; it must be true or false.",
            )


def _quoted(name: str | None) -> str:
    return "`" + str(name).replace("`", "``") + "`"

"""What a query's output mode does to its sinks: upserts by the grouping keys, or replacement of all rows."""

from __future__ import annotations

import re
from dataclasses import replace

from delivered.contract.connector import Connector
from delivered.model.errors import Refused, UsageError
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.registry import connector, connectors
from delivered.pipeline.transform import Transform

_GROUP_BY = re.compile(
    r"\bgroup\s+by\s+(.+?)(?:\bhaving\b.*|\border\s+by\b.*|\blimit\b.*|;|$)", re.IGNORECASE | re.DOTALL
)
_COLUMN = re.compile(r"(?:[A-Za-z_]\w*\.)?([A-Za-z_]\w*)|(?:[A-Za-z_]\w*\.)?`([^`]+)`")


def for_output_mode(sink: Endpoint, mode: str, transform: Transform) -> Endpoint:
    """The sink as this output mode writes to it.

    Raises:
        UsageError: an upsert without keys, or a contradicting mode of the sink.
        Refused: the sink cannot replace all its rows.
    """
    if mode == "append" or sink.is_spark_own:
        return sink
    values = {k.lower(): v for k, v in sink.options.items()}
    is_table = _has_table(connector(sink.system))
    required = "complete" if mode == "complete" else "upsert"
    if mode == "complete" and not is_table:
        raise Refused(
            "OUTPUT_MODE_COMPLETE",
            "output_mode complete delivers all rows of the result with every batch, and "
            f"delivered_{sink.system} cannot replace what earlier batches delivered.",
            next_step="choose output_mode update, which delivers the rows that changed; or a sink with tables "
            f"({', '.join(c.name for c in connectors().values() if _has_table(c))})",
        )
    if not is_table or (mode == "update" and values.get("mode") == "append"):
        return sink
    if values.get("mode", required) != required:
        raise UsageError(
            "OUTPUT_MODE",
            f"output_mode is {mode!r}, and the sink {sink.label} has mode {values['mode']!r}; it must be {required!r}.",
            next_step="remove the sink's mode, or choose another output_mode",
        )
    options = {**sink.options, **({} if "mode" in values else {"mode": required})}
    if mode == "update" and not values.get("keycolumns", "").strip():
        options["keyColumns"] = ",".join(_keys(sink, transform))
    return replace(sink, options=options)


def _has_table(of: Connector) -> bool:
    """Whether its sinks write rows that have a key."""
    return of.sink_options is not None and any(o.name == "keyColumns" for o in of.sink_options.options)


def grouping_columns(sql: str) -> list[str]:
    """The columns of the SQL's one GROUP BY, if they are plain columns; else none."""
    parts = _GROUP_BY.findall(sql)
    nested = re.search(r"\bgroup\s+by\b.*\bgroup\s+by\b", sql, re.I | re.S)
    columns = [_COLUMN.fullmatch(part.strip()) for part in parts[0].split(",")] if len(parts) == 1 else []
    return [m.group(1) or m.group(2) for m in columns if m is not None] if None not in columns and not nested else []


def _keys(sink: Endpoint, transform: Transform) -> list[str]:
    columns = grouping_columns(transform.sql)
    if not columns:
        groupings = [re.sub(r"\s+", " ", text).strip() for text in _GROUP_BY.findall(transform.sql)]
        why = f"its SQL groups by {groupings[0]!r}" if len(groupings) == 1 else "the transform does not tell them"
        raise UsageError(
            "OUTPUT_MODE_KEYS",
            f"output_mode update writes upserts into {sink.label}, which needs the columns that identify a row: "
            f"{why}, and the sink names no keyColumns.",
            next_step='add .option("keyColumns", "...") with the columns that the query groups by, as its result names '
            "them",
        )
    return columns

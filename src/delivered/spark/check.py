"""Facts that a session gives the planner: where it runs, and whether a pipeline's SQL fits its columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from delivered.contract.finding import Finding
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.identity import SOURCE
from delivered.pipeline.definition import Definition
from delivered.pipeline.facts import ASYNC_CONF, SessionFacts
from delivered.pipeline.transform import changing_in_sql
from delivered.spark.jvm import jvm_of
from delivered.spark.quick_start import advice
from delivered.spark.rows import apply_transform, own_views, projected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SUGGESTED = re.compile(r"Did you mean one of the following\? \[(.*?)\]", re.DOTALL)
_PLACE = re.compile(r"\(line (\d+), pos (\d+)\)|line (\d+),? pos(?:ition)? (\d+)")
_CLASS = re.compile(r"^\[([A-Z_.]+)\]\s*")


def session_facts(pipeline: Definition, spark: SparkSession) -> SessionFacts:
    """For `gather`."""
    return SessionFacts(
        str(spark.conf.get("spark.master", "local")),
        str(spark.conf.get(ASYNC_CONF, "false")).lower() == "true",
        jvm_of(spark),
        lambda: (*_sources_restart(pipeline, spark), *checked_transform(pipeline, spark), *_slow_workers(spark)),
    )


def _sources_restart(pipeline: Definition, spark: SparkSession) -> tuple[Finding, ...]:
    error = cannot_restart(pipeline.sources, spark.version)
    return () if error is None else (Finding.refusal(error),)


def cannot_restart(sources: Collection[str], version: str) -> Refused | None:
    """Why this version of Spark cannot restart a query with named sources; None: it can.

    Spark 4.2 expects the number of state partitions in the offset log, which its format 2 does not hold: a start whose
    newest batch is not finished ends with "None.get".
    """
    if set(sources) == {SOURCE} or not version.startswith("4.2."):
        return None
    return Refused(
        "SOURCES_SPARK_VERSION",
        f"Spark {version} cannot restart a query with named sources that stopped in the middle of a batch (it "
        f"ends with None.get); sources ({', '.join(sorted(sources))}) need Spark 4.3 or later. Nothing was started.",
        next_step='pip install -U "pyspark>=4.3", which also continues checkpoints of 4.2; or read one source, '
        "under source:",
    )


def _slow_workers(spark: SparkSession) -> tuple[Finding, ...]:
    return tuple(Finding(code, text, False) for code, text in advice(partial(spark.conf.get, default="")).items())


def checked_transform(pipeline: Definition, spark: SparkSession) -> tuple[Finding, ...]:
    """Findings about the SQL and the columns of each sink. Reads no records; does not run a Python transform."""
    own = any(e.is_spark_own for e in pipeline.sources.values())
    if own or pipeline.transform.kind not in ("none", "sql"):
        return ()
    try:
        sources = {n: e.source().planned().schema() for n, e in pipeline.sources.items()}
        schemas, repeatable = _results(pipeline, spark, sources)
        for endpoint, columns in zip(pipeline.sinks, schemas, strict=True):
            sink = endpoint.sink()
            sink.check_schema(columns)
            sink.check_rows(columns)
    except UsageError as error:
        return (Finding.refusal(error),)
    except DeliveredError:
        return ()  # a server went away meanwhile: the start reports it
    named = pipeline.transform.deterministic is not None or changing_in_sql(pipeline.transform.sql)
    return () if repeatable or named else (_UNREPEATABLE,)


_UNREPEATABLE = Finding(
    "SQL_NOT_DETERMINISTIC",
    "The SQL calls a function that is registered as nondeterministic (asNondeterministic): a batch that reruns gets "
    "other rows. If its decided transaction timed out and must be written again, or if the query keeps state, it stops "
    "with REPLAY_DIFFERS. Compute the value from the record, or declare `deterministic: true` if it depends on its "
    "arguments alone.",
    False,
)


def _results(
    pipeline: Definition, spark: SparkSession, sources: Mapping[str, pa.Schema]
) -> tuple[list[pa.Schema], bool]:
    """Columns of the rows that reach each sink, and whether Spark takes the transform for deterministic.

    Raises:
        UsageError: the SQL, or a sink's select, does not fit the columns.
    """
    read = {n: spark.createDataFrame([], from_arrow_schema(s)) for n, s in sources.items()}
    try:
        with own_views(pipeline.transform, spark, read):
            frame = apply_transform(pipeline.transform, spark, dict.fromkeys(sources))(read)
            # Spark Connect analyses here, not before: the views must still be there.
            frames = [projected(frame, s.projection) for s in pipeline.sinks]
            schemas = [to_arrow_schema(f.schema, timezone="UTC") for f in frames]
            jvm_frame = getattr(frame, "_jdf", None)  # Spark Connect does not tell
            return schemas, jvm_frame is None or bool(jvm_frame.queryExecution().analyzed().deterministic())
    except (AnalysisException, ParseException) as error:
        raise _invalid(error, pipeline.transform.sql, sources) from None


def _invalid(error: Any, sql: str, sources: Mapping[str, pa.Schema]) -> UsageError:
    text = str(error)
    place = _PLACE.search(text)
    first = _CLASS.sub("", text.split("SQLSTATE", maxsplit=1)[0].split("\n", maxsplit=1)[0]).strip().rstrip(".;")
    line = next((g for g in (place.group(1), place.group(3)) if g), None) if place else None
    position = next((g for g in (place.group(2), place.group(4)) if g), None) if place else None
    where = f" (line {line}, position {int(position or 0) + 1} of {sql.strip()!r})" if line else f" ({sql.strip()!r})"
    suggested = _SUGGESTED.search(text)
    views = "; ".join(f"the view `{n}` has the columns {', '.join(s.names)}" for n, s in sources.items())
    return UsageError(
        "SQL_INVALID",
        f"The transform's SQL does not fit the source{'s' * (len(sources) > 1)}: {first}{where}.",
        next_step="did you mean " + suggested.group(1).replace("`", "") if suggested else views,
    )

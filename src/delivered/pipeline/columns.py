"""What a plan says of a transform's SQL, and of its columns at every sink, without Spark: what a start would refuse.

Only what is certain is refused. What only Spark knows is a finding, `SQL_UNCHECKED`, and left to `run`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from delivered.contract.source import Finding
from delivered.model.errors import DeliveredError, UsageError
from delivered.pipeline.changing import changing_in_sql
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint, Item, Projection
from delivered.pipeline.sql import UNKNOWN, Place, SqlFacts, check_sql, is_readable

UNCHECKED = "SQL_UNCHECKED"
_HARMLESS = re.compile(
    r"spark\.sql\.(shuffle|streaming|execution|adaptive|files|ansi\.enabled$|session\.timeZone)", re.IGNORECASE
)
"""Settings that change neither grammar nor names nor types."""
_SESSION_FROM = frozenset(("SPARK_REMOTE", "PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS"))
"""Variables that give a session more than is known here."""
_STAND_INS = (pa.string(), pa.binary(), pa.int64(), pa.bool_(), pa.timestamp("us", "UTC"))
"""Types in the place of an unknown one: what a sink refuses for each of them, with the same words, it refuses."""


def check_columns(pipeline: Definition) -> tuple[Finding, ...]:
    """Findings about the SQL and the columns that reach each sink. Asks sinks for their tables; changes nothing."""
    transform = pipeline.transform
    unknown = transform.kind == "python" or (transform.kind == "arrow" and transform.function is not None)
    if unknown or any(e.is_spark_own for e in pipeline.sources.values()):
        return ()
    try:
        sources = {n: e.source().planned().schema() for n, e in pipeline.sources.items()}
        if transform.kind != "sql":
            columns: pa.Schema | None = project(
                next(iter(sources.values())), Projection(tuple(map(Item, transform.select)))
            )
        else:
            facts = _sql(pipeline, sources)
            if facts.error is not None:
                return (Finding.refusal(facts.error),)
            if facts.doubt:
                return (Finding.build(UNCHECKED, refuses=False, reason=facts.doubt),)
            if facts.aggregates and pipeline.output_mode == "append" and pipeline.dedup is None:
                return (Finding.refusal(UsageError("OUTPUT_MODE.AGGREGATES")),)
            if facts.sorts and pipeline.output_mode != "complete":
                return (Finding.refusal(UsageError("OUTPUT_MODE.SORTS", mode=pipeline.output_mode)),)
            if facts.outer is not None and pipeline.dedup is None:
                return (Finding.refusal(facts.outer),)
            columns = facts.columns
        found: list[Finding] = []
        for endpoint in pipeline.sinks if columns is not None else ():
            _check_projection(pipeline, endpoint, columns)
            own = project(columns, endpoint.projection)
            _check(endpoint, own)
            found += _audited_by(pipeline, endpoint, own)
        return tuple(found)
    except UsageError as error:
        return (Finding.refusal(error),)
    except DeliveredError:
        return ()  # a server went away meanwhile: the start reports it


def check_analysed(
    pipeline: Definition, analyse: Callable[[Mapping[str, pa.Schema]], tuple[Sequence[pa.Schema], bool]]
) -> tuple[Finding, ...]:
    """The same with a session, which knows all that its SQL means. Reads no records; runs no Python transform.

    Args:
        analyse: columns by source -> those that reach each sink, and whether the transform is deterministic. Raises
            UsageError: it, or a sink's select, does not fit the columns.
    """
    own = any(e.is_spark_own for e in pipeline.sources.values())
    if own or pipeline.transform.kind not in ("none", "sql"):
        return ()
    try:
        schemas, repeatable = analyse({n: e.source().planned().schema() for n, e in pipeline.sources.items()})
        for endpoint, columns in zip(pipeline.sinks, schemas, strict=True):
            _check(endpoint, columns)
    except UsageError as error:
        return (Finding.refusal(error),)
    except DeliveredError:
        return ()  # a server went away meanwhile: the start reports it
    named = pipeline.transform.deterministic is not None or changing_in_sql(pipeline.transform.sql)
    return () if repeatable or named else (Finding.build("SQL_NOT_DETERMINISTIC", refuses=False),)


def _sql(pipeline: Definition, sources: Mapping[str, pa.Schema]) -> SqlFacts:
    if not is_readable():
        return SqlFacts(doubt="the package sqlglot is not installed")
    facts = check_sql(pipeline.transform.sql, sources, builtin=_is_builtin(pipeline))
    return SqlFacts(doubt=facts.error.message) if facts.error is not None and _has_session() else facts


def _is_builtin(pipeline: Definition) -> bool:
    """Whether the pipeline's session has Spark's own functions, tables and grammar, and no others."""
    if _SESSION_FROM & os.environ.keys() or (pipeline.master or "local").startswith("sc:"):
        return False
    settings = {**spark_defaults(), **pipeline.conf}
    return not any(k.startswith(("spark.sql.", "spark.remote")) and not _HARMLESS.match(k) for k in settings)


def _has_session() -> bool:
    """Whether a start in this process uses a session that is there, with whatever was registered in it."""
    spark = sys.modules.get("pyspark.sql")
    return spark is not None and spark.SparkSession.getActiveSession() is not None


def spark_defaults() -> dict[str, str]:
    """Spark's configuration file: a key and a value on each line, with blanks or an equals sign between them."""
    folder = os.environ.get("SPARK_CONF_DIR") or f"{os.environ.get('SPARK_HOME', '')}/conf"
    try:
        text = (Path(folder) / "spark-defaults.conf").read_text(encoding="utf-8")
    except OSError:
        return {}
    lines = (re.split(r"[\s=]+", x.strip(), maxsplit=1) for x in text.splitlines() if not x.lstrip().startswith("#"))
    return {words[0]: words[1] for words in lines if len(words) > 1}


def project(columns: pa.Schema, projection: Projection) -> pa.Schema:
    """The columns that one sink gets. Raises UsageError: it names a column that the rows do not have."""
    types = {f.name.lower(): f.type for f in columns}
    for item in projection.items:
        if item.sql is None and item.name.lower() not in types:
            raise UsageError("SELECT_COLUMN.PLAN", column=item.name, names=", ".join(columns.names))
    kinds = [(i.name, types[i.name.lower()] if i.sql is None else UNKNOWN) for i in projection.items]
    return pa.schema(kinds) if kinds else columns


def _check_projection(pipeline: Definition, endpoint: Endpoint, columns: pa.Schema) -> None:
    """Raises UsageError: `select` or `where` of a sink is no SQL over the rows."""
    projection, sink = endpoint.projection, endpoint.name or endpoint.sink().name
    texts = [("select", item.sql, "SELECT ", " FROM source") for item in projection.items if item.sql is not None]
    if projection.where is not None:
        texts.append(("where", projection.where, "SELECT 1 AS n FROM source WHERE ", ""))
    builtin = _is_builtin(pipeline) and not _has_session()
    for key, text, before, after in texts:
        place = Place(f"The `{key}` of the sink {sink!r}", before, after, rows="the rows have")
        error = check_sql(text, {"source": columns}, builtin=builtin, place=place).error
        if error is not None:
            raise error


def _audited_by(pipeline: Definition, endpoint: Endpoint, columns: pa.Schema) -> Iterator[Finding]:
    """What identifies records for an audit, and is no SQL over the sink's columns: a run goes on, no audit does."""
    for name, text in {**pipeline.audit_by, **endpoint.audit}.items():
        query = f"SELECT {text} FROM source"  # noqa: S608 - nothing runs it
        facts = check_sql(query, {"source": columns}, builtin=_is_builtin(pipeline))
        if facts.error is not None:
            sink, names = endpoint.sink().name, ", ".join(columns.names)
            yield Finding.build(
                "AUDIT_EXPRESSION.PLAN", refuses=False, name=name, text=text, sink=endpoint.name or sink, columns=names
            )


def _check(endpoint: Endpoint, columns: pa.Schema) -> None:
    """Raises UsageError: a start would refuse the columns."""
    sink = endpoint.sink()
    _certain(sink.check_schema, columns)
    if UNKNOWN not in columns.types:
        sink.check_rows(columns)
    if (check := sink.target_check()) is None:
        return
    try:
        check(columns)
    except UsageError as error:
        step = re.sub(r"(ADD COLUMN .+?) None", r"\1 ...", error.next_step or "")  # of an unknown type
        raise UsageError(error.args[0], error.message, step) from None


def _certain(check: Callable[[pa.Schema], None], columns: pa.Schema) -> None:
    """Raises UsageError: the check does, whatever the unknown types are."""
    errors = []
    for schema in _possible(columns):
        try:
            check(schema)
        except UsageError as error:
            errors.append(error)
            continue
        return
    if len({e.message for e in errors}) == 1:
        raise errors[0]


def _possible(columns: pa.Schema) -> Iterator[pa.Schema]:
    if UNKNOWN not in columns.types:
        yield columns
        return
    for kind in _STAND_INS:
        yield pa.schema([f.with_type(kind) if f.type == UNKNOWN else f for f in columns])

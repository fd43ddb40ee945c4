"""What `register` adds to PySpark's own classes, so that an error reaches the user early and says what to do first.

PySpark shows an error of a Python data source as the worker's traceback, and runs a sink's code only in the query's
first batch, after `start()` returned. Nothing in the data source interface changes that (decision 035). So `register`
wraps, once per process:

    exceptions of Spark    str(error) is our message, if one of ours is inside; its type stays
    DataStreamWriter       start() asks the driver first whether the query can be started (start_check.py)
    load() over Connect    analyses the frame at once, as a classic session does
    load, save, start      find our formats in any session and on any thread of the application
    newSession             the new session knows our formats too
    explain()              says that PySpark asks a batch source for its offsets once
    StreamingQueryProgress lag and description of a source, as Spark's Kafka source says them (source_progress.py)

What does not name our formats passes through untouched.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.registry import PREFIX, connector
from delivered.spark.messages import from_our_code, translated
from delivered.spark.session import make_active
from delivered.spark.settings import START_OPTION
from delivered.spark.source_progress import is_python_stream, lag
from delivered.spark.start_check import OPTION, pack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_NOT_FOUND = re.compile(rf"DATA_SOURCE_NOT_FOUND.*?\b({PREFIX}\w+)", re.DOTALL)
_WRAPPED = "__delivered__"
_planned: ContextVar[bool] = ContextVar("delivered_planned", default=False)


_PLANNED_ONCE = (
    f"{PREFIX}*: the offsets of this DataFrame are fixed at its first action; to see later records, load() again or "
    "read from a SQL table\n"
)
_DESCRIPTIONS_MAX = 1_000
_descriptions: dict[str, tuple[str, ...]] = {}
"""Of a query's sources, by its run id."""


@dataclass(frozen=True)
class Write:
    """A streaming write as the user described it.

    Attributes:
        options: as given, in any case, `queryName` among them.
        columns: the schema as JSON; a callable, since Connect must ask the server.
    """

    format: str
    options: Mapping[str, str]
    output_mode: str
    columns: Callable[[], str]


@contextlib.contextmanager
def already_planned() -> Iterator[None]:
    """Queries started inside were checked by `Pipeline.plan`."""
    token = _planned.set(True)
    try:
        yield
    finally:
        _planned.reset(token)


def install(spark: SparkSession, register: Callable[[SparkSession, SparkSession | None], None]) -> None:
    """Wrap the classes that this kind of session uses. May be called again.

    Args:
        register: makes the formats known to a session; the second argument is one that knows them, if there is.
    """
    connect = not hasattr(spark, "_jvm")
    kind = "connect" if connect else "captured"
    for found in vars(import_module(f"pyspark.errors.exceptions.{kind}")).values():
        if isinstance(found, type) and issubclass(found, Exception) and "__str__" in vars(found):
            _wrap(found, "__str__", _message_first)
    found_by = functools.partial(_found, register=register)
    readers, streams = import_module(type(spark.read).__module__), import_module(type(spark.readStream).__module__)
    if connect:
        _wrap(readers.DataFrameReader, "load", _analysed, layer="analysed")
        _wrap(streams.DataStreamReader, "load", _analysed, layer="analysed")
    for owner, name in [
        (readers.DataFrameReader, "load"),
        (readers.DataFrameWriter, "save"),
        (streams.DataStreamReader, "load"),
        (streams.DataStreamWriter, "start"),
        (type(spark), "sql"),
        (type(spark), "table"),
    ]:
        _wrap(owner, name, found_by)
    frames = import_module(f"pyspark.sql.{'connect' if connect else 'classic'}.dataframe")
    _wrap(frames.DataFrame, "explain", _explained)
    _wrap(streams.DataStreamWriter, "start", _checked, layer="checked")
    _wrap(import_module("pyspark.sql.streaming.listener").StreamingQueryProgress, "__init__", _with_lag)
    _wrap(type(spark), "newSession", functools.partial(_registered, register=register))


def _wrap(owner: type, name: str, wrapper: Callable[..., Callable[..., Any]], layer: str = "") -> None:
    original = getattr(owner, name, None)
    mark = f"{_WRAPPED}{layer}"
    if original is None or hasattr(original, mark):  # older PySpark: no newSession over Connect
        return
    made = functools.wraps(original)(wrapper(original))
    setattr(made, mark, True)
    setattr(owner, name, made)


def _message_first(original: Callable[..., str]) -> Callable[..., str]:
    def text(self: Exception) -> str:
        said = original(self)
        found = from_our_code(said)
        return said if found is None else f"{found}\n(raised in a Spark worker; Spark's log has the trace)"

    return text


def _session_of(holder: Any) -> Any:
    """The session of a reader, a writer, or the session itself."""
    for name in ("_spark", "_session", "_client"):
        found = getattr(holder, name, None)
        if hasattr(found, "dataSource"):
            return found
    return holder


def _found(original: Callable[..., Any], register: Callable[..., None]) -> Callable[..., Any]:
    """Our formats are looked up in the thread's active session: if they are not there, make them known and go on."""

    def call(self: Any, *given: Any, **named: Any) -> Any:
        try:
            return original(self, *given, **named)
        except Exception as error:
            missing = _NOT_FOUND.search(str(error))
            if missing is None:
                raise
            connector(missing.group(1))  # raises, if there is no such format
            spark = _session_of(self)
            register(spark, None)
            make_active(spark)
        return original(self, *given, **named)

    return call


def _registered(original: Callable[..., Any], register: Callable[..., None]) -> Callable[..., Any]:
    def new_session(self: Any, *given: Any, **named: Any) -> Any:
        made = original(self, *given, **named)
        register(made, self)
        return made

    return new_session


def _analysed(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *given: Any, **named: Any) -> Any:
        frame = original(self, *given, **named)
        if str(getattr(self, "_format", "")).lower().startswith(PREFIX):
            _ = frame.schema
        return frame

    return load


def _explained(original: Callable[..., None]) -> Callable[..., None]:
    def explain(self: Any, *given: Any, **named: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            original(self, *given, **named)
        sys.stdout.write(said.getvalue() + (_PLANNED_ONCE if f"BatchScan {PREFIX}" in said.getvalue() else ""))

    return explain


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(
        self: Any,
        path: str | None = None,
        format: str | None = None,  # noqa: A002
        outputMode: str | None = None,  # noqa: N803
        partitionBy: Any = None,  # noqa: N803
        queryName: str | None = None,  # noqa: N803
        **options: Any,
    ) -> Any:
        # As PySpark does, so that what was given here is seen; giving it twice changes nothing.
        self.options(**options)
        if outputMode is not None:
            self.outputMode(outputMode)
        if format is not None:
            self.format(format)
        if queryName is not None:
            self.queryName(queryName)
        write = None if _planned.get() else _write(self)
        if write is not None and write.format.lower().startswith(PREFIX):
            _check(_session_of(self), write)
            self.option(START_OPTION, uuid.uuid4().hex)
        query = original(self, path, partitionBy=partitionBy)
        names = _sources(self)
        if names:
            _descriptions[str(query.runId)] = names
            while len(_descriptions) > _DESCRIPTIONS_MAX:
                _descriptions.pop(next(iter(_descriptions)), None)
        return query

    return start


def _with_lag(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        names = _descriptions.get(str(self["runId"]), ())
        sources = self["sources"]
        for number, source in enumerate(sources):
            if is_python_stream(source["description"]):
                source["metrics"] = {**lag(source["endOffset"], source["latestOffset"]), **source["metrics"]}
                if len(names) == len(sources):
                    source["description"] = names[number]

    return init


def _sources(writer: Any) -> tuple[str, ...]:
    """What a query reads, in Spark's order, for people: "delivered_kafka[orders]"; empty where it cannot be seen."""
    try:
        if hasattr(writer, "_write_proto"):
            return tuple(_connect_sources(writer._write_stream._child))
        leaves = writer._df._jdf.queryExecution().analyzed().collectLeaves()
        found = []
        for leaf in (leaves.apply(i) for i in range(leaves.size())):
            if leaf.getClass().getSimpleName() == "StreamingRelationV2":
                found.append(_described(leaf.sourceName(), dict(leaf.extraOptions())))
        return tuple(found)
    except Exception as error:
        log.debug("the sources of a query cannot be seen: %s", error)
        return ()


def _connect_sources(plan: Any) -> Iterator[str]:
    if getattr(plan, "_is_streaming", False) or getattr(plan, "is_streaming", False):
        yield _described(str(plan._format), plan._options)
    for inner in vars(plan).values():
        if hasattr(inner, "to_proto"):
            yield from _connect_sources(inner)


def _described(name: str, options: Mapping[str, str]) -> str:
    if not name.startswith(PREFIX):
        return name
    system, _, rest = Endpoint(name, options).label.partition(" ")
    return f"{PREFIX}{system}[{rest}]"


def _check(spark: Any, write: Write) -> None:
    """Ask the driver, where a Connect client may be far from: `schema` of a data source is what runs there at once."""
    reader = spark.read.format(write.format).options(**write.options)
    try:
        reader.option(OPTION, pack(write.columns(), write.output_mode)).load()
    except Exception as error:
        found = translated(error)
        if found is not None:
            raise found from None
        # What Spark itself cannot do it says again, at the start.
        log.debug("the start was not checked: %s", error)


def _write(writer: Any) -> Write | None:
    """What a DataStreamWriter was told. PySpark has no way to ask; where its insides changed, nothing is checked."""
    try:
        return _connect_write(writer) if hasattr(writer, "_write_proto") else _classic_write(writer)
    except Exception as error:
        log.debug("a streaming writer of this PySpark cannot be read: %s", error)
        return None


def _classic_write(writer: Any) -> Write:
    java, jvm = writer._jwrite, writer._spark._jvm

    def field(name: str) -> Any:
        found = java.getClass().getDeclaredField(name)
        found.setAccessible(True)
        return found.get(java)

    options = jvm.scala.jdk.javaapi.CollectionConverters.asJava(field("extraOptions").originalMap())
    return Write(field("source"), dict(options), str(field("outputMode").toString()), writer._df.schema.json)


def _connect_write(writer: Any) -> Write:
    told = writer._write_proto
    options = dict(told.options)
    if told.query_name:
        options["queryName"] = told.query_name

    def columns() -> str:
        frames = import_module("pyspark.sql.connect.dataframe")
        found: str = frames.DataFrame(writer._write_stream._child, writer._session).schema.json()
        return found

    return Write(told.format, options, told.output_mode or "append", columns)

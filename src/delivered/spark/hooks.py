"""What `register` adds to PySpark's own classes, so that errors reach the user early, without a traceback.

PySpark shows an error of a Python data source as the worker's traceback, and runs a sink's code only in the query's
first batch, after `start()` returned. Nothing in the data source interface changes that (decision 035). So `register`
wraps, once per process:

    exceptions of Spark    str(error) is our message, if it contains one; the type is unchanged
    DataStreamWriter       start() first checks on the driver whether the query can start (pipeline/facts.py), and
                           passes the query's checkpoint to our source
    load() over Connect    analyses the frame eagerly, as a classic session does
    load, save, start      find our formats in any session and on any thread of the application
    newSession             registers our formats in the new session
    start, save            a batch that runs again has the same shards (shards.py)
    explain()              adds that PySpark asks a batch source for its offsets only once
    StreamingQueryProgress lag and description of a source, as Spark's Kafka source reports them (source.py)

Calls that do not involve our formats are passed through unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import logging
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryProgress

from delivered.model.translate import from_our_code, translated
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.registry import PREFIX, connector
from delivered.pipeline.spec import CHECKPOINT, OPTION, StartCheck, idiom_option
from delivered.source import spark_metrics
from delivered.spark.declarative import analyse, without_accumulators
from delivered.spark.jvm import is_connect, make_active
from delivered.spark.reachable import check_executors
from delivered.spark.shards import FOREACH_BATCH, formatted, saved, shards_of, surviving

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_NOT_FOUND = re.compile(rf"DATA_SOURCE_NOT_FOUND.*?\b({PREFIX}\w+)", re.DOTALL)
_WRAPPED = "__delivered__"
_PYTHON_STREAM = "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream"
"""How Spark describes every Python source."""


_PLANNED_ONCE = (
    f"{PREFIX}*: the offsets of this DataFrame are fixed at its first action; to see later records, load() again or "
    "read from a SQL table\n"
)
_DESCRIPTIONS_MAX = 1_000
_descriptions: dict[str, tuple[str, ...]] = {}
"""By the query's run id."""


@dataclass(frozen=True)
class Write:
    """A streaming write as the user declared it.

    Attributes:
        options: as given, keys in any case, including `queryName`.
        columns: the schema as JSON; a callable, since Connect must ask the server.
    """

    format: str
    options: Mapping[str, str]
    output_mode: str
    columns: Callable[[], str]

    @property
    def is_idiom(self) -> bool:
        """Whether it uses one of our formats directly: `Pipeline` has done these checks already."""
        return self.format.lower().startswith(PREFIX) and not any(k.lower() == OPTION for k in self.options)


def install(spark: SparkSession, register: Callable[[SparkSession, SparkSession | None], None]) -> None:
    """Wrap the classes that this kind of session uses. May be called again.

    Args:
        register: registers the formats in a session; the second argument is a session that has them, if any.
    """
    connect = is_connect(spark)
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
        if hasattr(owner, "format"):
            _wrap(owner, "format", formatted)
            _wrap(owner, name, surviving, layer="surviving")
    frames = import_module(f"pyspark.sql.{'connect' if connect else 'classic'}.dataframe")
    _wrap(frames.DataFrame, "explain", _explained)
    _wrap(streams.DataStreamWriter, "start", _checked, layer="checked")
    _wrap(readers.DataFrameWriter, "save", saved, layer="shards")
    _wrap(StreamingQueryProgress, "__init__", _with_lag)
    if connect:
        _wrap(type(spark.client), "execute_command_as_iterator", without_accumulators)
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
        message = original(self)
        found = from_our_code(message)
        return message if found is None else f"{found}\n(raised in a Spark worker; Spark's log has the trace)"

    return text


def _session_of(holder: Any) -> Any:
    """The session of a reader or a writer, or the session itself."""
    for name in ("_spark", "_session", "_client"):
        found = getattr(holder, name, None)
        if hasattr(found, "dataSource"):
            return found
    return holder


def _found(original: Callable[..., Any], register: Callable[..., None]) -> Callable[..., Any]:
    """Spark looks formats up in the thread's active session: register ours there if they are missing, and retry."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            missing = _NOT_FOUND.search(str(error))
            if missing is None:
                raise
            connector(missing.group(1))  # raises if there is no such format
            spark = _session_of(self)
            register(spark, None)
            make_active(spark)
        return original(self, *args, **kwargs)

    return call


def _registered(original: Callable[..., Any], register: Callable[..., None]) -> Callable[..., Any]:
    def new_session(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        register(made, self)
        return made

    return new_session


def _analysed(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = original(self, *args, **kwargs)
        if str(getattr(self, "_format", "")).lower().startswith(PREFIX):
            analyse(frame)
        return frame

    return load


def _explained(original: Callable[..., None]) -> Callable[..., None]:
    def explain(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            original(self, *args, **kwargs)
        sys.stdout.write(printed.getvalue() + (_PLANNED_ONCE if f"BatchScan {PREFIX}" in printed.getvalue() else ""))

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
        # As PySpark does, so that arguments given here are seen; setting them twice is harmless.
        self.options(**options)
        if outputMode is not None:
            self.outputMode(outputMode)
        if format is not None:
            self.format(format)
        if queryName is not None:
            self.queryName(queryName)
        write = _write(self)
        if write is not None and write.is_idiom:
            _check(_session_of(self), write)
            check_executors(_session_of(self), write.options)
            self.option(OPTION, idiom_option(start=uuid.uuid4().hex))
            _tell_source(self, write)
        with shards_of(_session_of(self), write.format, write.options) if write is not None else nullcontext():
            query = original(self, path, partitionBy=partitionBy)
        if names := _sources(self):
            _descriptions[str(query.runId)] = names
            while len(_descriptions) > _DESCRIPTIONS_MAX:
                _descriptions.pop(next(iter(_descriptions)), None)
        return query

    return start


def _with_lag(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        names = _descriptions.get(str(self["runId"]), ())
        sources = self["sources"]
        for number, source in enumerate(sources):
            if source["description"].startswith(_PYTHON_STREAM):
                source["metrics"] = {**spark_metrics(source["endOffset"], source["latestOffset"]), **source["metrics"]}
                if len(names) == len(sources):
                    source["description"] = names[number]

    return init


def _sources(writer: Any) -> tuple[str, ...]:
    """Display names of a query's sources, in Spark's order: "delivered_kafka[orders]"; empty if not accessible."""
    try:
        if hasattr(writer, "_write_proto"):
            return tuple(_described(str(p._format), p._options) for p in _connect_reads(writer._write_stream._child))
        plan = writer._df._jdf.queryExecution().analyzed()
        return tuple(_described(leaf.sourceName(), dict(leaf.extraOptions())) for leaf in _classic_reads(plan))
    except Exception as error:
        log.debug("cannot read the sources of a query: %s", error)
        return ()


def _tell_source(writer: Any, write: Write) -> None:
    """Pass the query's checkpoint, which Spark hides from Python sources, to our source.

    The source keeps the start of batch 0 and its offset metadata there (`checkpoint/`). Queries with several sources
    are left alone: the sources would overwrite each other's state.
    """
    checkpoint = next((v for k, v in write.options.items() if k.lower() == CHECKPOINT.lower()), None)
    if checkpoint is None:
        return
    try:
        (_tell_connect if hasattr(writer, "_write_proto") else _tell_classic)(writer, checkpoint)
    except Exception as error:
        log.warning(
            "cannot pass the query's checkpoint to the source on this PySpark (%s): a source that was recreated while "
            'the query was stopped is detected only with .option("%s", ...) on the source',
            error,
            CHECKPOINT,
        )


def _tell_classic(writer: Any, checkpoint: str) -> None:
    jvm = writer._spark._jvm
    # A copy: another query may read the same DataFrame, with another checkpoint.
    plan = writer._df._jdf.queryExecution().analyzed().clone()
    reads = list(_classic_reads(plan))
    if len(reads) != 1 or not _wants_checkpoint(reads[0].sourceName(), dict(reads[0].extraOptions())):
        return
    options = {**dict(reads[0].extraOptions().asCaseSensitiveMap()), CHECKPOINT: checkpoint}
    # Load it again: Spark created the data source when the frame was loaded, and keeps its options.
    loaded = writer._spark.readStream.format(reads[0].sourceName()).options(**options).load()
    (loaded_read,) = _classic_reads(loaded._jdf.queryExecution().analyzed())
    if not loaded_read.schema().equals(reads[0].schema()):
        raise ValueError("the source has other columns now")
    for name in ("extraOptions", "table"):
        _java_field(reads[0], name).set(reads[0], _java_field(loaded_read, name).get(loaded_read))
    dataset = jvm.org.apache.spark.sql.classic.Dataset.ofRows(writer._spark._jsparkSession, plan)
    _java_field(writer._jwrite, "ds").set(writer._jwrite, dataset)


def _tell_connect(writer: Any, checkpoint: str) -> None:
    stream = writer._write_stream
    reads = list(_connect_reads(stream._child))
    if len(reads) == 1 and _wants_checkpoint(str(reads[0]._format), reads[0]._options):
        replaced = copy.copy(reads[0])
        replaced._options = {**replaced._options, CHECKPOINT: checkpoint}
        stream._child = _connect_replaced(stream._child, reads[0], replaced)


def _wants_checkpoint(name: str, options: Mapping[str, str]) -> bool:
    return name.startswith(PREFIX) and not any(k.lower() == CHECKPOINT.lower() for k in options)


def _classic_reads(plan: Any) -> Iterator[Any]:
    leaves = plan.collectLeaves()
    found = (leaves.apply(i) for i in range(leaves.size()))
    return (leaf for leaf in found if leaf.getClass().getSimpleName() == "StreamingRelationV2")


def _connect_reads(plan: Any) -> Iterator[Any]:
    if getattr(plan, "_is_streaming", False) or getattr(plan, "is_streaming", False):
        yield plan
    for inner in _connect_children(plan).values():
        yield from _connect_reads(inner)


def _connect_children(plan: Any) -> dict[str, Any]:
    return {name: inner for name, inner in vars(plan).items() if hasattr(inner, "to_proto")}


def _connect_replaced(plan: Any, old: Any, new: Any) -> Any:
    """A copy of a plan with one node replaced."""
    if plan is old:
        return new
    made = copy.copy(plan)
    for name, inner in _connect_children(plan).items():
        setattr(made, name, _connect_replaced(inner, old, new))
    return made


def _java_field(holder: Any, name: str) -> Any:
    found = holder.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found


def _described(name: str, options: Mapping[str, str]) -> str:
    if not name.startswith(PREFIX):
        return name
    system, _, rest = Endpoint(name, options).label.partition(" ")
    return f"{PREFIX}{system}[{rest}]"


def _check(spark: Any, write: Write) -> None:
    """Check on the driver, which may be remote to a Connect client: `schema` of a data source runs there eagerly."""
    reader = spark.read.format(write.format).options(**write.options)
    try:
        check = StartCheck(json.loads(write.columns()), write.output_mode.lower())
        reader.option(OPTION, idiom_option(check=check)).load()
    except Exception as error:
        found = translated(error)
        if found is not None:
            raise found from None
        # The start reports Spark's own errors again.
        log.debug("skipped the check before the start: %s", error)


def _write(writer: Any) -> Write | None:
    """The settings of a DataStreamWriter, from PySpark's private fields; without these nothing is checked."""
    try:
        return _connect_write(writer) if hasattr(writer, "_write_proto") else _classic_write(writer)
    except Exception as error:
        log.debug("cannot read the streaming writer of this PySpark: %s", error)
        return None


def _classic_write(writer: Any) -> Write:
    java, jvm = writer._jwrite, writer._spark._jvm

    def field(name: str) -> Any:
        return _java_field(java, name).get(java)

    options = jvm.scala.jdk.javaapi.CollectionConverters.asJava(field("extraOptions").originalMap())
    return Write(field("source"), dict(options), str(field("outputMode").toString()), writer._df.schema.json)


def _connect_write(writer: Any) -> Write:
    proto = writer._write_proto
    options = dict(proto.options)
    if proto.query_name:
        options["queryName"] = proto.query_name

    def columns() -> str:
        frames = import_module("pyspark.sql.connect.dataframe")
        found: str = frames.DataFrame(writer._write_stream._child, writer._session).schema.json()
        return found

    format_ = FOREACH_BATCH if proto.HasField("foreach_batch") else proto.format
    return Write(format_, options, proto.output_mode or "append", columns)

"""What is used of Spark beyond its public API, each internal behind one function or name here, and nowhere else; and
what differs between its versions: no other module asks which one it is.

| Spark | what it lacks, and what that costs |
|---|---|
| 4.2 | a query with several sources cannot restart in the middle of a batch: no pipeline has several |
| 4.1 | a stream is asked for its end without its start and without a limit: the reader remembers where it is. |
| | Available-now is one batch to the end: a query whose source limits batches runs without it until it has read what |
| | was there at its start. Sources have no names, so a pipeline has one. Progress shows no lag |
| 4.0 | sockets on this machine between JVM and workers are TCP. A DataFrame over a batch source asks for its offsets |
| | at every action |
| 3.5 | data sources in Python: no format of ours can be registered. Everything runs by `foreachBatch` (foreach.py) |

`INTERNALS` lists what is not public: tests/spark/test_internals.py watches it on the installed Spark, so that a release
that changes one fails with its name, and tests/unit/test_internals.py finds private access outside of this module. What
cannot be behind a function, because it lies in a package without Spark, is in `ELSEWHERE`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import pyspark

from delivered.model.errors import InvariantBroken, Refused, UsageError
from delivered.model.identity import SOURCE
from delivered.spark import parsed

if TYPE_CHECKING:
    import psutil
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

    from delivered.pipeline.definition import Definition

# Modules of pyspark that tasks do not need are imported where they are used.

VERSION = parsed(pyspark.__version__)
PYTHON_SOURCES = VERSION >= (4, 0)
"""Formats can be written in Python."""
CLASSIC_FRAME = "pyspark.sql.classic.dataframe" if VERSION >= (4, 0) else "pyspark.sql.dataframe"
ADMITS = VERSION >= (4, 2)
"""Spark asks a stream with its start and a limit, and runs available-now in several batches."""
LOCAL_SOCKETS = VERSION >= (4, 1)
VALID_TEXT = "make_valid_utf8({})" if VERSION >= (4, 0) else "decode(cast({} as binary), 'UTF-8')"
"""SQL: a string whose bytes may be any, as UTF-8."""
READS_ONCE = VERSION >= (4, 1)
"""A DataFrame over a batch source asks for its offsets at its first action alone."""

if ADMITS:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
else:
    ReadLimit = ReadAllAvailable = SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]

    class ReadMaxRows(NamedTuple):  # type: ignore[no-redef]
        """See `pyspark.sql.streaming.datasource`."""

        max_rows: int


if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter as ArrowWriter
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    from pyspark.sql.datasource import WriterCommitMessage
elif PYTHON_SOURCES:
    from pyspark.sql import datasource
    from pyspark.sql.datasource import DataSourceArrowWriter as ArrowWriter
    from pyspark.sql.datasource import WriterCommitMessage

    # Spark 4.0 passes Arrow to a stream's writer if it is also one for batches.
    StreamArrowWriter = getattr(
        datasource,
        "DataSourceStreamArrowWriter",
        type("StreamArrowWriter", (datasource.DataSourceStreamWriter, ArrowWriter), {}),
    )
else:
    ArrowWriter = StreamArrowWriter = WriterCommitMessage = object

__all__ = ["ArrowWriter", "StreamArrowWriter", "WriterCommitMessage"]  # what mypy does not take for exported
__all__ += ["ReadAllAvailable", "ReadLimit", "ReadMaxRows", "SupportsTriggerAvailableNow"]

_F = TypeVar("_F", bound=Callable[..., Any])

INTERNALS: dict[str, tuple[str, str]] = {}
"""By the function or the name of this module: what it touches, as Spark spells it, and what fails without it."""


def _touches(names: str, missing: str) -> Callable[[_F], _F]:
    def listed(function: _F) -> _F:
        INTERNALS[function.__name__] = names, missing
        return function

    return listed


# Settings whose effect we rely on. Those that only name a place or a size are not listed.


class Setting(StrEnum):
    ADAPTIVE = "spark.sql.adaptive.enabled"
    ADAPTIVE_STREAMS = "spark.sql.adaptive.streaming.stateless.enabled"
    ARROW_BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
    BATCHES_RETAINED = "spark.sql.streaming.minBatchesToRetain"
    CACHE_COMPRESSED = "spark.sql.inMemoryColumnarStorage.compressed"
    DAEMON = "spark.python.daemon.module"
    FILE_BYTES = "spark.sql.files.maxPartitionBytes"
    FILE_OPEN_COST = "spark.sql.files.openCostInBytes"
    FILE_PARTITIONS_MIN = "spark.sql.files.minPartitionNum"
    FILE_PARTITIONS_MAX = "spark.sql.files.maxPartitionNum"
    LOCAL_SOCKETS = "spark.python.unix.domain.socket.enabled"
    LOCAL_SOCKET_FOLDER = "spark.python.unix.domain.socket.dir"
    OFFSET_LOG_FORMAT = "spark.sql.streaming.offsetLog.formatVersion"
    PARALLELISM = "spark.sql.leafNodeDefaultParallelism"
    SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
    SOURCES_BY_NAME = "spark.sql.streaming.queryEvolution.enableSourceEvolution"


INTERNALS["Setting"] = ", ".join(Setting), "a query starts with other settings than it needs"

# Texts by which Spark says what has no other sign.

FORMAT_NOT_FOUND = re.compile(r"DATA_SOURCE_NOT_FOUND.*?\b(delivered_\w+)", re.DOTALL)
SOURCE_READ_TWICE = re.compile(r"DUPLICATE_SOURCE_NAMES.*?'(\w+)'")
OUTPUT_MODE_REFUSED = re.compile(r"\[STREAMING_OUTPUT_MODE\.\w+\] (.*?)\s*(?:SQLSTATE|\n|$)")
PYTHON_STREAM = "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream"
"""How a report describes every Python source."""
EVENT_TIME = "spark.watermarkDelayMs"
"""In the metadata of a column: it is event time, or the window of one."""
WINDOW_END = re.compile(r"#\d+-T\d+ms\.end AS ([^#,]+)#")
"""In a plan's text: a column that is the end of an event-time window."""
IDLE = ("Waiting for data to arrive", "Waiting for next trigger")
"""A query's status messages when no batch runs. The first one ends as soon as it asks a source for offsets."""
FOREACH_BATCH = "foreachBatch"
"""A writer's format, if it has a function instead."""
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties of a job of a streaming query."""

INTERNALS |= {
    "FORMAT_NOT_FOUND": ("DATA_SOURCE_NOT_FOUND", "formats are not found in a session or on a thread without them"),
    "SOURCE_READ_TWICE": ("DUPLICATE_SOURCE_NAMES", "a transform that reads a source twice has no next step"),
    "OUTPUT_MODE_REFUSED": ("STREAMING_OUTPUT_MODE", "the refusal of an output mode has no next step"),
    "PYTHON_STREAM": (PYTHON_STREAM, "reports show no lag and no name of a source"),
    "EVENT_TIME": (EVENT_TIME, "an audit does not know that a watermark drops rows"),
    "WINDOW_END": (WINDOW_END.pattern, "an audit does not know that a watermark drops windows"),
    "IDLE": (", ".join(IDLE), "a query is stopped after the time limit, not between two batches"),
    "QUERY_ID": (QUERY_ID, "no task of a stream writes"),
    "BATCH_ID": (BATCH_ID, "no task of a stream writes"),
    "FOREACH_BATCH": (FOREACH_BATCH, "a batch of a user's foreachBatch may run again with other shards"),
}

SINCE: Mapping[str, str] = {
    Setting.ADAPTIVE_STREAMS: "4.1",
    Setting.LOCAL_SOCKETS: "4.1",
    Setting.LOCAL_SOCKET_FOLDER: "4.1",
    **dict.fromkeys((Setting.OFFSET_LOG_FORMAT, Setting.SOURCES_BY_NAME), "4.2"),
    **dict.fromkeys(("SOURCE_READ_TWICE", "analyse", "_defines_flow", "named_sources", "to_arrow"), "4.2"),
}
"""The first version that has it. 4.0.4, 4.1.3, 4.2.0 and 4.3.0 were looked at: all have everything else."""

ELSEWHERE: Mapping[str, str] = {
    "checkpoint/__init__.py": "files metadata, offsets/N and commits/N of a checkpoint, and their header lines",
    "engine/context.py": "the JVM is an ancestor of each Python process of the driver",
    "model/translate.py": "errors of workers as text: a Python trace inside a message, and what a dead worker leaves",
    "pipeline/spec.py": "options that Spark adds to a writer's: checkpointlocation, queryname",
    "prefork/__init__.py": "JVM and daemon start a worker as PYTHON -m MODULE ARGUMENTS, with PYTHONPATH",
    "spark/writers.py": "a stream's writer is pickled once per batch, in the process that plans, before its tasks",
}
"""Internals that rooms without Spark know, and facts about processes: by file."""

# Sessions and the JVM. Sessions of Spark Connect have none.


@_touches("SparkSession._jvm", "classic sessions look like Spark Connect")
def is_connect(spark: Any) -> bool:
    return not hasattr(spark, "_jvm")


@_touches("SparkSession._jvm", "a second driver on this machine is not recognised before it is fenced")
def jvm_of(spark: Any) -> psutil.Process | None:
    """The local JVM of a session; None for Spark Connect."""
    if is_connect(spark):
        return None
    import psutil

    # As text: reflection is not allowed on the handle's class.
    return psutil.Process(int(spark._jvm.java.lang.ProcessHandle.current().toString()))


@_touches("SparkContext._gateway.proc", "`delivered doctor` cannot wait for the archive of classes")
def started_jvm(spark: SparkSession) -> Any:
    """The `subprocess.Popen` of a JVM that this process started: it ends when its standard input is closed."""
    context: Any = spark.sparkContext
    return context._gateway.proc


@_touches("SparkContext._accumulatorServer", "a JVM that is killed leaves a trace of its accumulators' server")
def hide_lost_accumulators(spark: SparkSession) -> None:
    """The end of the JVM's connection for accumulators is no trace on standard error."""
    context: Any = spark.sparkContext
    context._accumulatorServer.handle_error = lambda *_: None


@_touches("SparkContext.getExecutorMemoryStatus", "a session that its standalone master forgot waits for ever")
def executors(spark: Any) -> int:
    """How many executors a classic session has now. Raises PySpark's or Py4J's error if it was stopped."""
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1  # the driver is listed, too


@_touches("SparkContext._jsc", "a session that its standalone master forgot waits for ever")
def stop_context(spark: Any) -> None:
    """Stop a classic session in the JVM alone: its queries fail, and its user's objects stay as they are."""
    spark.sparkContext._jsc.sc().stop()


@_touches("SparkSession._jsparkSession, _get_j_spark_session_class", "formats are not found on other threads")
def make_active(spark: SparkSession) -> None:
    """Make a session the active one of this thread.

    Every Python thread has its own JVM thread, and Spark looks up the data source of a stream's sink in that thread's
    active session, not in the stream's: on any thread but the one that created the session, `delivered_...` is not
    found (DATA_SOURCE_NOT_FOUND). Not needed for Spark Connect.
    """
    if not is_connect(spark):
        _sessions(spark).setActiveSession(spark._jsparkSession)


@contextlib.contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one of this thread; restores the previous one afterwards."""
    if is_connect(spark):
        yield
        return
    sessions = _sessions(spark)
    before = sessions.getActiveSession()
    make_active(spark)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def _sessions(spark: SparkSession) -> Any:
    jvm: Any = spark._jvm
    find = getattr(type(spark), "_get_j_spark_session_class", None)  # 3.5 has one class of sessions
    return jvm.SparkSession if find is None else find(jvm)


@_touches("_spark, _session and _client of readers and writers", "formats are registered in the wrong session")
def session_of(holder: Any) -> Any:
    """The session of a reader or a writer, or the session itself."""
    candidates = (getattr(holder, name, None) for name in ("_spark", "_session", "_client"))
    return next((c for c in candidates if hasattr(c, "readStream")), holder)


@_touches(
    "sessionState.newHadoopConf, Configuration.getPropsWithPrefix and getPassword",
    "Python opens a checkpoint in S3 or HDFS with other settings than Spark",
)
def hadoop_settings(spark: Any, location: str) -> dict[str, str]:
    """Hadoop's settings by which a session opens a location; over Spark Connect, those of Spark's configuration."""
    from delivered.checkpoint import S3A, SECRETS, prefixes

    if is_connect(spark):
        prefix = "spark.hadoop."
        return {k.removeprefix(prefix): v for k, v in spark.conf.getAll.items() if k.startswith(prefix)}
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    settings = {"fs.defaultFS": str(conf.get("fs.defaultFS", ""))}
    for prefix in prefixes(location, settings):
        settings |= {prefix + k: str(v) for k, v in dict(conf.getPropsWithPrefix(prefix)).items()}
        for name in SECRETS if prefix == S3A else ():
            if (secret := conf.getPassword(name)) is not None:  # of a key store, or as it stands
                settings[name] = "".join(secret)
    return settings


# Schemas and pickling.


@_touches("pyspark.sql.pandas.types.to_arrow_schema", "no format has columns")
def to_arrow(schema: StructType) -> pa.Schema:
    """Timestamps are in UTC.

    Raises:
        UsageError: rows with a column of this type do not reach Python.
    """
    zone = {"timezone": "UTC"} if ADMITS else {}  # earlier versions know no other
    convert = import_module("pyspark.sql.pandas.types").to_arrow_schema
    try:
        columns: pa.Schema = convert(schema, **zone)
    except TypeError:
        for field in schema.fields if len(schema.fields) > 1 else ():
            to_arrow(type(schema)([field]))  # raises, of the one that is meant
        name, kind = schema.fields[-1].name, schema.fields[-1].dataType.simpleString()
        raise UsageError("COLUMN_TYPE.UNSUPPORTED", column=name, type=kind, system="a sink in Python") from None
    return columns


@_touches("pyspark.sql.pandas.types.from_arrow_schema", "no format has columns")
def from_arrow(schema: pa.Schema) -> StructType:
    columns: StructType = import_module("pyspark.sql.pandas.types").from_arrow_schema(schema)
    return columns


@_touches("pyspark.cloudpickle.dumps, loads", "no direct pipeline: functions of __main__ do not reach the tasks")
def dumps(value: object) -> bytes:
    """Pickled as Spark does: functions and classes that cannot be imported by name travel by value."""
    pickled: bytes = import_module("pyspark.cloudpickle").dumps(value)
    return pickled


def loads(pickled: bytes) -> Any:
    return import_module("pyspark.cloudpickle").loads(pickled)


@_touches("pyspark.cloudpickle.register_pickle_by_value", "executors must have the modules of a user's functions")
def pickle_by_value(module: ModuleType) -> None:
    import_module("pyspark.cloudpickle").register_pickle_by_value(module)


# Python processes of Spark.

TASK_MODULE = "pyspark.worker"
WORKER_MODULES = (TASK_MODULE, "pyspark.sql.datasource", "pyspark.sql.datasource_internal")
"""What planning processes and tasks import: a process that forks them imports it first."""
INTERNALS["WORKER_MODULES"] = ", ".join(WORKER_MODULES), "no process is forked: each imports Spark itself"


@_touches("pyspark.daemon.manager", "workers import Spark themselves, 0.5 s of CPU each")
def run_daemon() -> None:
    """Fork workers until Spark closes the daemon's standard input."""
    import_module("pyspark.daemon").manager()


# Frames and plans.


@_touches("pyspark.sql.classic.dataframe, pyspark.sql.connect.dataframe", "explain and recompute see no frames")
def frame_class(*, connect: bool) -> type:
    """Raises ImportError: of Spark Connect, without grpcio."""
    frame: type = import_module("pyspark.sql.connect.dataframe" if connect else CLASSIC_FRAME).DataFrame
    return frame


_READ = "StreamingRelationV2"
_READS = ("StreamingRelation", _READ)
"""Leaves of a plan that read a source, through Spark's first and second interface."""


@_touches("DataFrame._jdf.queryExecution, DataFrame._explain_string", "the audit does not know what a query does")
def logical_plan(frame: Any) -> str:
    """Spark's analyzed logical plan, as text."""
    if hasattr(type(frame), "_explain_string"):
        text = str(frame._explain_string(mode="extended"))
        tree = text.partition("== Analyzed Logical Plan ==")[2].partition("== Optimized")[0]
        return tree.strip().partition("\n")[2]  # skip its columns
    return str(_analyzed(frame).toString())


@_touches("DataFrame._jdf.queryExecution, DataFrame._explain_string", "the audit shuffles where it need not")
def physical_plan(frame: Any) -> str:
    """Spark's physical plan, as text."""
    if hasattr(type(frame), "_explain_string"):
        return str(frame._explain_string(mode="simple"))
    return str(frame._jdf.queryExecution().executedPlan().toString())


@_touches("LogicalPlan.deterministic", "a transform that returns other rows each time is not warned about")
def is_deterministic(frame: Any) -> bool:
    """Whether Spark takes a frame for deterministic; True over Spark Connect, which does not expose it."""
    return not hasattr(frame, "_jdf") or bool(_analyzed(frame).deterministic())


@_touches("sourceIdentifyingName of StreamingRelation, StreamingRelationV2", "an unread source is not refused")
def named_sources(frame: Any) -> set[str] | None:
    """The named sources that a streaming frame reads; None: Spark Connect does not expose them."""
    if not hasattr(frame, "_jdf"):
        return None
    names = [leaf.sourceIdentifyingName() for leaf in _leaves(_analyzed(frame), _READS)]
    return {str(n.name()) for n in names if n.getClass().getSimpleName() == "UserProvided"}


def _analyzed(frame: Any) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _leaves(plan: Any, kinds: Collection[str] = (_READ,)) -> Iterator[Any]:
    leaves = plan.collectLeaves()
    every = (leaves.apply(i) for i in range(leaves.size()))
    return (leaf for leaf in every if leaf.getClass().getSimpleName() in kinds)


class SqlError(NamedTuple):
    """`place`: line and position, from 1; None: unknown. `suggested`: columns, with commas; empty: none."""

    text: str
    place: tuple[int, int] | None
    suggested: str


@_touches("texts of AnalysisException and ParseException", "errors in SQL show no place and no columns")
def sql_error(error: Exception) -> SqlError:
    text = str(error).strip()
    first = re.sub(r"^\[[A-Z_.]+\]\s*", "", text.partition("SQLSTATE")[0].partition("\n")[0]).strip().rstrip(".;")
    place = re.search(r"\bline (\d+),? pos(?:ition)? (\d+)", text)
    columns = re.search(r"Did you mean one of the following\? \[(.*?)\]", text, re.DOTALL)
    return SqlError(
        first, (int(place[1]), int(place[2]) + 1) if place else None, columns[1].replace("`", "") if columns else ""
    )


@_touches("ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION", "spark-pipelines cannot read our formats")
def analyse(frame: Any) -> None:
    """Resolve a frame now, so that option errors are raised; not in a pipeline's flow, which Spark resolves later."""
    if _defines_flow(frame):
        return
    try:
        _ = frame.schema
    except import_module("pyspark.errors").AnalysisException as error:
        if "ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION" not in str(error):
            raise


@_touches("SparkConnectClient.thread_local.user_context_extensions", "spark-pipelines logs an error for each source")
def _defines_flow(frame: Any) -> bool:
    """Whether this thread runs the function of a flow: for a frame that is resolved there, the server logs an error."""
    client = frame.sparkSession.client if is_connect(frame.sparkSession) else None
    held = getattr(getattr(client, "thread_local", None), "user_context_extensions", ())
    contexts = [context for _, context in held if context.type_url.endswith(".PipelineAnalysisContext")]
    if not contexts:
        return False
    proto = import_module("pyspark.sql.connect.proto")
    found = proto.PipelineAnalysisContext()
    return any(context.Unpack(found) and found.flow_name for context in contexts)


# Queries.


@_touches("SharedState.activeStreamingQueries, resolvedCheckpointRoot", "write_batch needs its checkpoint")
def query_checkpoint(df: Any) -> str | None:
    """Checkpoint of the query whose `foreachBatch` runs on this thread; None: no query, or Spark Connect."""
    spark = df.sparkSession
    if is_connect(spark):
        return None
    query = spark.sparkContext.getLocalProperty(QUERY_ID)
    # The session is a clone of the query's; its own `streams` does not know the query.
    queries = spark._jsparkSession.sharedState().activeStreamingQueries()
    running = queries.get(spark._jvm.java.util.UUID.fromString(query)) if query else None
    return str(running.resolvedCheckpointRoot()) if running is not None else None


@_touches("StreamingQuery._jsq.recentProgress", "progress of a query with state costs more")
def recent_reports(query: Any) -> Iterator[Mapping[str, Any]]:
    """Spark's reports about a query, newest first, each parsed when it is asked for."""
    if hasattr(query, "_jsq"):  # PySpark reads all fields of all reports, one by one
        kept = query._jsq.recentProgress()
        yield from (json.loads(kept[i].json()) for i in reversed(range(len(kept))))
    else:
        for report in reversed(query.recentProgress):
            yield json.loads(report.json if hasattr(report, "json") else json.dumps(report))


# Streaming writers.


@dataclass(frozen=True)
class StreamWrite:
    """A streaming write as the user declared it.

    Attributes:
        options: as given, keys in any case, including `queryName`.
        columns: the schema as JSON; a callable, since Connect must ask the server.
        available_now: the query ends once it has read what is there.
    """

    format: str
    options: Mapping[str, str]
    output_mode: str
    columns: Callable[[], str]
    available_now: bool = False


@_touches("DataStreamWriter._jwrite, _df, _write_proto, _write_stream", "queries start unchecked")
def stream_write(writer: Any) -> StreamWrite:
    """The settings of a DataStreamWriter."""
    if hasattr(writer, "_write_proto"):
        proto = writer._write_proto
        options = {**proto.options, **({"queryName": proto.query_name} if proto.query_name else {})}

        def columns() -> str:
            frame: Any = frame_class(connect=True)
            return str(frame(writer._write_stream._child, writer._session).schema.json())

        format_ = FOREACH_BATCH if proto.HasField("foreach_batch") else proto.format
        return StreamWrite(format_, options, proto.output_mode or "append", columns, bool(proto.available_now))
    fields = ("source", "outputMode", "extraOptions", "trigger")
    source, mode, extra, trigger = (_java_field(writer._jwrite, n).get(writer._jwrite) for n in fields)
    options = dict(writer._spark._jvm.scala.jdk.javaapi.CollectionConverters.asJava(extra.originalMap()))
    available_now = str(trigger.toString()).startswith("AvailableNow")
    return StreamWrite(source, options, str(mode.toString()), writer._df.schema.json, available_now)


@_touches("StreamingRelationV2; Connect: _format and _options of a plan", "reports show no name of a source")
def stream_sources(writer: Any) -> list[tuple[str, Mapping[str, str]]]:
    """Format and options of each source of a DataStreamWriter's query, in Spark's order; those of a table, too."""
    if hasattr(writer, "_write_proto"):
        return [(str(p._format), p._options) for p in _connect_reads(writer._write_stream._child)]
    leaves = _leaves(_analyzed(writer._df))
    return [(leaf.sourceName(), {**_of_table(leaf), **dict(leaf.extraOptions())}) for leaf in leaves]


def _of_table(read: Any) -> dict[str, str]:
    from delivered.pipeline.spec import table_options  # not in a task

    columns = json.loads(read.schema().json())["fields"]
    return table_options(columns[0]["metadata"]) if columns else {}


@_touches("StreamingRelationV2, Dataset.ofRows, field ds of _jwrite", "a source does not know its checkpoint")
def set_source_option(writer: Any, name: str, value: str) -> None:
    """Give the one source of a DataStreamWriter's query one more option. The frame stays as it is: another query may
    read it, too."""
    if hasattr(writer, "_write_proto"):
        stream = writer._write_stream
        (read,) = _connect_reads(stream._child)
        replaced = copy.copy(read)
        replaced._options = {**read._options, name: value}
        stream._child = _connect_replaced(stream._child, read, replaced)
        return
    spark, plan = writer._spark, _analyzed(writer._df).clone()
    (read,) = _leaves(plan)
    options = {**_of_table(read), **dict(read.extraOptions().asCaseSensitiveMap()), name: value}
    # Load it again: Spark created the data source when the frame was loaded, and keeps its options.
    loaded = spark.readStream.format(read.sourceName()).options(**options).load()
    (loaded_read,) = _leaves(_analyzed(loaded))
    if loaded_read.schema().catalogString() != read.schema().catalogString():  # a table has metadata, too
        raise ValueError("the source has other columns now")
    for field in ("extraOptions", "table"):
        _java_field(read, field).set(read, _java_field(loaded_read, field).get(loaded_read))
    dataset = spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan)
    _java_field(writer._jwrite, "ds").set(writer._jwrite, dataset)


def _connect_reads(plan: Any) -> Iterator[Any]:
    if getattr(plan, "_is_streaming", False) or getattr(plan, "is_streaming", False):
        yield plan
    for child in _connect_children(plan).values():
        yield from _connect_reads(child)


def _connect_children(plan: Any) -> dict[str, Any]:
    # Not by an attribute's presence: a Column has any.
    kind = import_module("pyspark.sql.connect.plan").LogicalPlan
    return {name: child for name, child in vars(plan).items() if isinstance(child, kind)}


def _connect_replaced(plan: Any, old: Any, new: Any) -> Any:
    """A copy of a plan with one node replaced."""
    if plan is old:
        return new
    replaced = copy.copy(plan)
    for name, child in _connect_children(plan).items():
        setattr(replaced, name, _connect_replaced(child, old, new))
    return replaced


def _java_field(holder: Any, name: str) -> Any:
    field = holder.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field


# Classes of PySpark that `hooks.py` wraps.


@dataclass(frozen=True)
class SessionClasses:
    """Of the kind of a session.

    Attributes:
        errors: exceptions whose text Spark makes of a message of the JVM.
    """

    session: type
    frame: type
    reader: type
    writer: type
    stream_reader: type
    stream_writer: type
    progress: type
    errors: tuple[type, ...]
    client: type | None


@_touches("pyspark.errors.exceptions.*, StreamingQueryProgress", "errors show a worker's trace")
def session_classes(spark: SparkSession) -> SessionClasses:
    connect = is_connect(spark)
    classes = vars(import_module(f"pyspark.errors.exceptions.{'connect' if connect else 'captured'}")).values()
    errors = tuple(e for e in classes if isinstance(e, type) and issubclass(e, Exception) and "__str__" in vars(e))
    readers, streams = import_module(type(spark.read).__module__), import_module(type(spark.readStream).__module__)
    progress = import_module("pyspark.sql.streaming.listener").StreamingQueryProgress
    return SessionClasses(
        type(spark),
        frame_class(connect=connect),
        readers.DataFrameReader,
        readers.DataFrameWriter,
        streams.DataStreamReader,
        streams.DataStreamWriter,
        progress,
        errors,
        type(spark.client) if connect else None,
    )


@_touches("DataStreamReader._format, DataFrameReader._format (Connect)", "bad options fail late over Connect")
def format_of_reader(reader: Any) -> str:
    """The format of a reader of Spark Connect; empty: none was set."""
    return str(getattr(reader, "_format", None) or "")


@_touches("SparkConnectClient._execute_and_fetch_as_iterator", "runs of spark-pipelines fail at their end")
def without_accumulators(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """PySpark 4.3.0 fails a run at its end with UNKNOWN_RESPONSE: for the accumulators of a Python source's workers."""

    def execute(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return original(_EventsAlone(self), *args, **kwargs)

    return execute


class _EventsAlone:
    """A client whose iterator skips observed metrics."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _execute_and_fetch_as_iterator(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for response in self._client._execute_and_fetch_as_iterator(*args, **kwargs):
            if type(response).__name__ != "PlanObservedMetrics":
                yield response


def unfit_version(pipeline: Definition, version: str) -> Refused | None:
    """What this version of Spark lacks for a pipeline."""
    own = next((e for e in pipeline.sources.values() if not e.is_spark_own), None)
    if own is not None and parsed(version) < (4, 0):
        return Refused("SPARK_VERSION.SOURCE", version=version, label=own.label)
    return cannot_restart(pipeline.sources, version)


def cannot_restart(sources: Collection[str], version: str) -> Refused | None:
    """Why this version of Spark has no named sources, or cannot restart a query with them; None: it can.

    Spark 4.2 expects the number of state partitions in the offset log, which its format 2 does not hold: a start whose
    newest batch is not finished ends with "None.get".
    """
    if set(sources) == {SOURCE} or parsed(version) > (4, 2):
        return None
    named = ", ".join(sorted(sources))
    if parsed(version) < (4, 2):
        return Refused("SOURCES_SPARK_VERSION.NAMES", version=version, sources=named)
    return Refused("SOURCES_SPARK_VERSION.RESTART", version=version, sources=named)


# A stream's reader, and available-now, on a Spark that does not ask for both ends.

_POLL_S = 0.02
_R = TypeVar("_R", bound="type[DataSourceStreamReader]")


class _Remembering:
    """Puts the start into the calls of a Spark that does not pass it.

    Spark asks in one process for each query, which ends with it. After a restart it first asks for the partitions of
    the newest batch that it logged, or of none behind it; a new query begins with its first end. Each end is the start
    of the next batch.
    """

    _known_end: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        at: dict[str, Any] = super().initialOffset()  # type: ignore[misc]
        self._known_end = at
        return at

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._known_end = end
        pieces: Sequence[InputPartition] = super().partitions(start, end)  # type: ignore[misc]
        return pieces

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._known_end is None:
            from delivered.checkpoint import read_logged  # not in a task

            checkpoint = self.query_checkpoint  # type: ignore[attr-defined]
            if checkpoint is not None and read_logged(checkpoint)[1] is not None:
                raise InvariantBroken("START_UNKNOWN", version=pyspark.__version__, checkpoint=checkpoint)
            self._known_end = super().initialOffset()  # type: ignore[misc]
        limit = self.getDefaultReadLimit()  # type: ignore[attr-defined]
        self._known_end = super().latestOffset(self._known_end, limit)  # type: ignore[misc]
        return self._known_end


def asked_without_start(reader: _R) -> _R:
    """The class of a stream's reader, as this Spark calls it. Its `query_checkpoint` is where the query may restart."""
    if ADMITS:
        return reader
    return cast("_R", type(reader.__name__, (_Remembering, reader), {"__module__": reader.__module__}))


def start_available_now(writer: DataStreamWriter, *, ends: bool = True) -> StreamingQuery:
    """Start a query that ends once it has read what was there at its start.

    Args:
        ends: its source offers nothing beyond, in batch after batch, by itself.
    """
    if ADMITS or not ends:
        return writer.trigger(availableNow=True).start()
    query = writer.trigger(processingTime="0 seconds").start()
    stop_when_read(query)
    return query


def stop_when_read(query: StreamingQuery) -> None:
    """End a query, from a thread of its own, once its source offers nothing beyond what it has read."""
    threading.Thread(target=_stop_idle, args=(query,), daemon=True, name="delivered-available-now").start()


def _stop_idle(query: StreamingQuery) -> None:
    """A source that offers nothing beyond its first end has no more batch once a trigger found no data."""
    while query.isActive:
        if query.status["message"] == "Waiting for data to arrive":
            query.stop()
            return
        time.sleep(_POLL_S)

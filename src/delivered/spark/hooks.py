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
    start, toTable, save   a batch that runs again has the same shards (settings.py)
    explain()              adds that PySpark asks a batch source for its offsets only once
    StreamingQueryProgress lag and description of a source, as Spark's Kafka source reports them (source.py)

Calls that do not involve our formats are passed through unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from delivered.checkpoint import Store
from delivered.model.errors import Refused
from delivered.model.options import find_option
from delivered.model.translate import from_our_code, translated, worker_death
from delivered.pipeline.facts import check_source_checkpoints, check_sources
from delivered.pipeline.registry import PREFIX, connector
from delivered.pipeline.spec import CHECKPOINT, OPTION, Envelope, IdiomStart, OrderCheck, Reading, StartCheck
from delivered.pipeline.start import descriptions, identities, read_to_its_end, record_order
from delivered.source import spark_metrics
from delivered.spark import internals
from delivered.spark.check import check_executors, checkpoint_store
from delivered.spark.internals import StreamWrite, session_of
from delivered.spark.settings import same_shards, unadapted, unadapted_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_WRAPPED = "__delivered__"
_OURS = "_delivered"
"""Set on a reader or writer with one of our formats: classic ones do not show theirs."""
_PARTS = "_delivered_parts"
"""On a streaming writer: the columns of `partitionBy`, which Spark does not pass to a Python sink."""
_PLANNED_ONCE = (
    f"{PREFIX}*: the offsets of this DataFrame are fixed at its first action; to see later records, load() again or "
    "read from a SQL table\n"
)
_DESCRIPTIONS_MAX = 1_000
_descriptions: dict[str, tuple[str, ...]] = {}
"""By the query's run id."""


def install(spark: SparkSession, register: Callable[[SparkSession, SparkSession | None], None]) -> None:
    """Wrap the classes that this kind of session uses. May be called again.

    Args:
        register: registers the formats in a session; the second argument is a session that has them, if any.
    """
    classes = internals.session_classes(spark)
    for error in classes.errors:
        _wrap(error, "__str__", _message_first)
    if classes.client is not None:
        _wrap(classes.reader, "load", _analysed, layer="analysed")
        _wrap(classes.stream_reader, "load", _analysed, layer="analysed")
        _wrap(classes.client, "execute_command_as_iterator", internals.without_accumulators)
    registering = functools.partial(_registering, register=register)
    for owner, name in [
        (classes.reader, "load"),
        (classes.writer, "save"),
        (classes.stream_reader, "load"),
        (classes.stream_writer, "start"),
    ]:
        _wrap(owner, name, registering)
        _wrap(owner, "format", _marked)
        _wrap(owner, name, _surviving, layer="surviving")
    _wrap(classes.session, "sql", registering)
    _wrap(classes.session, "table", registering)
    _wrap(classes.session, "newSession", functools.partial(_registered, register=register))
    _wrap(classes.frame, "explain", _explained)
    _wrap(classes.stream_writer, "partitionBy", _parted)
    _wrap(classes.stream_writer, "start", _checked, layer="checked")
    _wrap(classes.stream_writer, "toTable", _unadapted)
    _wrap(classes.writer, "save", _saved, layer="shards")
    _wrap(classes.progress, "__init__", _with_lag)


def _wrap(owner: type, name: str, wrapper: Callable[..., Callable[..., Any]], layer: str = "") -> None:
    """Once for each layer. Does nothing if there is no such method."""
    original = getattr(owner, name, None)
    mark = f"{_WRAPPED}{layer}"
    if original is None or hasattr(original, mark):  # older PySpark: no newSession over Connect
        return
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, mark, True)
    setattr(owner, name, wrapped)


def _message_first(original: Callable[..., str]) -> Callable[..., str]:
    def text(self: Exception) -> str:
        message = original(self)
        ours = from_our_code(message)
        return message if ours is None else f"{ours}\n(raised in a Spark worker; Spark's log has the trace)"

    return text


def _registering(original: Callable[..., Any], register: Callable[..., None]) -> Callable[..., Any]:
    """Spark looks formats up in the thread's active session: register ours there if they are missing, and retry."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            missing = internals.FORMAT_NOT_FOUND.search(str(error))
            if missing is None:
                raise
            connector(missing.group(1))  # raises if there is no such format
            spark = session_of(self)
            if not internals.PYTHON_SOURCES:
                raise Refused("SPARK_VERSION.FORMATS", version=spark.version) from None
            register(spark, None)
            internals.make_active(spark)
        return original(self, *args, **kwargs)

    return call


def _registered(original: Callable[..., Any], register: Callable[..., None]) -> Callable[..., Any]:
    def new_session(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = original(self, *args, **kwargs)
        register(session, self)
        return session

    return new_session


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    def format_(self: Any, source: str) -> Any:
        setattr(self, _OURS, str(source).lower().startswith(PREFIX))
        return original(self, source)

    return format_


def _parted(original: Callable[..., Any]) -> Callable[..., Any]:
    def partition_by(self: Any, *cols: Any) -> Any:
        setattr(self, _PARTS, cols)
        return original(self, *cols)

    return partition_by


def _surviving(original: Callable[..., Any]) -> Callable[..., Any]:
    """A call that ended because a process of Spark died says so."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            died = worker_death(error) if getattr(self, _OURS, False) else None
            if died is None:
                raise
            raise died from error

    return call


def _saved(original: Callable[..., Any]) -> Callable[..., Any]:
    """A run has as many shards as its last shuffle has partitions, on any cores."""

    def save(self: Any, path: str | None = None, format: str | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        if format is not None:
            self.format(format)
        with unadapted(session_of(self)) if getattr(self, _OURS, False) else nullcontext():
            return original(self, path, None, *args, **kwargs)

    return save


def _analysed(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = original(self, *args, **kwargs)
        if internals.format_of_reader(self).lower().startswith(PREFIX):
            internals.analyse(frame)
        return frame

    return load


def _explained(original: Callable[..., None]) -> Callable[..., None]:
    def explain(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            original(self, *args, **kwargs)
        once = internals.READS_ONCE and f"BatchScan {PREFIX}" in printed.getvalue()
        sys.stdout.write(printed.getvalue() + (_PLANNED_ONCE if once else ""))

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
        if partitionBy is not None:
            self.partitionBy(partitionBy)
        if getattr(self, _OURS, False) and (parts := getattr(self, _PARTS, ())):
            self.option("partitionBy", ",".join(parts[0] if isinstance(parts[0], list | tuple) else parts))
        spark, write = session_of(self), _write(self)
        check_source_checkpoints(_read_by(self), find_option(write.options, CHECKPOINT) if write is not None else None)
        # A `Pipeline`, which sets OPTION, has done these checks already.
        if write is not None and write.format.lower().startswith(PREFIX) and find_option(write.options, OPTION) is None:
            if not internals.is_connect(spark):  # whose client may not reach the brokers
                check_sources(internals.stream_sources(self))
            checkpoint = find_option(write.options, CHECKPOINT)
            store = checkpoint_store(spark, checkpoint) if checkpoint is not None else {}
            _check(spark, write, store)
            check_executors(spark, write.options)
            self.option(OPTION, Envelope(IdiomStart(uuid.uuid4().hex, store)).encode())
            _check_order(self, spark, write.format, checkpoint)
            _pass_checkpoint(self, write, store)
        elif write is not None and write.format == internals.FOREACH_BATCH:
            _check_order(self, spark, "", find_option(write.options, CHECKPOINT))
        ends = write is not None and _read_to_its_end(self, write)
        if ends:
            self.trigger(processingTime="0 seconds")
        with _same_shards(spark, write):
            query = original(self, path, partitionBy=partitionBy)
        if ends:
            internals.stop_when_read(query)
        if names := _sources(self):
            _descriptions[str(query.runId)] = names
            while len(_descriptions) > _DESCRIPTIONS_MAX:
                _descriptions.pop(next(iter(_descriptions)), None)
        return query

    return start


def _write(writer: Any) -> StreamWrite | None:
    """Without it nothing is checked."""
    try:
        return internals.stream_write(writer)
    except Exception as error:
        log.debug("cannot read the streaming writer of this PySpark: %s", error)
        return None


def _sources(writer: Any) -> tuple[str, ...]:
    """Display names; empty if they are not accessible."""
    try:
        return descriptions(_read_by(writer))
    except Exception as error:
        log.debug("cannot name the sources of a query: %s", error)
        return ()


def _read_by(writer: Any) -> list[tuple[str, Mapping[str, str]]]:
    """Format and options of each source; empty if they are not accessible."""
    try:
        return internals.stream_sources(writer)
    except Exception as error:
        log.debug("cannot read the sources of a query: %s", error)
        return []


def _same_shards(spark: Any, write: StreamWrite | None) -> contextlib.AbstractContextManager[None]:
    """For a write of ours, or one with `foreachBatch`, which may call `write_batch`. A `Pipeline` has done it."""
    if write is None or find_option(write.options, OPTION) is not None:
        return nullcontext()
    if write.format.lower().startswith(PREFIX):
        return same_shards(spark, find_option(write.options, CHECKPOINT))
    return unadapted_stream(spark) if write.format == internals.FOREACH_BATCH else nullcontext()


def _unadapted(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_table(self: Any, *args: Any, **kwargs: Any) -> Any:
        with unadapted_stream(session_of(self)):  # the table may be of ours
            return original(self, *args, **kwargs)

    return to_table


def _check(spark: Any, write: StreamWrite, store: Store) -> None:
    """Check on the driver, which may be remote to a Connect client: `schema` of a data source runs there eagerly."""
    reader = spark.read.format(write.format).options(**write.options)
    _ask(reader, lambda: StartCheck(json.loads(write.columns()), write.output_mode.lower(), store))


def _check_order(writer: Any, spark: Any, sink: str, checkpoint: str | None) -> None:
    """Where the query's checkpoint is. `sink`: format of the write; empty: the user's own."""
    sources = _read_by(writer)
    ours = next((name for name in (sink, *dict(sources)) if name.startswith(PREFIX)), "")
    if not ours or checkpoint is None:
        return
    if not internals.is_connect(spark):
        checkpoint_store(spark, checkpoint)
        record_order(checkpoint, identities(sources))
    elif len(sources) > 1:
        _ask(spark.read.format(ours), lambda: OrderCheck(checkpoint, identities(sources)))


def _ask(reader: Any, question: Callable[[], StartCheck | OrderCheck]) -> None:
    try:
        reader.option(OPTION, Envelope(question()).encode()).load()
    except Exception as error:
        ours = translated(error)
        if ours is not None:
            raise ours from None
        # The start reports Spark's own errors again.
        log.debug("skipped the check before the start: %s", error)


def _read_to_its_end(writer: Any, write: StreamWrite) -> bool:
    """Whether this Spark would end the query after one batch, whose size its source limits: then its source is to
    offer nothing beyond what is there now, in any number of batches.

    Raises:
        Refused: there are several sources.
    """
    if internals.ADMITS or not write.available_now:
        return False
    checkpoint = find_option(write.options, CHECKPOINT)
    reading = read_to_its_end(internals.stream_sources(writer), checkpoint, session_of(writer).version)
    if reading is not None:
        internals.set_source_option(writer, OPTION, Envelope(reading).encode())
    return reading is not None


def _pass_checkpoint(writer: Any, write: StreamWrite, store: Store) -> None:
    """Pass the query's checkpoint, which Spark hides from Python sources, to our source.

    The source keeps the start of batch 0 and its offset metadata there (`checkpoint/`). Queries with several sources
    are left alone: the sources would overwrite each other's state.
    """
    checkpoint = find_option(write.options, CHECKPOINT)
    if checkpoint is None:
        return
    try:
        sources = internals.stream_sources(writer)
        if len(sources) == 1 and sources[0][0].startswith(PREFIX) and find_option(sources[0][1], CHECKPOINT) is None:
            internals.set_source_option(writer, CHECKPOINT, checkpoint)
            if store:
                internals.set_source_option(writer, OPTION, Envelope(Reading(checkpoint, store=store)).encode())
    except Exception as error:
        log.warning(
            "cannot pass the query's checkpoint to the source on this PySpark (%s): a source that was recreated while "
            'the query was stopped is detected only with .option("%s", ...) on the source',
            error,
            CHECKPOINT,
        )


def _with_lag(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        names = _descriptions.get(str(self["runId"]), ())
        sources = self["sources"]
        for number, source in enumerate(sources):
            if source["description"].startswith(internals.PYTHON_STREAM):
                source["metrics"] = {**spark_metrics(source["endOffset"], source["latestOffset"]), **source["metrics"]}
                if len(names) == len(sources):
                    source["description"] = names[number]

    return init

"""Starts a pipeline as a query, records when it starts and ends, and stops it between two batches.

`query.stop()` kills the running batch. So the source is drained first: a file, named in its envelope, makes it offer no
new records. No batch starts after that, the running one completes, and the query is stopped while idle. The file is on
the driver's machine, where the source plans its batches.
"""

from __future__ import annotations

import atexit
import contextlib
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from delivered.checkpoint import read_logged, recall
from delivered.checkpoint.history import SAMPLE_EVERY_S, Run, States, keep_run
from delivered.contract.source import COORDINATES, Source
from delivered.engine import Columns
from delivered.engine.transform import Direct
from delivered.machine import describe_exit
from delivered.model.capability import Dedup
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.identity import SOURCE
from delivered.model.rows import OnBadRow
from delivered.model.translate import cause_of, translated
from delivered.pipeline.definition import AVAILABLE_NOW, Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.registry import PREFIX
from delivered.pipeline.spec import OPTION, Drain, Envelope, PipelineSpec, Reading
from delivered.pipeline.start import for_start, record_query, record_sources, unfit_for_unfinished
from delivered.spark import internals
from delivered.spark.check import check_executors, checkpoint_store, sender_of
from delivered.spark.foreach import save_batch
from delivered.spark.internals import Setting
from delivered.spark.rows import (
    Failing,
    apply_transform,
    arrow_transform,
    own_views,
    projected,
    routed,
    without_repeats,
    without_seen_repeats,
)
from delivered.spark.session import is_registered, prepare, session, why_ended
from delivered.spark.settings import AUDITED, batches_fit_for, same_shards, with_setting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader

_POLL_S = 0.05
_REFUSED_MODES = {
    "append": "OUTPUT_MODE.APPEND",
    "update": "OUTPUT_MODE.UPDATE",
    "complete": "OUTPUT_MODE.COMPLETE",
}
"""Codes by the mode that Spark refused for a query."""

_one_start = threading.RLock()
"""Held while a session is configured for a starting query: another start may need other settings."""


@dataclass(frozen=True)
class Running:
    """A query that was started here."""

    pipeline: Definition
    query: StreamingQuery
    drain: Drain

    @property
    def lives(self) -> bool:
        try:
            return bool(self.query.isActive)
        except Exception:
            return False  # its session was stopped


_running: dict[str, Running] = {}
"""By run id."""


def running(pipeline: Definition) -> list[Running]:
    """Queries started by this process, and not ended, that use the pipeline's checkpoint or its name."""
    for ended in [run for run, r in _running.copy().items() if not r.lives]:
        _running.pop(ended, None)
    return [
        r for r in _running.values() if pipeline.name == r.pipeline.name or pipeline.checkpoint == r.pipeline.checkpoint
    ]


def start(pipeline: Definition, chosen: SparkSession | None) -> StreamingQuery:
    """Record the source's first offsets, and start the query of a planned pipeline."""
    if pipeline.lineage:
        from delivered.operate.lineage import configured

        configured()  # refused before the query starts
    spark = ready(pipeline, chosen)
    drain = Drain.new()
    try:
        query = _query(pipeline, spark, drain)
    except DeliveredError:
        raise
    except Exception as error:
        refusal = translated(error) or _refusal(error, pipeline)
        raise (refusal if refusal is not None else error) from None
    _running[str(query.runId)] = Running(pipeline, query, drain)
    record(pipeline.checkpoint, query, Jvm(spark))
    return query


def _refusal(error: Exception, pipeline: Definition) -> UsageError | None:
    """What Spark refuses, in terms of the pipeline."""
    text = str(error)
    if (twice := internals.SOURCE_READ_TWICE.search(text)) is not None:
        return UsageError("SOURCE_TWICE", source=twice[1])
    if (refused := internals.OUTPUT_MODE_REFUSED.search(text)) is not None:
        return UsageError(_REFUSED_MODES[pipeline.output_mode], reason=refused[1])
    if isinstance(error, AnalysisException):
        return unfit_for_unfinished(pipeline, text.partition(" SQLSTATE")[0].partition("\n")[0].rstrip("."))
    return None


def ready(pipeline: Definition, chosen: SparkSession | None) -> SparkSession:
    """The chosen session or a new one, with every format registered, active in this thread."""
    spark = chosen or SparkSession.getActiveSession() or new_session(pipeline)
    if not is_registered(spark):
        prepare(spark)
    internals.make_active(spark)
    checkpoint_store(spark, pipeline.checkpoint)
    return spark


def new_session(pipeline: Definition) -> SparkSession:
    """A session with the pipeline's own configuration."""
    conf = {**AUDITED, **pipeline.conf} if pipeline.audit_every is not None else pipeline.conf
    return session(pipeline.name, pipeline.master, conf)


def stop_between_batches(query: StreamingQuery, timeout_s: float, waiting: Callable[[], None] | None = None) -> bool:
    """Let the running batch finish, then stop the query. Returns whether it was idle when it was stopped.

    Args:
        timeout_s: afterwards the query is stopped mid-batch; recovery completes or repeats the batch.
        waiting: called about every 50 ms.
    """
    idle = False
    own = _running.pop(str(query.runId), None)
    drain = own.drain if own is not None else None
    if drain is not None:
        drain.request()
    try:
        deadline = time.monotonic() + timeout_s
        while query.isActive and not idle and time.monotonic() < deadline:
            idle = query.status["message"] in internals.IDLE
            if waiting is not None:
                waiting()
            time.sleep(_POLL_S)
        idle = idle or not query.isActive
        query.stop()
    finally:
        if drain is not None:
            drain.clear()
    return idle


def _query(pipeline: Definition, spark: SparkSession, drain: Drain) -> StreamingQuery:
    named = tuple(pipeline.sources) != (SOURCE,)
    refused = internals.unfit_version(pipeline, spark.version)
    if refused is not None:
        raise refused
    with _one_start, ExitStack() as held:  # a query keeps the configuration that it started with
        # A source's name identifies it in Spark's offset log, in format 2 of the log.
        held.enter_context(with_setting(spark, Setting.SOURCES_BY_NAME, str(named).lower()))
        if named:
            held.enter_context(with_setting(spark, Setting.OFFSET_LOG_FORMAT, "2"))
        held.enter_context(same_shards(spark, pipeline.checkpoint))
        held.enter_context(own_views(pipeline.transform, spark, pipeline.sources))
        return _started(pipeline, spark, drain)


def _started(pipeline: Definition, spark: SparkSession, drain: Drain) -> StreamingQuery:
    spec = replace(pipeline.spec, start=uuid.uuid4().hex, store=recall(pipeline.checkpoint))
    check_executors(spark, {"guarantee": spec.guarantee.value})
    endpoints = for_start(pipeline)
    sources = record_sources(pipeline, endpoints)
    own = [s for s in sources.values() if s is not None]
    rejects = spec.on_bad_row is not OnBadRow.FAIL
    if pipeline.is_direct:
        spec = replace(spec, direct=internals.dumps(Direct(own[0], arrow_transform(pipeline.transform), rejects)))
    else:
        spec = replace(spec, rejects=rejects and any(s.capability().decodes for s in own))
    ends = pipeline.trigger == AVAILABLE_NOW and len(own) == len(sources)
    read = {}
    for name, endpoint in endpoints.items():
        reading = spec.reading(
            name,
            drain=drain,
            until=pipeline.until.get(name),
            raw=pipeline.transform.isolates,
            ends=ends and not internals.ADMITS,
        )
        read[name] = _read(spark, reading, endpoint).load()
    frame, spec = _rows(pipeline, spark, read, sources, spec)
    more = {k: v for e in pipeline.all_sinks for k, v in e.spark_options.items()}
    writer = frame.writeStream.options(**more).option("checkpointLocation", pipeline.checkpoint)
    if pipeline.output_mode == "append" and internals.PYTHON_SOURCES:
        writer = writer.format(PREFIX + spec.sinks[0].system).option(OPTION, spec.to_option())
    else:
        by_key = replace(spec, one_of_each=pipeline.output_mode == "update", sender=sender_of(spark))
        writer = writer.outputMode(pipeline.output_mode).foreachBatch(partial(save_batch, by_key))
    record_query(pipeline)
    with batches_fit_for(spark, frame.schema):
        writer = writer.queryName(pipeline.name)
        if pipeline.trigger == AVAILABLE_NOW:
            query = internals.start_available_now(writer, ends=ends)
        else:
            query = writer.trigger(**pipeline.trigger.for_spark()).start()
    if pipeline.lineage:
        from delivered.spark.listener import follow

        follow(spark, query, pipeline, frame.schema if spec.direct is None and pipeline.spark_projects else None)
    return query


def _read(spark: SparkSession, reading: Reading, source: Endpoint) -> DataStreamReader:
    reader = spark.readStream if reading.source == SOURCE else spark.readStream.name(reading.source)
    if source.is_spark_own:
        return reader.format(source.system).options(**source.options)
    reader = reader.format(PREFIX + source.system).options(**source.options)
    return reader.option(OPTION, Envelope(reading).encode())


def _rows(
    pipeline: Definition,
    spark: SparkSession,
    read: dict[str, DataFrame],
    sources: Mapping[str, Source | None],
    spec: PipelineSpec,
) -> tuple[DataFrame, PipelineSpec]:
    """The rows for the sinks, and the spec with each sink's route."""
    projections = [s.projection for s in pipeline.sinks]
    routes: Sequence[Columns | None] = [p.route for p in projections]
    frame = next(iter(read.values()))
    if spec.direct is None:
        if pipeline.dedup is not None:
            read = {n: _once(spark, f, pipeline.dedup, spec) for n, f in read.items()}
        failing = Failing.FAIL if spec.on_bad_row is OnBadRow.FAIL else Failing.KEEP
        frame = apply_transform(pipeline.transform, spark, sources, failing=failing)(read)
        if not frame.isStreaming:
            raise UsageError("TRANSFORM_NOT_STREAMING")
        _check_read(frame, sources)
        if pipeline.spark_projects:
            frame, routes = projected(frame, projections[0]), [None]
        else:
            keep = COORDINATES if pipeline.on_bad_row is OnBadRow.DEAD_LETTER else ()
            frame, routes = routed(frame, projections, keep)
    return frame, replace(spec, sinks=tuple(replace(s, route=r) for s, r in zip(spec.sinks, routes, strict=True)))


def _check_read(frame: DataFrame, sources: Mapping[str, Source | None]) -> None:
    """Spark forgets a named source that a query does not read: its offsets leave the log with the first batch."""
    if tuple(sources) == (SOURCE,):
        return
    read = internals.named_sources(frame)
    unread = [n for n in sources if read is not None and n not in read]
    if unread:
        raise UsageError("TRANSFORM_SOURCES.UNREAD", source=unread[0])


def _once(spark: SparkSession, frame: DataFrame, dedup: Dedup, spec: PipelineSpec) -> DataFrame:
    """The deduplicated stream, by Spark's state or a table, as the pipeline declares."""
    if not dedup.in_table:
        return without_repeats(frame, dedup)
    sinks = spec.open()
    shards = int(str(spark.conf.get(Setting.SHUFFLE_PARTITIONS)))
    return without_seen_repeats(frame, dedup, sinks.decider.sink, spec.scope(sinks), shards)


# When queries of this process start and end, and why, kept in their checkpoint; meanwhile, how much state they have.

_STATE_EVERY_S = int(SAMPLE_EVERY_S)
_EXIT_S = 1.0
_AT_EXIT_S = 3.0


class Jvm:
    """Spark's JVM, if this process started it, and why it ended."""

    def __init__(self, spark: SparkSession) -> None:
        self._process = None if internals.is_connect(spark) else internals.started_jvm(spark)
        self._memory = spark.conf.get("spark.driver.memory", "1g")
        if self._process is not None:
            internals.hide_lost_accumulators(spark)

    def death(self) -> DeliveredError | None:
        """The error to report, a moment after its connections broke; None: it runs, or another process started it."""
        if self._process is None:
            return None
        try:
            status = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return None
        return DeliveredError("SPARK_ENDED", how=describe_exit(status), memory=self._memory)


_threads: dict[threading.Thread, StreamingQuery] = {}


def record(location: str, query: StreamingQuery, jvm: Jvm) -> None:
    """Keep the start of a query, and its end once it has ended.

    Args:
        location: of its checkpoint.
    """
    run = Run.new(str(query.runId))
    keep_run(location, run)

    def wait() -> None:
        error, states = None, States(location)
        try:
            while not query.awaitTermination(_STATE_EVERY_S):
                with contextlib.suppress(Exception):  # whether the query has ended is asked above
                    states.keep(query.lastProgress)
        except Exception as failure:
            error = translated(failure) or why_ended() or jvm.death()
            error = error or DeliveredError("QUERY_FAILED.RAN", cause=cause_of(failure))
        batch = None
        with contextlib.suppress(DeliveredError):
            _, batch = read_logged(location)
        keep_run(location, run.ended(batch, error))
        _threads.pop(threading.current_thread(), None)

    if not _threads:
        atexit.register(recorded)
    thread = threading.Thread(target=wait, daemon=True, name=f"delivered-run-{query.runId}")
    _threads[thread] = query
    thread.start()


def recorded() -> None:
    """Wait a moment for the ends of queries that have ended."""
    deadline = time.monotonic() + _AT_EXIT_S
    for thread, query in [*_threads.items()]:
        active = False
        with contextlib.suppress(Exception):  # its JVM may have ended
            active = query.isActive
        if not active:
            thread.join(max(0.0, deadline - time.monotonic()))

"""What is known and checked of a session before a query starts: where it runs, which owner its formats carry, whether a
pipeline's SQL fits its columns, and whether executors reach the driver's arbiter."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import SparkSession

from delivered.checkpoint import Store, is_relative, remember, store_of
from delivered.contract.source import Finding
from delivered.engine.context import new_owner
from delivered.model.capability import Guarantee
from delivered.model.errors import Refused, Unreachable, UsageError, texts
from delivered.model.options import find_option
from delivered.model.work import Arbiter, DriverAddress, Owner
from delivered.pipeline.definition import Definition
from delivered.pipeline.facts import ASYNC_CONF, SessionFacts, check_analysed
from delivered.pipeline.spec import Sender
from delivered.pipeline.sql import invalid_sql
from delivered.spark import internals
from delivered.spark.internals import Setting, is_connect
from delivered.spark.rows import apply_transform, own_views, projected

log = logging.getLogger(__name__)

owners: WeakKeyDictionary[SparkSession, Owner] = WeakKeyDictionary()
"""Of sessions that have every format registered: the owner of ledgers that the registered classes carry."""

_unregistered: dict[int, Owner] = {}
"""Owner of this process, by its JVM, for batches in sessions that nobody registered; 0: it has none."""

OUR_DAEMON = "delivered.spark.daemon"


def sender_of(spark: SparkSession) -> Sender:
    """This driver, for a batch that is planned and committed here. Spark passes `foreachBatch` a clone of the session
    that was registered."""
    jvm = internals.jvm_of(spark)
    process = jvm.pid if jvm is not None else 0
    owner = owners.get(spark) or next((o for o in reversed(list(owners.values())) if o.process == process), None)
    if owner is None:
        owner = _unregistered.setdefault(process, new_owner(jvm))
    return Sender(owner, DriverAddress.of(spark.conf.get))


def check_session(spark: Any) -> None:
    """Raises UsageError: something else was passed. A session of any API can read streams."""
    if not hasattr(spark, "readStream"):
        raise UsageError("SPARK_VALUE.SESSION", value=spark, value_type=type(spark).__name__)


def session_facts(pipeline: Definition, spark: SparkSession) -> SessionFacts:
    """For `gather`."""
    check_session(spark)
    return SessionFacts(
        str(spark.conf.get("spark.master", "local")),
        str(spark.conf.get(ASYNC_CONF, "false")).lower() == "true",
        internals.jvm_of(spark),
        partial(_findings, pipeline, spark),
    )


def _findings(pipeline: Definition, spark: SparkSession) -> tuple[Finding, ...]:
    error = internals.unfit_version(pipeline, spark.version)
    return (
        *(() if error is None else (Finding.refusal(error),)),
        *check_analysed(pipeline, partial(_results, pipeline, spark)),
        *(Finding.build(code, refuses=False) for code in advice(partial(spark.conf.get, default=""))),
    )


def advice(setting: Callable[[str], str | None]) -> dict[str, str]:
    """The settings that a session lacks for cheap Python tasks, by code, and what each is worth.

    Args:
        setting: the session's value of a key, None if unset.
    """
    codes = []
    if internals.LOCAL_SOCKETS and os.name == "posix" and str(setting(Setting.LOCAL_SOCKETS)).lower() != "true":
        codes.append("WORKERS_OVER_TCP")  # decision 043: 200 tasks take 4.3 s instead of 6.7 s
    if os.name == "posix" and not setting(Setting.DAEMON):
        codes.append("WORKERS_IMPORT")  # decision 064
    return {code: texts(code, {})[0] for code in codes}


def _results(
    pipeline: Definition, spark: SparkSession, sources: Mapping[str, pa.Schema]
) -> tuple[list[pa.Schema], bool]:
    """Columns of the rows that reach each sink, and whether Spark takes the transform for deterministic.

    Raises:
        UsageError: the SQL, or a sink's select, does not fit the columns.
    """
    read = {n: spark.createDataFrame([], internals.from_arrow(s)) for n, s in sources.items()}
    try:
        with own_views(pipeline.transform, spark, read):
            frame = apply_transform(pipeline.transform, spark, dict.fromkeys(sources))(read)
            # Spark Connect analyses here, not before: the views must still be there.
            frames = [projected(frame, s.projection) for s in pipeline.sinks]
            schemas = [internals.to_arrow(f.schema) for f in frames]
            return schemas, internals.is_deterministic(frame)
    except (AnalysisException, ParseException) as error:
        problem = internals.sql_error(error)
        raise invalid_sql(
            pipeline.transform.sql, sources, problem.text, place=problem.place, suggested=problem.suggested
        ) from None


def checkpoint_store(spark: SparkSession, location: str) -> Store:
    """How Python opens a checkpoint as this session does; this process remembers it.

    Raises:
        Refused: it is relative, to a folder that is not known here.
        Unreachable: the session opens it in a way that Python has not.
    """
    if is_connect(spark) and is_relative(location):
        raise Refused("CHECKPOINT_RELATIVE.CONNECT", location=location, absolute=str(Path(location).absolute()))
    store = store_of(location, internals.hadoop_settings(spark, location))
    remember(location, store)
    return store


def check_executors(spark: SparkSession, options: Mapping[str, str]) -> None:
    """Let a task on each core ask the arbiter something. Not over Spark Connect, whose client runs no arbiter.

    If only the first tasks noticed, they would send nothing, but the ledger would hold their batch as one that may have
    been sent, and the next start would give it up.

    Args:
        options: the query's, keys in any case; under another guarantee nothing is asked.

    Raises:
        Unreachable: one of them had no answer.
    """
    from delivered.engine.arbiter import ensure_listening

    owner = owners.get(spark)
    guarantee = find_option(options, "guarantee") or ""
    if guarantee.strip().lower() != Guarantee.AT_MOST_ONCE.value or owner is None or is_connect(spark):
        return
    arbiter, context = ensure_listening(owner, DriverAddress.of(spark.conf.get)), spark.sparkContext
    cores = context.defaultParallelism
    try:
        failed = context.parallelize(range(cores), cores).mapPartitions(partial(_ask, arbiter)).collect()
    except Exception as error:
        log.debug("skipped the check of executors: %s", error)  # what they cannot run, the query reports
        return
    if failed:
        host, reason = failed[0]
        raise Unreachable(
            "GRANT_UNREACHABLE.START", task_host=host, host=arbiter.host, port=arbiter.port, reason=reason
        )


def _ask(arbiter: Arbiter, _: Iterable[int]) -> Iterator[tuple[str, str]]:
    from delivered.engine.shard import check_reachable

    try:
        check_reachable(arbiter)
    except OSError as error:
        yield socket.gethostname(), str(error)

"""Keeps when a query of this process started, when it ended, and why, in its checkpoint (`checkpoint/history.py`);
meanwhile, how much state it has."""

from __future__ import annotations

import atexit
import contextlib
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from delivered.checkpoint.folder import read_logged
from delivered.checkpoint.history import SAMPLE_EVERY_S, Run, States, keep_run
from delivered.model.errors import DeliveredError
from delivered.model.translate import cause_of, translated
from delivered.spark.cluster import why_ended
from delivered.spark.internals import hide_lost_accumulators, is_connect, started_jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_STATE_EVERY_S = int(SAMPLE_EVERY_S)
_EXIT_S = 1.0
_AT_EXIT_S = 3.0


class Jvm:
    """Spark's JVM, if this process started it, and why it ended."""

    def __init__(self, spark: SparkSession) -> None:
        self._process = None if is_connect(spark) else started_jvm(spark)
        self._memory = spark.conf.get("spark.driver.memory", "1g")
        if self._process is not None:
            hide_lost_accumulators(spark)

    def death(self) -> DeliveredError | None:
        """The error to report, a moment after its connections broke; None: it runs, or another process started it."""
        if self._process is None:
            return None
        try:
            status = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return None
        return DeliveredError("SPARK_ENDED", how=_how(status), memory=self._memory)


def _how(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (", as by the system when memory runs out" if -status == signal.SIGKILL else "")


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

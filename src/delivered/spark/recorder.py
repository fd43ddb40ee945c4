"""When queries of this process start and end, and why, kept in their checkpoint (`checkpoint/history.py`); meanwhile,
how much state they have. Ends a session whose standalone cluster has forgotten it.

A master that starts anew without recovery (`spark.deploy.recoveryMode`) knows no application. It has their executors
killed and tells their drivers nothing, so that their jobs wait for executors for ever: Spark stops an application only
when a master says that it removed it (StandaloneAppClient).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from delivered.checkpoint.folder import read_logged
from delivered.checkpoint.history import SAMPLE_EVERY_S, Run, States, keep_run
from delivered.model.errors import DeliveredError
from delivered.model.translate import cause_of, translated
from delivered.spark.internals import executors, hide_lost_accumulators, is_connect, started_jvm, stop_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


log = logging.getLogger(__name__)

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


# The executors of a standalone cluster.

LOST_S = 120.0
"""A master that knows the application replaces its executors within seconds, and workers start again within these."""
_LOOK_S = 5.0

_watched: set[str] = set()
_ended: list[DeliveredError] = []


def watch(spark: SparkSession) -> None:
    """Watch a session's executors from a thread, if its cluster may forget it."""
    _ended.clear()  # it was another session's
    if is_connect(spark) or not str(spark.sparkContext.master).startswith("spark://"):
        return
    application = str(spark.sparkContext.applicationId)
    if application not in _watched:
        _watched.add(application)
        threading.Thread(target=_look, args=(spark,), daemon=True, name="delivered-executors").start()


def why_ended() -> DeliveredError | None:
    """Why this process's session was ended here; None: it was not."""
    return _ended[-1] if _ended else None


class Loss:
    """How long a job has waited for executors, of an application that had some. One that waits for its first ones
    waits, and one without jobs needs none: dynamic allocation gives them back."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._had = False

    def is_final(self, count: int, jobs: int, now: float) -> bool:
        """
        Args:
            count: of executors.
            jobs: that run or wait.
            now: in seconds.
        """
        self._had |= count > 0
        if count > 0 or not jobs or not self._had:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= LOST_S


def _look(spark: SparkSession) -> None:
    loss, jobs = Loss(), spark.sparkContext.statusTracker()
    try:
        while not loss.is_final(executors(spark), len(jobs.getActiveJobsIds()), time.monotonic()):
            time.sleep(_LOOK_S)
    except Exception:  # the session was stopped, or its JVM has ended
        return
    _ended.append(DeliveredError("EXECUTORS_LOST", master=spark.sparkContext.master, seconds=f"{LOST_S:.0f}"))
    log.error("%s", _ended[-1])
    stop_context(spark)


# The queries.

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

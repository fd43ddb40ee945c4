"""Ends a session whose standalone cluster has forgotten it.

A master that starts anew without recovery (`spark.deploy.recoveryMode`) knows no application. It has their executors
killed and tells their drivers nothing, so that their jobs wait for executors for ever: Spark stops an application only
when a master says that it removed it (StandaloneAppClient).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from delivered.model.errors import DeliveredError
from delivered.spark.internals import executors, is_connect, stop_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

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

"""The JVM of a classic session, as far as Python must know it. A session of Spark Connect has none here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
from pyspark.sql import SparkSession


def is_connect(spark: Any) -> bool:
    """Whether a session is one of Spark Connect: the driver is elsewhere."""
    return not hasattr(spark, "_jvm")


def jvm_of(spark: Any) -> psutil.Process | None:
    """The JVM of a session that runs on this machine; None for one of Spark Connect."""
    if is_connect(spark):
        return None
    # As text: the class of the handle itself is none that reflection may look into.
    return psutil.Process(int(spark._jvm.java.lang.ProcessHandle.current().toString()))


@contextlib.contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """A session is the active one of this thread; then the former one again."""
    if is_connect(spark):
        yield
        return
    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def make_active(spark: SparkSession) -> None:
    """Make a session the active one of this thread.

    Every Python thread has a JVM thread of its own, and Spark looks for the data source of a stream's sink in the
    active session of that thread alone, not in the session that the stream belongs to: on any thread but the one that
    made the session it finds no `delivered_...` (DATA_SOURCE_NOT_FOUND). A session of Spark Connect has no such thread.
    """
    if is_connect(spark):
        return
    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    sessions.setActiveSession(spark._jsparkSession)

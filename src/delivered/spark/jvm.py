"""The JVM of a classic session. Sessions of Spark Connect have none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
from pyspark.sql import SparkSession

_STREAMS = ("StreamingRelation", "StreamingRelationV2")
"""Leaves of a plan that read a source, through Spark's first and second interface."""


def is_connect(spark: Any) -> bool:
    return not hasattr(spark, "_jvm")


def jvm_of(spark: Any) -> psutil.Process | None:
    """The local JVM of a session; None for Spark Connect."""
    if is_connect(spark):
        return None
    # As text: reflection is not allowed on the handle's class.
    return psutil.Process(int(spark._jvm.java.lang.ProcessHandle.current().toString()))


@contextlib.contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one of this thread; restores the previous one afterwards."""
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

    Every Python thread has its own JVM thread, and Spark looks up the data source of a stream's sink in that thread's
    active session, not in the stream's: on any thread but the one that created the session, `delivered_...` is not
    found (DATA_SOURCE_NOT_FOUND). Not needed for Spark Connect.
    """
    if is_connect(spark):
        return
    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    sessions.setActiveSession(spark._jsparkSession)


def named_sources(frame: Any) -> set[str] | None:
    """The named sources that a streaming frame reads; None: Spark Connect does not expose them."""
    if not hasattr(frame, "_jdf"):
        return None
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    found = (leaves.apply(i) for i in range(leaves.size()))
    names = [leaf.sourceIdentifyingName() for leaf in found if leaf.getClass().getSimpleName() in _STREAMS]
    return {str(n.name()) for n in names if n.getClass().getSimpleName() == "UserProvided"}

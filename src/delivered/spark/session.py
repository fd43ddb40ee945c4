"""A Spark session whose workers run this interpreter, on a Java that is really there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Tasks that take rows in larger Arrow batches spend less time between Python and the JVM.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
    "spark.sql.shuffle.partitions": "4",
}


def prepare_environment(python: str | None = None) -> None:
    """Set JAVA_HOME and PYSPARK_PYTHON of this process where they are not set. Call before the JVM starts.

    Without PYSPARK_PYTHON Spark's workers would run whatever `python3` the system has.

    Args:
        python: what workers run; default: this interpreter.

    Raises:
        DeliveredError: no Java 17 or newer, neither on the machine nor from the extra `java`.
    """
    from delivered.brokers.java import java_home

    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", python or sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", python or sys.executable)


def _listen_on_loopback(builder: SparkSession.Builder) -> SparkSession.Builder:
    """A driver that is its own cluster has no business on the network's addresses."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")


def session(name: str = "delivered", master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session with every format registered.

    Args:
        master: default: what `spark-submit` set, else `local[*]`.
        conf: Spark configuration on top of ours.
    """
    from pyspark.sql import SparkSession

    from delivered.spark.class_archive import with_archive
    from delivered.spark.formats import register
    from delivered.spark.worker_python import worker_python

    if master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        master = "local[*]"  # not below spark-submit, which would have set a master
    local = master is not None and (master == "local" or master.startswith("local["))
    prepare_environment(worker_python() if local else None)
    builder = SparkSession.builder.appName(name)
    settings = {**_CONF, **(conf or {})}
    if master is not None:
        builder = builder.master(master)
    if local:
        builder = _listen_on_loopback(builder)
        settings = with_archive(settings)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


@contextlib.contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """A session is the active one of this thread; then the former one again."""
    if not hasattr(spark, "_jvm"):
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
    if not hasattr(spark, "_jvm"):
        return
    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    sessions.setActiveSession(spark._jsparkSession)

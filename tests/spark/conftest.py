"""One Spark session for all tests of this folder that run Spark in-process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyspark
import pytest
from benchmarks.cases import EARLIER_KAFKA_JARS, SPARK_KAFKA_JARS
from tests.support.grouped import end_with_group

from delivered.model.errors import DeliveredError
from delivered_lab.brokers.servers import fetch_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark_kafka_jars() -> str:
    """JARs of Spark's own Kafka connector, comma-separated; empty if unavailable."""
    version = pyspark.__version__.rpartition(".")[0]
    name = version if version in EARLIER_KAFKA_JARS else "4.2.0"
    try:
        jars = EARLIER_KAFKA_JARS.get(version, SPARK_KAFKA_JARS)
        folder = fetch_jars(f"spark-kafka/{name}", jars, print, transitive=False)
    except DeliveredError as error:
        print(f"without Spark's own Kafka connector: {error}")
        return ""
    return ",".join(str(jar) for jar in sorted(folder.glob("*.jar")))


@pytest.fixture(scope="session")
def sparks_own_kafka(spark_kafka_jars: str) -> bool:
    """Whether the session of `spark` has `format("kafka")`."""
    return bool(spark_kafka_jars)


@pytest.fixture(scope="session")
def spark(spark_kafka_jars: str, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    from delivered.spark.session import session

    end_with_group(request)
    made = session("tests", master="local[2]", conf={"spark.jars": spark_kafka_jars} if spark_kafka_jars else None)
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def small_shuffles(spark: SparkSession) -> Iterator[None]:
    """Two partitions behind a shuffle, not 200, each of which keeps state in files of its own."""
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield
    spark.conf.set("spark.sql.shuffle.partitions", before)

"""A user's jobs that read files and divide their rows by a shuffle, into a topic, in three ways that Spark offers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

import delivered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHUFFLED = {
    "spark.sql.shuffle.partitions": "20",
    # Small, so that adaptive execution makes as many partitions of few rows as there are cores.
    "spark.sql.adaptive.coalescePartitions.minPartitionSize": "1b",
}


def stream(spark: SparkSession, given: argparse.Namespace) -> DataFrame:
    return spark.readStream.schema("value binary").parquet(given.input)


def spark_api(spark: SparkSession, given: argparse.Namespace) -> None:
    writer = stream(spark, given).repartition("value").writeStream.format("delivered_kafka")
    writer = writer.option("kafka.bootstrap.servers", given.bootstrap).option("topic", given.topic)
    writer = writer.option("guarantee", "exactly_once").option("pipeline", given.topic)
    writer = writer.option("checkpointLocation", given.checkpoint).trigger(availableNow=True)
    writer.start().awaitTermination()


def to_table(spark: SparkSession, given: argparse.Namespace) -> None:
    table = f"divided_{given.topic.replace('-', '_')}"
    # Spark passes the options of the stream's writer alone.
    spark.sql(
        f"CREATE TABLE {table} USING delivered_kafka OPTIONS ('kafka.bootstrap.servers' '{given.bootstrap}', "
        f"topic '{given.topic}', guarantee 'exactly_once', pipeline '{given.topic}')"
    )
    try:
        rows = stream(spark, given).repartition("value").selectExpr("CAST(NULL AS BINARY) AS key", "value")
        writer = rows.writeStream.option("guarantee", "exactly_once").option("pipeline", given.topic)
        writer = writer.option("kafka.bootstrap.servers", given.bootstrap).option("topic", given.topic)
        writer = writer.option("checkpointLocation", given.checkpoint).trigger(availableNow=True)
        writer.toTable(table).awaitTermination()
    finally:
        spark.sql(f"DROP TABLE {table}")


def own_foreach_batch(spark: SparkSession, given: argparse.Namespace) -> None:
    sink = delivered.kafka(given.bootstrap, topic=given.topic)

    def write(frame: DataFrame, batch: int) -> None:
        rows = frame.repartition("value")
        delivered.write_batch(rows, batch, sink=sink, guarantee="exactly_once", pipeline=given.topic)

    writer = stream(spark, given).writeStream.foreachBatch(write).option("checkpointLocation", given.checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()


WAYS: dict[str, Callable[[SparkSession, argparse.Namespace], None]] = {
    run.__name__: run for run in (spark_api, to_table, own_foreach_batch)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("by", "input", "bootstrap", "topic", "checkpoint", "cores"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    WAYS[given.by](delivered.session("divided", f"local[{given.cores}]", SHUFFLED), given)


if __name__ == "__main__":
    main()

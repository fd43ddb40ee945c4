"""A user's job: copy a topic, exactly once. Run by spark-submit on a cluster; over_connect.py runs it there."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

import delivered


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("bootstrap", "source", "sink", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    return parser.parse_args()


def copy(spark: SparkSession, given: argparse.Namespace) -> None:
    delivered.register(spark)
    query = (
        spark.readStream.format("delivered_kafka")
        .option("kafka.bootstrap.servers", given.bootstrap)
        .option("subscribe", given.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "4000")
        .load()
        .selectExpr("key", "value")
        .writeStream.format("delivered_kafka")
        .option("guarantee", "exactly_once")
        .option("kafka.bootstrap.servers", given.bootstrap)
        .option("topic", given.sink)
        .option("checkpointLocation", given.checkpoint)
        .queryName(given.sink)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    print("BATCHES", len(query.recentProgress))


if __name__ == "__main__":
    session = SparkSession.builder.appName("copy").getOrCreate()
    copy(session, arguments())
    session.stop()

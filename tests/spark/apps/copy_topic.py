"""A user's job: copy a topic, exactly once. Run by spark-submit on a cluster, or over Spark Connect."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

import delivered


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--sink", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--remote", help="Spark Connect, for instance local[2]")
    given = parser.parse_args()
    if given.remote:
        from tests.spark.apps.connect import connected

        spark = connected(given.remote)
    else:
        spark = SparkSession.builder.appName("copy").getOrCreate()
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
    spark.stop()


if __name__ == "__main__":
    main()

"""A user's job that tells Hadoop of a store in code: in the Spark idiom, then by `write_batch`."""

from __future__ import annotations

import json
import sys

import delivered

if __name__ == "__main__":
    from pyspark.sql import DataFrame, SparkSession

    folder, checkpoints, jars, settings = sys.argv[1:]
    builder = SparkSession.builder.master("local[2]").config("spark.driver.extraClassPath", jars)
    spark = builder.config("spark.ui.enabled", "false").config("spark.driver.memory", "512m").getOrCreate()
    for key, value in json.loads(settings).items():
        spark.sparkContext._jsc.hadoopConfiguration().set(key, value)  # type: ignore[union-attr]
    delivered.register(spark)
    rows = spark.readStream.format("delivered_log").option("path", f"{folder}/in").option("startingOffsets", "earliest")
    idiom = rows.load().select("value").writeStream.format("delivered_sqlite").queryName("idiom")
    idiom = idiom.options(guarantee="exactly_once", path=f"{folder}/out.db", table="orders")
    idiom.option("checkpointLocation", f"{checkpoints}/idiom").trigger(availableNow=True).start().awaitTermination()

    def write(df: DataFrame, batch_id: int) -> None:
        sink = delivered.sqlite(f"{folder}/own.db", "orders")
        delivered.write_batch(df, batch_id, sink=sink, guarantee="exactly_once", pipeline="own")

    own = rows.load().select("value").writeStream.foreachBatch(write).option("checkpointLocation", f"{checkpoints}/own")
    own.trigger(availableNow=True).start().awaitTermination()
    spark.stop()

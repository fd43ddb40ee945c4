"""A user's job with a foreachBatch of its own: totals as an upsert, and every change of them."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame

import delivered


def main() -> None:
    folder = Path(sys.argv[1])
    database = str(folder / "out.db")
    totals = delivered.sqlite(database, "totals", mode="upsert", keyColumns="k")
    changes = delivered.sqlite(database, "changes")

    def write(df: DataFrame, batch_id: int) -> None:
        df.persist()
        delivered.write_batch(df, batch_id, sink=totals, guarantee="exactly_once", pipeline="totals")
        delivered.write_batch(df, batch_id, sink=changes, guarantee="exactly_once", pipeline="totals")
        df.unpersist()

    spark = delivered.session("own", master="local[2]")
    source = spark.readStream.format("delivered_log").option("path", str(folder / "in"))
    frame = source.option("maxOffsetsPerTrigger", 100).load()
    sums = frame.selectExpr("CAST(key AS STRING) AS k", "CAST(CAST(value AS STRING) AS BIGINT) AS v").groupBy("k")
    counted = sums.agg({"*": "count", "v": "sum"}).selectExpr("k", "`count(1)` AS n", "`sum(v)` AS total")
    query = counted.writeStream.outputMode("update").foreachBatch(write).trigger(availableNow=True)
    query.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()


if __name__ == "__main__":
    main()

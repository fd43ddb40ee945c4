"""A user's jobs over Spark Connect: a copy of a topic, then its totals by output mode and by a custom foreachBatch."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from tests.spark.apps.connect import connected
from tests.spark.apps.copy_topic import arguments, copy

import delivered
from delivered.planner import Plan

TOTALS = "SELECT CAST(CAST(value AS STRING) AS INT) % 10 AS k, count(*) AS n FROM source GROUP BY k"


def totals(spark: SparkSession, bootstrap: str, topic: str, folder: Path) -> None:
    source = delivered.kafka(bootstrap, subscribe=topic, startingOffsets="earliest")
    pipeline = delivered.Pipeline(
        name="totals",
        guarantee="exactly_once",
        checkpoint=folder / "totals",
        source=source,
        transform=TOTALS,
        sinks=[delivered.sqlite(str(folder / "totals.db"), "totals", keyColumns="k")],
        output_mode="update",
        trigger="available_now",
    )
    plan = pipeline.plan(spark)
    assert isinstance(plan, Plan) and any("over TCP" in w for w in plan.warnings), plan
    pipeline.start(spark).awaitTermination()

    own = str(folder / "own")
    sink = delivered.sqlite(str(folder / "own.db"), "totals", mode="complete")

    def write(df: DataFrame, batch_id: int) -> None:
        delivered.write_batch(df, batch_id, sink=sink, guarantee="exactly_once", pipeline="own", checkpoint=own)

    read = spark.readStream.format("delivered_kafka").options(**source.options).load()
    counts = (
        read.selectExpr("CAST(CAST(value AS STRING) AS INT) % 10 AS k")
        .groupBy("k")
        .count()
        .withColumnRenamed("count", "n")
    )
    writer = counts.writeStream.outputMode("complete").foreachBatch(write).option("checkpointLocation", own)
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    given = arguments()
    session = connected("local[2]")
    session.conf.set("spark.sql.shuffle.partitions", "2")
    copy(session, given)
    totals(session, given.bootstrap, given.sink, Path(given.checkpoint).parent)
    session.stop()

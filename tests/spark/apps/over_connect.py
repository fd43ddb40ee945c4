"""A user's jobs over Spark Connect: a copy of a topic, then its totals by output mode and by a custom foreachBatch."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from tests.spark.apps.connect import connected
from tests.spark.apps.copy_topic import arguments, copy

import delivered
from delivered.entry import CellView
from delivered.model.identity import Scope
from delivered.pipeline.progress import watch
from delivered.planner import Plan
from delivered.spark.internals import recent_reports

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
        rows = df.repartition("k")  # each partition is a shard, also a small one
        delivered.write_batch(rows, batch_id, sink=sink, guarantee="exactly_once", pipeline="own", checkpoint=own)

    read = spark.readStream.format("delivered_kafka").options(**source.options).load()
    counts = (
        read.selectExpr("CAST(CAST(value AS STRING) AS INT) % 10 AS k")
        .groupBy("k")
        .count()
        .withColumnRenamed("count", "n")
    )
    writer = counts.writeStream.outputMode("complete").foreachBatch(write).option("checkpointLocation", own)
    writer.trigger(availableNow=True).start().awaitTermination()
    made = sink.sink()
    state = made.store(Scope("own", made.name, "new")).peek()
    decision = state.last or state.earlier[0]
    assert {p.shard for p in decision.participants} == {0, 1}, decision


def again(spark: SparkSession, bootstrap: str, topic: str, folder: Path) -> None:
    """As a notebook's cell that runs again with changed code, and what it shows."""

    def version(tag: str) -> delivered.Pipeline:
        return delivered.Pipeline(
            name="again",
            guarantee="exactly_once",
            checkpoint=folder / "again",
            source=delivered.kafka(bootstrap, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=5_000),
            transform=f"SELECT CAST(value AS STRING) AS v, '{tag}' AS version FROM source",
            sinks=[delivered.sqlite(str(folder / "again.db"), "again")],
        )

    first = version("a").start(spark)
    while (last := first.lastProgress) is None or last.batchId < 0:
        first.awaitTermination(0.1)
    made = version("b")
    second = made.start(spark, restart=True)
    assert not first.isActive and first.exception() is None
    with watch(made, second, recent_reports) as progress:
        second.processAllAvailable()
        progress.refresh()
        assert progress.step in ("waiting", "plan"), progress.step
        assert progress.text in repr(CellView("again", "running", progress))
    assert made.stop(second)
    assert "exactly_once by" in made.plan(spark)._repr_html_()


if __name__ == "__main__":
    given = arguments()
    session = connected("local[2]")
    session.conf.set("spark.sql.shuffle.partitions", "2")
    copy(session, given)
    totals(session, given.bootstrap, given.sink, Path(given.checkpoint).parent)
    again(session, given.bootstrap, given.sink, Path(given.checkpoint).parent)
    session.stop()

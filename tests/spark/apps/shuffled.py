"""A user's job in a session of its own: files through a shuffle into a SQLite table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import delivered

WAIT_S = 120.0


def _held(folder: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Rows in two batches: the first attempt of partition 0 waits in between until there is a second attempt."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        second = Path(folder) / "second"
        if task.partitionId() == 0 and task.attemptNumber():
            second.touch()
        for number, batch in enumerate(batches):
            yield batch.slice(0, batch.num_rows // 2)
            deadline = time.monotonic() + WAIT_S
            while task.partitionId() == 0 and not number and not second.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            yield batch.slice(batch.num_rows // 2)

    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("input", "database", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--held")
    parser.add_argument("--guarantee", default="at_most_once")
    parser.add_argument("--foreach", action="store_true")
    given = parser.parse_args()
    spark = SparkSession.builder.appName("shuffled").getOrCreate()
    if not given.foreach:
        delivered.register(spark)
    rows = spark.readStream.schema("id bigint").parquet(given.input).repartition(4, "id")
    if given.held:
        rows = rows.mapInArrow(_held(given.held), "id bigint")

    def write(df: DataFrame, batch_id: int) -> None:
        sink = delivered.sqlite(given.database, "ids")
        delivered.write_batch(df, batch_id, sink=sink, guarantee=given.guarantee, pipeline="ids")

    if given.foreach:
        writer = rows.writeStream.foreachBatch(write)
    else:
        writer = rows.writeStream.format("delivered_sqlite").option("guarantee", given.guarantee)
        writer = writer.option("path", given.database).option("table", "ids")
    query = writer.option("checkpointLocation", given.checkpoint).queryName("ids")
    query.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()

"""A user's job in a session of its own: files through a shuffle into a SQLite table, at most once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

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
    given = parser.parse_args()
    spark = SparkSession.builder.appName("shuffled").getOrCreate()
    delivered.register(spark)
    rows = spark.readStream.schema("id bigint").parquet(given.input).repartition(4, "id")
    if given.held:
        rows = rows.mapInArrow(_held(given.held), "id bigint")
    query = (
        rows.writeStream.format("delivered_sqlite")
        .option("guarantee", "at_most_once")
        .option("path", given.database)
        .option("table", "ids")
        .option("checkpointLocation", given.checkpoint)
        .queryName("ids")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()

"""One `df.write` into SQLite: argv is the database, the run's id, and how many rows."""

from __future__ import annotations

import sys

import delivered
from delivered.spark.session import session


def main(path: str, run: str, rows: int) -> None:
    spark = session("batch-run", master="local[2]")
    delivered.register(spark)
    writer = spark.range(rows).selectExpr("id", "cast(id % 7 AS string) AS name").write.format("delivered_sqlite")
    writer = writer.mode("append").option("path", path).option("table", "orders").option("pipeline", "daily")
    writer.option("guarantee", "exactly_once").option("runId", run).save()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""One `df.write`: argv is the format, its options as JSON, the run's id, how many rows, and their columns in SQL."""

from __future__ import annotations

import json
import sys

import delivered
from delivered.spark.session import session


def main(system: str, options: str, run: str, rows: int, columns: list[str]) -> None:
    spark = session("batch-run", master="local[2]")
    delivered.register(spark)
    writer = spark.range(rows).selectExpr(*columns).write.format(f"delivered_{system}").mode("append")
    writer = writer.options(**json.loads(options)).option("pipeline", "daily")
    writer.option("guarantee", "exactly_once").option("runId", run).save()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])

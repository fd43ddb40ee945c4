"""A user's job: a log into a PostgreSQL table, exactly once, through a DataFrame transform."""

from __future__ import annotations

import argparse

from delivered.spark.session import session


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("log", "url", "table", "mechanism", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    spark = session("to-postgres", "local[2]")
    query = (
        spark.readStream.format("delivered_log")
        .option("path", given.log)
        .option("maxOffsetsPerTrigger", "2000")
        .load()
        .selectExpr("cast(key AS string) AS id", "value AS payload", "`offset` AS position", "timestamp AS at")
        .writeStream.format("delivered_postgres")
        .option("guarantee", "exactly_once")
        .option("url", given.url)
        .option("dbtable", given.table)
        .option("mechanism", given.mechanism)
        .option("ifNotExists", "true")
        .option("checkpointLocation", given.checkpoint)
        .option("pipeline", "to-postgres")
        .queryName("to-postgres")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()

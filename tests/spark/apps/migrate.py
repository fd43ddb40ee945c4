"""A user's job before, during and after a migration: one query from Kafka to Kafka, with one of the two connectors."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

from pyspark.sql.functions import lit, udf
from pyspark.sql.types import BinaryType

import delivered
from delivered.spark.session import session


@udf(BinaryType())  # by name would need a session
def held(value: bytes | None, at: str) -> bytes | None:
    """The value; but the task that meets `at` never ends."""
    if value is not None and bytes(value).decode() == at:
        threading.Event().wait()
    return value


def query(spark: Any, connector: str, given: Any, **options: str) -> Any:
    """The user's query, up to start(). Migrating changes one word twice, and adds `options` of the sink."""
    rows = (
        spark.readStream.format(connector)
        .option("kafka.bootstrap.servers", given.bootstrap)
        .option("subscribe", given.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "100")
        .load()
        .selectExpr("key", "value")
    )
    if given.hold:
        rows = rows.withColumn("value", held("value", lit(given.hold)))
    writer = rows.writeStream.format(connector).option("kafka.bootstrap.servers", given.bootstrap)
    return (
        writer.option("topic", given.sink)
        .option("checkpointLocation", given.checkpoint)
        .options(**options)
        .queryName("orders")
        .trigger(availableNow=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap", "--source", "--sink", "--checkpoint", "--jars", "--turns"):
        parser.add_argument(name, required=True)
    parser.add_argument("--hold")
    parser.add_argument("connectors", nargs="+", help="of the first run, of the second, ...; the last one stays")
    parser.add_argument("--option", action="append", default=[], help="name=value, of our sink")
    given = parser.parse_args()
    turns = Path(given.turns)
    turn = len(turns.read_text()) if turns.exists() else 0
    turns.write_text("x" * (turn + 1))
    connector = given.connectors[min(turn, len(given.connectors) - 1)]
    options = {} if connector == "kafka" else dict(o.split("=", 1) for o in given.option)
    spark = session("orders", master="local[2]", conf={"spark.jars": given.jars})
    delivered.register(spark)
    query(spark, connector, given, **options).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()

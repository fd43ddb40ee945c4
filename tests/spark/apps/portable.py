"""A user's job: files, written by `foreachBatch` into SQLite, and into Kafka if there is one. Ends when all are read.

python -m tests.spark.apps.portable FOLDER [BOOTSTRAP TOPIC]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame

import delivered


def main() -> None:
    folder = Path(sys.argv[1])
    sinks = [delivered.sqlite(str(folder / "out.db"), "t")]
    if len(sys.argv) > 2:
        sinks.append(delivered.kafka(sys.argv[2], topic=sys.argv[3]))

    def write(df: DataFrame, batch_id: int) -> None:
        for sink in sinks:
            rows = df if sink.format.endswith("sqlite") else df.selectExpr("CAST(v AS STRING) AS value")
            delivered.write_batch(rows, batch_id, sink=sink, guarantee="exactly_once", pipeline="portable")

    spark = delivered.session("portable", master="local[2]", conf={"spark.sql.shuffle.partitions": "3"})
    source = spark.readStream.schema("v bigint").option("maxFilesPerTrigger", 1)
    frame = source.json(str(folder / "in")).repartition("v")
    query = frame.writeStream.foreachBatch(write).option("checkpointLocation", str(folder / "checkpoint"))
    (folder / "ready").touch()
    query.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main()

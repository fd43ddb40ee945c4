"""A user's job: files, written by `foreachBatch` into SQLite, and into Kafka if there is one. Ends when all are read.

It starts a JVM, or uses that of `jvm_host.py`, or Spark Connect, if the environment names it.

python -m tests.spark.apps.portable FOLDER GUARANTEE [BOOTSTRAP TOPIC]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

import delivered
from delivered.crash import CRASH, CRASH_DIR


def make_session(**conf: str) -> SparkSession:
    return delivered.session("portable", master="local[2]", conf={"spark.sql.shuffle.partitions": "3", **conf})


def attached_session() -> SparkSession:
    """The session of a JVM that another process started."""
    gateway = launch_gateway()
    java = gateway.jvm.JavaSparkContext(gateway.jvm.org.apache.spark.SparkContext.getOrCreate())
    context = SparkContext(gateway=gateway, jsc=java, conf=SparkConf(_jconf=java.sc().conf()))
    if os.environ[CRASH].startswith("write"):  # else tasks keep their processes
        context.environment |= {name: os.environ[name] for name in (CRASH, CRASH_DIR)}
    return SparkSession.builder.getOrCreate()


def main() -> None:
    folder, guarantee, *kafka = Path(sys.argv[1]), *sys.argv[2:]
    sinks = [delivered.sqlite(str(folder / "out.db"), "t")]
    if kafka:
        sinks.append(delivered.kafka(kafka[0], topic=kafka[1]))
    remote, checkpoint = "SPARK_REMOTE" in os.environ, str(folder / "checkpoint")
    known = checkpoint if remote else None  # a classic session tells it

    def write(df: DataFrame, batch_id: int) -> None:
        for sink in sinks:
            rows = df if sink.format.endswith("sqlite") else df.selectExpr("CAST(v AS STRING) AS value")
            delivered.write_batch(rows, batch_id, sink=sink, guarantee=guarantee, pipeline="portable", checkpoint=known)

    if remote:
        spark = SparkSession.builder.getOrCreate()
    else:
        spark = attached_session() if "PYSPARK_GATEWAY_PORT" in os.environ else make_session()
    source = spark.readStream.schema("v bigint").option("maxFilesPerTrigger", 1)
    frame = source.json(str(folder / "in")).repartition("v")
    query = frame.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    (folder / "ready").touch()
    start(query.trigger(availableNow=True)).awaitTermination()


def start(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query. While a Connect server still starts that of a killed client, Spark refuses a second one."""
    while True:
        try:
            return writer.start()
        except PySparkException as refusal:
            if "CONCURRENT_QUERY" not in str(refusal):
                raise
            print("refused, started again:", refusal, flush=True)


if __name__ == "__main__":
    main()

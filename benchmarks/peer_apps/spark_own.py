"""Spark's own Kafka source and sink. Arguments: pipeline file, folder of the connector's JARs."""

import sys
from pathlib import Path

import yaml

from delivered.spark.session import session

told = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
source, sink = told["source"], told["sinks"][0]
jars = ",".join(str(jar) for jar in sorted(Path(sys.argv[2]).glob("*.jar")))
spark = session(told["pipeline"], told["master"], {"spark.jars": jars})
spark.sparkContext.setLogLevel("ERROR")
rows = (
    spark.readStream.format("kafka")
    .option("kafka.bootstrap.servers", source["kafka.bootstrap.servers"])
    .option("subscribe", source["subscribe"])
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", str(source["maxOffsetsPerTrigger"]))
    # Else records of the source's open transactions would be read; the peer is set up as well as it can be.
    .option("kafka.isolation.level", "read_committed")
    .load()
)
query = (
    rows.select("key", "value")
    .writeStream.format("kafka")
    .option("kafka.bootstrap.servers", sink["kafka.bootstrap.servers"])
    .option("topic", sink["topic"])
    .option("kafka.acks", "all")
    .option("checkpointLocation", told["checkpoint"])
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
spark.stop()

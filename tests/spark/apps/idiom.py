"""Mistakes in the bare Spark idiom, and their error messages. Run in a session, or over Spark Connect."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import delivered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Idiom:
    """One user, two topics, a folder for checkpoints."""

    def __init__(self, bootstrap: str, source: str, sink: str, folder: str) -> None:
        self.servers, self.source, self.sink, self.folder = bootstrap, source, sink, folder
        self.progress: list[Any] = []

    def read(self, spark: SparkSession, **options: str) -> DataFrame:
        reader = spark.readStream.format("delivered_kafka").option("kafka.bootstrap.servers", self.servers)
        return reader.option("subscribe", self.source).option("startingOffsets", "earliest").options(**options).load()

    def start(self, frame: DataFrame, **options: str) -> Any:
        settings = {"guarantee": "exactly_once", "kafka.bootstrap.servers": self.servers, "topic": self.sink}
        settings |= {"checkpointLocation": f"{self.folder}/checkpoint", "pipeline": self.sink, **options}
        settings = {k: v for k, v in settings.items() if v != "none"}
        mode = settings.pop("mode", "append")
        writer = frame.writeStream.format("delivered_kafka").options(**settings).outputMode(mode)
        return writer.trigger(availableNow=True).queryName(self.sink).start()

    def run(self, frame: DataFrame, **options: str) -> int:
        """A whole run; returns how many batches the checkpoint then holds."""
        query = self.start(frame, **options)
        query.awaitTermination()
        sources = [p["sources"][0] for p in query.recentProgress]
        self.progress = [(s["description"], s["metrics"]) for s in sources]
        return len([f for f in Path(self.folder, "checkpoint", "commits").iterdir() if f.name.isdigit()])


def in_thread(call: Callable[[], Any]) -> Any:
    said: list[Any] = []

    def run() -> None:
        try:
            said.append(call())
        except Exception as error:
            said.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(said[0], Exception):
        raise said[0]
    return said[0]


def texts(spark: SparkSession, idiom: Idiom) -> dict[str, str]:
    """The error of each mistake, by call; "" without an error."""
    found: dict[str, str] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = ""
        except Exception as error:
            found[name] = str(error)
        print(f"{time.monotonic() - began:.1f} s", name, file=sys.stderr, flush=True)

    began = time.monotonic()
    rows = idiom.read(spark, maxOffsetsPerTrigger="4").select("key", "value")
    fresh = f"{idiom.folder}/fresh"
    note("load: option", lambda: idiom.read(spark, subscrib="x"))
    note("load: format", lambda: spark.read.format("delivered_kafak").load())
    note("start: guarantee missing", lambda: idiom.start(rows, guarantee="none"))
    note("start: guarantee", lambda: idiom.start(rows, guarantee="exactly-once"))
    note("start: option", lambda: idiom.start(rows, topik="x"))
    note("start: columns", lambda: idiom.start(rows.selectExpr("key", "value AS payload")))
    note(
        "start: output mode",
        lambda: idiom.start(rows.groupBy("key").count().selectExpr("key AS value"), mode="complete"),
    )
    note("start: timeout", lambda: idiom.start(rows, transactionTimeout="40000"))
    note("start: topic", lambda: idiom.start(rows, topic="nobody-made-it"))
    found["started"] = str(Path(idiom.folder, "checkpoint").exists())
    idiom.run(rows)
    note("start: new checkpoint", lambda: idiom.start(rows, checkpointLocation=fresh))
    note("start: pipeline renamed", lambda: idiom.start(rows, pipeline="another"))
    found["offsets"] = ",".join(sorted(f.name for f in Path(idiom.folder, "checkpoint/offsets").glob("[0-9]*")))
    found["progress"] = json.dumps(idiom.progress)

    def late() -> None:
        bad = rows.selectExpr("key", "value", "CAST(NULL AS STRING) AS topic")
        idiom.start(bad, topic="none", pipeline="late", checkpointLocation=f"{idiom.folder}/late").awaitTermination()

    note("awaitTermination: row", late)
    note("other", lambda: idiom.start(rows.selectExpr("no_such_column")))
    return found


def written(rows: DataFrame, name: str, checkpoint: Path, said: str) -> None:
    """A query whose own foreachBatch names a checkpoint."""
    sink = delivered.sqlite(f"{checkpoint}.db", "rows")

    def write(df: DataFrame, batch_id: int) -> None:
        delivered.write_batch(df, batch_id, sink=sink, guarantee="exactly_once", pipeline=name, checkpoint=said)

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def main() -> None:
    from tests.spark.apps.connect import another, connected

    parser = argparse.ArgumentParser()
    for name in ("remote", "bootstrap", "source", "sink", "folder"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    spark = connected(given.remote)
    delivered.register(spark)
    idiom = Idiom(given.bootstrap, given.source, given.sink, given.folder)
    found = texts(spark, idiom)
    rows = idiom.read(spark).select("key", "value")
    for name, run in (
        ("start", lambda: idiom.start(rows, checkpointLocation="checkpoints/orders")),
        ("write_batch", lambda: written(rows, given.sink, Path(given.folder) / "own", "checkpoints/own")),
    ):
        try:
            run()
        except Exception as error:
            found[f"relative: {name}"] = str(error)
    other = another(spark)
    found["batches"] = str(in_thread(lambda: idiom.run(idiom.read(other).select("key", "value"))))
    print("SAID", json.dumps(found))
    # The server stops with `spark`: at exit, PySpark's client of another session would look for it for minutes.
    other.client.close()  # type: ignore[attr-defined]
    spark.stop()


if __name__ == "__main__":
    main()

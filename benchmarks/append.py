"""Milliseconds of a small batch that is appended by a stream's writer, and by `foreachBatch`, in turns in one session.

python -m benchmarks.append [--rows 10] [--batches 40] [--rounds 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

import delivered
from benchmarks.__main__ import create_topic
from delivered.spark import start
from delivered.spark.session import session
from delivered_lab import brokers

WARM_UP = 5
"""Batches of each query that do not count."""


def run(spark: SparkSession, bootstrap: str, topic: str, rows: int, folder: Path, *, by_writer: bool) -> list[int]:
    """Milliseconds of each batch of a query that reads the topic to its end."""
    create_topic(bootstrap, out := folder.name)
    start.PYTHON_SOURCES = by_writer  # as on a Spark without writers in Python
    pipeline = delivered.Pipeline(
        name=out,
        guarantee="exactly_once",
        checkpoint=folder,
        source=delivered.kafka(bootstrap, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=rows),
        transform="SELECT key, value FROM source",
        sinks=[delivered.kafka(bootstrap, topic=out)],
        trigger="available_now",
    )
    query = pipeline.start(spark)
    query.awaitTermination()
    done = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]]
    return done[WARM_UP:]


def main() -> None:
    from tests.kafka_tools import produce

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    spark = session("append", "local[2]")
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as work:
        broker = brokers.start("kafka", Path(work) / "kafka", dies_with_parent=True)
        try:
            create_topic(broker.bootstrap, "in", 1)
            produce(broker.bootstrap, "in", [(b"k", b"%d" % n) for n in range(given.rows * (given.batches + WARM_UP))])
            for number in range(given.rounds * 2):
                by_writer = number % 2 == 0
                done = run(spark, broker.bootstrap, "in", given.rows, Path(work) / f"q{number}", by_writer=by_writer)
                quarters = statistics.quantiles(done, n=4)
                print(
                    json.dumps({"by": "writer" if by_writer else "foreachBatch", "batches": len(done), "ms": quarters})
                )
        finally:
            spark.stop()
            broker.kill()


if __name__ == "__main__":
    main()

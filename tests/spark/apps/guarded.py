"""A user's job with a session of the user's own: one topic into another, under a guarantee, until all is there."""

from __future__ import annotations

import sys
from pathlib import Path

import delivered

if __name__ == "__main__":
    from pyspark.sql import SparkSession

    bootstrap, source, sink, checkpoint, guarantee, stop = sys.argv[1:]
    session = SparkSession.builder.appName(sink).getOrCreate()
    pipeline = delivered.Pipeline(
        name=sink,
        guarantee=guarantee,
        checkpoint=checkpoint,
        source=delivered.kafka(bootstrap, subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger=400),
        transform="SELECT /*+ REPARTITION(4, key) */ key, value FROM source",
        sinks=[delivered.kafka(bootstrap, topic=sink)],
    )
    query = pipeline.start(session)
    while not Path(stop).exists():
        query.awaitTermination(1)
    pipeline.stop(query)
    session.stop()

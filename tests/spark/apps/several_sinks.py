"""A user's job: a pipeline file, run to its end, then audited sink by sink."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import delivered


def main() -> None:
    file, report = (Path(p) for p in sys.argv[1:3])
    pipeline = delivered.Pipeline.from_file(file)
    query = pipeline.start()
    query.awaitTermination()
    spark = SparkSession.getActiveSession()
    assert spark is not None
    found = {name: json.loads(pipeline.audit(spark, sink=name).to_json()) for name in pipeline.sink_names}
    report.write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()

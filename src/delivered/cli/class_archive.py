"""Creates the archive of Spark's classes that makes sessions start faster (spark/session.py).

python -m delivered.cli.class_archive       `make setup` runs it
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from delivered.connectors.log import append
from delivered.entry import Pipeline
from delivered.machine import java_home
from delivered.model.errors import DeliveredError
from delivered.pipeline.endpoint import log, sqlite
from delivered.spark.internals import started_jvm
from delivered.spark.session import JAVA_OPTIONS, archive, session

_EXIT_TIMEOUT_S = 120.0


def make() -> Path:
    """Run a small stream to its end and archive the classes that it loaded.

    Raises:
        DeliveredError: the JVM wrote no archive.
    """
    file = archive()
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(prefix="delivered-classes-") as folder:
            _stream(Path(folder), f'"-XX:ArchiveClassesAtExit={fresh}" -Xlog:cds=off -Xlog:cds+dynamic=off')
        if not fresh.is_file():
            raise DeliveredError("NO_CLASS_ARCHIVE", java_home=java_home())
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)
    return file


def _stream(folder: Path, java_options: str) -> None:
    rows = pa.table({"key": pa.array([b"1", b"2"], pa.binary()), "value": pa.array([b"{}", b"{}"], pa.binary())})
    append(str(folder / "log"), rows, partition_by=2)
    spark = session("class-archive", "local[2]", {JAVA_OPTIONS: java_options, "spark.log.level": "ERROR"})
    jvm = started_jvm(spark)
    query = Pipeline(
        name="class-archive",
        guarantee="exactly_once",
        checkpoint=str(folder / "checkpoint"),
        source=log(str(folder / "log")),
        transform="SELECT CAST(key AS STRING) AS key, CAST(value AS STRING) AS value FROM source",
        sinks=[sqlite(str(folder / "sink.db"), table="rows")],
        trigger="available_now",
    ).start(spark)
    query.awaitTermination()
    spark.range(10).selectExpr("id % 3 AS k").groupBy("k").count().collect()
    spark.stop()
    # The JVM writes the archive at exit, and it exits once its standard input is closed.
    if jvm.stdin is not None:
        jvm.stdin.close()
    jvm.wait(_EXIT_TIMEOUT_S)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{make()}\n")
    except DeliveredError as error:
        sys.exit(str(error))

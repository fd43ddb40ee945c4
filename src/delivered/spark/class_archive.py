"""Spark's classes as the JVM keeps them for a quick start: loaded, verified, in one file that is mapped into memory.

Most of a session's start is loading 20,000 classes out of 250 JARs. Java's class data sharing writes them to an archive
once (about 25 s and 160 MB); each start after that takes about 3 s less. The JVM compares the archive with its own
version and the JARs and goes on without it where they differ, so a stale one costs nothing and breaks nothing.

    python -m delivered.spark.class_archive       makes it; done by `make setup`

Source: "Class Data Sharing" in Oracle's guide to the HotSpot virtual machine, and JEP 350.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from delivered.brokers.fetch import cache_folder
from delivered.brokers.java import java_home
from delivered.model.errors import DeliveredError

_OPTIONS = "spark.driver.extraJavaOptions"
_EXIT_TIMEOUT_S = 120.0


def archive() -> Path:
    """Where the archive for this Java and this pyspark lies, or would lie."""
    import pyspark

    told = f"{java_home().resolve()} {Path(pyspark.__file__).parent} {pyspark.__version__}"
    name = hashlib.sha256(told.encode()).hexdigest()[:12]
    return cache_folder() / "classes" / f"spark-{pyspark.__version__}-{name}.jsa"


def with_archive(conf: Mapping[str, str]) -> dict[str, str]:
    """The configuration with the archive in it, if it was made and the caller names none."""
    options = conf.get(_OPTIONS, "")
    try:
        file = archive()
    except DeliveredError:
        return dict(conf)
    if "Archive" in options or not file.is_file():
        return dict(conf)
    return {**conf, _OPTIONS: f'{options} "-XX:SharedArchiveFile={file}" -Xlog:cds=off'.strip()}


def make() -> Path:
    """Run a small stream to its end and keep the classes that it loaded.

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
            raise DeliveredError(
                "NO_CLASS_ARCHIVE",
                f"The Java in {java_home()} wrote no archive of classes: sessions start some seconds later.",
                next_step="nothing has to be done; another Java 17 or later may write one",
            )
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)
    return file


def _stream(folder: Path, java_options: str) -> None:
    import pyarrow as pa

    import delivered
    from delivered.connectors.log import append
    from delivered.spark.session import session

    rows = pa.table({"key": pa.array([b"1", b"2"], pa.binary()), "value": pa.array([b"{}", b"{}"], pa.binary())})
    append(str(folder / "log"), rows, partition_by=2)
    spark = session("class-archive", "local[2]", {_OPTIONS: java_options, "spark.log.level": "ERROR"})
    jvm: subprocess.Popen[bytes] = cast(Any, spark.sparkContext)._gateway.proc
    query = delivered.Pipeline(
        name="class-archive",
        guarantee="exactly_once",
        checkpoint=str(folder / "checkpoint"),
        source=delivered.log(str(folder / "log")),
        transform="SELECT CAST(key AS STRING) AS key, CAST(value AS STRING) AS value FROM source",
        sinks=[delivered.sqlite(str(folder / "sink.db"), table="rows")],
        trigger="available_now",
    ).start(spark)
    query.awaitTermination()
    spark.range(10).selectExpr("id % 3 AS k").groupBy("k").count().collect()
    spark.stop()
    # The archive is written when the JVM ends, and it ends when nobody holds its standard input.
    if jvm.stdin is not None:
        jvm.stdin.close()
    jvm.wait(_EXIT_TIMEOUT_S)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{make()}\n")
    except DeliveredError as error:
        sys.exit(str(error))

"""What makes a session on this machine start sooner: Java's archive of Spark's classes, and a launcher for the workers.

Most of a session's start is loading 20,000 classes out of 250 JARs. Java's class data sharing writes them to an archive
once (class_archive.py: about 25 s and 160 MB); each start after that takes about 3 s less. The JVM compares the archive
with its own version and the JARs and goes on without it where they differ, so a stale one costs nothing and breaks
nothing. Source: "Class Data Sharing" in Oracle's guide to the HotSpot virtual machine, and JEP 350.

Spark puts `pyspark.zip` before everything else on the path of its workers. Python keeps no bytecode for a zip, so every
process compiles pyspark anew: 0.4 to 0.9 s each, and a query starts a dozen of them one after the other. The installed
package is the same code with its bytecode beside it. The order of the path is Spark's own and no setting changes it, so
the workers get a launcher that takes the zip out and becomes the real interpreter.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark

from delivered.brokers.fetch import cache_folder
from delivered.brokers.java import java_home, write_launcher
from delivered.model.errors import DeliveredError

JAVA_OPTIONS = "spark.driver.extraJavaOptions"

_SCRIPT = """#!/bin/sh
set -f
IFS=:
kept=
for entry in $PYTHONPATH; do
  case "$entry" in
    */pyspark/python/lib/*.zip | */pyspark/jars/*.jar) ;;
    *) kept="${{kept:+$kept:}}$entry" ;;
  esac
done
export PYTHONPATH="$kept"
exec "{python}" "$@"
"""


def archive() -> Path:
    """Where the archive for this Java and this pyspark lies, or would lie."""
    told = f"{java_home().resolve()} {Path(pyspark.__file__).parent} {pyspark.__version__}"
    name = hashlib.sha256(told.encode()).hexdigest()[:12]
    return cache_folder() / "classes" / f"spark-{pyspark.__version__}-{name}.jsa"


def with_archive(conf: Mapping[str, str]) -> dict[str, str]:
    """The configuration with the archive in it, if it was made and the caller names none."""
    options = conf.get(JAVA_OPTIONS, "")
    try:
        file = archive()
    except DeliveredError:
        return dict(conf)
    if "Archive" in options or not file.is_file():
        return dict(conf)
    return {**conf, JAVA_OPTIONS: f'{options} "-XX:SharedArchiveFile={file}" -Xlog:cds=off'.strip()}


def worker_python() -> str:
    """A launcher of this interpreter, made in the cache folder; the interpreter itself where that cannot be.

    Fit for workers on this machine alone. With a Spark that is not the installed package (SPARK_HOME is set) the zip
    is what must be read, and the interpreter itself is returned.
    """
    if os.environ.get("SPARK_HOME") or os.name != "posix":
        return sys.executable
    name = re.sub(r"\W+", "-", sys.executable).strip("-")[-80:]
    try:
        launcher: Path = cache_folder() / "python" / name / "python"
        write_launcher(launcher, _SCRIPT.format(python=sys.executable))
    except (OSError, DeliveredError):
        return sys.executable
    return str(launcher)

"""The Python that Spark's workers run on this machine: this one, reading pyspark from where it is installed.

Spark puts `pyspark.zip` before everything else on the path of its workers. Python keeps no bytecode for a zip, so every
process compiles pyspark anew: 0.4 to 0.9 s each, and a query starts a dozen of them one after the other. The installed
package is the same code with its bytecode beside it. The order of the path is Spark's own and no setting changes it, so
the workers get a launcher that takes the zip out and becomes the real interpreter.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from delivered.brokers.fetch import cache_folder
from delivered.brokers.java import write_launcher
from delivered.model.errors import DeliveredError

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

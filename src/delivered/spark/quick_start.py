"""Faster sessions on this machine: an archive of Spark's classes; the workers' launcher, daemon and local sockets.

Most of a session's start is spent loading 20,000 classes from 250 JARs. Java's class data sharing archives them once
(class_archive.py: about 25 s and 160 MB), which saves about 3 s per start. The JVM ignores an archive that does not
match its version and JARs, so a stale one is harmless. See "Class Data Sharing" in Oracle's HotSpot guide, and JEP 350.

Spark puts `pyspark.zip` first on the path of its workers. Python caches no bytecode for a zip, so every process
recompiles pyspark: 0.4 to 0.9 s each, and a query starts a dozen of them in sequence. The installed package is the same
code with cached bytecode. No setting changes Spark's path order, so the workers get a launcher that removes the zip and
execs the real interpreter.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pyspark

from delivered.machine import cache_folder, java_home, write_launcher
from delivered.model.errors import DeliveredError
from delivered.spark.template import LAUNCHER, SOCKET

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOCAL_SOCKETS = "spark.python.unix.domain.socket.enabled"
_SOCKET_FOLDER = "spark.python.unix.domain.socket.dir"
_DAEMON = "spark.python.daemon.module"
_OUR_DAEMON = "delivered.spark.daemon"
OVER_TCP = (
    f"Spark talks to its Python workers over TCP: each Python task waits about 40 ms. Set {_LOCAL_SOCKETS}=true before "
    "the session starts."
)
"""Measured in decision 043: 200 tasks take 4.3 s instead of 6.7 s."""
OWN_IMPORTS = (
    "Each Python worker imports pyspark, pyarrow and numpy itself, about 0.5 s of CPU, and its first task ends with a "
    f"collection over all of them. Set {_DAEMON}={_OUR_DAEMON} before the session starts, if the executors' Python has "
    "this package when they start."
)
"""Measured in decision 064."""

_TEMPORARY_LENGTH_MAX = 40
"""A socket's path is limited to about 104 bytes, of which our folder's name takes 19 and Spark's 43."""

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
if [ "$1" = -m ] && [ -S "${{{socket}:-}}" ]; then
  exec "{python}" -I -S "{launch}" "{python}" "$@"
fi
exec "{python}" "$@"
"""


def archive() -> Path:
    """Path of the archive for this Java and this pyspark, whether it exists or not."""
    versions = f"{java_home().resolve()} {Path(pyspark.__file__).parent} {pyspark.__version__}"
    name = hashlib.sha256(versions.encode()).hexdigest()[:12]
    return cache_folder() / "classes" / f"spark-{pyspark.__version__}-{name}.jsa"


def with_archive(conf: Mapping[str, str]) -> dict[str, str]:
    """The configuration plus the archive, if it exists and the caller sets none."""
    options = conf.get(JAVA_OPTIONS, "")
    try:
        file = archive()
    except DeliveredError:
        return dict(conf)
    if "Archive" in options or not file.is_file():
        return dict(conf)
    return {**conf, JAVA_OPTIONS: f'{options} "-XX:SharedArchiveFile={file}" -Xlog:cds=off'.strip()}


def worker_python() -> str:
    """A launcher of this interpreter, created in the cache folder; the interpreter itself if that is not possible.

    Only for workers on this machine. If SPARK_HOME names another Spark than the installed package, its zip must be
    used, and the interpreter itself is returned.
    """
    if os.environ.get("SPARK_HOME") or os.name != "posix":
        return sys.executable
    name = re.sub(r"\W+", "-", sys.executable).strip("-")[-80:]
    try:
        launcher: Path = cache_folder() / "python" / name / "python"
        write_launcher(launcher, _SCRIPT.format(python=sys.executable, socket=SOCKET, launch=LAUNCHER))
    except (OSError, DeliveredError):
        return sys.executable
    return str(launcher)


@cache
def local_sockets() -> dict[str, str]:
    """Local sockets between JVM and workers on this machine: over TCP every Python task waits about 40 ms for a delayed
    acknowledgement. They go to a folder of this process, because Spark does not delete them."""
    if os.name != "posix" or len(tempfile.gettempdir()) > _TEMPORARY_LENGTH_MAX:
        return {}
    folder = tempfile.mkdtemp(prefix="delivered-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {_LOCAL_SOCKETS: "true", _SOCKET_FOLDER: folder}


_template: subprocess.Popen[bytes] | None = None


def start_template(python: str) -> None:
    """Start the process that planning and committing processes are forked from (template.py), for sessions of this
    process. Call before the JVM starts, which passes the environment on. It ends with this process.

    Args:
        python: of the workers; nothing is started if it is not our launcher.
    """
    global _template
    folder = local_sockets().get(_SOCKET_FOLDER)
    if folder is None or python != worker_python() or python == sys.executable:
        return
    if _template is not None and _template.poll() is None:
        return
    path = Path(folder) / "template"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", "delivered.spark.template", str(path)]
    # As PySpark sets it for its workers; and a fork copies no threads.
    fixed = {"PYTHONHASHSEED": "0", **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    _template = subprocess.Popen(command, stdin=subprocess.PIPE, env=fixed)
    os.environ[SOCKET] = str(path)


def forked_workers(python: str) -> dict[str, str]:
    """Workers on this machine, forked from a process that has imported what tasks need.

    Args:
        python: of the workers. Another one than this may lack the package, which tasks of other formats do not need.
    """
    return {_DAEMON: _OUR_DAEMON} if os.name == "posix" and python in (sys.executable, worker_python()) else {}


def advice(setting: Callable[[str], str | None]) -> dict[str, str]:
    """The settings that a session lacks for cheap Python tasks, by code, and what each is worth.

    Args:
        setting: the session's value of a key, None if unset.
    """
    found = {}
    if os.name == "posix" and str(setting(_LOCAL_SOCKETS)).lower() != "true":
        found["WORKERS_OVER_TCP"] = OVER_TCP
    if os.name == "posix" and not setting(_DAEMON):
        found["WORKERS_IMPORT"] = OWN_IMPORTS
    return found

"""Python processes forked from one that has imported what they need (decision 087): for sessions on this machine, the
launcher of Spark's Python processes, and the start of the server that forks them.

Spark puts `pyspark.zip` first on the path of its workers. Python caches no bytecode for a zip, so every process
recompiles pyspark: 0.4 to 0.9 s each, and a query starts a dozen of them in sequence. The installed package is the same
code with cached bytecode. No setting changes Spark's path order, so the workers get a launcher that removes the zip and
execs the real interpreter, or asks the server.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from delivered.model.errors import DeliveredError

SOCKET = "DELIVERED_TEMPLATE"
"""Environment variable of a launcher: where the server listens."""
_TEMPORARY_LENGTH_MAX = 40
"""A socket's path is limited to about 104 bytes, of which our folder's name takes 19 and Spark's 43."""
LAUNCHER = Path(__file__).with_name("launch.py")


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


def worker_python() -> str:
    """A launcher of this interpreter, created in the cache folder; the interpreter itself if that is not possible.

    Only for workers on this machine. If SPARK_HOME names another Spark than the installed package, its zip must be
    used, and the interpreter itself is returned.
    """
    if os.environ.get("SPARK_HOME") or os.name != "posix":
        return sys.executable
    from delivered.machine import cache_folder, write_launcher  # not in the server

    name = re.sub(r"\W+", "-", sys.executable).strip("-")[-80:]
    try:
        launcher: Path = cache_folder() / "python" / name / "python"
        write_launcher(launcher, _SCRIPT.format(python=sys.executable, socket=SOCKET, launch=LAUNCHER))
    except (OSError, DeliveredError):
        return sys.executable
    return str(launcher)


@cache
def socket_folder() -> str | None:
    """A folder of this process for sockets, which Spark does not delete; None: this machine has no place for one."""
    if os.name != "posix" or len(tempfile.gettempdir()) > _TEMPORARY_LENGTH_MAX:
        return None
    folder = tempfile.mkdtemp(prefix="delivered-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_server: subprocess.Popen[bytes] | None = None


def start_server(folder: str, task_module: str, modules: Sequence[str]) -> None:
    """Start the server (server.py), for sessions of this process. Call before the JVM starts, which passes the
    environment on. It ends with this process.

    Args:
        folder: for its socket.
        task_module, modules: see server.py.
    """
    global _server
    if _server is not None and _server.poll() is None:
        return
    path = Path(folder) / "server"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", "delivered.prefork.server", str(path), task_module, *modules]
    # As PySpark sets it for its workers; and a fork copies no threads.
    fixed = {"PYTHONHASHSEED": "0", **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    _server = subprocess.Popen(command, stdin=subprocess.PIPE, env=fixed)
    os.environ[SOCKET] = str(path)

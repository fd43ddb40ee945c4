"""Python processes of Spark on this machine: their launcher, and the server that forks them, which has imported what
they need (decision 087).

Spark puts `pyspark.zip` first on the path of its workers. Python caches no bytecode for a zip, so every process
recompiles pyspark: 0.4 to 0.9 s each, and a query starts a dozen of them in sequence. The installed package is the same
code with cached bytecode. No setting changes Spark's path order, so the workers get a launcher that removes the zip and
execs the real interpreter.

Even so each imports pyspark, pyarrow and this package: half a second of CPU. In a local session that this package
makes, the launcher (`launch.py`) asks a server for a process instead: it sends its arguments, environment and standard
streams over a local socket, and stays until the forked process ends, with its exit code. So the JVM sees a process like
any other. If anything fails before the fork, the launcher starts an ordinary interpreter.

The command line of a forked process is the server's; its name, as `ps -o comm` and `top` show it, is that of its work:
"tasks" if its last argument is TASK_MODULE or, as in Spark 3.5, a daemon's module, else "plan". Workers of tasks have
the name of their daemon.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import marshal
import os
import re
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from delivered.model.errors import DeliveredError

SOCKET = "DELIVERED_TEMPLATE"
"""Environment variable of a launcher: where the server listens."""
_TEMPORARY_LENGTH_MAX = 40
"""A socket's path is limited to about 104 bytes, of which our folder's name takes 19 and Spark's 43."""
LAUNCHER = Path(__file__).with_name("launch.py")
SERVE = f"from {__name__} import serve; serve()"

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
    from delivered.machine import cache_folder, write_launcher  # not in a forked process

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
    """Start the server, for sessions of this process. Call before the JVM starts, which passes the
    environment on. It ends with this process.

    Args:
        folder: for its socket.
        task_module: names the processes that run tasks.
        modules: to import.
    """
    global _server
    if _server is not None and _server.poll() is None:
        return
    path = Path(folder) / "server"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-u", "-c", SERVE, str(path), task_module, *modules]
    # As PySpark sets it for its workers; and a fork copies no threads.
    fixed = {"PYTHONHASHSEED": "0", **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    _server = subprocess.Popen(command, stdin=subprocess.PIPE, env=fixed)
    os.environ[SOCKET] = str(path)


# The server.

TASKS = "tasks"
"""Name of the processes that run tasks."""
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!i")
_STREAMS = 3
_PR_SET_NAME = 15
_AT_START = ("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONUTF8", "PYTHONMALLOC")
"""What an interpreter reads only when it starts."""


@dataclass
class _Request:
    """A launcher's request, as far as it has arrived."""

    streams: list[int] = field(default_factory=list)
    data: bytes = b""

    @property
    def missing(self) -> int:
        """Bytes that are still to come; at least those of the length."""
        if len(self.data) < LENGTH.size:
            return LENGTH.size - len(self.data)
        return LENGTH.size + int.from_bytes(self.data[: LENGTH.size], "big") - len(self.data)


def serve() -> None:
    """Listen, import, and fork until standard input is closed. Arguments: SOCKET TASK_MODULE MODULE..."""
    path, task_module, *modules = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)  # whoever asks meanwhile waits: an interpreter of its own would take as long
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()
    Server(listener, task_module).run()


class Server:
    """One thread: a fork copies no other."""

    def __init__(self, listener: socket.socket, task_module: str) -> None:
        self._listener = listener
        self._task_module = task_module
        self._requests: dict[socket.socket, _Request] = {}
        self._children: dict[int, socket.socket | None] = {}
        self._selector = selectors.DefaultSelector()
        self._ended, wake = socket.socketpair()
        for end in (self._ended, wake):
            end.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: queries then finish their batch
        for waited in (listener, self._ended, sys.stdin):
            self._selector.register(waited, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                match key.fileobj:
                    case self._listener:
                        launcher, _ = self._listener.accept()
                        self._requests[launcher] = _Request()
                        self._selector.register(launcher, selectors.EVENT_READ)
                    case self._ended:
                        with contextlib.suppress(BlockingIOError):
                            self._ended.recv(4096)
                        self._reap()
                    case socket.socket() as launcher:
                        self._hear(launcher)
                    case _:
                        if not os.read(sys.stdin.fileno(), 4096):
                            return

    def _hear(self, launcher: socket.socket) -> None:
        if launcher.fileno() < 0:
            return  # its child ended too, and was reaped earlier in this round
        request = self._requests.get(launcher)
        if request is None:  # its child runs: the launcher was killed, perhaps before it read the child's id
            with contextlib.suppress(ConnectionError):
                launcher.recv(1)
            self._kill_child_of(launcher)
            return
        try:
            data, streams, _, _ = socket.recv_fds(launcher, request.missing, _STREAMS)
        except ConnectionError:
            data, streams = b"", []
        request.data += data
        request.streams += streams
        if not data:
            self._forget(launcher, request)
        elif not request.missing:
            if len(request.streams) == _STREAMS:
                self._fork(launcher, request)
            else:
                self._forget(launcher, request)

    def _forget(self, launcher: socket.socket, request: _Request) -> None:
        del self._requests[launcher]
        for stream in request.streams:
            os.close(stream)
        self._selector.unregister(launcher)
        launcher.close()

    def _fork(self, launcher: socket.socket, request: _Request) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(request)
        del self._requests[launcher]
        for stream in request.streams:
            os.close(stream)
        self._children[pid] = launcher
        with contextlib.suppress(OSError):
            launcher.sendall(STATUS.pack(pid))

    def _become(self, request: _Request) -> NoReturn:
        """In the child: run what the launcher was asked to run, then end."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._selector.close()
            launchers = [one for one in self._children.values() if one is not None]
            for end in (self._listener, self._ended, self._wake, *self._requests, *launchers):
                end.close()
            for number, stream in enumerate(request.streams):
                os.dup2(stream, number)
                os.close(stream)
            status = self._run(*marshal.loads(request.data[LENGTH.size :]))  # noqa: S302 - from our launcher, over our socket
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            launcher = self._children.pop(pid, None)
            if launcher is not None:
                with contextlib.suppress(OSError):
                    launcher.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
                self._selector.unregister(launcher)
                launcher.close()

    def _kill_child_of(self, launcher: socket.socket) -> None:
        """The JVM kills a worker by killing its process, which is the launcher."""
        for pid in [p for p, of in self._children.items() if of is launcher]:
            self._children[pid] = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._selector.unregister(launcher)
        launcher.close()

    def _run(self, arguments: list[str], environment: dict[str, str], folder: str) -> int:
        """As `python -m MODULE ARGUMENTS...` would in that environment; returns the exit code."""
        if any(environment[name] != os.environ.get(name) for name in _AT_START if name in environment):
            os.execve(sys.executable, [sys.executable, *arguments], environment)  # noqa: S606
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for entry in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
            if entry and entry not in sys.path:
                sys.path.insert(0, entry)
        module = arguments[1]
        _name_process(TASKS if arguments[-1] == self._task_module or arguments[-1].endswith(".daemon") else "plan")
        sys.argv = [module, *arguments[2:]]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        return 0


def _name_process(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)

"""A driver that is started before it is needed: it has a JVM and a session, and waits for the command of a run.

    python -m delivered_lab.verify.driver SPARK_LOG < REQUESTS      answers on standard output

A request is a line of JSON: `arguments` of `delivered`, variables of its `environment`, and the files for its `output`
and `errors`. The command runs as `python -m delivered.cli.main` would: the session that it asks for is the one that is
there, with the variables of the request in every Python process that works for it. An answer is a line of JSON: `code`,
once the command has ended, and `ready`, when the next one may come. All that a run leaves is ended with it, except the
JVM and the server that forks Python processes; the next run has a session of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import sys
import traceback
from contextlib import suppress
from typing import IO, Any

import psutil

import delivered
from delivered_lab.supervisor import wait_dead
from delivered_lab.verify.workloads import MASTER

_IMPORTED = (
    "delivered.cli.run",
    "delivered.entry",
    "delivered.pipeline.facts",
    "delivered.pipeline.progress",
    "delivered.checkpoint.history",
    "delivered.spark.start",
)
"""What `delivered run` imports once it runs."""
_CLI = "delivered.cli.main"
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Answer requests until standard input is closed."""
    requests, answers = _own_streams(sys.argv[1])
    if sys.platform == "linux":
        # What loses its parent becomes a child of this process, which ends it with its run.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in _IMPORTED:
        importlib.import_module(name)
    kept: set[int] = set()
    while True:
        spark = delivered.session("verify", MASTER)
        kept = kept or {p.pid for p in psutil.Process().children(recursive=True)}
        _answer(answers, ready=True)
        line = requests.readline()
        if not line:
            return
        request = json.loads(line)
        spark.sparkContext.environment.update(request["environment"])
        code = run(request["arguments"], request["environment"], request["output"], request["errors"])
        with suppress(Exception):  # the command has stopped it, unless it ended before it asked for a session
            spark.stop()
        _end_what_is_left(kept)
        _answer(answers, code=code)


def run(arguments: list[str], environment: dict[str, str], output: str, errors: str) -> int:
    """Run a command of `delivered` with these variables, and its output in these files; returns its exit code."""
    before, path, streams = dict(os.environ), [*sys.path], [os.dup(n) for n in (1, 2)]
    os.environ.update(environment)
    sys.argv = [_CLI, *arguments]
    _write_to(output, errors)
    try:
        runpy.run_module(_CLI, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        _flush()
        for n, stream in enumerate(streams, 1):
            os.dup2(stream, n)
            os.close(stream)
        os.environ.clear()
        os.environ.update(before)
        sys.path[:] = path


def _own_streams(log: str) -> tuple[IO[str], IO[str]]:
    """Requests and answers, away from the standard streams, which children inherit."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _write_to(log, log)
    return requests, answers


def _write_to(output: str, errors: str) -> None:
    """Append standard output and standard error to files."""
    _flush()
    for n, name in enumerate((output, errors), 1):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, n)
        os.close(file)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _end_what_is_left(kept: set[int]) -> None:
    """As the end of the process would: workers, and whatever else a run started."""
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in kept]
    for p in left:
        with suppress(psutil.NoSuchProcess):
            p.kill()
    wait_dead(left)
    for p in left:
        with suppress(ChildProcessError):  # an orphan that became a child
            os.waitpid(p.pid, os.WNOHANG)


def _answer(answers: IO[str], **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()

"""Run a command, kill its complete process tree at each crash point that is hit, and restart it until it ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from delivered import DeliveredError
from delivered.crash import CRASH, CRASH_DIR, HIT_SUFFIX, RELEASED_SUFFIX, CrashAction, parse

_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_LASTING = ThreadPoolExecutor(1, "delivered-starter")
"""For Linux, the thread that starts a process is its parent: this one lives as long as ours."""


def start_with_us(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A program in a session of its own that ends with this process, even if this one is killed (Linux).

    Args:
        options: of `subprocess.Popen`.
    """

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_us, **options)

    return _LASTING.submit(start).result()


def _end_with_us() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Hit:
    """A crash point that was reached.

    Attributes:
        point: as written in `DELIVERED_CRASH`.
        pid: of the process that reached it.
        facts: of the point: batch, shard, attempt, rows.
        at_ms: Unix time.
    """

    point: str
    pid: int
    facts: Mapping[str, Any]
    at_ms: int

    @classmethod
    def read(cls, path: Path) -> Hit:
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["point"], data["pid"], data["facts"], data["at_ms"])


def hits(folder: Path) -> list[tuple[Path, Hit]]:
    """All hits in a folder, oldest first."""
    found = [(path, Hit.read(path)) for path in folder.glob(f"*{HIT_SUFFIX}")]
    return sorted(found, key=lambda item: (item[1].at_ms, item[0].name))


def release(hit: Path) -> None:
    """Release the process that waits at a point with `!wait`."""
    hit.with_suffix(RELEASED_SUFFIX).touch()


@dataclass(frozen=True)
class Kill:
    """
    Attributes:
        hit: why the tree was killed.
        processes: how many processes were killed.
    """

    hit: Hit
    processes: int


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        kills: in order. Points with `!kill` and `!raise` are not included: they need no supervisor.
        exit_code: of the last run.
        runs: how often the command was started.
    """

    kills: tuple[Kill, ...]
    exit_code: int
    runs: int


def run(
    command: Sequence[str],
    crash: str,
    folder: Path,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> Outcome:
    """Run `command` until it ends by itself.

    Args:
        crash: as in `DELIVERED_CRASH`.
        folder: where hits are stored; created if missing. Points already hit there are not hit again.
        timeout_s: for all runs together.
        env: added to this process's environment.
        output: receives the command's output; None: this process's output.

    Raises:
        UsageError: `crash` is malformed.
        DeliveredError: the command did not end in time. Its process tree was killed.
    """
    halting = {str(p) for p in parse(crash) if p.action is CrashAction.HALT}
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **(env or {}), CRASH: crash, CRASH_DIR: str(folder)}
    deadline = time.monotonic() + timeout_s
    seen = {path for path, _ in hits(folder)}
    kills: list[Kill] = []
    runs = 0
    while True:
        runs += 1
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            hit = _wait(process, folder, seen, halting, deadline)
        except BaseException:
            kill_tree(process)
            process.wait()
            raise
        if hit is None:
            return Outcome(tuple(kills), process.wait(), runs)
        killed = kill_tree(process)
        process.wait()
        kills.append(Kill(hit, killed))


def _wait(
    process: subprocess.Popen[bytes], folder: Path, seen: set[Path], halting: set[str], deadline: float
) -> Hit | None:
    """Wait for a new hit that halts; None: the command ended."""
    while True:
        ended = process.poll() is not None
        for path, hit in hits(folder):
            if path not in seen:
                seen.add(path)
                if hit.point in halting:
                    return hit
        if ended:
            return None
        if time.monotonic() > deadline:
            raise DeliveredError("SUPERVISOR_TIMEOUT", command=process.args)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)


class HasPid(Protocol):
    @property
    def pid(self) -> int | None: ...


def kill_tree(process: HasPid) -> int:
    """SIGKILL a process and all its descendants, whatever group or session they moved to; return how many.

    The tree is stopped from the top before it is killed, so that nothing can start a child, and no parent can react to
    the death of a child. Of a process that was waited for, only those are left that have its session: the system keeps
    its number for them, and may otherwise have given it to another process.

    Args:
        process: as subprocess, psutil or multiprocessing have it.
    """
    pid = int(process.pid or 0)
    ended = getattr(process, "returncode", getattr(process, "exitcode", None)) is not None
    if isinstance(process, psutil.Process):
        ended = ended or not process.is_running()
    if ended and psutil.pid_exists(pid):
        return 0
    stopped: dict[int, psutil.Process] = {}
    while True:
        try:
            root = psutil.Process(pid)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        # Workers of a daemon that has ended still have the command's session.
        found += [p for p in psutil.process_iter() if _session(p) == pid]
        new = [p for p in found if p.pid not in stopped]
        if not new:
            break
        for p in new:
            stopped[p.pid] = p
            with contextlib.suppress(psutil.NoSuchProcess):
                p.send_signal(signal.SIGSTOP)
    for p in stopped.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            p.kill()
    wait_dead(list(stopped.values()))
    return len(stopped)


def wait_dead(processes: Sequence[psutil.Process], timeout_s: float = 10.0) -> None:
    """Wait until killed processes have let go of all they had, whether or not their parents know of it: some parents
    of orphans ask for their children only every few seconds."""
    deadline = time.monotonic() + timeout_s
    while not all(map(_is_dead, processes)) and time.monotonic() < deadline:
        time.sleep(_POLL_S / 4)


def _is_dead(process: psutil.Process) -> bool:
    try:
        # Files are closed with the last thread, which may outlive the first one.
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None

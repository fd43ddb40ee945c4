"""Processes started by this package, identified by id and start time, so that no other process is touched."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

PORTS_LOW, PORTS_HIGH = 20_000, 32_000
"""Below Linux's ephemeral ports: while a server is down, no outgoing connection can take its port."""

STOP_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1

_LASTING = ThreadPoolExecutor(1, "delivered-servers")
"""One starter thread for all: a server would end with the thread that started it."""


@dataclass(frozen=True)
class Identity:
    """Identity of a process: ids are reused, an id with its start time is not.

    Attributes:
        started: seconds since 1970, from the system.
    """

    pid: int
    started: float

    def find(self) -> psutil.Process | None:
        """The process, if it is still running."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > 1.0 or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process


def launch(command: Sequence[str], log: Path, environment: dict[str, str], dies_with_parent: bool) -> Identity:
    """Start a program in a session of its own, with its output appended to `log`."""
    if dies_with_parent:
        # For Linux the starting thread is the parent: this one lives as long as the process.
        return _LASTING.submit(_launch, command, log, environment, True).result()
    return _launch(command, log, environment, False)


def _launch(command: Sequence[str], log: Path, environment: dict[str, str], dies_with_parent: bool) -> Identity:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_die_with_parent if dies_with_parent else None,
        )
    return Identity(process.pid, psutil.Process(process.pid).create_time())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(identity: Identity, kill: bool = False, ask: signal.Signals = signal.SIGTERM) -> bool:
    """Terminate a process, and kill it if it does not end or if `kill`. Returns whether it was running.

    `kill` includes its child processes, as in a crash of the machine.
    """
    process = identity.find()
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            below = process.children(recursive=True) if kill else []
            process.send_signal(signal.SIGKILL if kill else ask)
            for child in below:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            try:
                process.wait(STOP_TIMEOUT_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
            psutil.wait_procs(below, STOP_TIMEOUT_S)
    with suppress(ChildProcessError):  # if it is our child, it is a zombie until it is waited for
        os.waitpid(identity.pid, os.WNOHANG)
    return process is not None


def telling_lines(output: str) -> str:
    """The end of a program's output on one line, without Java stack frames."""
    lines = [x.strip() for x in output.splitlines() if x.strip() and not x.startswith(("\tat ", "\t..."))]
    return " | ".join(lines[-6:])[-900:] or "nothing"


def free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(PORTS_LOW, PORTS_HIGH)  # noqa: S311
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if port not in found:
                    found.append(port)
    return found


@dataclass(frozen=True)
class State:
    """A server's state in its data folder.

    Attributes:
        listeners: security protocol -> "127.0.0.1:port".
        identity: the last process, running or not; None: never started.
    """

    kind: str
    listeners: dict[str, str]
    settings: dict[str, Any]
    identity: Identity | None = None

    def save(self, folder: Path) -> None:
        fresh = folder / f".state.{os.getpid()}"
        fresh.touch(mode=0o600)  # settings may contain secrets
        fresh.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        fresh.replace(folder / "state.json")

    @classmethod
    def load(cls, folder: Path) -> State | None:
        """None: no server was ever started in this folder."""
        try:
            data = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        identity = Identity(**data["identity"]) if data["identity"] else None
        return cls(data["kind"], data["listeners"], data["settings"], identity)

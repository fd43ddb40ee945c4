"""What cases of both ends share: a folder, a history, processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivered_lab.verify.case import Environment
from delivered_lab.verify.evidence import End as Ended
from delivered_lab.verify.evidence import History, Stop
from delivered_lab.verify.services import DRIVER, Run, start

PROCESS_TIMEOUT_S = 120.0


class Process:
    """A program of this package in a process of its own.

    Args:
        module: run with `spec` as JSON.
    """

    def __init__(
        self, what: str, number: int, module: str, spec: Mapping[str, Any], folder: Path, env: Mapping[str, str]
    ) -> None:
        self.name = f"{what} {number}"
        self.output = folder / f"{what}{number}.log"
        with self.output.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(spec)],
                env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait(self) -> int:
        """Its exit code, negative for a signal. Raises TimeoutError, after a SIGKILL."""
        try:
            return self.popen.wait(PROCESS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"{self.output.name} did not end within {PROCESS_TIMEOUT_S:.0f} s") from None

    def wait_stopped(self) -> None:
        """Wait until it has stopped itself. Raises RuntimeError if it ended instead."""
        _, status = os.waitpid(self.popen.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.popen.returncode = os.waitstatus_to_exitcode(status)
            raise RuntimeError(f"{self.output.name} ended with {self.popen.returncode}: {self.words}")

    def go_on(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    @property
    def words(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")[-800:]


@dataclass
class End:
    """A case under way.

    Attributes:
        name: in the alphabet of every database and broker.
        variant: what is broken on purpose; empty: nothing.
        expected, found: effects, filled at the end.
    """

    system: str
    name: str
    folder: Path
    environment: Environment
    history: History
    stops: list[Stop] = field(default_factory=list)
    stays_down: bool = False
    expected: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    _started: list[Process | Run] = field(default_factory=list)

    @property
    def variant(self) -> str:
        return self.environment.variant

    def fire(self, name: str, **facts: Any) -> None:
        self.history.add("fault", name, Ended.OK, facts)

    def start(self, what: str, module: str, spec: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Process:
        number = len(self._started) + 1
        env = {**self.environment.env, **(env or {})}
        process = Process(what, number, module, spec, self.folder, env)
        self._started.append(process)
        self.history.add(process.name, "run", Ended.STARTED, {"point": spec.get("point", "")})
        return process

    def pipeline(self, file: Path, crash: str = "") -> Run:
        """Start a pipeline file without Spark."""
        command = [sys.executable, "-m", "delivered_lab.verify.loop", str(file)]
        run = start(DRIVER, len(self._started) + 1, self.folder, command, crash, self.environment.env)
        self._started.append(run)
        self.history.add(run.name, "run", Ended.STARTED, {"crash": crash})
        return run

    def run_out(self, run: Run) -> str | None:
        """Wait for a pipeline to end by itself; its error code, None if it succeeded."""
        run.wait_end(PROCESS_TIMEOUT_S)
        how = Ended.OK if run.code is None else Ended.FAILED
        self.history.add(run.name, "run", how, {"code": run.code})
        return run.code

    def close(self) -> None:
        """Kill what still runs, or is stopped."""
        for process in self._started:
            if process.lives:
                process.kill()

    def ended(self, process: Process) -> int:
        """Wait for it; its exit code."""
        code = process.wait()
        how = Ended.OK if code == 0 else Ended.UNKNOWN if code == -signal.SIGKILL else Ended.FAILED
        self.history.add(process.name, "run", how, {"code": code})
        return code


Script = Callable[[Any], None]


@dataclass(frozen=True)
class Trial:
    """A fault of one end.

    Attributes:
        place, text, requires: as of `verify.fault.Fault`.
        script: breaks a world, and runs it to its end.
    """

    name: str
    place: str
    text: str
    script: Script
    requires: tuple[str, ...] = ()


def digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def must_end(code: int, process: Process, *, wanted: Sequence[int] = (0,)) -> None:
    """Raises RuntimeError: the verifier cannot go on."""
    if code not in wanted:
        raise RuntimeError(f"{process.output.name} ended with {code}: {process.words}")

"""Drivers that are started ahead of the runs that they take: most of a start through Spark is its interpreter, its JVM
and its session, which say nothing about delivery.

A killed driver takes no further run. One whose run ended by itself may take another, with a session of its own
(`verify.driver`). A ledger takes a driver for alive as long as its JVM lives: before a run starts, every other idle
driver that ran the same case ends.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from delivered_lab.supervisor import kill_tree, start_with_us
from delivered_lab.verify.services import variables

COMMAND = (sys.executable, "-m", "delivered_lab.verify.driver")
RUNS_MAX = 40
"""Of one driver: a JVM that compiles query after query grows."""
IDLE_MAX = 2
"""Two drivers meet in some cases."""
_READY_TIMEOUT_S = 120.0
_POLL_S = 0.02


class Driver:
    """A process that runs commands of `delivered`, one at a time. Not thread-safe.

    Args:
        log: of its JVM: Spark's log of every run.
        command: that starts it.

    Attributes:
        task: what it runs, or ran last.
        spent: takes no other run.
    """

    def __init__(self, log: Path, env: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self.log = log
        self._env = env
        self.task: Task | None = None
        self.spent = False
        self._runs = 0
        self._process = start_with_us(
            [*command, str(log)], env=variables(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._unread = b""
        self._ready = False
        self._code: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def idle(self) -> bool:
        return self.lives and (self.task is None or self.task.poll() is not None)

    def wait_ready(self, timeout_s: float = _READY_TIMEOUT_S) -> bool:
        """Wait until it can take a run; False: it ended, or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not self._ready and self.lives and time.monotonic() < deadline:
            self._hear(_POLL_S)
        return self._ready

    def ask(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path) -> Task:
        """Run a command. Call once it is ready. Args: environment: variables that it may have been started without."""
        environment = {k: v for k, v in environment.items() if self._env.get(k) != v}
        files = {"output": str(output), "errors": str(errors)}
        request = json.dumps({"arguments": [*arguments], "environment": environment, **files})
        self._ready, self._code = False, None
        self._runs += 1
        self.spent = self.spent or self._runs >= RUNS_MAX
        self.task = Task(self)
        with suppress(BrokenPipeError):  # it ended: so has its task
            stdin = cast("IO[bytes]", self._process.stdin)
            stdin.write(request.encode() + b"\n")
            stdin.flush()
        return self.task

    def code(self, timeout_s: float) -> int | None:
        """The exit code of the running command; None: it has not ended in time. If the driver itself ends, its own."""
        deadline = time.monotonic() + timeout_s
        while self._code is None:
            ended, left = self._process.poll(), deadline - time.monotonic()
            if self._hear(0.0 if ended is not None else max(0.0, min(left, _POLL_S))):
                continue
            if ended is not None:
                return ended
            if left <= 0:
                return None
        return self._code

    def end(self) -> None:
        """End it at once: between two runs there is nothing to finish. May be called again."""
        if self.lives:
            kill_tree(self._process)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def terminate(self) -> None:
        self._process.terminate()

    def _hear(self, timeout_s: float) -> bool:
        """Read an answer, or a part of it; False: there was none."""
        stdout = cast("IO[bytes]", self._process.stdout)
        if not select.select([stdout], [], [], timeout_s)[0]:
            return False
        data = os.read(stdout.fileno(), 4096)
        if not data and self.lives:
            time.sleep(_POLL_S)  # it is ending
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._ready = bool(answer.get("ready", self._ready))
            self._code = answer.get("code", self._code)
        return bool(data)


@dataclass
class Task:
    """A command that a driver runs, as `subprocess.Popen` shows a process: killing it kills the driver."""

    driver: Driver
    returncode: int | None = None

    @property
    def pid(self) -> int:
        return self.driver.pid

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.driver.code(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired: it did not end in time."""
        if self.returncode is None:
            self.returncode = self.driver.code(math.inf if timeout is None else timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("delivered", timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        self.driver.terminate()


@dataclass
class Drivers:
    """Drivers for the runs of one case after the other. Not thread-safe.

    Attributes:
        folder: receives their logs.
        env: for their processes.
        command: that starts one.
    """

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = COMMAND
    _all: list[Driver] = field(default_factory=list)
    _of_case: list[Driver] = field(default_factory=list)
    _started: int = 0

    def take(self) -> Driver | None:
        """A driver that is ready for a run of this case; None: none gets ready. If none is left behind it, another one
        is started."""
        idle = self._idle()
        known = [d for d in self._of_case if d in idle]
        for driver in known[:-1]:
            self._end(driver)
        rest = [d for d in idle if d not in self._of_case]
        found = known[-1] if known else rest.pop(0) if rest else self._start()
        if not rest:
            self._start()
        if not found.wait_ready():
            self._end(found)
            return None
        self._of_case = [*(d for d in self._of_case if d is not found), found]
        return found

    def next_case(self) -> None:
        """A case begins: what others left may take its runs. At least one driver is on its way."""
        self._of_case.clear()
        idle = self._idle()
        for driver in [d for d in self._all if d not in idle[:IDLE_MAX]]:
            self._end(driver)
        if not self._all:
            self._start()

    def close(self) -> None:
        """End all of them. May be called again."""
        for driver in [*self._all]:
            self._end(driver)

    def _idle(self) -> list[Driver]:
        """Those that may take a run; ends those that can take none any more."""
        idle = [d for d in self._all if d.idle]
        for driver in [d for d in self._all if not d.lives or (d in idle and d.spent)]:
            self._end(driver)
        return [d for d in idle if d in self._all]

    def _start(self) -> Driver:
        self._started += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        self._all.append(Driver(self.folder / f"driver{self._started}.spark.log", self.env, self.command))
        return self._all[-1]

    def _end(self, driver: Driver) -> None:
        self._all.remove(driver)
        driver.end()

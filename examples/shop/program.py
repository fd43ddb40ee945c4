"""A process that is killed with all that it started, and started again, as by a process manager."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from delivered_lab.supervisor import kill_tree

STOP_TIMEOUT_S = 90.0


class Program:
    """
    Args:
        batches: how many a pipeline has committed; None: not a pipeline.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        batches: Callable[[], int] | None = None,
    ) -> None:
        self._log = log
        self._batches = batches
        self._command = command
        self._environment = {**os.environ, **environment}
        self._process = self._start()

    @property
    def is_at_work(self) -> bool:
        """A pipeline has committed a batch since it was started, and so may be in the middle of the next one."""
        return self._batches is None or self._batches() > self._before

    def keep(self) -> None:
        """Start it again if it failed, for instance because a server was away."""
        if self._process.poll() not in (None, 0):
            self._process = self._start()

    def kill(self) -> bool:
        """SIGKILL it and all that it started, by process id; start it again. Returns whether it was running."""
        running = self._process.poll() is None
        if running:
            self.end()
            self._process = self._start()
        return running

    def stop(self) -> None:
        """Ask it to end (SIGTERM), and wait."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self._command} did not end; see {self._log}") from None

    def end(self) -> None:
        """Nothing of it is left after this."""
        if self._process.poll() is None:
            kill_tree(self._process.pid)
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._before = self._batches() if self._batches is not None else 0
        with self._log.open("ab") as output:
            return subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

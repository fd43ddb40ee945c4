"""A command that is killed with all that it started when it stands at a crash point, and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from delivered.crash import CRASH, CRASH_DIR, CrashAction, parse
from delivered_lab.supervisor import hits, kill_tree

STOP_TIMEOUT_S = 150.0


class Alive:
    """Look at it often: nothing happens in between.

    Args:
        crashes: as `delivered.crash` writes them. With `!kill` one process kills itself, and the command goes on.
        folder: for its log and its hits.
        say: told of each kill.
    """

    def __init__(
        self, command: Sequence[str], crashes: Sequence[str], folder: Path, say: Callable[[str], None]
    ) -> None:
        self.kills: list[str] = []
        self.left = len(crashes)
        self._command = command
        self._say = say
        self._hits = folder / "hits"
        self._hits.mkdir(parents=True)
        self.log = folder / "output.log"
        self._environment = {**os.environ, CRASH: ",".join(crashes), CRASH_DIR: str(self._hits)}
        self._halting = {str(p) for p in parse(",".join(crashes)) if p.action is CrashAction.HALT}
        self._seen = set[Path]()
        self._orphaned: list[int] = []
        self._process = self._start()

    def look(self) -> None:
        """Kill and start again if a crash point was hit.

        Raises:
            RuntimeError: the command ended by itself.
        """
        for path, hit in hits(self._hits):
            if path not in self._seen:
                self._seen.add(path)
                self.left -= 1
                at = hit.point.partition("@")[0].partition("#")[0].partition("!")[0]
                batch = f", batch {hit.facts['batch']}" if "batch" in hit.facts else ""
                if hit.point in self._halting:
                    self.kill(at + batch)
                else:
                    self._noted(at + batch, "one process")
        if self._process.poll() is not None:
            raise RuntimeError(
                f"{self._command} ended with {self._process.returncode}; {self.log} ends:\n{self._tail()}"
            )

    def kill(self, where: str) -> None:
        """SIGKILL it and all that it started, as a machine that fails would; start it again.

        Args:
            where: it stands, for people.
        """
        killed = kill_tree(self._process.pid)
        self._process.wait()
        self._noted(where, f"{killed} processes")
        self._process = self._start()

    def kill_alone(self, where: str) -> None:
        """SIGKILL the command itself, and start it again at once; what it had started may still be at work then."""
        self._orphaned.append(self._process.pid)
        self._process.kill()
        self._process.wait()
        self._noted(where, "the driver alone")
        self._process = self._start()

    def stop(self) -> None:
        """Ask it to end (SIGTERM), and wait.

        Raises:
            RuntimeError: it ended with an error, or not at all.
        """
        self.look()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(STOP_TIMEOUT_S) == 0:
                return
        raise RuntimeError(
            f"{self._command} did not end well ({self._process.poll()}); {self.log} ends:\n{self._tail()}"
        )

    def end(self) -> None:
        """Nothing of it is left after this."""
        for pid in (*self._orphaned, self._process.pid):
            kill_tree(pid)
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _noted(self, where: str, what: str) -> None:
        self.kills.append(where)
        self._say(f"SIGKILL of {what} at {where}")

    def _tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-3_000:]

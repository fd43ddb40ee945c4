"""Receivers of a queue, next to the pipeline: processes to kill, and whether all messages came through them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from delivered_lab.verify.evidence import Stop
from delivered_lab.verify.history import End, History
from delivered_lab.verify.services import DELIVERED, RECEIVER, Run, VerifierError, last_words, start, wait_for
from delivered_lab.verify.systems.base import QueueSource

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 60.0
_STARTS_MAX = 40
_POLL_S = 0.05


class Receiving:
    """One receiver at a time, unless a script starts another alongside. Not thread-safe.

    Attributes:
        stops: ends of receivers that were not killed; they must have been asked to stop.

    Args:
        pipeline: a file of which only the source is read.
    """

    def __init__(
        self, folder: Path, queue: QueueSource, pipeline: Path, history: History, env: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._queue = queue
        self._pipeline = pipeline
        self._history = history
        self._env = env
        self.stops: list[Stop] = []
        self._runs: list[Run] = []
        self._over: set[int] = set()
        self._given_up: frozenset[str] = frozenset()

    def ready(self) -> None:
        """Ensure that the log exists: without it no pipeline can be planned.

        Raises:
            VerifierError: the receiver that was started for it ended.
        """
        log = self._queue.log / "_delta_log"
        if log.exists():
            return
        run = next((r for r in self._runs if r.lives), None) or self.start()
        wait_for(lambda: log.exists() or not run.lives, _START_TIMEOUT_S, "a receiver makes its log")
        if not run.lives:
            raise VerifierError("RECEIVER_FAILED", f"The first receiver ended with {run.code}: {last_words(run)}")

    def start(self, crash: str = "", *, alongside: bool = False) -> Run:
        """Start a receiver with these crash points.

        Args:
            alongside: leave others running; else stop them first.
        """
        if not alongside:
            self.stop()
        if len(self._runs) >= _STARTS_MAX:
            raise VerifierError(
                "RECEIVER_FAILED", f"Receivers were started {_STARTS_MAX} times: {last_words(self._runs[-1])}"
            )
        number = len(self._runs) + 1
        command = [*DELIVERED, "receive", str(self._pipeline), "--output", "json"]
        run = start(RECEIVER, number, self._folder, command, crash, self._env)
        self._runs.append(run)
        self._history.add(run.name, "run", End.BEGUN, {"crash": crash})
        return run

    def stop(self) -> None:
        """Stop all running receivers and wait: what they hold is persisted and acknowledged."""
        for run in self._runs:
            if run.lives:
                run.stop(_STOP_TIMEOUT_S)
        self._note()

    def kill(self, run: Run) -> None:
        """SIGKILL a receiver."""
        self._history.add(run.name, "run", End.UNKNOWN, {"killed": run.kill()})
        self._over.add(run.number)

    def close(self) -> None:
        """Kill all that are running. May be called again."""
        for run in self._runs:
            if run.lives:
                self._history.add(run.name, "run", End.OK, {"ended with the case": run.kill()})

    def settle(self, sent: Collection[str]) -> None:
        """Wait until all of these ids are in the log, or no more can arrive. Ids that were waited for in vain are not
        waited for again.

        Starts a receiver if none is running.
        """
        wanted = frozenset(sent) - self._given_up
        grew_at, before = time.monotonic(), self._queue.arrived()
        while not wanted <= before:
            if not any(run.lives for run in self._runs):
                self._note()
                self.start()
            now = self._queue.arrived()
            begins = not any(run.lives and run.output.stat().st_size for run in self._runs)
            if now != before or begins:
                grew_at, before = time.monotonic(), now
            if time.monotonic() - grew_at > self._queue.patience_s:
                self.stop()  # what it held is now in the log and acknowledged; the rest is in the queue
                left = self._queue.left()
                if left or self._queue.arrived() != before:
                    grew_at = time.monotonic()
                    continue
                missing = sorted(wanted - before)
                if left is not None:
                    self._given_up |= wanted - before
                self._history.add("receivers", "settle", End.UNKNOWN, {"missing": len(missing), "some": missing[:10]})
                return
            time.sleep(_POLL_S)

    def _note(self) -> None:
        for run in self._runs:
            if not run.lives and run.number not in self._over:
                self._over.add(run.number)
                self.stops.append(Stop((), run.code, run.name))
                end = End.OK if run.code is None else End.FAILED
                self._history.add(run.name, "run", end, {"code": run.code, "output": last_words(run)})

"""What cases of both ends share: a folder, a history, processes."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivered_lab.verify.case import Environment
from delivered_lab.verify.evidence import End as Ended
from delivered_lab.verify.evidence import History, Stop
from delivered_lab.verify.services import DRIVER, LOOP_MODULE, Run, last_words, start

PROCESS_TIMEOUT_S = 120.0


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
    _started: list[Run] = field(default_factory=list)

    @property
    def variant(self) -> str:
        return self.environment.variant

    def fire(self, name: str, **facts: Any) -> None:
        self.history.add("fault", name, Ended.OK, facts)

    def start(self, role: str, module: str, spec: Mapping[str, Any], crash: str = "") -> Run:
        """Start a program of this package, with `spec` as JSON, in a process of its own."""
        return self._run(role, [module, json.dumps(spec)], crash, {"point": spec.get("point", "")})

    def pipeline(self, file: Path, crash: str = "") -> Run:
        """Start a pipeline file without Spark."""
        return self._run(DRIVER, [LOOP_MODULE, str(file)], crash, {"crash": crash})

    def _run(self, role: str, arguments: Sequence[str], crash: str, facts: Mapping[str, str]) -> Run:
        command = [sys.executable, "-m", *arguments]
        run = start(role, len(self._started) + 1, self.folder, command, crash, self.environment.env)
        self._started.append(run)
        self.history.add(run.name, "run", Ended.STARTED, facts)
        return run

    def run_out(self, run: Run) -> str | None:
        """Wait for a pipeline to end by itself; its error code, None if it succeeded."""
        run.wait_end(PROCESS_TIMEOUT_S)
        self.history.add(run.name, "run", Ended.OK if run.code is None else Ended.FAILED, {"code": run.code})
        return run.code

    def must_end(self, run: Run, wanted: int | None = 0) -> None:
        """Wait for a program.

        Args:
            wanted: its exit code, negative for a signal; None: any.

        Raises:
            RuntimeError: it ended otherwise; the verifier cannot go on.
        """
        code = run.wait_end(PROCESS_TIMEOUT_S)
        how = Ended.OK if code == 0 else Ended.UNKNOWN if code == -signal.SIGKILL else Ended.FAILED
        self.history.add(run.name, "run", how, {"code": code})
        if wanted is not None and code != wanted:
            raise RuntimeError(f"{run.name} ended with {code}: {last_words(run)}")

    def close(self) -> None:
        """Kill what still runs, or is stopped."""
        for run in self._started:
            if run.lives:
                run.kill()

"""Forks embedded pipelines from a process that has done the imports, which take longer than a run.

    python zygote.py

It reads a line of JSON for each request, and answers with one.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Zygote:
    """Used by one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def load(self, *systems: str) -> None:
        """Import the connectors of these systems and their clients, for pipelines started afterwards."""
        self._ask(load=systems)

    def start(self, spec: dict[str, Any], folder: Path, crash: str = "") -> Child:
        """Start a pipeline.

        Args:
            spec: as `embedded_pipeline.py` takes it.
            crash: crash points as in DELIVERED_CRASH; those hit are recorded in `<folder>/crashes`.
        """
        crashes, error = folder / "crashes", folder / "error"
        crashes.mkdir(exist_ok=True)
        if spec.get("stop_at"):
            error = folder / "error-of-the-stopped"  # another one runs before it resumes
        environment = {**os.environ, "DELIVERED_CRASH": crash, "DELIVERED_CRASH_DIR": str(crashes)}
        return Child(self, self._ask(start=spec, environment=environment, error=str(error)), error)

    def run(self, spec: dict[str, Any], folder: Path, crash: str = "") -> tuple[int, str]:
        """Start one, and wait until it ended. Returns exit code, negative for a signal, and standard error."""
        return self.start(spec, folder, crash).finish()

    def stop(self) -> None:
        """Kill everything that still runs or is stopped."""
        self._process.communicate()

    def _ask(self, **request: Any) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline()))


@dataclass(frozen=True)
class Child:
    """A pipeline in a separate process."""

    zygote: Zygote
    pid: int
    error: Path

    def wait_stopped(self) -> None:
        """Wait until it has stopped itself."""
        status = self.zygote._ask(wait=self.pid, options=os.WUNTRACED)
        assert os.WIFSTOPPED(status), self.error.read_text()

    def go_on(self) -> tuple[int, str]:
        """Resume a stopped one and wait for its end, as `finish`."""
        os.kill(self.pid, signal.SIGCONT)
        return self.finish()

    def kill(self) -> tuple[int, str]:
        os.kill(self.pid, signal.SIGKILL)
        return self.finish()

    def finish(self) -> tuple[int, str]:
        """Wait until it ended. Returns exit code, negative for a signal, and standard error."""
        return os.waitstatus_to_exitcode(self.zygote._ask(wait=self.pid, options=0)), self.error.read_text()


CLIENTS = {
    "delta": ("deltalake",),
    "iceberg": ("pyiceberg.catalog.sql", "pyiceberg.io.pyarrow"),
    "kafka": ("confluent_kafka",),
    "log": ("deltalake",),
    "mysql": ("pymysql",),
    "postgres": ("psycopg",),
}
"""Imported where they are used: they do not come with the connector."""


def _load(system: str) -> None:
    package = importlib.import_module(f"delivered.connectors.{system}")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    for client in CLIENTS.get(system, ()):
        importlib.import_module(client)


def _serve() -> None:
    from tests.support import embedded_pipeline

    _load("log")
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        answer = 0
        if "load" in request:
            for system in request["load"]:
                _load(system)
        elif "wait" in request:
            _, answer = os.waitpid(request["wait"], request["options"])
            if not os.WIFSTOPPED(answer):
                children.discard(request["wait"])
        else:
            answer = os.fork()
            if not answer:
                with Path(request["error"]).open("wb") as error:
                    os.dup2(error.fileno(), 1)
                    os.dup2(error.fileno(), 2)
                os.environ.clear()
                os.environ |= request["environment"]
                code = 1
                try:
                    code = embedded_pipeline.main(request["start"])
                    sys.stdout.flush()
                    sys.stderr.flush()
                finally:
                    os._exit(code)
            children.add(answer)
        print(json.dumps(answer), flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # not this folder, whose modules have the names of clients
    _serve()

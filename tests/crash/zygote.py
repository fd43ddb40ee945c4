"""Starts embedded pipelines by fork, from a process that has done the imports: a client library that takes seconds to
import is imported once for all the deaths of a test module.

    python zygote.py [module ...]      modules to import besides

It reads a line of JSON for each pipeline, and answers with one when that has ended: its exit code, negative for a
signal.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Zygote:
    """Runs pipelines one after the other. Used by one thread."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, spec: dict[str, Any], folder: Path, crash: str) -> tuple[int, str]:
        """As `child.start_child`, to its end. Returns exit code and standard error."""
        crashes, error = folder / "crashes", folder / "error"
        crashes.mkdir(exist_ok=True)
        assert self._process.stdin
        assert self._process.stdout
        given = {"spec": spec, "crash": crash, "crashes": str(crashes), "error": str(error)}
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline())), error.read_text()

    def stop(self) -> None:
        self._process.communicate()


def _serve() -> None:
    from tests.crash import embedded_pipeline

    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        given = json.loads(line)
        child = os.fork()
        if not child:
            with Path(given["error"]).open("wb") as error:
                os.dup2(error.fileno(), 2)
            os.environ |= {"DELIVERED_CRASH": given["crash"], "DELIVERED_CRASH_DIR": given["crashes"]}
            code = embedded_pipeline.main(given["spec"])
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    _serve()

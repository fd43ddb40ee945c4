"""Writes down which lines of our functions each Python process of a pipeline runs, and which of our modules it loads.

Python imports this module at its start because `tools/happy_path.py` puts this folder on PYTHONPATH. A line is written
when it runs first, so that a killed process loses nothing. Module-level code, and what it calls, counts as loading.
"""

import inspect
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_FILE = os.environ.get("DELIVERED_TRACED", "")
_PACKAGE = os.environ.get("DELIVERED_TRACED_PACKAGE", "")
_FIRST_COMMIT = os.environ.get("DELIVERED_TRACED_COMMIT", "")
"""Spark's file in the checkpoint that says that batch 0 is done."""


def _process() -> str:
    """Which of Spark's Python processes this is, by what it was started as."""
    arguments = getattr(sys, "argv", None) or [""]
    program = arguments[-1] if "daemon" in arguments[0] else arguments[0]  # a daemon forks one kind of worker
    if "pyspark" in program:
        return "task" if "sql" not in program and "worker" in program else "driver"
    # While Python still looks for the module that `-m` names, argv does not name it.
    return "template" if any("delivered.prefork" in each for each in sys.orig_argv) else "application"


class _Tracer:
    def __init__(self) -> None:
        self._output = os.open(_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._seen: set[tuple[str, ...]] = set()
        self._phase = "first"

    def _write(self, path: str, line: int | str) -> None:
        record = (_process(), self._phase, path, str(line))
        if record not in self._seen:
            self._seen.add(record)
            os.write(self._output, "\t".join(record).encode() + b"\n")

    def call(self, frame: FrameType, *_: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return None
        if code.co_name == "<module>":
            self._write(code.co_filename, "loads")
            return None
        if self._phase == "first" and Path(_FIRST_COMMIT).exists():
            self._phase = "later"
        if not code.co_flags & inspect.CO_OPTIMIZED or self._is_loading(frame):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._write(frame.f_code.co_filename, frame.f_lineno)
        return self._line

    @staticmethod
    def _is_loading(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(_PACKAGE):
                return frame.f_globals["__name__"] != "__main__"
            frame = frame.f_back
        return False


if _FILE:
    _tracer = _Tracer()
    threading.settrace(_tracer.call)
    sys.settrace(_tracer.call)

"""Shifts the wall clock that a pipeline's Python processes read: `time.time` and `time.time_ns`.

Python imports this module at its start because the verifier puts this folder on PYTHONPATH. The first time that the
commit engine reads the clock, a file says so. Waits are not affected: they use the monotonic clock.
"""

import os
import sys
import time
from pathlib import Path

_SHIFT_S = int(os.environ.get("DELIVERED_VERIFY_CLOCK_S", "0"))
_time, _time_ns = time.time, time.time_ns


def _shifted() -> float:
    return _time() + _SHIFT_S


def _shifted_ns() -> int:
    reader = sys._getframe(1).f_globals.get("__name__", "")
    if reader.startswith("delivered.engine."):
        Path(os.environ["DELIVERED_VERIFY_CLOCK_READ"]).touch()
    return _time_ns() + _SHIFT_S * 1_000_000_000


if _SHIFT_S:
    time.time, time.time_ns = _shifted, _shifted_ns

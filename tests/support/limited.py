"""A pipeline in a process of its own whose machine is out of something: space, permission, files, memory, or its time.

    python -m tests.support.limited '{"limits": {...}, ...the rest for embedded_pipeline...}'

Limits hold once everything is imported.
"""

from __future__ import annotations

import itertools
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import embedded_pipeline

IMPORTED = {
    "sqlite": ("sqlite3",),
    "files": ("pyarrow.parquet", "pyarrow.dataset"),
    "delta": ("deltalake", "pyarrow.parquet", "pyarrow.dataset"),
    "iceberg": ("pyiceberg.catalog.sql", "pyarrow.parquet", "pyarrow.dataset"),
}


def limit(limits: dict[str, Any]) -> None:
    if "file_bytes" in limits:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"],) * 2)
    if "memory_bytes" in limits:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits["memory_bytes"],) * 2)
    if "open_files" in limits:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"],) * 2)
    if "clock_s" in limits:  # the wall clock jumps at every look: ahead, back, and where it was
        jumps, now = itertools.cycle(limits["clock_s"]), time.time_ns
        time.time_ns = lambda: now() + next(jumps) * 1_000_000_000
        time.time = lambda: time.time_ns() / 1e9


def main() -> int:
    given = json.loads(sys.argv[1])
    limits = given.pop("limits")
    system = next((name for name in IMPORTED if name in given), "sqlite")
    for module in ("deltalake", *IMPORTED[system]):  # the log is a Delta table
        __import__(module)
    limit(limits)
    return embedded_pipeline.main(given)


if __name__ == "__main__":
    sys.exit(main())

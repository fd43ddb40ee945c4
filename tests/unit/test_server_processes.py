"""Processes that end with their parent, even if started by several threads concurrently."""

from __future__ import annotations

import subprocess
import sys

_AT_ONCE = """
import gc, sys, threading
from pathlib import Path
from delivered_lab.brokers.servers import end, launch

sys.setswitchinterval(1e-6)
started, gate = [], threading.Barrier(8)

def start(n):
    gate.wait()
    started.append(launch(["sleep", "60"], Path(f"{sys.argv[1]}/{n}.log"), dies_with_parent=True))

threads = [threading.Thread(target=start, args=(n,)) for n in range(8)]
for t in threads: t.start()
for t in threads: t.join()
gc.collect()
lasting = [t for t in threading.enumerate() if t not in threads and t is not threading.main_thread()]
print(len(lasting), sum(end(i, kill=True) for i in started))
"""


def test_one_thread_starts_all_and_outlives_them(tmp_path: object) -> None:
    """Linux ends such a process with the thread that started it, not with that thread's process."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", _AT_ONCE, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.split() == ["1", "8"], done.stderr

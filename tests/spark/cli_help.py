"""The command line as a user runs it, in a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_S = 250.0
RUN = [sys.executable, "-c", "from delivered.cli.main import app; app()"]


@contextmanager
def running(*arguments: str, own_group: bool = False) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*RUN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_group,
        env={k: v for k, v in os.environ.items() if not k.startswith("DELIVERED_")},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def until(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for a fact while the process runs."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""The command line as a user runs it, in a process."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

WAIT_S = 250.0
RUN = [sys.executable, "-c", "from delivered.cli.main import app; app()"]


@contextmanager
def terminal() -> Iterator[tuple[int, Callable[[], str]]]:
    """A terminal to write to, and what is written so far."""
    leader, follower = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # closed
            while data := os.read(leader, 65536):
                seen.append(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield follower, lambda: b"".join(seen).decode(errors="replace")
    finally:
        os.close(follower)
        thread.join(10)
        os.close(leader)


@contextmanager
def running(*arguments: str, own_group: bool = False, stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*RUN, *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
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

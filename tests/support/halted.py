"""A process that halts at a crash point and is killed there. Mostly the session of the test goes on with its work.

That saves the start of a second JVM; `supervisor.run` starts the same command again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from delivered.crash import CRASH, CRASH_DIR, parse
from delivered_lab.supervisor import hits, kill_tree

WAIT_S = 300.0


@contextmanager
def halted(
    command: Sequence[str], crash: str, folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process that waits at a point, and its hit. At the end it is killed with all of its children.

    Args:
        crash: as in `DELIVERED_CRASH`. Points that were hit in this folder are not hit again.
        folder: gets the process's `output`, and the hits in `points`.
        env: of the process; default: this one's.
    """
    points, output = folder / "points", folder / "output"
    points.mkdir(exist_ok=True)
    seen = {path for path, _ in hits(points)}
    given = {**(os.environ if env is None else env), CRASH: crash, CRASH_DIR: str(points)}
    with output.open("wb") as said:
        process = subprocess.Popen(command, env=given, stdout=said, stderr=said, start_new_session=True)
        try:
            deadline = time.monotonic() + WAIT_S
            while not (new := [path for path, _ in hits(points) if path not in seen]):
                assert process.poll() is None and time.monotonic() < deadline, output.read_text()[-4000:]
                time.sleep(0.02)
            yield process, new[0]
        finally:
            kill_tree(process)
            process.wait()


def killed(command: Sequence[str], crash: str, folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Start a command as often as there are points, and kill it at each. Nobody starts it again after the last one."""
    for _ in parse(crash):
        with halted(command, crash, folder, env):
            pass


def run_loop(file: Path, crash: str = "", *, wait_s: float) -> int:
    """Run the verifier's loop over a pipeline file until it ends, or a crash point kills it. Returns the exit code."""
    points = file.parent / "hits"
    points.mkdir(exist_ok=True)
    env = {**os.environ, CRASH: crash, CRASH_DIR: str(points)}
    command = [sys.executable, "-m", "delivered_lab.verify.loop", str(file), "--takeover"]
    process = subprocess.Popen(command, env=env, cwd=file.parent, start_new_session=True)
    try:
        return process.wait(wait_s)
    finally:
        kill_tree(process)  # its workers outlive a driver that was killed

"""Helpers of queue tests: messages, a pipeline file, `delivered receive` as users run it, the log's content."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.steps import ROLE_OF_STEP, Role

from delivered.connectors.log import CONNECTOR as LOG
from delivered.crash import CRASH, CRASH_DIR
from delivered.model.step import Moment, StepId
from delivered_lab.supervisor import hits, release

MESSAGES = 3_000
_STEPS = [s for s, role in ROLE_OF_STEP.items() if role is Role.RECEIVER and s is not StepId.RECEIVE_QUARANTINE]
POINTS = [f"{s}:{m}" for s in _STEPS for m in Moment]
"""Crash points that a receiver of good messages reaches."""


def body(n: int) -> bytes:
    return b"message %d" % n


def pipeline_file(folder: Path, system: str, url: str, queue: str, **options: Any) -> Path:
    source = {"format": system, "url": url, "queue": queue, "log": str(folder / "log")}
    text = {
        "pipeline": "orders",
        "guarantee": "exactly_once",
        "checkpoint": str(folder / "checkpoint"),
        "source": {**source, "receiveMessagesMax": 500, "receiveLingerMs": 20, **options},
        "sinks": [{"format": "sqlite", "path": str(folder / "out.db"), "table": "orders"}],
    }
    file = folder / "orders.yaml"
    file.write_text(json.dumps(text))
    return file


def receive(file: Path, *options: str, crash: str = "") -> subprocess.Popen[str]:
    (file.parent / "hits").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "delivered.cli.main", "receive", str(file), "-o", "json", *options]
    environment = {**os.environ, CRASH: crash, CRASH_DIR: str(file.parent / "hits")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def entered(log: Path) -> Counter[bytes]:
    driver = (source := LOG.source({"path": str(log)})).driver()
    pieces = driver.slices(*driver.batch())
    return Counter(v for p in pieces for b in source.read(p) for v in b.column("value").to_pylist())


def all_that_comes(receiver: Any, count: int) -> list[Any]:
    """Handles of so many messages, and then of no more for half a second."""
    handles: list[Any] = []
    deadline = time.monotonic() + 120
    while len(handles) < count:
        assert time.monotonic() < deadline, f"{len(handles)} of {count} came"
        handles += receiver.receive(100, 0.2).handles
    handles += receiver.receive(100, 0.5).handles
    assert len(handles) == count
    return handles


def drained(receiver: Any, wait_s: float = 1.0) -> Iterator[Any]:
    """The batches that come until none does for so long, each acknowledged; then the receiver is closed."""
    while len(batch := receiver.receive(10_000, wait_s)):
        receiver.acknowledge(batch.handles)
        yield batch
    receiver.close()


def through_a_killed_broker(server: Any, file: Path, wait_s: float = 60) -> dict[str, Any]:
    """Receive all messages while the broker is killed before an acknowledgement; what `delivered receive` reports.

    Args:
        wait_s: for the kill, and again for the messages.
    """
    process = receive(file, crash="receive.ack:before#3!wait")
    deadline = time.monotonic() + wait_s
    while not (found := hits(file.parent / "hits")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    server.broker.kill()
    release(found[0][0])
    server.broker.restart()
    while entered(file.parent / "log") != each_once():
        assert time.monotonic() < deadline + wait_s
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    return finish(process)


def each_once(count: int = MESSAGES) -> Counter[bytes]:
    return Counter(body(n) for n in range(count))


def numbered(count: int = MESSAGES) -> list[tuple[str, bytes]]:
    return [(f"id{n}", body(n)) for n in range(count)]

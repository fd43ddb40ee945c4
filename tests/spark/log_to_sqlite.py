"""Helpers of tests with pipelines from a log to SQLite."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from delivered.connectors.log.produce import append

WAIT_S = 120.0


def produce(path: Path, start: int, count: int) -> None:
    ids = range(start, start + count)
    rows = pa.table(
        {"key": [f"k{i % 7}".encode() for i in ids], "value": [json.dumps({"id": i}).encode() for i in ids]}
    )
    append(str(path), rows, partition_by=2, idempotence=("test", start + count))


def rows(folder: Path) -> int:
    connection = sqlite3.connect(f"file:{folder / 'out.db'}?mode=ro", uri=True)
    try:
        return int(connection.execute("SELECT count(*) FROM orders").fetchone()[0])
    except sqlite3.OperationalError:
        return 0  # the first batch creates the table
    finally:
        connection.close()


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.05)

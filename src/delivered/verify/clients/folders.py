"""Tables that are files: which of their rows came first is told by the order in which a reader met the files."""

from __future__ import annotations

import threading
from pathlib import Path

from delivered.verify.clients.base import Row, as_row

ROWS_MAX = 1 << 24
"""Rows of one file that keep their place before those of the next."""


class Order:
    """Numbers files as a reader meets them first. Thread-safe; one for all readers of a sink."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def number(self, name: str) -> int:
        with self._lock:
            return self._numbers.setdefault(name, len(self._numbers))


def parquet_rows(path: Path, lane: str, number: int) -> list[Row]:
    """Rows of one file.

    Args:
        number: of the file among those of the lane.

    Raises:
        OSError: it is not there, or no Parquet.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        rows = file.read().to_pylist()
    return [as_row(lane, number * ROWS_MAX + n, r) for n, r in enumerate(rows)]

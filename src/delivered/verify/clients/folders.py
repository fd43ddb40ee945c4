"""Tables that are files: which of their rows came first is told by the order in which a reader met the files."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

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


class Folder:
    """What the readers of a sink that is a folder share.

    Args:
        extra: more options of the sink in the pipeline file.
    """

    batch_atomic = True

    def __init__(self, path: Path, extra: dict[str, Any] | None = None) -> None:
        self.path = path
        self._extra = extra or {}
        self._order = Order()

    def create(self) -> None:
        """The pipeline makes it."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def open_transactions(self, pipeline: str) -> list[str]:
        """There is nothing that a reader could wait for."""
        del pipeline
        return []


def parquet_rows(path: Path, partition: str, number: int) -> list[Row]:
    """Rows of one file.

    Args:
        number: of the file among those of the partition.

    Raises:
        OSError: it is not there, or no Parquet.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        rows = file.read().to_pylist()
    return [as_row(partition, number * ROWS_MAX + n, r) for n, r in enumerate(rows)]

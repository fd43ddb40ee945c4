"""Tables that are files: rows are in the order in which a reader met their files."""

from __future__ import annotations

import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from delivered.verify.systems.base import Poll, ReadDisturbed, Row, SinkKind, SinkPlace, as_row, polling

ROWS_MAX = 1 << 24
"""Rows of one file that keep their place before those of the next."""
PARTITION = "table"


class FileTable(ABC):
    """
    Args:
        extra: more options of the sink in the pipeline file.
    """

    system = "files"
    batch_atomic = True

    def __init__(self, path: Path, extra: dict[str, Any] | None = None) -> None:
        self.path = path
        self._extra = extra or {}
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Of the table in the pipeline file."""

    @abstractmethod
    def commits(self, known: Set[Any]) -> Iterator[tuple[Set[Any], list[str]]]:
        """Commits that are not known, oldest first: their ids, and the files with new rows."""

    @abstractmethod
    def scan(self) -> list[Row] | None:
        """What anybody's reader finds in the table; None: that is what its files hold, or there is no table."""

    @abstractmethod
    def pinned(self) -> Callable[[], Any]:
        """What reads again, and counts, what a reader sees that begins now."""

    def create(self) -> None:  # noqa: B027 - the pipeline makes it
        """Nothing to do."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def options(self) -> dict[str, Any]:
        return {"format": self.system, **self.place(), **self._extra}

    def open_transactions(self, pipeline: str) -> list[str]:
        """There is nothing that a reader could wait for."""
        del pipeline
        return []

    def read(self) -> list[Row]:
        """What a scan finds, each row at the place where its file came in.

        A row that the scan finds, and the files that commits added do not hold, has a place behind all others.
        """
        scanned = self.scan()
        rows = [row for _, files in self.commits(frozenset()) for name in files for row in self._rows(name)]
        if scanned is None:
            return rows
        left, found = Counter((r.key, r.value) for r in scanned), []
        for row in rows:
            if left[row.key, row.value] > 0:
                left[row.key, row.value] -= 1
                found.append(row)
        behind = self._number("in no commit") * ROWS_MAX
        return found + [Row(PARTITION, behind + n, *what) for n, what in enumerate(left.elements())]

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        """Commit by commit, so that no state that a reader could meet is left out."""
        known: set[Any] = set()
        for _ in polling(stop):
            for ids, files in self.commits(known):
                rows = [row for name in files for row in self._rows(name)]
                if rows:
                    seen(Poll(rows, snapshot=True))
                known |= ids

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reader that has looked at what there is, and reads the files a while later."""
        again = self.pinned()
        before = again()
        yield
        try:
            now = again()
        except Exception as error:
            raise ReadDisturbed(f"what a reader had begun to read cannot be read any more: {error}") from error
        if now != before:
            raise ReadDisturbed(f"a reader began with {before} rows and ended with {now}")

    def _rows(self, name: str) -> list[Row]:
        """
        Raises:
            OSError: the file is not there, or no Parquet.
        """
        import pyarrow.parquet as pq

        number = self._number(name)
        with pq.ParquetFile(self.path / name) as file:
            rows = file.read().to_pylist()
        return [as_row(PARTITION, number * ROWS_MAX + n, r) for n, r in enumerate(rows)]

    def _number(self, name: str) -> int:
        """Of a file, as a reader meets it first: one order for all readers of a sink."""
        with self._lock:
            return self._numbers.setdefault(name, len(self._numbers))


def on_disk(table: type[FileTable]) -> Callable[[SinkKind, SinkPlace], FileTable]:
    """Its client in a case."""
    return lambda _, place: table(place.disk / "effects", dict(place.extra))

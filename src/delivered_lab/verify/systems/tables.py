"""Tables made of files: rows are in the order in which a reader found their files."""

from __future__ import annotations

import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from delivered_lab.verify.systems.base import Poll, ReadDisturbed, Row, SinkKind, SinkPlace, as_row, polling

ROWS_MAX = 1 << 24
"""Row positions reserved per file, before those of the next."""
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
        """Table options in the pipeline file."""

    @abstractmethod
    def commits(self, known: Set[Any]) -> Iterator[tuple[Set[Any], list[str]]]:
        """Unknown commits, oldest first: their ids, and the files with new rows."""

    @abstractmethod
    def scan(self) -> list[Row] | None:
        """What any reader finds in the table; None: the same as the files hold, or no table exists."""

    @abstractmethod
    def pinned(self) -> Callable[[], Any]:
        """A function that rereads, and counts, what a reader that starts now sees."""

    def create(self) -> None:  # noqa: B027 - the pipeline makes it
        """Nothing to do."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def options(self) -> dict[str, Any]:
        return {"format": self.system, **self.place(), **self._extra}

    def open_transactions(self, pipeline: str) -> list[str]:
        """There is nothing for a reader to wait for."""
        del pipeline
        return []

    def read(self) -> list[Row]:
        """The result of a scan, each row at the position where its file was committed.

        A row that the scan finds, but the committed files do not hold, is placed after all others.
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
        """Commit by commit, so that no state visible to a reader is skipped."""
        known: set[Any] = set()
        for _ in polling(stop):
            for ids, files in self.commits(known):
                rows = [row for name in files for row in self._rows(name)]
                if rows:
                    seen(Poll(rows, snapshot=True))
                known |= ids

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reader that has listed the data, and reads the files later."""
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
            OSError: the file is missing, or not Parquet.
        """
        import pyarrow.parquet as pq

        number = self._number(name)
        with pq.ParquetFile(self.path / name) as file:
            rows = file.read().to_pylist()
        return [as_row(PARTITION, number * ROWS_MAX + n, r) for n, r in enumerate(rows)]

    def _number(self, name: str) -> int:
        """Number of a file, in the order first found: the same for all readers of a sink."""
        with self._lock:
            return self._numbers.setdefault(name, len(self._numbers))


def on_disk(table: type[FileTable]) -> Callable[[SinkKind, SinkPlace], FileTable]:
    """Its client in a case."""
    return lambda _, place: table(place.disk / "effects", dict(place.extra))

"""A table of a SQLite file, read with the standard library."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from delivered_lab.verify.systems.base import Poll, ReadDisturbed, Row, SinkKind, System, as_row, polling

_BUSY_S = 30.0


class SqliteTable:
    """
    Args:
        extra: more options of the sink in the pipeline file; `format` may name another connector for the same tables.
    """

    system = "sqlite"
    batch_atomic = True

    def __init__(self, path: Path, name: str = "effects", extra: dict[str, Any] | None = None) -> None:
        self.path = path
        self.name = name
        self._extra = extra or {}

    def create(self) -> None:
        """The pipeline makes the table."""

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def options(self) -> dict[str, Any]:
        return {"format": "sqlite", "path": str(self.path), "table": self.name, **self._extra}

    def read(self) -> list[Row]:
        return self._after(-1)[0]

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        newest, count = -1, 0
        for _ in polling(stop):
            rows, total = self._after(newest)
            if total != count + len(rows):
                # Rows that were seen are missing: reread everything, and let the checkers compare.
                rows, total = self._after(-1)
                count = 0
            if rows:
                newest, count = max(newest, rows[-1].position), count + len(rows)
                seen(Poll(rows, snapshot=True))

    def open_transactions(self, pipeline: str) -> list[str]:
        """The write lock, if it is still held after everything has ended."""
        del pipeline
        if not self.path.exists():
            return []
        with closing(sqlite3.connect(self.path, timeout=5, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                return [f"{self.path.name}: {error}"]
            connection.execute("ROLLBACK")
        return []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The write lock of the file."""
        with closing(sqlite3.connect(self.path, timeout=20, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[None]:
        with closing(sqlite3.connect(self.path, timeout=20, isolation_level=None)) as other:
            count = f"SELECT count(*) FROM {self._quoted}"  # noqa: S608
            other.execute("BEGIN")
            before = other.execute(count).fetchone()
            yield
            if other.execute(count).fetchone() != before:
                raise ReadDisturbed(f"a reader's transaction began with {before[0]} rows and ended with others")
            other.execute("COMMIT")

    @property
    def _quoted(self) -> str:
        return '"' + self.name.replace('"', '""') + '"'

    def _after(self, position: int) -> tuple[list[Row], int]:
        """Rows after `position` and the total row count, in one transaction."""
        if not self.path.exists():
            return [], 0
        # A read-only reader could not roll back what a killed writer left half done, and would see nothing.
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (self.name,)).fetchone()
            if there is None:
                return [], 0
            (total,) = connection.execute(f"SELECT count(*) FROM {self._quoted}").fetchone()  # noqa: S608
            cursor = connection.execute(
                f"SELECT rowid, * FROM {self._quoted} WHERE rowid > ? ORDER BY rowid",  # noqa: S608
                (position,),
            )
            columns = [c[0] for c in cursor.description][1:]
            rows = [(r[0], dict(zip(columns, r[1:], strict=True))) for r in cursor.fetchall()]
            return [as_row(self.name, rowid, values) for rowid, values in rows], total


SYSTEM = System(
    (
        SinkKind(
            "sqlite",
            "sqlite",
            lambda _, at: SqliteTable(at.disk / "effects.db", extra=dict(at.extra)),
            locks=True,
            locked="DATABASE_LOCKED",
            upserts=True,
            own=True,
        ),
    )
)

"""Shared by tables of database servers: patient sessions, and successive snapshots."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from delivered_lab.verify.systems.base import Poll, ReadDisturbed, Row, SinkKind, SinkPlace, digest

ANSWER_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 20
RETRY_S = 0.2
_POLL_S = 0.05
SEEN = "seen_as"
"""The column that numbers a table's rows as they are written."""


class SqlTable(ABC):
    """A table `effects` in a database of its own, on a server that the judge may kill.

    Attributes:
        begin_snapshot: statements that begin a transaction with a single snapshot; lock, unlock: of a table.
    """

    begin_snapshot: tuple[str, ...] = ()
    lock: tuple[str, ...] = ()
    unlock = "COMMIT"

    def __init__(self, kind: SinkKind, place: SinkPlace) -> None:
        self.name = "effects"
        # A name in the server's alphabet, however long the case's name is.
        self.database = f"case_{digest(place.name)}"
        self.batch_atomic = not kind.two_phase
        self._place, self._server = place, place.server
        self._address = place.pipeline_address or self._server.bootstrap
        self._asked = {**({"mechanism": "two_phase"} if kind.two_phase else {}), **place.extra}

    @property
    def upserted(self) -> bool:
        """Rows replace those with their key: the table must have one per key."""
        return self._asked.get("mode") == "upsert"

    def read(self) -> list[Row]:
        """Raises Exception: the client's own; the server did not answer within 60 s."""
        with self._session() as connection:
            return self._new(connection, set())

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        """Reads snapshots of the server. While it is down, there is nothing to see."""
        known: set[int] = set()
        state: tuple[Any, ...] = ()
        connection: Any = None
        try:
            while True:
                last = stop.is_set()
                try:
                    if connection is None:
                        connection = self._connect(patience_s=ANSWER_TIMEOUT_S if last else 0.0)
                    now = self._state(connection)
                    rows = self._new(connection, known) if now != state else []
                except self._lost():
                    if connection is None and last:
                        raise
                    self._drop(connection)
                    connection = None
                    stop.wait(RETRY_S)
                    continue
                state = now
                if rows:
                    known |= {r.position for r in rows}
                    seen(Poll(rows, snapshot=True))
                if last:
                    return
                stop.wait(_POLL_S)
        finally:
            self._drop(connection)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A reader in the middle of a transaction with a single snapshot."""
        count = f"SELECT count(*) FROM {self.name}"  # noqa: S608
        with self._session() as other:
            before = self._run(other, *self.begin_snapshot, count)
            yield
            if self._run(other, count) != before:
                raise ReadDisturbed(f"a snapshot began with {before} rows of {self.name} and ended with others")
            self._run(other, "COMMIT")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock a table as a migration does: nobody can write or read it."""
        with self._session() as other:
            self._run(other, *(s.format(table=self.name) for s in self.lock))
            yield
            self._run(other, self.unlock)

    @contextmanager
    def _session(self, database: str | None = None) -> Iterator[Any]:
        connection = self._connect(database)
        try:
            yield connection
        finally:
            connection.close()

    def _connect(self, database: str | None = None, patience_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Connect to the server itself, never through a proxy."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._connect_once(self.database if database is None else database)
            except self._lost():
                if time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_S)

    @abstractmethod
    def _run(self, connection: Any, *statements: str) -> list[tuple[Any, ...]]:
        """Run them in sequence; return the rows of the last one."""

    @abstractmethod
    def _lost(self) -> tuple[type[Exception], ...]:
        """What the client raises when the server does not answer."""

    @abstractmethod
    def _connect_once(self, database: str) -> Any:
        """An autocommit connection."""

    @abstractmethod
    def _drop(self, connection: Any) -> None:
        """Close a connection whose server may be down; None: there is none."""

    @abstractmethod
    def _state(self, connection: Any) -> tuple[Any, ...]:
        """Changes whenever a transaction that added or removed rows commits."""

    @abstractmethod
    def _new(self, connection: Any, known: set[int]) -> list[Row]:
        """Unknown rows, by one statement and therefore one snapshot."""

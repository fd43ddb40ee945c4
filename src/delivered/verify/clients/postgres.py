"""A table of a PostgreSQL database, read with psycopg by statements of the judge's own."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivered import brokers
from delivered.verify.clients.base import Disturbed, Look, Row, as_row

if TYPE_CHECKING:
    import psycopg

ANSWER_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 20
_POLL_S = 0.05
_RETRY_S = 0.2
_SEEN = "seen_as"
_JUDGE = "judge"
_TABLESPACE = "small"


class PgTable:
    """A table `effects` in a database of its own.

    Args:
        server: that the judge may kill; name: of the cell.
        seen_by_pipeline: the address that the pipeline is given: the server's, or a proxy's.
        kinds: types of the columns key and value. The table then has a column more, which numbers its rows as they are
            written; a pipeline that would be blind to a default could not write it. None: the pipeline makes the
            table, whatever its columns are.
        disk: a small disk that the table lies on, and nothing else of the server.
    """

    system = "postgres"

    def __init__(
        self,
        server: brokers.Broker,
        name: str,
        seen_by_pipeline: str | None = None,
        kinds: tuple[str, str] | None = ("bytea", "bytea"),
        two_phase: bool = False,
        disk: Path | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.name = "effects"
        # A name of the server's own alphabet, however long the cell's is.
        self.database = f"cell_{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
        self.batch_atomic = not two_phase
        self._server = server
        self._given = seen_by_pipeline or server.bootstrap
        self._kinds = kinds
        self._two_phase = two_phase
        self._disk = disk
        self._extra = extra or {}

    def create(self) -> None:
        self.remove()
        with self._connect("postgres") as connection:
            if self._disk is not None:
                place = self._disk / "tablespace"
                place.mkdir()
                owner = (self._server.folder / "data").stat()
                os.chown(place, owner.st_uid, owner.st_gid)
                connection.execute(f"CREATE TABLESPACE {_TABLESPACE} LOCATION '{place}'")
            connection.execute(f"CREATE DATABASE {self.database}")
        if self._kinds is not None:
            key, value = self._kinds
            where = f"TABLESPACE {_TABLESPACE}" if self._disk is not None else ""
            with self._connect() as connection:
                connection.execute(f"CREATE TABLE {self.name} (key {key}, value {value}, {_SEEN} bigserial) {where}")

    def remove(self) -> None:
        with self._connect("postgres") as connection:
            there = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self.database]).fetchone()
        if there is not None:
            self.roll_back_prepared()
        with self._connect("postgres") as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {self.database} WITH (FORCE)")
            if self._disk is not None:
                connection.execute(f"DROP TABLESPACE IF EXISTS {_TABLESPACE}")

    def options(self) -> dict[str, Any]:
        return {
            "format": "postgres",
            # In the clear, so that a proxy can read along.
            "url": f"postgresql://delivered@{self._given}/{self.database}?sslmode=disable&gssencmode=disable",
            "dbtable": self.name,
            **({"mechanism": "two_phase"} if self._two_phase else {}),
            **({"ifNotExists": "true"} if self._kinds is None else {}),
            **self._extra,
        }

    def read(self) -> list[Row]:
        """
        Raises:
            psycopg.Error: the server did not answer within 60 s.
        """
        with self._connect() as connection:
            return self._new(connection, set())

    def follow(self, seen: Callable[[Look], None], stop: threading.Event) -> None:
        """In snapshots of the server's. While it is down, there is nothing to see."""
        import psycopg

        known: set[int] = set()
        state: tuple[Any, ...] = ()
        connection: psycopg.Connection[Any] | None = None
        try:
            while True:
                last = stop.is_set()
                try:
                    if connection is None:
                        connection = self._connect(patience_s=ANSWER_TIMEOUT_S if last else 0.0)
                    now = self._state(connection)
                    rows = self._new(connection, known) if now != state else []
                except psycopg.Error:
                    if connection is not None:
                        connection.close()
                    elif last:
                        raise
                    connection = None
                    stop.wait(_RETRY_S)
                    continue
                state = now
                if rows:
                    known |= {r.position for r in rows}
                    seen(Look(rows, whole=True))
                if last:
                    return
                stop.wait(_POLL_S)
        finally:
            if connection is not None:
                connection.close()

    def open_transactions(self, pipeline: str) -> list[str]:
        """Prepared transactions, which hold their locks for ever, and sessions that hold theirs and do nothing."""
        with self._connect() as connection:
            prepared = connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"
            ).fetchall()
            idle = connection.execute(
                "SELECT 'session ' || pid || ' of ' || application_name FROM pg_stat_activity "
                "WHERE datname = current_database() AND state LIKE 'idle in transaction%%' AND application_name <> %s",
                [_JUDGE],
            ).fetchall()
        del pipeline  # the database is the cell's own
        return [str(text) for (text,) in [*prepared, *idle]]

    def roll_back_prepared(self) -> list[str]:
        with self._connect() as connection:
            found = connection.execute(
                "SELECT gid, quote_literal(gid) FROM pg_prepared_xacts WHERE database = current_database()"
            ).fetchall()
            for _, quoted in found:
                connection.execute(f"ROLLBACK PREPARED {quoted}")
        return [str(gid) for gid, _ in found]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """As a migration holds a table: nobody can write to it, nobody can read it."""
        with self._connect() as other, other.transaction():
            other.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")
            other.execute(f"LOCK TABLE {self.name} IN ACCESS EXCLUSIVE MODE")
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._connect() as other:
            count = f"SELECT count(*) FROM {self.name}"  # noqa: S608
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            before = other.execute(count).fetchone()
            yield
            if other.execute(count).fetchone() != before:
                raise Disturbed(f"a reader's snapshot began with {before} rows of {self.name} and ended with others")
            other.execute("COMMIT")

    def _connect(self, database: str | None = None, patience_s: float = ANSWER_TIMEOUT_S) -> psycopg.Connection[Any]:
        """To the server itself, never through a proxy."""
        import psycopg

        deadline = time.monotonic() + patience_s
        url = f"postgresql://delivered@{self._server.bootstrap}/{database or self.database}"
        while True:
            try:
                return psycopg.connect(url, autocommit=True, connect_timeout=5, application_name=_JUDGE)
            except psycopg.OperationalError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_S)

    def _state(self, connection: psycopg.Connection[Any]) -> tuple[Any, ...]:
        """Changes whenever a transaction that wrote rows, or took some away, gets in."""
        if not self._there(connection):
            return ()
        row = connection.execute(f"SELECT count(*), sum({self._position}) FROM {self.name}").fetchone()  # noqa: S608
        return tuple(row or ())

    def _new(self, connection: psycopg.Connection[Any], known: set[int]) -> list[Row]:
        """Rows that are not known, by one statement, and so by one snapshot."""
        if not self._there(connection):
            return []
        cursor = connection.execute(
            f"SELECT * FROM (SELECT {self._position} AS {_SEEN}_, * FROM {self.name}) AS e "  # noqa: S608
            f"WHERE NOT {_SEEN}_ = ANY(%s) ORDER BY 1",
            [list(known)],
        )
        names = [c.name for c in cursor.description or ()]
        rows = [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]
        kept = [n for n in names if n not in (f"{_SEEN}_", _SEEN)]
        return [as_row(self.name, int(r[f"{_SEEN}_"]), {n: r[n] for n in kept}) for r in rows]

    def _there(self, connection: psycopg.Connection[Any]) -> bool:
        row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [self.name]).fetchone()
        return row is not None and bool(row[0])

    @property
    def _position(self) -> str:
        if self._kinds is not None:
            return _SEEN
        # Of a table that the pipeline made: where a row lies; the page and the place in it.
        return "((ctid::text::point)[0]::bigint * 65536 + (ctid::text::point)[1]::bigint)"

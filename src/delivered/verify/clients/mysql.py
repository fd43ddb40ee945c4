"""A table of a MySQL or MariaDB database, read with PyMySQL by statements of the judge's own."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from delivered import brokers
from delivered.verify.clients.base import Disturbed, Look, Row, as_row

ANSWER_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 20
_POLL_S = 0.05
_RETRY_S = 0.2
_SEEN = "seen_as"
_XA_NOT_ENDED = 1397
_KINDS = {"bytea": "longblob", "text": "longtext"}


class MysqlTable:
    """A table `effects` in a database of its own, with a column that numbers its rows as they are written.

    Args:
        server: that the judge may kill; no other cell uses it meanwhile. name: of the cell.
        seen_by_pipeline: the address that the pipeline is given: the server's, or a proxy's.
        kinds: types of the columns key and value, as PostgreSQL names them.
    """

    system = "mysql"

    def __init__(
        self,
        server: brokers.Broker,
        name: str,
        seen_by_pipeline: str | None = None,
        kinds: tuple[str, str] = ("bytea", "bytea"),
        two_phase: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.name = "effects"
        self.database = f"cell_{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
        self.batch_atomic = not two_phase
        self._server = server
        self._given = seen_by_pipeline or server.bootstrap
        self._kinds = kinds
        self._two_phase = two_phase
        self._extra = extra or {}

    def create(self) -> None:
        self.remove()
        key, value = (_KINDS[k] for k in self._kinds)
        with self._session("") as cursor:
            cursor.execute(f"CREATE DATABASE {self.database} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
            cursor.execute(
                f"CREATE TABLE {self._table} (`key` {key}, value {value}, "
                f"{_SEEN} bigint NOT NULL AUTO_INCREMENT PRIMARY KEY)"
            )

    def remove(self) -> None:
        self.roll_back_prepared()
        with self._session("") as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {self.database}")
            cursor.execute(f"DROP DATABASE IF EXISTS {self._ledger}")

    def options(self) -> dict[str, Any]:
        return {
            "format": "mysql",
            "url": f"mysql://delivered@{self._given}/{self.database}",
            "dbtable": self.name,
            "ledgerSchema": self._ledger,
            **({"mechanism": "two_phase"} if self._two_phase else {}),
            **self._extra,
        }

    def read(self) -> list[Row]:
        """
        Raises:
            pymysql.MySQLError: the server did not answer within 60 s.
        """
        with self._session() as cursor:
            return self._new(cursor, set())

    def follow(self, seen: Callable[[Look], None], stop: threading.Event) -> None:
        """In snapshots of the server's. While it is down, there is nothing to see."""
        import pymysql

        known: set[int] = set()
        state: tuple[Any, ...] = ()
        connection: Any = None
        try:
            while True:
                last = stop.is_set()
                try:
                    if connection is None:
                        connection = self._connect(patience_s=ANSWER_TIMEOUT_S if last else 0.0)
                    with connection.cursor() as cursor:
                        cursor.execute(f"SELECT count(*), sum({_SEEN}) FROM {self._table}")  # noqa: S608
                        now = cursor.fetchone()
                        rows = self._new(cursor, known) if now != state else []
                except (pymysql.MySQLError, OSError):
                    if connection is None and last:
                        raise
                    _drop(connection)
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
            _drop(connection)

    def open_transactions(self, pipeline: str) -> list[str]:
        """Prepared transactions, which hold their locks for ever, and sessions whose transaction does nothing."""
        del pipeline  # one cell at a time uses the server
        with self._session() as cursor:
            cursor.execute(
                "SELECT CONCAT('session ', p.ID) FROM information_schema.INNODB_TRX AS t "
                "JOIN information_schema.PROCESSLIST AS p ON p.ID = t.trx_mysql_thread_id "
                "WHERE p.COMMAND = 'Sleep' AND p.ID <> CONNECTION_ID()"
            )
            idle = [str(text) for (text,) in cursor.fetchall()]
            return [*(text for text, _ in _prepared(cursor)), *idle]

    def roll_back_prepared(self) -> list[str]:
        import pymysql

        with self._session("") as cursor:
            ended = []
            for text, xid in _prepared(cursor):
                deadline = time.monotonic() + ANSWER_TIMEOUT_S
                while True:
                    try:
                        cursor.execute(f"XA ROLLBACK {xid}")
                    except pymysql.MySQLError as error:
                        # The session that prepared it has to be over first; or somebody else was quicker.
                        if error.args[0] != _XA_NOT_ENDED or time.monotonic() > deadline:
                            raise
                        if any(x == xid for _, x in _prepared(cursor)):
                            time.sleep(_RETRY_S)
                            continue
                        break
                    ended.append(text)
                    break
        return ended

    @contextmanager
    def locked(self) -> Iterator[None]:
        """As a migration holds a table: nobody can write to it, nobody can read it."""
        with self._session() as other:
            other.execute(f"SET lock_wait_timeout = {LOCK_TIMEOUT_S}")
            other.execute(f"LOCK TABLES {self.name} WRITE")
            yield
            other.execute("UNLOCK TABLES")

    @contextmanager
    def reading(self) -> Iterator[None]:
        count = f"SELECT count(*) FROM {self.name}"  # noqa: S608
        with self._session() as other:
            other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            other.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            other.execute(count)
            before = other.fetchone()
            yield
            other.execute(count)
            if other.fetchone() != before:
                raise Disturbed(f"a reader's snapshot began with {before} rows of {self.name} and ended with others")
            other.execute("COMMIT")

    @property
    def _table(self) -> str:
        return f"{self.database}.{self.name}"

    @property
    def _ledger(self) -> str:
        return f"{self.database}_ledger"

    @contextmanager
    def _session(self, database: str | None = None) -> Iterator[Any]:
        with closing(self._connect(database)) as connection, connection.cursor() as cursor:
            yield cursor

    def _connect(self, database: str | None = None, patience_s: float = ANSWER_TIMEOUT_S) -> Any:
        """To the server itself, never through a proxy."""
        import pymysql

        host, _, port = self._server.bootstrap.rpartition(":")
        deadline = time.monotonic() + patience_s
        given = {"database": self.database if database is None else database or None, "charset": "utf8mb4"}
        while True:
            try:
                return pymysql.connect(
                    host=host, port=int(port), user="delivered", autocommit=True, connect_timeout=5, **given
                )
            except pymysql.MySQLError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_S)

    def _new(self, cursor: Any, known: set[int]) -> list[Row]:
        """Rows that are not known, by one statement, and so by one snapshot."""
        least = min(set(range(1, len(known) + 2)) - known)
        cursor.execute(f"SELECT {_SEEN}, `key`, value FROM {self._table} WHERE {_SEEN} >= {least} ORDER BY 1")  # noqa: S608
        found = ((int(n), {"key": key, "value": value}) for n, key, value in cursor.fetchall())
        return [as_row(self.name, n, columns) for n, columns in found if n not in known]


def _prepared(cursor: Any) -> list[tuple[str, str]]:
    """Every prepared transaction of the server: for people, and as SQL writes its id."""
    cursor.execute("XA RECOVER")
    found = []
    for form, first, second, data in cursor.fetchall():
        raw = data if isinstance(data, bytes) else str(data).encode()
        parts = f"x'{raw[:first].hex()}',x'{raw[first : first + second].hex()}',{int(form)}"
        found.append((raw.decode("utf-8", "replace"), parts))
    return found


def _drop(connection: Any) -> None:
    if connection is not None and connection.open:
        connection._force_close()  # no goodbye to a server that may be gone

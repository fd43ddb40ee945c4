"""A table of MySQL itself, read with PyMySQL by the judge's own statements; the same of MariaDB."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from delivered_lab.verify.proxy import MysqlProxy
from delivered_lab.verify.systems.base import (
    ANSWER_TIMEOUT_S,
    LOCK_TIMEOUT_S,
    RETRY_S,
    SEEN,
    Row,
    SinkKind,
    SqlTable,
    Statements,
    System,
    as_row,
)

_XA_NOT_ENDED = 1397
_IDLE_S = 5.0
_KINDS = {"bytea": "longblob", "text": "longtext"}


class MysqlTable(SqlTable):
    """Has the server to itself."""

    system = "mysql"
    begin_snapshot = ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "START TRANSACTION WITH CONSISTENT SNAPSHOT")
    lock = (f"SET lock_wait_timeout = {LOCK_TIMEOUT_S}", "LOCK TABLES {table} WRITE")
    unlock = "UNLOCK TABLES"

    def create(self) -> None:
        self.remove()
        key, value = (_KINDS[k] for k in self._place.workload.kinds)
        if self.upserted:
            key = "varbinary(255) NOT NULL UNIQUE"
        with self._cursor("") as cursor:
            cursor.execute(f"CREATE DATABASE {self.database} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
            cursor.execute(
                f"CREATE TABLE {self._table} (`key` {key}, value {value}, "
                f"{SEEN} bigint NOT NULL AUTO_INCREMENT PRIMARY KEY)"
            )

    def remove(self) -> None:
        self.roll_back_prepared()
        with self._cursor("") as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {self.database}")
            cursor.execute(f"DROP DATABASE IF EXISTS {self._ledger}")

    def options(self) -> dict[str, Any]:
        return {
            "format": "mysql",
            "url": f"mysql://delivered@{self._address}/{self.database}",
            "dbtable": self.name,
            "ledgerSchema": self._ledger,
            **self._asked,
        }

    def open_transactions(self, pipeline: str) -> list[str]:
        """Prepared transactions, which hold their locks forever, and sessions that stay idle in a transaction.

        The server's list of transactions is older than its list of sessions (by a tenth of a second, says its manual):
        a session that has just committed is idle in the one and open in the other. So it is looked for again.
        """
        del pipeline  # only one case at a time uses the server
        deadline = time.monotonic() + _IDLE_S
        with self._cursor() as cursor:
            idle = _idle(cursor)
            while idle and time.monotonic() < deadline:
                time.sleep(RETRY_S)
                idle &= _idle(cursor)
            return [*(text for text, _ in _prepared(cursor)), *sorted(idle)]

    def roll_back_prepared(self) -> list[str]:
        import pymysql

        with self._cursor("") as cursor:
            ended = []
            for text, xid in _prepared(cursor):
                deadline = time.monotonic() + ANSWER_TIMEOUT_S
                while True:
                    try:
                        cursor.execute(f"XA ROLLBACK {xid}")
                    except pymysql.MySQLError as error:
                        # The session that prepared it must end first; or somebody else was quicker.
                        if error.args[0] != _XA_NOT_ENDED or time.monotonic() > deadline:
                            raise
                        if any(x == xid for _, x in _prepared(cursor)):
                            time.sleep(RETRY_S)
                            continue
                        break
                    ended.append(text)
                    break
        return ended

    def _run(self, connection: Any, *statements: str) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    @property
    def _table(self) -> str:
        return f"{self.database}.{self.name}"

    @property
    def _ledger(self) -> str:
        return f"{self.database}_ledger"

    @contextmanager
    def _cursor(self, database: str | None = None) -> Iterator[Any]:
        with self._session(database) as connection, connection.cursor() as cursor:
            yield cursor

    def _lost(self) -> tuple[type[Exception], ...]:
        import pymysql

        return (pymysql.MySQLError, OSError)

    def _connect_once(self, database: str) -> Any:
        import pymysql

        host, _, port = self._server.bootstrap.rpartition(":")
        options = {"database": database or None, "charset": "utf8mb4"}
        return pymysql.connect(
            host=host, port=int(port), user="delivered", autocommit=True, connect_timeout=5, **options
        )

    def _drop(self, connection: Any) -> None:
        if connection is not None and connection.open:
            connection._force_close()  # skip the goodbye: the server may be down

    def _state(self, connection: Any) -> tuple[Any, ...]:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*), sum({SEEN}) FROM {self._table}")  # noqa: S608
            return tuple(cursor.fetchone())

    def _new(self, connection: Any, known: set[int]) -> list[Row]:
        least = min(set(range(1, len(known) + 2)) - known)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {SEEN}, `key`, value FROM {self._table} WHERE {SEEN} >= {least} ORDER BY 1")  # noqa: S608
            found = ((int(n), {"key": key, "value": value}) for n, key, value in cursor.fetchall())
            return [as_row(self.name, n, columns) for n, columns in found if n not in known]


def _idle(cursor: Any) -> set[str]:
    """Sessions of others that are idle in a transaction."""
    cursor.execute(
        "SELECT CONCAT('session ', p.ID, ', transaction ', t.trx_id) FROM information_schema.INNODB_TRX AS t "
        "JOIN information_schema.PROCESSLIST AS p ON p.ID = t.trx_mysql_thread_id "
        "WHERE p.COMMAND = 'Sleep' AND p.ID <> CONNECTION_ID()"
    )
    return {str(text) for (text,) in cursor.fetchall()}


def _prepared(cursor: Any) -> list[tuple[str, str]]:
    """Every prepared transaction of the server: for display, and its id as SQL."""
    mariadb = "mariadb" in str(cursor.connection.server_version).lower()
    cursor.execute("XA RECOVER" if mariadb else "XA RECOVER CONVERT XID")
    found = []
    for form, first, second, data in cursor.fetchall():
        raw = data if isinstance(data, bytes) else bytes.fromhex(str(data).removeprefix("0x"))
        parts = f"x'{raw[:first].hex()}',x'{raw[first : first + second].hex()}',{int(form)}"
        found.append((raw.decode("utf-8", "replace"), parts))
    return found


def build_system(server: str, properties: Mapping[str, str]) -> System:
    """Tables of one kind of server: rows with their decision in one transaction, and by XA."""
    words = Statements("XA PREPARE", "XA COMMIT", "LOAD DATA")

    def build_sink(name: str, two_phase: bool) -> SinkKind:
        return SinkKind(
            name, "mysql", MysqlTable, server, two_phase=two_phase, locks=True, statements=words, upserts=True
        )  # fmt: skip

    sinks = build_sink(server, False), build_sink(f"{server}-xa", True)
    return System(sinks, properties=properties, proxy=MysqlProxy)


SYSTEM = build_system("mysql", {"tls_version": ""})
"""Without TLS, which MySQL offers by itself: the proxy reads statements."""
MARIADB = build_system("mariadb", {})

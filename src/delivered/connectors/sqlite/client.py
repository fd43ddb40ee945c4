"""Connections to a database file, translation of errors, and the ledger's tables, versioned.

Durability. `synchronous=EXTRA`: in rollback-journal mode SQLite also syncs the folder after deleting the journal;
otherwise a power loss can undo a committed transaction. In WAL mode it is the same as FULL. A new file uses SQLite's
default, the rollback journal: SQLite 3.7.0 to 3.51.2, which most Pythons include, has a race in WAL mode between
checkpoints and writers of several processes that can corrupt the file. A file that its owner has set to WAL stays so.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from delivered.kits.options import not_a_file
from delivered.kits.sql.database import LEDGER_TABLES, Database, Dialect, identify_file, is_newest
from delivered.model.errors import BadRecord, DeliveredError, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S

WAL_RACE_FIXED = (3, 51, 3)


class FileConnection(sqlite3.Connection):
    """Knows which file it has open (`identify_file`)."""

    file: tuple[int, int] | None = None


def connect(path: str, *, mode: str = "rwc") -> FileConnection:
    """Open the database with manual transactions.

    Args:
        mode: "ro", "rw" or "rwc" (create). "ro" changes no rows, but rolls back a hot journal, as every reader must:
            SQLite's own mode=ro rejects such a file forever.

    Raises:
        DeliveredError: it cannot be opened.
    """
    if mode == "rwc" and not Path(path).parent.is_dir():
        raise UsageError("FOLDER_MISSING", path=path, parent=Path(path).parent)
    try:
        connection = sqlite3.connect(
            f"file:{quote(path)}?mode={'rw' if mode == 'ro' else mode}",
            uri=True,
            timeout=CONNECT_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            factory=FileConnection,
        )
        connection.file = identify_file(path)
        connection.execute("PRAGMA synchronous=EXTRA")
        if mode == "ro":
            connection.execute("PRAGMA query_only=ON")
    except sqlite3.Error as error:
        raise explained(error, path) from None
    return connection


def begin(connection: sqlite3.Connection, timeout_s: float | None = None) -> None:
    """Take the write lock; wait at most `timeout_s`, by default 30 s, for another writer."""
    wait_s = REQUEST_TIMEOUT_S if timeout_s is None else timeout_s
    connection.execute(f"PRAGMA busy_timeout={int(wait_s * 1000)}")
    connection.execute("BEGIN IMMEDIATE")


def rollback(connection: sqlite3.Connection) -> None:
    """Roll back. Never raises: if the rollback fails, the connection is closed, which also rolls back."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        with contextlib.suppress(sqlite3.Error):
            connection.close()


@contextlib.contextmanager
def writing(connection: sqlite3.Connection, path: str, timeout_s: float | None = None) -> Iterator[None]:
    """One transaction, committed at the end or rolled back. Not for the ledger, which must know the outcome.

    Raises:
        DeliveredError: the database rejected it.
    """
    try:
        begin(connection, timeout_s)
        yield
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        rollback(connection)
        raise explained(error, path) from error
    except BaseException:
        rollback(connection)
        raise


def explained(error: Exception, path: str) -> DeliveredError:
    name = _name(error)
    detail = f"{error} ({name})"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Unreachable("DATABASE_LOCKED", path=path, detail=detail)
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        return not_a_file(path) or Unreachable("DATABASE_READONLY", path=path, detail=detail, parent=Path(path).parent)
    if name.startswith("SQLITE_FULL"):
        return DeliveredError("DISK_FULL.SQLITE", path=path, detail=detail)
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return UsageError("DATABASE_DAMAGED", path=path, detail=detail)
    if refuses_a_row(error):
        return row_refused(path, "a row", error)
    return Unreachable("DATABASE_ERROR.SQLITE", path=path, detail=detail)


def _name(error: Exception) -> str:
    """Python knows the names of older codes alone."""
    name = getattr(error, "sqlite_errorname", None)
    return type(error).__name__ if name in (None, "unknown") else str(name)


_OF_VALUES = re.compile(r"JSON|integer overflow|too complex|cannot store|too big")


def refuses_a_row(error: Exception) -> bool:
    """Whether SQLite refused a row: for a constraint, its length, or what an expression of the table makes of it."""
    if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError):
        return True
    name = getattr(error, "sqlite_errorname", None)
    return name == "SQLITE_ERROR" and _OF_VALUES.search(str(error)) is not None


def row_refused(path: str, row: str, error: Exception) -> BadRecord:
    """Args: row: which one."""
    detail = f"{error} ({_name(error)})"
    return BadRecord("ROW_REFUSED.SQLITE", path=path, row=row, detail=detail)


@dataclass(frozen=True)
class SqliteDatabase(Database[sqlite3.Connection]):
    """The file that the user named.

    Attributes:
        foreign_keys: check them; SQLite does not by default.
    """

    path: str
    foreign_keys: bool = False

    @property
    def where(self) -> str:
        return f"in {self.path!r}"

    def connect(self, role: str, *, writes: bool = True) -> sqlite3.Connection:
        del role
        connection = connect(self.path, mode="rwc" if writes else "ro")
        if self.foreign_keys:
            connection.execute("PRAGMA foreign_keys=ON")
        return connection

    @property
    def dialect(self) -> Dialect:
        return DIALECT

    @contextlib.contextmanager
    def borrow(self, *, writes: bool) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(self.connect("task", writes=writes)) as connection, self.explaining():
            if writes:
                begin(connection)
            yield connection
            if writes:
                connection.execute("COMMIT")

    def exists(self) -> bool:
        return Path(self.path).exists()

    def version(self, connection: sqlite3.Connection) -> int:
        return ledger_version(connection)

    def migrate(self, connection: sqlite3.Connection) -> None:
        migrate(connection, self.path)

    def begin(self, connection: sqlite3.Connection) -> None:
        begin(connection)

    def claiming(self, connection: sqlite3.Connection) -> contextlib.AbstractContextManager[None]:
        return writing(connection, self.path, CONNECT_TIMEOUT_S)

    def idle(self, connection: sqlite3.Connection) -> bool:
        try:
            moved = isinstance(connection, FileConnection) and connection.file != identify_file(self.path)
            return not connection.in_transaction and not moved
        except sqlite3.ProgrammingError:  # closed
            return False

    def may_commit(self, error: Exception) -> bool:
        del error
        return False

    def errors(self) -> type[Exception]:
        return sqlite3.Error

    def explained(self, error: Exception) -> DeliveredError:
        return explained(error, self.path)

    def is_constraint(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.IntegrityError)


DIALECT = Dialect(
    tables={
        name: f"_delivered_{table}"
        for name, table in LEDGER_TABLES.items()
        if name != "marker"  # there are no prepared transactions
    },
    value=lambda statement: statement,
    written={"decision": "rowid", "started": "rowid"},
    hold="",  # there is only one write transaction at a time
    pack=lambda names: json.dumps(list(names)),
    unpack=json.loads,
    hash=lambda value: f"x'{value.hex()}'",
    snapshot=("BEGIN",),
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE {owner} (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, id TEXT NOT NULL, epoch INTEGER NOT NULL,
            host TEXT NOT NULL, process INTEGER NOT NULL, started_ms INTEGER NOT NULL, superseded TEXT NOT NULL,
            PRIMARY KEY (pipeline, sink))""",
        """CREATE TABLE {decision} (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, batch INTEGER NOT NULL,
            decision TEXT NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation, batch))""",
        """CREATE TABLE {started} (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, batch INTEGER NOT NULL,
            offsets TEXT NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation))""",
        "CREATE TABLE _delivered_table (name TEXT PRIMARY KEY, arrow_schema BLOB NOT NULL)",
    ),
    (
        """CREATE TABLE {memory} (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, number INTEGER NOT NULL UNIQUE,
            batch INTEGER NOT NULL, newest_us INTEGER NOT NULL, former_us INTEGER NOT NULL, made_ms INTEGER NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation))""",
        """CREATE TABLE {admitted} (
            number INTEGER NOT NULL, epoch INTEGER NOT NULL, batch INTEGER NOT NULL, hash BLOB NOT NULL,
            at_us INTEGER NOT NULL, until_us INTEGER NOT NULL,
            PRIMARY KEY (number, epoch, batch, hash, at_us)) WITHOUT ROWID""",
        """CREATE TABLE {seen} (
            number INTEGER NOT NULL, hash BLOB NOT NULL, until_us INTEGER NOT NULL, batch INTEGER NOT NULL,
            PRIMARY KEY (number, hash, until_us)) WITHOUT ROWID""",
        "CREATE INDEX {seen}_of_time ON {seen} (number, until_us)",
    ),
    (
        """CREATE TABLE {archive} (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, entry BLOB NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation)) WITHOUT ROWID""",
    ),
    (
        """CREATE TABLE {skipped} (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, batch INTEGER NOT NULL,
            kind TEXT NOT NULL, total INTEGER NOT NULL)""",
        "CREATE INDEX {skipped}_of ON {skipped} (pipeline, sink, incarnation, batch)",
        """CREATE TABLE {dead_letter} (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, incarnation TEXT NOT NULL, batch INTEGER NOT NULL,
            shard INTEGER NOT NULL, reason TEXT NOT NULL, record TEXT NOT NULL)""",
    ),
    (
        """CREATE TABLE {seal} (
            pipeline TEXT NOT NULL, sink TEXT NOT NULL, number INTEGER NOT NULL, seal TEXT NOT NULL,
            PRIMARY KEY (pipeline, sink, number)) WITHOUT ROWID""",
    ),
)
"""Statements that migrate the ledger's tables from version n to n + 1. Append-only."""


def ledger_version(connection: sqlite3.Connection) -> int:
    """Version of the ledger's tables; 0: they do not exist."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = '_delivered_migration'").fetchone() is None:
        return 0
    row = connection.execute("SELECT coalesce(max(version), 0) FROM _delivered_migration").fetchone()
    return int(row[0])


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Create or migrate the ledger's tables; does nothing if they are up to date.

    Raises:
        UsageError: a newer version of this package created them.
        DeliveredError: the database rejected it.
    """
    try:
        if is_newest(ledger_version(connection), len(MIGRATIONS), f"in {path!r}"):
            return
    except sqlite3.Error as error:
        raise explained(error, path) from error
    with writing(connection, path, CONNECT_TIMEOUT_S):
        connection.execute(
            "CREATE TABLE IF NOT EXISTS _delivered_migration (version INTEGER PRIMARY KEY, applied_at_ms INTEGER)"
        )
        # Check again: another process may have been faster.
        for version in range(ledger_version(connection), len(MIGRATIONS)):
            for statement in MIGRATIONS[version]:
                connection.execute(DIALECT(statement))
            connection.execute(
                "INSERT INTO _delivered_migration VALUES (?, ?)", (version + 1, time.time_ns() // 1_000_000)
            )

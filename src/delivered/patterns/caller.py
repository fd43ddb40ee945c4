"""The caller's own transaction, through the client that the caller uses.

psycopg 3, PyMySQL, sqlite3, or a SQLAlchemy Session or Connection over one of them. Nothing here commits or rolls back
more than its own savepoint. Client libraries are recognised by type, not imported.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.model.errors import Refused, UsageError

DIALECTS = ("postgres", "mysql", "sqlite")
_DUPLICATE_MYSQL, _NO_TABLE_MYSQL, _NO_SAVEPOINT_MYSQL = 1062, 1146, 1305
_IN_TRANSACTION_MYSQL = 1  # SERVER_STATUS_IN_TRANS
NOW_MS = {
    "postgres": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)",
    # Not of NOW(): where clocks are set back in autumn, one hour of local time would come twice.
    "mysql": "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000 AS SIGNED)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}
"""Unix time in ms by the database's clock, which all its clients share."""
_CLIENTS = {"psycopg.Connection": "postgres", "pymysql.Connection": "mysql", "sqlite3.Connection": "sqlite"}
_numbers = itertools.count()


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        rows: empty for statements that return none.
        count: rows that were changed.
    """

    rows: Sequence[tuple[Any, ...]]
    count: int


class Caller:
    """One connection of the caller.

    Attributes:
        dialect: one of `DIALECTS`.
        driver: the client's own connection, also below SQLAlchemy.

    Args:
        writes: a transaction that begins here will write.

    Raises:
        UsageError: not a connection of a client that is known.
        Refused: each statement would commit by itself.
    """

    def __init__(self, connection: Any, *, what: str, writes: bool = True) -> None:
        names = _names(connection)
        self._connection = connection
        self._alchemy: Any = None
        if names & {"sqlalchemy.Session", "sqlalchemy.scoped_session"}:
            self._alchemy = connection.connection()
        elif "sqlalchemy.Connection" in names:
            self._alchemy = connection
        self.driver = connection if self._alchemy is None else self._alchemy.connection.driver_connection
        dialects = [dialect for name, dialect in _CLIENTS.items() if name in _names(self.driver)]
        if not dialects:
            raise UsageError(
                "CONNECTION_TYPE",
                what=what,
                module=type(connection).__module__,
                type=type(connection).__qualname__,
                driver="." if self._alchemy is None else f" over {type(self.driver).__module__}.",
            )
        self.dialect = dialects[0]
        self._begin(what, writes)

    def _begin(self, what: str, writes: bool) -> None:
        """Refuse autocommit; begin in SQLite, where a savepoint outside of a transaction would commit by itself."""
        driver = self.driver
        if self.dialect == "postgres":
            alone, how = driver.autocommit and driver.info.transaction_status == 0, "connection.autocommit = False"
        elif self.dialect == "mysql":
            if driver.get_autocommit():
                self.execute("DO 0")  # after a deadlock, the client still reports the transaction that it ended
            alone = driver.get_autocommit() and not driver.server_status & _IN_TRANSACTION_MYSQL
            how = "connection.autocommit(False)"
        else:
            mode = getattr(driver, "autocommit", -1)  # -1: as before Python 3.12, by isolation_level
            alone = not driver.in_transaction and (mode is True or (mode == -1 and driver.isolation_level is None))
            how = 'connection.execute("BEGIN")'
        if alone:
            raise Refused("AUTOCOMMIT.CONNECTION" if self._alchemy is None else "AUTOCOMMIT.ENGINE", what=what, how=how)
        if self.dialect == "sqlite" and not driver.in_transaction:
            # A transaction that has read first cannot wait for another writer: SQLite fails it at once.
            self.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Answer:
        """Run one statement; `?` stands for a value."""
        text = statement if self.dialect == "sqlite" else statement.replace("?", "%s")
        if self._alchemy is not None:
            result = self._alchemy.exec_driver_sql(text, tuple(values))
            return Answer([tuple(r) for r in result.fetchall()] if result.returns_rows else [], result.rowcount)
        with contextlib.closing(self._cursor()) as cursor:
            with self._answered():
                cursor.execute(text, tuple(values))
            return Answer(list(cursor.fetchall()) if cursor.description else [], cursor.rowcount)

    def _answered(self) -> contextlib.AbstractContextManager[Any]:
        """Waits for the answer, also in psycopg's pipeline mode, where rows and their count are unknown before it."""
        if self.dialect != "postgres" or not self.driver.pgconn.pipeline_status:
            return contextlib.nullcontext()
        pipeline: contextlib.AbstractContextManager[Any] = self.driver.pipeline()  # nested: its end waits
        return pipeline

    def _cursor(self) -> Any:
        """A cursor that returns tuples, regardless of the connection's row factory."""
        if self.dialect == "postgres":
            import psycopg

            if issubclass(self.driver.cursor_factory, getattr(psycopg, "RawCursor", ())):  # takes $1 instead of %s
                return psycopg.Cursor(self.driver, row_factory=psycopg.rows.tuple_row)
            return self.driver.cursor(row_factory=psycopg.rows.tuple_row)
        if self.dialect == "mysql":
            from pymysql.cursors import Cursor

            return self.driver.cursor(Cursor)
        cursor = self.driver.cursor()
        cursor.row_factory = None
        return cursor

    def insert(self, table: str, columns: Sequence[str], values: Sequence[Any]) -> bool:
        """Insert a row unless its unique key exists. Waits for a transaction that is inserting the same key.

        A duplicate leaves the transaction usable: PostgreSQL would abort it on an error, so the statement has a clause
        for it; MySQL undoes the statement alone, and its clauses also hide other errors.

        Returns: False: the key is there.
        """
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608
        if self.dialect != "mysql":
            return self.execute(f"{statement} ON CONFLICT DO NOTHING", values).count == 1
        try:
            self.execute(statement, values)
        except Exception as error:
            if cause(error).args[:1] != (_DUPLICATE_MYSQL,):
                raise
            return False
        return True

    @contextlib.contextmanager
    def savepoint(self, committed: Callable[[], Exception]) -> Iterator[None]:
        """Rolls back what is done inside if it raises.

        Args:
            committed: creates the error for a transaction that ended inside.
        """
        if self._alchemy is not None:  # a session has rows that it has not sent yet: its own savepoint sends them
            nested = self._connection.begin_nested()
            if self._connection is not self._alchemy:
                self._connection.connection()  # a session makes its savepoint only now
            release, undo = nested.commit, nested.rollback
        else:
            name = f"delivered_{next(_numbers)}"  # MySQL: a second savepoint of one name replaces the first
            self.execute(f"SAVEPOINT {name}")
            release = lambda: self.execute(f"RELEASE SAVEPOINT {name}")  # noqa: E731
            undo = lambda: self.execute(f"ROLLBACK TO SAVEPOINT {name}")  # noqa: E731
        try:
            yield
            if self._connection is not self._alchemy is not None:
                self._connection.flush()  # here, as an error of a row that it has not sent yet is the block's
        except BaseException:
            with contextlib.suppress(Exception):  # the connection or the transaction has ended, and with it all rows
                undo()
            raise
        try:
            release()
        except Exception as error:
            if self._ended(error):
                raise committed() from error
            raise

    def quoted(self, name: str) -> str:
        """A table or column, `schema.table` included."""
        return quoted(self.dialect, name)

    def exact(self, text: str) -> str | bytes:
        """A text for a column that compares exactly: bytes in MySQL, whose collations ignore spaces at the end."""
        return text.encode() if self.dialect == "mysql" else text

    @property
    def latest(self) -> str:
        """SQL at the end of a SELECT that must see what was committed last: an ordinary read of MySQL does not see what
        was committed after the transaction's first one."""
        return " LOCK IN SHARE MODE" if self.dialect == "mysql" else ""

    def check_format(self, table: str, what: str, newest: int, absent: Refused) -> None:
        """Read the version of tables' format from `table`.

        Args:
            what: what the tables are, for messages: "a saga log".
            absent: raised if there is no such table.

        Raises:
            Refused: a later version of this package made them.
        """
        try:
            rows = self.execute(f"SELECT version FROM {table}").rows  # noqa: S608
        except Exception as error:
            if not self.missing(error):
                raise
            rows = ()
        if not rows:
            raise absent
        version = int(rows[0][0])
        if not 0 <= version <= newest:
            raise Refused("FORMAT_NEWER", what=what, version=version, newest=newest)

    def _ended(self, error: Exception) -> bool:
        """The error says that the savepoint's transaction has ended, or failed."""
        own = cause(error)
        if self.dialect == "postgres":
            return getattr(own, "sqlstate", None) in ("3B001", "25P01", "25P02")
        return own.args[:1] == (_NO_SAVEPOINT_MYSQL,) or "no such savepoint" in str(own)

    def missing(self, error: Exception) -> bool:
        """The error says that a table does not exist."""
        own = cause(error)
        if self.dialect == "postgres":
            return getattr(own, "sqlstate", None) in ("42P01", "3F000")  # no table, no schema
        if self.dialect == "mysql":
            return own.args[:1] == (_NO_TABLE_MYSQL,)
        return "no such table" in str(own)


def format_ddl(table: str, version: int, tail: str) -> tuple[str, str]:
    """The statements that make and fill the table of `Caller.check_format`."""
    return (
        f"CREATE TABLE IF NOT EXISTS {table} (\n  version BIGINT NOT NULL PRIMARY KEY\n){tail}",
        f"INSERT INTO {table} SELECT {version} FROM (SELECT 1 AS one) AS x "  # noqa: S608
        f"WHERE NOT EXISTS (SELECT 1 FROM {table})",
    )


def json_text(value: Any) -> str:
    """A value as JSON that every database here stores; text is JSON already.

    Raises:
        ValueError, TypeError, RecursionError: it is none; or keys of a dict become the same key of JSON, such as 1 and
            "1", of which databases keep one value.
    """
    given = isinstance(value, str)
    text = value if given else json.dumps(value, ensure_ascii=False, allow_nan=False)
    parsed = json.loads(text, parse_constant=_no_constant, object_pairs_hook=None if given else _distinct)
    if unstorable(json.dumps(parsed, ensure_ascii=False)) or _holds_nul(parsed):
        raise ValueError("it holds the character NUL or half of a surrogate pair")
    return text


def json_content(text: str) -> str:
    """The same for two texts of one JSON value: `true` is not `1`. Other numbers than integers of 64 bits count as
    doubles, as MySQL keeps them.

    Raises:
        ValueError, RecursionError: it is none.
    """
    return json.dumps(json.loads(text, parse_int=_number, parse_float=_number), sort_keys=True)


def _number(text: str) -> int | float:
    if len(text) <= 20 and text.lstrip("-").isdigit() and -(1 << 63) <= int(text) < 1 << 64:
        return int(text)
    double = float(text)
    return int(double) if double.is_integer() else double


def unstorable(text: str) -> bool:
    """PostgreSQL stores no NUL; UTF-8 has no surrogates."""
    return any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text)


def as_text(value: Any) -> str:
    """What a database returned for a text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not in JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"two keys of a dict become the same key of JSON: {twice!r:.100}; make every key text")
    return found


def _holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any("\0" in k or _holds_nul(v) for k, v in value.items())
    if isinstance(value, list):
        return any(map(_holds_nul, value))
    return isinstance(value, str) and "\0" in value


def cause(error: Exception) -> Exception:
    """The client's own error below SQLAlchemy's."""
    return getattr(error, "orig", None) or error


NAME_LENGTHS_MAX = {"postgres": 63, "mysql": 64}
"""In bytes, and in characters."""


def quoted(dialect: str, name: str) -> str:
    """A name for SQL; dots separate schema and table.

    Raises:
        UsageError: not a name, or longer than the database keeps: PostgreSQL would cut it, and take another table's.
    """
    mark = "`" if dialect == "mysql" else '"'
    parts = name.split(".") if isinstance(name, str) else []
    if not parts or not all(parts) or any(c in name for c in "\0%?"):
        raise UsageError("TABLE_NAME", name=name)
    for part in parts:
        length = len(part) if dialect == "mysql" else len(part.encode())
        if length > NAME_LENGTHS_MAX.get(dialect, length):
            raise UsageError(
                "NAME_TOO_LONG.PATTERN",
                name=part,
                length=length,
                unit="characters" if dialect == "mysql" else "bytes",
                dialect=dialect,
                limit=NAME_LENGTHS_MAX[dialect],
            )
    return ".".join(mark + part.replace(mark, mark * 2) + mark for part in parts)


def check_dialect(dialect: str) -> str:
    """
    Raises:
        UsageError: unknown.
    """
    if dialect not in DIALECTS:
        raise UsageError("DIALECT", dialect=dialect, known=", ".join(DIALECTS))
    return dialect


def _names(value: Any) -> set[str]:
    """`library.Class` of a value's classes, and of what it stands for: tracing libraries hand out proxies."""
    return {f"{c.__module__.partition('.')[0]}.{c.__qualname__}" for c in value.__class__.__mro__}

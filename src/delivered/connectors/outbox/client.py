"""Connections to the database of an outbox, and translation of its errors."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from delivered.connectors.outbox import OWNER, OutboxOptions
from delivered.kits.mysql import DENIED, FULL, LOGIN, LOST, address, tls_of_url
from delivered.kits.sql.database import pin_postgres, refuses_login
from delivered.model import patience
from delivered.model.errors import BadRecord, DeliveredError, Unreachable, UsageError, extra
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.patience import connect_timeout_s, left_s
from delivered.patterns.caller import Caller, cause
from delivered.source import id_bytes, id_text

if TYPE_CHECKING:
    import psycopg


# Values that PostgreSQL's client cannot read: texts that are not UTF-8, and times outside of Python's range.
#
# Texts of a database with the encoding SQL_ASCII are any bytes, which the server refuses to send as UTF-8. They are
# read and written as they are: bytes that are not UTF-8 become lone surrogates in Python, and back.

_OF_ANY_BYTES = "SQL_ASCII"
_TEXTS = ("text", "varchar", "bpchar", "name", 0)
"""Types whose values are strings; 0: every type unknown to the client."""


def raw_texts(connection: psycopg.Connection[Any]) -> None:
    """Read and write texts as bytes, if the database has no encoding. Outside any transaction."""
    if connection.info.parameter_status("server_encoding") != _OF_ANY_BYTES:
        return
    from psycopg.adapt import Loader
    from psycopg.pq import Format
    from psycopg.types.string import StrDumperUnknown

    class Load(Loader):
        def load(self, data: Any) -> str | None:
            return id_text(bytes(data))

    class LoadBinary(Load):
        format = Format.BINARY

    class Dump(StrDumperUnknown):
        def dump(self, obj: str) -> bytes:
            return id_bytes(obj)

    connection.execute(f"SET client_encoding = {_OF_ANY_BYTES}")
    if not connection.autocommit:
        connection.commit()  # a rollback would set it back
    for name in _TEXTS:
        for loader in (Load, LoadBinary):
            connection.adapters.register_loader(name, loader)
    connection.adapters.register_dumper(str, Dump)


def beyond_python(connection: psycopg.Connection[Any]) -> None:
    """Read dates and times outside of Python's range, such as infinity, as text."""
    from psycopg import DataError
    from psycopg.types import datetime as times

    def reading(kind: type[Any]) -> type[Any]:
        class Load(kind):  # type: ignore[misc]
            def load(self, data: Any) -> Any:
                try:
                    return super().load(data)
                except DataError:
                    return bytes(data).decode()

        return Load

    loaders = {
        "date": times.DateLoader, "time": times.TimeLoader, "timetz": times.TimetzLoader,
        "timestamp": times.TimestampLoader, "timestamptz": times.TimestamptzLoader, "interval": times.IntervalLoader,
    }  # fmt: skip
    for name, kind in loaders.items():
        connection.adapters.register_loader(name, reading(kind))


T = TypeVar("T")

_CONNECT_TRY_S = 5
_NO_DATABASE_RIGHT = 1044
_SQL_MODE = "NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION,STRICT_ALL_TABLES"
"""Overrides the server's mode: PAD_CHAR_TO_FULL_LENGTH would pad values with blanks."""


def connect(options: OutboxOptions) -> Any:
    """Open a connection with manual transactions, at a level where each statement sees what was committed before it.

    Raises:
        Unreachable: once the patience of a start, or of a running query, is over.
        UsageError: login or database is wrong.
        MissingExtra: the client library is not installed.
    """
    with explaining(options):
        match options.dialect:
            case "postgres":
                return patiently(options, lambda: _postgres(options))
            case "mysql":
                return patiently(options, lambda: _mysql(options))
            case _:
                return _sqlite(options)


def replication(options: OutboxOptions) -> psycopg.Connection[Any]:
    """A connection that takes commands of PostgreSQL's replication protocol."""
    with explaining(options):
        return _postgres(options, replication="database", autocommit=True)


def patiently(options: OutboxOptions, ask: Callable[[], T]) -> T:
    """Ask until the server answers; `ask` changes nothing, or may be called again."""

    def explained_() -> T:
        with explaining(options):
            return ask()

    return patience.patiently(options.system, explained_, patience_s=patience.patience_s(answered=False))


@contextlib.contextmanager
def explaining(options: OutboxOptions) -> Iterator[None]:
    """Translate the client's errors."""
    try:
        yield
    except DeliveredError:
        raise
    except Exception as error:
        explanation = explained(error, options)
        if explanation is None:
            raise
        raise explanation from error


@contextlib.contextmanager
def transaction(options: OutboxOptions, connection: Any, *, writes: bool = False) -> Iterator[Caller]:
    """One transaction, committed at the end or rolled back.

    Args:
        writes: SQLite takes its write lock at the beginning, so that nothing that was read changes before the write.
    """
    with explaining(options):
        try:
            if options.dialect == "sqlite":
                connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            yield Caller(connection, what=OWNER)
            connection.commit()
        except BaseException:
            with contextlib.suppress(Exception):
                connection.rollback()
            raise


def sqlstate(error: BaseException) -> str:
    """PostgreSQL's code of an error, also below ours; empty: there is none."""
    state = getattr(error, "sqlstate", None) or getattr(error.__cause__, "sqlstate", None)
    return str(state or "")


def explained(error: Exception, options: OutboxOptions) -> DeliveredError | None:
    """Our error for a client's; None: it is not a client's."""
    own = cause(error)
    if isinstance(own, UnicodeDecodeError):  # MariaDB stores surrogates
        return BadRecord("OUTBOX_TEXT", table=options.table, system=options.system, error=own)
    library = type(own).__module__.partition(".")[0]
    if library not in ("psycopg", "pymysql", "sqlite3"):
        return None
    text, where = " ".join(str(own).split())[:1000], options.system
    code = getattr(own, "sqlstate", None) if library == "psycopg" else own.args[0] if own.args else None
    if library == "sqlite3":
        name = getattr(own, "sqlite_errorname", type(own).__name__)
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
            return UsageError("OUTBOX_DATABASE", where=where, text=text, name=name)
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return Unreachable("DATABASE_LOCKED", path=options.file, detail=f"{text} ({name})")
        return Unreachable("OUTBOX_ERROR.RETRY", where=where, text=text, name=name)
    if library == "psycopg":
        lost = code is None or code.startswith(("08", "57P", "53300"))
        login = str(code).startswith("28") or (code is None and refuses_login(text))
        if code is None and not login and "FATAL" in text and "does not exist" in text:
            return UsageError("DATABASE_MISSING.POSTGRES_CONNECT", where=where, text=text)
    else:
        lost, login = code in (*LOST, *FULL), code in (*LOGIN, _NO_DATABASE_RIGHT)
    if login:
        return Unreachable("OUTBOX_LOGIN", where=where, text=text)
    if lost:
        return Unreachable("OUTBOX_UNREACHABLE", where=where, text=text)
    if code == "42501" or code in DENIED:
        return UsageError("PERMISSION.OUTBOX", where=where, text=text)
    if code == "53400":
        return UsageError("OUTBOX_SLOTS", where=where, text=text)
    return DeliveredError("OUTBOX_ERROR.SERVER", where=where, text=text, number=code)


def _postgres(options: OutboxOptions, **more: Any) -> psycopg.Connection[Any]:
    with extra("outbox"):
        import psycopg
        from psycopg.types.json import set_json_loads
    parameters: dict[str, Any] = {"user": options.user, "password": options.password_resolved()}
    try:
        connect_s = connect_timeout_s(_CONNECT_TRY_S)
    except TimeoutError as error:
        raise psycopg.errors.ConnectionTimeout(str(error)) from None
    connection = psycopg.connect(
        options.url.replace("postgres://", "postgresql://", 1),
        **{k: v for k, v in parameters.items() if v is not None},
        connect_timeout=connect_s,
        application_name=f"delivered {options.slot if options.by_log else options.positions}"[:63],
        client_encoding="utf8",
        prepare_threshold=None,
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=4,
        **more,
    )
    try:
        pin_postgres(connection, options.system)
        raw_texts(connection)
        beyond_python(connection)
    except BaseException:
        connection.close()
        raise
    set_json_loads(_text, connection)  # as the table has it
    return connection


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


def _mysql(options: OutboxOptions) -> Any:
    with extra("outbox"):
        from delivered.kits.mysql.connection import Connection
    connection = Connection(
        tls_of_url(options.url),
        **address(options.url, options.user),
        password=options.password_resolved() or "",
        charset="utf8mb4",
        autocommit=False,
        connect_timeout=left_s(_CONNECT_TRY_S),
        program_name="delivered",
        init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    )
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(f"SET SESSION time_zone = '+00:00', sql_mode = '{_SQL_MODE}'")
    connection.rollback()
    return connection


def _sqlite(options: OutboxOptions) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{options.file}?mode=rw",
        uri=True,
        timeout=CONNECT_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.text_factory = id_text
    connection.execute("PRAGMA synchronous=EXTRA")
    return connection

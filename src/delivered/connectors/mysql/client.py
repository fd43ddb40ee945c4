"""Connections with session settings that do not depend on the server's defaults; their errors; the ledger's tables.

Errors are known by the numbers that MySQL and MariaDB share. The ledger's tables are versioned, in their own database.
The server commits each DDL statement implicitly: an interrupted migration is rerun from its first statement, so every
statement is idempotent.

Session ids are reused after a restart, and only privileged users see what sessions do. So a session that may block
others takes a named lock with a nonce, and stores the nonce where others find it: the lock is held by that session or
is free.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from delivered.connectors.mysql import MysqlOptions
from delivered.kits.mysql import DENIED, FULL, LOGIN, LOST, Tls, address
from delivered.kits.sql.database import Peer, create_statement, is_newest, quoted, watch, with_values
from delivered.kits.sql.sink import new_nonce
from delivered.kits.sql.table import no_right_to_alter
from delivered.model.errors import BadRecord, DeliveredError, InvariantBroken, Unreachable, UsageError, extra
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import left_s

with extra("mysql"):
    import pymysql
    from pymysql.constants import CLIENT, COMMAND, CR, SERVER_STATUS
    from pymysql.protocol import OKPacketWrapper

    from delivered.kits.mysql.connection import Connection

ERRORS: type[Exception] = pymysql.MySQLError
CONNECT_TRY_S = 5.0
"""Timeout of connecting, and of each reply during login. Errors must be raised within 15 s."""
VERSIONS_MIN = {"MariaDB": (10, 5), "MySQL": (8, 0)}
"""First versions whose prepared transactions survive their session, and that support upserts."""
STALLED_S = 3_600
"""The server closes sessions that are idle for this long, and rolls back their transactions."""

SQL_MODE = (
    "ANSI_QUOTES,ERROR_FOR_DIVISION_BY_ZERO,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION,NO_ZERO_DATE,NO_ZERO_IN_DATE,"
    "ONLY_FULL_GROUP_BY,STRICT_ALL_TABLES"
)
_SETTINGS = {
    "sql_mode": f"'{SQL_MODE}'",
    "time_zone": "'+00:00'",
    "wait_timeout": str(STALLED_S),
    "net_read_timeout": "600",
    "net_write_timeout": "600",
    "foreign_key_checks": "1",
    "unique_checks": "1",
    "sql_notes": "1",
    "sql_big_selects": "1",
    "sql_select_limit": "18446744073709551615",
}


def connect(options: MysqlOptions, role: str = "task", writes: bool = True) -> Session:
    """Open a connection.

    Args:
        role: unused; the server has no field for it.
        writes: fail if the server is read-only.

    Raises:
        Unreachable, UsageError: within 15 s.
    """
    del role
    password = options.password_resolved()
    parameters = {**address(options.url, options.user), "password": None if password is None else password.encode()}
    parameters = {k: v for k, v in parameters.items() if v is not None}
    try:
        session = Session(left_s(CONNECT_TRY_S), options.tls, **parameters)
    except ERRORS as error:
        raise explained(error, options) from None
    try:
        session.watch(f"MySQL at {options.host}:{options.port}", options.tls, parameters)
        _check_version(session, options)
        lock_s = str(options.lock_timeout_s)
        settings = {**_SETTINGS, "innodb_lock_wait_timeout": lock_s, "lock_wait_timeout": lock_s}
        if session.mariadb:
            settings["max_statement_time"] = "0"
        # Setting it is a right of its own in MySQL, and only a server that keeps no warning at all needs it.
        if session.execute("SELECT @@max_error_count").fetchone()[0] == 0:
            settings["max_error_count"] = "64"
        session.execute("SET SESSION " + ", ".join(f"{k} = {v}" for k, v in settings.items()))
        session.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        if writes:
            check_writable(session, options)
    except ERRORS as error:
        session.close()
        raise explained(error, options) from None
    except BaseException:
        session.close()
        raise
    return session


def check_writable(session: Session, options: MysqlOptions) -> None:
    """Query it: privileged users are exempt from read_only, and would write to a replica. Raises Unreachable."""
    if session.execute("SELECT @@global.read_only").fetchone()[0]:
        raise read_only(options)


def read_only(options: MysqlOptions) -> Unreachable:
    return Unreachable("READ_ONLY.MYSQL", place=options.place)


def _check_version(session: Session, options: MysqlOptions) -> None:
    system = "MariaDB" if session.mariadb else "MySQL"
    # For old replicas, MariaDB used to prefix another version.
    match = re.match(r"(\d+)\.(\d+)", str(session.server_version).removeprefix("5.5.5-"))
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < VERSIONS_MIN[system]:
        needed = " or ".join(f"{name} {a}.{b}" for name, (a, b) in VERSIONS_MIN.items())
        raise UsageError(
            "SERVER_TOO_OLD.MYSQL", place=options.place, system=system, version=session.server_version, needed=needed
        )


# A connection that loads rows from memory.
#
# PyMySQL replies to LOAD DATA LOCAL with the file that the *server* requests: a rogue server could read any file of
# this machine. Here the requested name is ignored and the caller's data is sent; a file request in reply to any other
# statement is an error.

PACKET_BYTES = 1 << 17
"""Packet size of a load."""


class Session(Connection):
    """One connection with manual transactions. Used by one thread.

    Attributes:
        nonce: of the named lock that shows that this session is alive; empty: none.
    """

    def __init__(self, connect_s: float, tls: Tls | None, **settings: Any) -> None:
        self.nonce = ""
        self._peer: Peer | None = None
        # The client's own handling, `local_infile`, stays off.
        super().__init__(
            tls,
            **settings,
            autocommit=True,
            charset="utf8mb4",
            client_flag=CLIENT.LOCAL_FILES | CLIENT.FOUND_ROWS,  # an UPDATE counts the rows that it found
            connect_timeout=connect_s,
            read_timeout=connect_s,
            write_timeout=connect_s,
            program_name="delivered",
        )

    def connect(self, sock: Any = None) -> None:
        """Called by the constructor. Fails after `connect_s` if the server accepts but sends nothing."""
        if sock is None:
            try:
                sock = socket.create_connection((self.host, self.port), self.connect_timeout)
            except OSError as error:
                raise pymysql.OperationalError(
                    CR.CR_CONN_HOST_ERROR, f"Can't connect to {self.host}:{self.port}: {error}"
                ) from None
            _keep_alive(sock)
        super().connect(sock)
        # Statements may take long: moving a batch, waiting for a lock. Keep-alives detect a dead peer.
        self._read_timeout = self._write_timeout = None

    @property
    def mariadb(self) -> bool:
        return "mariadb" in str(self.server_version).lower()

    @property
    def idle(self) -> bool:
        """Open, and outside any transaction according to the server's last reply."""
        return bool(self.open) and not self.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS

    def watch(self, label: str, tls: Tls | None, settings: Mapping[str, Any]) -> None:
        """Watch all statements from here on. Args: as this session was opened."""

        def waits(sessions: Sequence[int]) -> Mapping[int, str]:
            try:
                other = Session(self.connect_timeout, tls, **settings)
            except pymysql.OperationalError as error:
                if isinstance(error.__context__, TimeoutError) or "timed out" in str(error):
                    raise TimeoutError(str(error)) from None
                raise
            try:
                rows = other.execute("SELECT id, state FROM information_schema.processlist").fetchall()
            finally:
                other.close()
            waiting = {int(i) for i, state in rows if "semi-sync" in str(state).lower()}
            return dict.fromkeys(waiting & set(sessions), "a semi-synchronous replica")

        self._peer = Peer(label, waits)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        if self._peer is None:
            yield
            return
        with watch(self._peer, self.thread_id(), self._cut) as call:
            try:
                yield
            except pymysql.OperationalError as error:
                if call.reason:
                    raise pymysql.OperationalError(CR.CR_SERVER_LOST, call.reason) from error
                raise

    def _cut(self) -> None:
        """From another thread: the wait sees the end of the stream."""
        if self._sock is not None:
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read_query_result(self, unbuffered: bool = False) -> None:
        with self._watched():
            super()._read_query_result(unbuffered)

    def execute(self, statement: str, values: Any = None) -> Any:
        """Run a statement; its cursor has all rows."""
        cursor = self.cursor()
        cursor.execute(statement, values)
        return cursor

    def stream(self, statement: str) -> Any:
        """Run a query; its cursor streams the rows."""
        cursor = self.cursor(pymysql.cursors.SSCursor)
        cursor.execute(statement)
        return cursor

    def start(self, statement: bytes, data: memoryview | None = None) -> None:
        """Send a statement, with `data` for LOAD DATA LOCAL; return before the server has finished.

        Raises MySQLError: the server rejected the statement, or the connection was lost.
        """
        with self._watched():
            self._execute_command(COMMAND.COM_QUERY, statement)
            if data is None:
                return
            answer = self._read_packet()
            if not answer.is_load_local_packet():
                raise InvariantBroken("LOAD_NOT_REQUESTED")
            for at in range(0, len(data), PACKET_BYTES):
                self.write_packet(bytes(data[at : at + PACKET_BYTES]))
            self.write_packet(b"")

    def finish(self) -> tuple[int, int]:
        """Wait until the server has finished. Returns the numbers of loaded rows and warnings.

        Raises MySQLError: the server rejected it, or the connection was lost.
        """
        with self._watched():
            answer = OKPacketWrapper(self._read_packet())
        self.server_status = answer.server_status
        return int(answer.affected_rows), int(answer.warning_count)


def _keep_alive(sock: socket.socket) -> None:
    """Detect a lost server within a minute, even while nothing is sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", int(REQUEST_TIMEOUT_S * 1000)),
    ):  # fmt: skip
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Errors, by the numbers that MySQL and MariaDB share.

LOCK_TIMEOUT, DEADLOCK = 1205, 1213
NO_TABLE, NO_DATABASE = 1146, 1049
XA_UNKNOWN = 1397
"""No such XA transaction: it has ended, or (MariaDB) the session that prepared it is still alive."""

_READ_ONLY = frozenset({1290, 1792, 1836, 3989})
_DISK = frozenset({1021, 1114})
_FILE = frozenset({3, 20, 1026, 1030})
"""File errors: disk full, if the message says so."""
_ROW = frozenset({1048, 1062, 1136, 1138, 1153, 1264, 1265, 1292, 1300, 1301, 1364, 1365, 1366, 1367, 1406, 1411, 1416,
                  1451, 1452, 1526, 1557, 1586, 1644, 1690, 1748, 3140, 3819, 4025})  # fmt: skip
CONSTRAINTS = frozenset({1048, 1062, 1451, 1452, 1557, 1586, 3819, 4025})
"""Of these: constraint violations. The statement is rolled back, its transaction continues."""

_REFUSED = " rejected a row: "
_BY_NUMBER: dict[int, tuple[type[DeliveredError], str]] = {
    NO_DATABASE: (UsageError, "DATABASE_MISSING.MYSQL"),
    NO_TABLE: (UsageError, "TABLE_MISSING.MYSQL"),
    1054: (UsageError, "COLUMN_MISSING.MYSQL"),
    DEADLOCK: (DeliveredError, "DEADLOCK.MYSQL"),
    LOCK_TIMEOUT: (DeliveredError, "LOCK_TIMEOUT.MYSQL"),
    1665: (UsageError, "BINLOG_STATEMENT.WRITE"),
    1785: (UsageError, "ENGINE_NOT_TRANSACTIONAL.XA"),
    1613: (DeliveredError, "LOCK_TIMEOUT.MYSQL_XA"),
    1614: (DeliveredError, "DEADLOCK.MYSQL_XA"),
}


def error_number(error: BaseException) -> int:
    """The server's or the client's error number; 0: none, the connection was already closed."""
    first = error.args[0] if error.args else 0
    return first if isinstance(first, int) else 0


def is_lost(error: BaseException) -> bool:
    """Whether the connection was lost, so that the outcome of the last statement is unknown."""
    return error_number(error) in LOST


def about_a_row(error: BaseException) -> bool:
    """Whether the server refused a row, not the statement."""
    return error_number(error) in _ROW


def explained(error: Exception, options: MysqlOptions) -> DeliveredError:
    """Translate an error. The client's messages never contain passwords."""
    number = error_number(error)
    text, where = error_message(error), f"MySQL at {options.place}"
    if number in LOGIN:
        return Unreachable("MYSQL_LOGIN", where=where, text=text)
    if "SSL is required but" in text:
        return UsageError("TLS_ABSENT.MYSQL", where=where, text=text)
    if text.startswith("Packet sequence number wrong"):
        return Unreachable("MYSQL_UNREACHABLE.OTHER_SERVER", where=where, text=text)
    if number in LOST:
        return Unreachable("MYSQL_UNREACHABLE.CONNECTION", where=where, text=text, host=options.host, port=options.port)
    if number in FULL:
        return Unreachable("MYSQL_UNREACHABLE.TOO_MANY", where=where, text=text)
    if number in DENIED:
        return UsageError(
            "PERMISSION.MYSQL",
            where=where,
            text=text,
            number=number,
            table=options.table_text,
            ledger_schema=options.ledger_schema,
        )
    if number in _READ_ONLY:
        return Unreachable("READ_ONLY.MYSQL_STATEMENT", where=where, text=text, number=number)
    if number in _DISK or (number in _FILE and "space" in text.lower()):
        return DeliveredError("DISK_FULL.MYSQL", where=where, text=text, number=number)
    if number in _ROW:
        return BadRecord("ROW_REFUSED.MYSQL", where=where, text=text, number=number)
    if number in _BY_NUMBER:
        kind, code = _BY_NUMBER[number]
        return kind(code, where=where, text=text, number=number, table=options.table_text)
    return DeliveredError("MYSQL_ERROR", where=where, text=text, number=number)


def row_refused(text: str, options: MysqlOptions) -> BadRecord:
    """A row that LOAD DATA changed or skipped with only a warning, or that no statement can hold."""
    return BadRecord("ROW_REFUSED.MYSQL_CLIENT", place=options.place, text=text)


def refusal_text(error: BadRecord) -> str:
    """The text that `row_refused` was given."""
    return error.message.partition(_REFUSED)[2].rstrip(".")


def error_message(error: BaseException) -> str:
    """The server's message on one line."""
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    return " ".join(text.split())[:1500] or type(error).__name__


def alter(session: Session, options: MysqlOptions, statement: str) -> None:
    """Run a change of the table for `mergeSchema`. Raises UsageError if the user may not, and MySQLError."""
    try:
        session.execute(statement)
    except Exception as error:
        if error_number(error) not in DENIED:
            raise
        plain = statement.replace('"', "`")  # sessions of ours quote names as standard SQL does
        raise no_right_to_alter(options, error, plain, f"GRANT ALTER ON {options.table_text} TO the user") from error


# The ledger's tables, versioned, in their own database.

_NAME_TYPE = "varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
_SCOPE = f"pipeline {_NAME_TYPE}, sink {_NAME_TYPE}, incarnation {_NAME_TYPE}, batch bigint NOT NULL"
_TABLE = "ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
_GROWS = "n bigint unsigned NOT NULL AUTO_INCREMENT"

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.owner (
            pipeline {_NAME_TYPE}, sink {_NAME_TYPE}, id varchar(255) NOT NULL, epoch bigint NOT NULL,
            host varchar(255) NOT NULL, process bigint NOT NULL, started_ms bigint NOT NULL,
            superseded longtext NOT NULL, session varchar(32) NOT NULL DEFAULT '',
            PRIMARY KEY (pipeline, sink)) {_TABLE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.decision (
            {_SCOPE}, decision longtext NOT NULL, decided_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
            {_GROWS}, PRIMARY KEY (pipeline, sink, incarnation, batch), UNIQUE KEY (n)) {_TABLE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.{{started}} (
            {_SCOPE}, offsets longtext NOT NULL, {{started_at}} datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
            {_GROWS}, PRIMARY KEY (pipeline, sink, incarnation), UNIQUE KEY (n)) {_TABLE}""",
        # Not unique by shard: two attempts with open markers would block each other forever.
        f"""CREATE TABLE IF NOT EXISTS {{s}}.marker (
            {_SCOPE}, shard integer NOT NULL, gid varchar(191) NOT NULL, fingerprint varchar(255) NOT NULL,
            {_GROWS}, PRIMARY KEY (n), KEY of_shard (pipeline, sink, incarnation, batch, shard)) {_TABLE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.target (
            base varchar(64) NOT NULL, name varchar(64) NOT NULL, arrow_schema longblob NOT NULL,
            PRIMARY KEY (base, name)) {_TABLE}""",
    ),
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.memory (
            pipeline {_NAME_TYPE}, sink {_NAME_TYPE}, incarnation {_NAME_TYPE}, number bigint NOT NULL,
            batch bigint NOT NULL, newest_us bigint NOT NULL, former_us bigint NOT NULL, made_ms bigint NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation), UNIQUE KEY of_number (number)) {_TABLE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.{{admitted}} (
            number bigint NOT NULL, epoch bigint NOT NULL, batch bigint NOT NULL, hash binary(16) NOT NULL,
            at_us bigint NOT NULL, until_us bigint NOT NULL,
            PRIMARY KEY (number, epoch, batch, hash, at_us)) {_TABLE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.seen (
            number bigint NOT NULL, hash binary(16) NOT NULL, until_us bigint NOT NULL, batch bigint NOT NULL,
            PRIMARY KEY (number, hash, until_us), KEY of_time (number, until_us)) {_TABLE}""",
    ),
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.archive (
            pipeline {_NAME_TYPE}, sink {_NAME_TYPE}, incarnation {_NAME_TYPE}, entry varbinary(32) NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation)) {_TABLE}""",
    ),
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.{{skipped}} (
            {_SCOPE}, kind varchar(16) NOT NULL, total bigint NOT NULL,
            {_GROWS}, PRIMARY KEY (n), KEY of_batch (pipeline, sink, incarnation, batch)) {_TABLE}""",
        f"""CREATE TABLE IF NOT EXISTS {{s}}.dead_letter (
            {_SCOPE}, shard integer NOT NULL, reason text NOT NULL, record longtext NOT NULL,
            {_GROWS}, PRIMARY KEY (n)) {_TABLE}""",
    ),
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.seal (
            pipeline {_NAME_TYPE}, sink {_NAME_TYPE}, number bigint NOT NULL, seal longtext NOT NULL,
            PRIMARY KEY (pipeline, sink, number)) {_TABLE}""",
    ),
    (
        f"""CREATE TABLE IF NOT EXISTS {{s}}.writer (
            target varchar(160) NOT NULL, number bigint NOT NULL, pipeline {_NAME_TYPE}, sink {_NAME_TYPE},
            incarnation {_NAME_TYPE}, PRIMARY KEY (target, number),
            UNIQUE KEY of_writer (target, pipeline, sink, incarnation)) {_TABLE}""",
    ),
)
"""Statements that migrate from version n to n + 1. Append-only."""

ALONE_S = 30
_LOCK = "delivered.tables"


def ledger_version(connection: Session, schema: str) -> int:
    """Version of the ledger's tables; 0: they do not exist. Raises MySQLError."""
    try:
        row = connection.execute(f"SELECT coalesce(max(version), 0) FROM {quoted(schema)}.migration").fetchone()
    except Exception as error:
        if error_number(error) in (NO_TABLE, NO_DATABASE):
            return 0
        raise
    return int(row[0])


def migrate(connection: Session, schema: str) -> None:
    """Create or migrate the ledger's tables; does nothing if they are up to date. Outside a transaction.

    Raises:
        UsageError: a newer version of this package created them.
        MySQLError: the server rejected it.
    """
    if is_newest(ledger_version(connection, schema), len(MIGRATIONS), f"in database {schema!r}"):
        return
    s = quoted(schema)
    with alone(connection):
        # IF NOT EXISTS requires the CREATE privilege even if everything exists.
        there = "SELECT 1 FROM information_schema.schemata WHERE schema_name = %s"
        if connection.execute(there, [schema]).fetchone() is None:
            connection.execute(f"CREATE DATABASE IF NOT EXISTS {s} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
        if ledger_version(connection, schema) == 0:
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {s}.migration (version integer PRIMARY KEY, "
                f"applied_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)) {_TABLE}"
            )
        # Check again: another process may have been faster.
        for version in range(ledger_version(connection, schema), len(MIGRATIONS)):
            for statement in MIGRATIONS[version]:
                connection.execute(create_statement(statement, s))
            connection.execute(
                f"INSERT IGNORE INTO {with_values(schema)}.migration (version) VALUES (%s)", [version + 1]
            )


@contextlib.contextmanager
def alone(connection: Session) -> Iterator[None]:
    """Serialize our migrations on this server; continue without the lock after 30 s, as every statement is
    idempotent."""
    held = connection.execute("SELECT GET_LOCK(%s, %s)", [_LOCK, ALONE_S]).fetchone()[0]
    try:
        yield
    finally:
        if held:
            with contextlib.suppress(Exception):
                connection.execute("SELECT RELEASE_LOCK(%s)", [_LOCK])


# Sessions that may block others, known by the named lock that each one holds.


def register_session(session: Session, nonce: str | None = None) -> None:
    """Take the named lock for the lifetime of the session. Raises MySQLError."""
    session.nonce = nonce or new_nonce()
    session.execute("SELECT GET_LOCK(%s, 0)", [_lock_name(session.nonce)])


def release_session(session: Session) -> None:
    """Release the named lock: this session no longer blocks anyone. Raises MySQLError."""
    session.execute("SELECT RELEASE_LOCK(%s)", [_lock_name(session.nonce)])
    session.nonce = ""


def session_has_ended(session: Session, nonce: str, wait_s: float) -> bool:
    """Wait until the session with this nonce, and its transaction, has ended. Raises MySQLError."""
    row = session.execute("SELECT GET_LOCK(%s, %s)", [_lock_name(nonce), wait_s]).fetchone()
    if row[0] != 1:
        return False
    session.execute("SELECT RELEASE_LOCK(%s)", [_lock_name(nonce)])
    return True


def end_session(session: Session, nonce: str) -> None:
    """Kill the session with this nonce, if it is alive: its open transaction is rolled back, prepared ones stay. Works
    for sessions of the same user. Ignores the server's errors."""
    with contextlib.suppress(ERRORS):
        row = session.execute("SELECT IS_USED_LOCK(%s)", [_lock_name(nonce)]).fetchone()
        if row[0] is not None and int(row[0]) != session.thread_id():
            session.execute(f"KILL {int(row[0])}")


def _lock_name(nonce: str) -> str:
    return f"delivered.{nonce}"

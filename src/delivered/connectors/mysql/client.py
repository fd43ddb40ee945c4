"""Connections, with session settings that do not depend on the server's defaults."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from delivered.connectors.mysql import errors, sessions
from delivered.connectors.mysql.migrate import migrate, version_of, with_values
from delivered.connectors.mysql.options import MysqlOptions
from delivered.kits.mysql.server import address
from delivered.kits.sql.database import CLAIM_WAIT_S, LEDGER_TABLES, Connection, Definition, Dialect, Server
from delivered.model.errors import DeliveredError, MissingExtra, Unreachable, UsageError

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session

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
    "max_error_count": "64",
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
        MissingExtra: PyMySQL is not installed.
    """
    del role
    try:
        from delivered.connectors.mysql.wire import ERRORS, Session
    except ImportError:
        raise MissingExtra("mysql") from None
    password = options.password_resolved()
    given = {**address(options.url, options.user), "password": None if password is None else password.encode()}
    given = {k: v for k, v in given.items() if v is not None}
    try:
        session = Session(CONNECT_TRY_S, options.tls, **given)
    except ERRORS as error:
        raise errors.explained(error, options) from None
    try:
        session.watch(f"MySQL at {options.host}:{options.port}", options.tls, given)
        _check_version(session, options)
        lock_s = str(options.lock_timeout_s)
        settings = {**_SETTINGS, "innodb_lock_wait_timeout": lock_s, "lock_wait_timeout": lock_s}
        if session.mariadb:
            settings["max_statement_time"] = "0"
        session.execute("SET SESSION " + ", ".join(f"{k} = {v}" for k, v in settings.items()))
        session.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        if writes:
            check_writable(session, options)
    except ERRORS as error:
        session.close()
        raise errors.explained(error, options) from None
    except BaseException:
        session.close()
        raise
    return session


def check_writable(session: Session, options: MysqlOptions) -> None:
    """Query it: privileged users are exempt from read_only, and would write to a replica. Raises Unreachable."""
    if session.execute("SELECT @@global.read_only").fetchone()[0]:
        raise read_only(options)


def read_only(options: MysqlOptions) -> Unreachable:
    return Unreachable(
        "READ_ONLY",
        f"MySQL at {options.place} is read-only (read_only): it is a replica or under maintenance.",
        "point the url at the primary server",
    )


def _check_version(session: Session, options: MysqlOptions) -> None:
    system = "MariaDB" if session.mariadb else "MySQL"
    # For old replicas, MariaDB used to prefix another version.
    found = re.match(r"(\d+)\.(\d+)", str(session.server_version).removeprefix("5.5.5-"))
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < VERSIONS_MIN[system]:
        needed = " or ".join(f"{name} {a}.{b}" for name, (a, b) in VERSIONS_MIN.items())
        raise UsageError(
            "SERVER_TOO_OLD",
            f"The server at {options.place} is {system} {session.server_version}; this sink needs {needed}, or newer.",
            next_step="use a newer server",
        )


@dataclass(frozen=True)
class MysqlDialect(Dialect):
    """A DELETE by a condition scans a short table whatever its indexes, and waits for locked rows: another pipeline's
    decision, or, forever, a marker of a prepared transaction. So nothing here does that."""

    def known(self, keys: str, column: str | None) -> str:
        first = column or keys.partition(",")[0]
        return f"ON DUPLICATE KEY UPDATE {first} = VALUES({first})"

    def delete(self, connection: Connection, table: str, where: str, values: Mapping[str, Any]) -> None:
        """Deletes only rows that a non-locking read sees, which excludes prepared ones; each by its id, the only form
        for which the server never scans."""
        for (number,) in connection.execute(self(f"SELECT n FROM {{{table}}} WHERE {where}"), values).fetchall():
            connection.execute(self(f"DELETE d FROM {{{table}}} AS d WHERE n = :n"), {"n": int(number)})

    def forget(self, connection: Connection, table: str, index: str, where: str) -> None:
        """Forces the index: a scan would wait for rows of other pipelines' decisions."""
        connection.execute(self(f"DELETE d FROM {{{table}}} AS d FORCE INDEX ({index}) WHERE {where}"), {})


@cache
def ledger_dialect(schema: str) -> MysqlDialect:
    """Dialect of a ledger in this database."""
    s = with_values(schema)
    return MysqlDialect(
        tables={name: f"{s}.{name}" for name in LEDGER_TABLES},
        value=lambda statement: re.sub(r":(\w+)", r"%(\1)s", statement),
        written={"decision": "n", "begun": "n"},
        hold=" FOR UPDATE",
        pack=lambda names: json.dumps(list(names)),
        unpack=json.loads,
        hash=lambda value: f"x'{value.hex()}'",
        snapshot=("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "START TRANSACTION READ ONLY"),
        see_holders="find the session: SELECT * FROM information_schema.innodb_trx; then KILL its trx_mysql_thread_id",
        sign="UPDATE {owner} SET session = :session WHERE pipeline = :pipeline AND sink = :sink",
    )


@dataclass(frozen=True)
class MysqlDatabase(Server["Session"]):
    """The user's database."""

    options: MysqlOptions
    system = "MySQL"

    @property
    def where(self) -> str:
        return self.options.where

    @property
    def dialect(self) -> Dialect:
        return ledger_dialect(self.options.ledger_schema)

    def begin(self, connection: Session) -> None:
        check_writable(connection, self.options)
        if not connection.nonce:
            sessions.register(connection)
        connection.execute("START TRANSACTION")

    @contextlib.contextmanager
    def claiming(self, connection: Session) -> Iterator[None]:
        connection.execute(f"SET SESSION innodb_lock_wait_timeout = {CLAIM_WAIT_S}")
        try:
            self.begin(connection)
            yield
        except BaseException:
            self.discard(connection)
            raise
        connection.execute("COMMIT")
        connection.execute(f"SET SESSION innodb_lock_wait_timeout = {self.options.lock_timeout_s}")

    def may_commit(self, error: Exception) -> bool:
        """Always: only a claim, which waits for the transaction to end, can tell."""
        del error
        return True

    def end_holders(self, connection: Session, role: str, signature: Callable[[], str]) -> str:
        del role
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        connection.execute("START TRANSACTION READ ONLY")
        nonce = signature()
        connection.execute("COMMIT")
        if nonce and nonce != connection.nonce:
            sessions.end(connection, nonce)
        return ""

    def _connect(self, role: str, writes: bool) -> Session:
        return connect(self.options, role, writes)

    def check_writable(self, connection: Session) -> None:
        check_writable(connection, self.options)

    def errors(self) -> type[Exception]:
        from delivered.connectors.mysql.wire import ERRORS

        return ERRORS

    def explained(self, error: Exception) -> DeliveredError:
        return errors.explained(error, self.options)

    def is_lost(self, error: BaseException) -> bool:
        return errors.is_lost(error)

    def is_locked(self, error: BaseException) -> bool:
        return errors.number_of(error) in (errors.LOCK_TIMEOUT, errors.DEADLOCK)

    def is_constraint(self, error: Exception) -> bool:
        return errors.number_of(error) in errors.CONSTRAINTS

    def idle(self, connection: Session) -> bool:
        return connection.idle

    def definition(self, connection: Session, *, columns: bool = False) -> Definition:
        from delivered.connectors.mysql.target import read_definition

        del columns  # they are read for the keys' collations anyway
        return read_definition(connection, self.options)

    def table(self, connection: Session) -> str | None:
        from delivered.connectors.mysql.target import find

        found = find(connection, self.options)
        return None if found is None else found.full

    def version(self, connection: Session) -> int:
        return version_of(connection, self.options.ledger_schema)

    def migrate(self, connection: Session) -> None:
        migrate(connection, self.options.ledger_schema)

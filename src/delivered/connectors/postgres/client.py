"""Connections whose waits are watched, and translation of the server's errors. Imports psycopg.

Dates and times that Python has not are read as numbers, infinity and JSON as text: they are for dead letters and
messages (`model.rows.plain_rows`).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres import PostgresOptions
from delivered.connectors.postgres.target import find, migrate, read_definition, version_of
from delivered.kits.sql.database import (
    CLAIM_WAIT_S,
    LEDGER_TABLES,
    POSTGRES,
    STARTED_AT,
    Definition,
    Dialect,
    Peer,
    Server,
    days,
    micros,
    refuses_login,
    setting_refused,
    watch,
    with_values,
)
from delivered.model.errors import BadRecord, DeliveredError, Unreachable, UsageError, extra
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import connect_timeout_s

with extra("postgres"):
    import psycopg
    from psycopg.pq import TransactionStatus
    from psycopg.types.datetime import DateLoader, TimestampLoader, TimestamptzLoader
    from psycopg.types.string import TextLoader

if TYPE_CHECKING:
    from psycopg.abc import AdaptContext, Loader


CONNECT_TRY_S = 5
"""Per address; a name may resolve to two. Errors must be raised within 15 s."""
VERSION_MIN = 140_000
"""14: the first version with TID range scans."""

_SETTINGS = {
    **POSTGRES,
    "client_min_messages": "error",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    # A dead peer must not hold locks for two hours, the system's default.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}


def connect(options: PostgresOptions, role: str = "task", writes: bool = True) -> Session:
    """Open a connection with manual transactions.

    Its commits are durable once acknowledged, at a synchronous standby too, whatever the defaults of server, database
    and role for synchronous_commit.

    Args:
        role: suffix of the application name at the server.
        writes: fail if the server is read-only.

    Raises:
        Unreachable, UsageError: within 15 s.
    """
    try:
        connect_s = connect_timeout_s(CONNECT_TRY_S)
    except TimeoutError as error:
        raise Unreachable("POSTGRES_UNREACHABLE.CONNECTION", where=options.where, text=error, url=options.url) from None
    credentials: dict[str, Any] = {"user": options.user, "password": options.password_resolved()}
    given = {
        **{k: v for k, v in credentials.items() if v is not None},
        "connect_timeout": connect_s,
        "application_name": f"delivered {role}",
        "client_encoding": "utf8",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 4,
        "tcp_user_timeout": int(REQUEST_TIMEOUT_S * 1000),
    }
    if options.several_hosts:  # of several, only the primary counts, unless the URL says otherwise
        given["target_session_attrs"] = "read-write"
    try:
        connection = Session.connect(options.url, **given, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise explained(error, options) from None
    try:
        register_loaders(connection)
        connection.watch("PostgreSQL", options.url, given)
        if connection.info.server_version < VERSION_MIN:
            raise UsageError(
                "SERVER_TOO_OLD.POSTGRES",
                place=options.place,
                version=connection.info.server_version // 10000,
                version_min=VERSION_MIN // 10000,
            )
        _pin(connection, {**_SETTINGS, "lock_timeout": f"{options.lock_timeout_s * 1000}ms"}, options, writes)
    except psycopg.Error as error:
        connection.close()
        raise explained(error, options) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _pin(connection: Session, settings: Mapping[str, str], options: PostgresOptions, writes: bool) -> None:
    """Set what a role, a database or the server may set otherwise, and check that it took. One round trip.

    A commit under `off` is lost by a crash, one under `local` by a fail-over; stronger settings stay.
    """
    pinned = [*settings, "synchronous_commit"]
    calls = ", ".join("set_config(%s, %s, false)" for _ in settings)
    now = "current_setting('synchronous_commit')"
    commit = f"CASE WHEN {now} IN ('off', 'local') THEN 'on' ELSE {now} END"
    with connection.pipeline():
        connection.execute(
            f"SELECT {calls}, set_config('synchronous_commit', {commit}, false)",
            [x for pair in settings.items() for x in pair],
        )
        current = ", ".join(f"current_setting('{name}')" for name in pinned)
        answer = connection.execute(f"SELECT current_setting('transaction_read_only') = 'on', {current}")
    read_only, *values = answer.fetchone() or (False,)
    found = dict(zip(pinned, map(str, values), strict=True))
    wrong = [name for name, value in POSTGRES.items() if found[name] != value]
    if found["synchronous_commit"] in ("off", "local"):
        wrong.append("synchronous_commit")
    if wrong:
        raise setting_refused(wrong[0], found[wrong[0]], options.place)
    if writes and read_only:
        raise read_only_server(options)
    connection.settings = found


def read_only_server(options: PostgresOptions) -> Unreachable:
    return Unreachable("READ_ONLY.POSTGRES", place=options.place)


STANDBYS = (
    "SELECT current_setting('synchronous_standby_names'), "
    "coalesce(string_agg(application_name || ' (' || state || ', ' || sync_state || ')', ', '), 'none') "
    "FROM pg_stat_replication"
)
"""The synchronous standbys that are wanted, and all that are connected; names of the latter only for a monitor."""


class WaitEnded(psycopg.OperationalError):
    """The connection was ended, because the server, or a standby, did not answer. The outcome is unknown."""


class Session(psycopg.Connection[Any]):
    """A connection of the sink. Used by one thread.

    Attributes:
        settings: what `connect` pinned, as the server has it.
    """

    settings: Mapping[str, str]
    _peer: Peer | None = None

    def watch(self, label: str, conninfo: str, given: Mapping[str, Any]) -> None:
        """Watch all statements from here on. Args: conninfo, given: as this session was opened."""
        host, port = self.info.host, self.info.port
        # The same server, however many the URL names.
        here = {
            **given,
            "host": host,
            "port": port,
            "target_session_attrs": "any",
            "application_name": "delivered look",
        }
        if self.info.hostaddr:
            here["hostaddr"] = self.info.hostaddr

        def waits(sessions: Sequence[int]) -> Mapping[int, str]:
            try:
                connection = psycopg.connect(conninfo, **here, autocommit=True)
            except psycopg.errors.ConnectionTimeout as error:
                raise TimeoutError(str(error)) from None
            with connection:
                found = connection.execute(
                    "SELECT pid FROM pg_stat_activity WHERE pid = ANY(%s) AND wait_event = 'SyncRep'", [list(sessions)]
                ).fetchall()
                return dict.fromkeys((pid for (pid,) in found), standbys(connection)) if found else {}

        self._peer = Peer(f"{label} ({host}:{port})", waits)
        self._pid = self.info.backend_pid

    def wait(self, *given: Any, **options: Any) -> Any:
        """The one place where psycopg waits for the server."""
        if self._peer is None:
            return super().wait(*given, **options)
        with watch(self._peer, self._pid, self._cut) as call:
            try:
                return super().wait(*given, **options)
            except psycopg.OperationalError as error:
                if call.reason:
                    raise WaitEnded(call.reason) from error
                raise

    def _cut(self) -> None:
        """From another thread: the wait sees the end of the stream."""
        with socket.socket(fileno=os.dup(self.pgconn.socket)) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def standbys(connection: psycopg.Connection[Any]) -> str:
    """The synchronous standbys, in words. Raises psycopg.Error."""
    wanted, there = connection.execute(STANDBYS).fetchone() or ("", "none")
    return f"a synchronous standby (synchronous_standby_names = '{wanted}'; connected: {there})"


def register_loaders(context: AdaptContext) -> None:
    for name, loader in _LOADERS.items():
        context.adapters.register_loader(name, loader)


def _loader(base: type[Any], parse: Callable[[str], int]) -> type[Loader]:
    class Beyond(base):  # type: ignore[misc]
        def load(self, data: Any) -> Any:
            try:
                return super().load(data)
            except psycopg.DataError:
                text = bytes(data).decode()
                try:
                    return parse(text)
                except ValueError:
                    return text

    return Beyond


_LOADERS: dict[str, type[Loader]] = {
    "date": _loader(DateLoader, days),
    "timestamp": _loader(TimestampLoader, lambda text: micros(text, zoned=False)),
    "timestamptz": _loader(TimestamptzLoader, lambda text: micros(text, zoned=True)),
    **dict.fromkeys(("json", "jsonb"), TextLoader),  # texts, as in the rows
}


@cache
def ledger_dialect(schema: str) -> Dialect:
    """Dialect of a ledger in this schema."""
    s = with_values(schema)
    return Dialect(
        tables={name: f"{s}.{table}" for name, table in LEDGER_TABLES.items()},
        value=lambda statement: re.sub(r":(\w+)", r"%(\1)s", statement),
        written={"decision": "decided_at", "started": STARTED_AT},
        hold=" FOR UPDATE",
        pack=list,
        unpack=lambda names: names,
        hash=lambda value: f"decode('{value.hex()}', 'hex')",
        snapshot=("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",),
        see_holders="find the session: SELECT pid, usename, application_name, state FROM pg_stat_activity WHERE "
        "xact_start IS NOT NULL; then SELECT pg_terminate_backend(pid)",
        # A server's clock may be set back, or a standby's be behind: never before an earlier row. The owner's row is
        # locked meanwhile.
        now=f"greatest(now(), (SELECT max({STARTED_AT}) + interval '1 microsecond' FROM {{started}} "  # noqa: S608
        "WHERE pipeline = :pipeline AND sink = :sink))",
    )


@dataclass(frozen=True)
class PostgresDatabase(Server[psycopg.Connection[Any]]):
    """The user's database."""

    options: PostgresOptions
    system = "PostgreSQL"

    @property
    def where(self) -> str:
        return self.options.where

    @property
    def dialect(self) -> Dialect:
        return ledger_dialect(self.options.ledger_schema)

    def begin(self, connection: psycopg.Connection[Any]) -> None:
        """Pins synchronous_commit once more: behind a pooler, this may be another session than the one that set it."""
        level = getattr(connection, "settings", {}).get("synchronous_commit", "on")
        connection.execute(f"BEGIN; SET LOCAL synchronous_commit = '{level}'")

    @contextlib.contextmanager
    def claiming(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {CLAIM_WAIT_S * 1000}")
            yield

    def may_commit(self, error: Exception) -> bool:
        return is_lost(error)  # the server may still be committing: only a claim can find out

    def end_holders(self, connection: psycopg.Connection[Any], role: str, signature: Callable[[], str]) -> str:
        del signature
        ended = connection.execute(
            "SELECT CASE WHEN wait_event = 'SyncRep' THEN NULL ELSE pg_terminate_backend(pid) END "
            "FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = %s AND xact_start IS NOT NULL AND pid <> pg_backend_pid()",
            [f"delivered {role}"],
        ).fetchall()
        return standbys(connection) if (None,) in ended else ""

    def _connect(self, role: str, writes: bool) -> psycopg.Connection[Any]:
        return connect(self.options, role, writes)

    def check_writable(self, connection: psycopg.Connection[Any]) -> None:
        if connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
            raise read_only_server(self.options)

    def errors(self) -> type[Exception]:
        return psycopg.Error

    def explained(self, error: Exception) -> DeliveredError:
        return explained(error, self.options)

    def is_lost(self, error: BaseException) -> bool:
        return is_lost(error)

    def is_locked(self, error: BaseException) -> bool:
        return getattr(error, "sqlstate", None) == "55P03"

    def is_constraint(self, error: Exception) -> bool:
        return str(getattr(error, "sqlstate", None)).startswith("23")

    def at_once(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def idle(self, connection: psycopg.Connection[Any]) -> bool:
        return not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE

    def definition(self, connection: psycopg.Connection[Any], *, columns: bool = False) -> Definition:
        return read_definition(connection, self.options, columns=columns)

    def table(self, connection: psycopg.Connection[Any]) -> str | None:
        found = find(connection, self.options)
        return None if found is None else found[1]

    def version(self, connection: psycopg.Connection[Any]) -> int:
        return version_of(connection, self.options.ledger_schema)

    def migrate(self, connection: psycopg.Connection[Any]) -> None:
        migrate(connection, self.options.ledger_schema)


def is_lost(error: BaseException) -> bool:
    """Whether the connection was lost, so that the outcome of the last statement is unknown."""
    state = getattr(error, "sqlstate", None)
    return state is None or state.startswith(("08", "57P"))


def explained(error: Exception, options: PostgresOptions) -> DeliveredError:
    """Translate an error. psycopg's messages never contain passwords."""
    state = getattr(error, "sqlstate", None)
    text, where = _message(error), f"PostgreSQL at {options.place}"
    if type(error).__name__ == "DataError" and state is None:  # of the client, about a value
        return BadRecord("ROW_UNWRITABLE.CLIENT", where=where, text=text)
    if state is None:
        if "invalid URI query parameter" in text:
            return UsageError("OPTION_UNKNOWN.LIBPQ", where=where, text=text)
        if "does not support SSL" in text:
            return UsageError("TLS_ABSENT.POSTGRES", where=where, text=text)
        if "received invalid response to" in text or "expected authentication request" in text:
            return Unreachable("POSTGRES_UNREACHABLE.OTHER_SERVER", where=where, text=text)
        if refuses_login(text):
            return _login(text, where)
        if "FATAL" in text and "does not exist" in text:  # while connecting, the client keeps no SQLSTATE
            return UsageError("DATABASE_MISSING.POSTGRES_CONNECT", where=where, text=text)
        if isinstance(error, WaitEnded):
            return Unreachable("POSTGRES_NO_ANSWER", where=where, text=text)
        return Unreachable("POSTGRES_UNREACHABLE.CONNECTION", where=where, text=text, url=options.url)
    if state.startswith("28"):
        return _login(text, where)
    if state.startswith(("08", "57P", "53300")):
        return Unreachable("POSTGRES_UNREACHABLE.TERMINATED", where=where, text=text)
    found = _BY_STATE.get(state) or _BY_CLASS.get(state[:2])
    if found is None:
        return DeliveredError("POSTGRES_ERROR", where=where, text=text, state=state)
    kind, code = found
    return kind(code, where=where, text=text, state=state, table=options.table_text)


def about_a_row(error: psycopg.Error) -> str | None:
    """The server's message, if it refused a row, not the statement. To be asked where no constraint but a domain's
    applies."""
    state = error.sqlstate or ""
    return _message(error) if state.startswith(("22", "54")) or state in ("23502", "23514") else None


def _login(text: str, where: str) -> DeliveredError:
    return Unreachable("POSTGRES_LOGIN", where=where, text=text)


def _message(error: Exception) -> str:
    """The server's message on one line: message, detail, hint, and context of the COPY."""
    diagnosis = getattr(error, "diag", None)
    parts = [getattr(diagnosis, f"message_{x}", None) for x in ("primary", "detail", "hint")]
    parts.append(getattr(diagnosis, "context", None))
    text = ". ".join(str(p).rstrip(".") for p in parts if p) or str(error)
    return " ".join(text.split())[:1500]


_BY_STATE: dict[str, tuple[type[DeliveredError], str]] = {
    "3D000": (UsageError, "DATABASE_MISSING.POSTGRES"),
    "3F000": (UsageError, "SCHEMA_MISSING.POSTGRES"),
    "42P01": (UsageError, "TABLE_MISSING.POSTGRES"),
    "42703": (UsageError, "COLUMN_MISSING.POSTGRES"),
    "42501": (UsageError, "PERMISSION.POSTGRES"),
    "42P10": (UsageError, "KEY_NOT_UNIQUE.UPSERT"),
    "21000": (UsageError, "KEY_COLLATION.UPSERT"),
    "25006": (Unreachable, "READ_ONLY.POSTGRES_STATEMENT"),
    "53100": (DeliveredError, "DISK_FULL.POSTGRES"),
    "40P01": (DeliveredError, "DEADLOCK.POSTGRES"),
    "55P03": (DeliveredError, "LOCK_TIMEOUT.POSTGRES"),
    "55000": (UsageError, "PREPARED_TRANSACTIONS_OFF.PREPARE"),
    "53200": (DeliveredError, "PREPARED_TRANSACTIONS_FULL.PREPARE"),
    "0A000": (UsageError, "NOT_PREPARABLE"),
}
_BY_CLASS: dict[str, tuple[type[DeliveredError], str]] = {
    "22": (BadRecord, "ROW_REFUSED.POSTGRES"),
    "23": (BadRecord, "ROW_REFUSED.POSTGRES"),
    "54": (BadRecord, "ROW_REFUSED.POSTGRES"),
    "42": (UsageError, "STATEMENT_REFUSED"),
    "53": (DeliveredError, "SERVER_RESOURCES"),
}

"""The saga log: its tables, how a saga comes into them, who runs it, and what happened to it.

A saga is recorded in the caller's own transaction. A worker claims it by raising its epoch, for as long as its longest
step may take. Every later write is fenced: its transaction checks the epoch, so a worker that was paused until another
one claimed its saga can write nothing more.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

from delivered.kits.mysql import address, tls_of_url
from delivered.model.errors import BadRecord, Fenced, Refused, Unreachable, UsageError, extra, holds_password
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, SAGA_DATA_BYTES_MAX, SAGA_ID_BYTES_MAX
from delivered.model.options import Unfit, check_argument, check_database_url, password_in_url, resolve_secret
from delivered.patterns.caller import (
    NOW_MS,
    Caller,
    as_text,
    check_dialect,
    format_ddl,
    json_content,
    json_text,
    unstorable,
)
from delivered.patterns.saga.definition import Entry, Event, Saga, Status, Verb

FORMAT = 1
SAGAS, ENTRIES, FORMATS = "delivered_saga", "delivered_saga_entry", "delivered_saga_format"

# Exact text: MySQL's other collations ignore case and spaces at the end.
_TYPES = {
    "postgres": ('VARCHAR(64) COLLATE "C"', f'VARCHAR({SAGA_ID_BYTES_MAX}) COLLATE "C"', "TEXT", ""),
    "mysql": (
        "VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin",
        f"VARBINARY({SAGA_ID_BYTES_MAX})",
        "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        " ENGINE=InnoDB",
    ),
    "sqlite": ("TEXT", "TEXT", "TEXT", ""),
}

_CREATING = {
    "postgres": "SELECT pg_advisory_xact_lock(1684368489)",
    "mysql": "SELECT GET_LOCK('delivered saga log', 30)",
}
"""IF NOT EXISTS fails over what another process is creating. The lock ends with the transaction, or the connection;
SQLite's transaction holds one."""
_CANDIDATES = 16
ABANDONED_S = 60
"""A saga that nobody took for so long, although it was due, has no worker."""
CLEANED_MAX = 500
"""Sagas that one call of `clean` deletes."""
_OPEN = (Status.RUNNING.value, Status.COMPENSATING.value)


class DuplicateSaga(Refused):
    """The log has a saga with this id, and other data. The transaction can go on."""


def begin(connection: Any, saga: Saga, *, id: str, data: Any = None) -> bool:  # noqa: A002
    """Record a saga, in the transaction that is open on `connection`. Commits nothing; a worker runs it afterwards.

    Args:
        connection: of psycopg 3, PyMySQL or sqlite3; a SQLAlchemy Session or Connection.
        id: of this saga, given before the first try; at most 128 bytes of UTF-8. Keys of steps are made of it.
        data: a JSON value, which every step gets.

    Returns: False: the log has it already, with the same data.

    Raises:
        DuplicateSaga: the id belongs to a saga with other data.
        Refused: the connection is in autocommit, or there are no tables, or a newer version wrote them.
        BadRecord: a value cannot be stored. Nothing was sent to the database.
    """
    id_, text = check_row(id, json.dumps(data, ensure_ascii=False) if isinstance(data, str) else data)
    caller = Caller(connection, what="saga.begin")
    check_tables(caller)
    return record(caller, saga, id_, text)


def record(caller: Caller, saga: Saga, id_: str, text: str) -> bool:
    """As `begin`, with values as `checked` returns them."""
    key = caller.exact(id_)
    columns = ("saga", "id", "steps", "data", "status", "entries", "epoch", "worker", "due_ms", "began_ms")
    ((now,),) = caller.execute(f"SELECT {NOW_MS[caller.dialect]}").rows
    values = (saga.name, key, saga.signature, text, Status.RUNNING.value, 0, 0, "", int(now), int(now))
    if caller.insert(SAGAS, columns, values):
        return True
    select = f"SELECT data FROM {SAGAS} WHERE saga = ? AND id = ?{caller.latest}"
    rows = caller.execute(select, (saga.name, key)).rows
    if rows and json_content(as_text(rows[0][0])) == json_content(text):
        return False
    raise DuplicateSaga("SAGA_ID_REUSED", saga=saga.name, id=id_)


def ddl(dialect: str) -> tuple[str, ...]:
    """The statements that make the tables, unless they are there.

    Args:
        dialect: postgres, mysql (and MariaDB), or sqlite.
    """
    name, id_, text, tail = _TYPES[check_dialect(dialect)]
    make = "CREATE TABLE IF NOT EXISTS"
    return (
        f"{make} {SAGAS} (\n  saga {name} NOT NULL,\n  id {id_} NOT NULL,\n  steps {text} NOT NULL,\n"
        f"  data {text} NOT NULL,\n  status {name} NOT NULL,\n  entries BIGINT NOT NULL,\n  epoch BIGINT NOT NULL,\n"
        f"  worker {name} NOT NULL,\n  due_ms BIGINT NOT NULL,\n  began_ms BIGINT NOT NULL,\n"
        f"  PRIMARY KEY (saga, id),\n  UNIQUE (status, due_ms, saga, id)\n){tail}",
        f"{make} {ENTRIES} (\n  saga {name} NOT NULL,\n  id {id_} NOT NULL,\n  n BIGINT NOT NULL,\n"
        f"  epoch BIGINT NOT NULL,\n  step {name} NOT NULL,\n  verb {name} NOT NULL,\n  event {name} NOT NULL,\n"
        f"  value {text},\n  error {text},\n  at_ms BIGINT NOT NULL,\n  PRIMARY KEY (saga, id, n)\n){tail}",
        *format_ddl(FORMATS, FORMAT, tail),
    )


@dataclass
class Claim:
    """A saga that this worker runs, until another one claims it.

    Attributes:
        entries: its log so far, kept up to date by `Log.append`.
    """

    saga: Saga
    id: str
    epoch: int
    data: Any
    status: Status
    entries: list[Entry]


@dataclass(frozen=True)
class Row:
    """A saga as listed.

    Attributes:
        step, error: of its newest entry; error of the newest one that has one.
        age_s: since it was recorded.
    """

    saga: str
    id: str
    status: Status
    step: str
    error: str
    age_s: float
    worker: str


@dataclass(frozen=True)
class Log:
    """Where sagas are kept. Picklable.

    Attributes:
        where: path of a SQLite file; a URL postgresql://host/db or mysql://host/db, without a password; or a function
            that returns a new connection.
        password: env:NAME or file:PATH.

    Raises:
        UsageError: the URL contains a password.
    """

    where: str | Callable[[], Any]
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        kinds: Any = (str, Callable)
        check_argument("Log", "where", self.where, kinds, "a path, a URL or a function that connects", '"sagas.db"')
        check_argument("Log", "password", self.password, (str, NoneType), "text", '..., password="env:NAME"')
        if isinstance(self.where, str) and holds_password(self.where):
            raise password_in_url("saga log", "log", "remove it and pass password='env:NAME' (--password env:NAME)")
        if isinstance(self.where, str) and self.where.startswith(("postgres:", "postgresql:", "mysql:", "mariadb:")):
            try:
                check_database_url(self.where)
            except Unfit as why:
                raise UsageError("SAGA_LOG.URL", reason=why.reason, action=why.next_step) from None

    def open(self) -> OpenLog:
        """
        Raises:
            Refused: there are no tables.
            Unreachable: the database does not answer, or does not let this user in.
            MissingExtra: the database's client is not installed.
        """
        if isinstance(self.where, str) and "://" not in self.where and not Path(self.where).exists():
            raise no_tables("sqlite")
        opened = OpenLog(self._connect())
        try:
            with opened.transaction() as caller:
                check_tables(caller)
        except BaseException:
            opened.close()
            raise
        return opened

    def create(self) -> None:
        """Make the tables, unless they are there."""
        with contextlib.closing(OpenLog(self._connect())) as log, log.transaction() as caller:
            if lock := _CREATING.get(caller.dialect):
                caller.execute(lock)
            for statement in ddl(caller.dialect):
                caller.execute(statement)

    @property
    def label(self) -> str:
        """For messages."""
        if not isinstance(self.where, str):
            return "the saga log"
        parts = urlsplit(self.where)
        return f"the saga log {parts.netloc.rpartition('@')[2] + parts.path if parts.scheme else self.where}"

    def _connect(self) -> Any:
        try:
            return self._connect_client()
        except Exception as error:
            if not is_lost(error):
                raise
            raise Unreachable("SAGA_UNREACHABLE", label=self.label, error=error) from None

    def _connect_client(self) -> Any:
        if not isinstance(self.where, str):
            return self.where()
        scheme = urlsplit(self.where).scheme
        password = None if self.password is None else resolve_secret("password", self.password)
        with extra("saga"):
            if scheme in ("postgresql", "postgres"):
                import psycopg

                login: dict[str, Any] = {} if password is None else {"password": password}
                return psycopg.connect(self.where, connect_timeout=int(CONNECT_TIMEOUT_S), **login)
            if scheme in ("mysql", "mariadb"):
                return _mysql(self.where, password)
        if "://" in self.where:
            raise UsageError("SAGA_LOG.PLACE", scheme=scheme)
        # A connection per thread of a worker, handed over at its end.
        connection = sqlite3.connect(self.where, timeout=REQUEST_TIMEOUT_S, check_same_thread=False)
        connection.execute("PRAGMA synchronous=EXTRA")
        return connection


def is_lost(error: BaseException) -> bool:
    """The database does not answer, or the client says that connection or transaction were lost."""
    return getattr(error, "may_come_back", False) or any(
        c.__module__.partition(".")[0] in ("psycopg", "pymysql", "sqlite3")
        and c.__name__ in ("OperationalError", "InterfaceError")
        for c in type(error).__mro__
    )


def _mysql(url: str, password: str | None) -> Any:
    from delivered.kits.mysql.connection import Connection

    return Connection(
        tls_of_url(url),
        **address(url),
        password=password or "",
        charset="utf8mb4",
        connect_timeout=int(CONNECT_TIMEOUT_S),
        read_timeout=REQUEST_TIMEOUT_S,
    )


def _identify_file(connection: Any) -> tuple[int, int] | None:
    """The file that the path of an SQLite connection leads to: the connection itself keeps a file that was replaced, as
    by a restore, and never sees what others write to the new one. None: none."""
    if not isinstance(connection, sqlite3.Connection):
        return None
    try:
        found = Path(connection.execute("PRAGMA database_list").fetchone()[2]).stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


class OpenLog:
    """One connection to a saga log; used by one thread."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._file = _identify_file(connection)
        if getattr(connection, "autocommit", -1) != -1 and isinstance(connection, sqlite3.Connection):
            own: Any = connection
            own.autocommit = True  # ends the transaction that sqlite3 keeps open with False
            own.autocommit = -1  # from here on, commit() does what it did before Python 3.12

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Caller]:
        """Committed at the end, durably, or rolled back."""
        if self._file != _identify_file(self._connection):
            raise sqlite3.OperationalError("another file has replaced the saga log")
        if isinstance(self._connection, sqlite3.Connection):
            self._connection.execute("BEGIN IMMEDIATE")  # a lock requested later is refused instead of waited for
        try:
            caller = Caller(self._connection, what="the saga log")
            if caller.dialect == "postgres":
                caller.execute("SET LOCAL synchronous_commit = 'on'")
            yield caller
            self._connection.commit()
        except BaseException:
            with contextlib.suppress(Exception):
                self._connection.rollback()
            raise

    def begin(self, saga: Saga, rows: Iterable[tuple[Any, Any]]) -> None:
        """Record sagas in one transaction, unless the log has them.

        Args:
            rows: id, and data as JSON text; None: null.

        Raises:
            DuplicateSaga: an id belongs to a saga with other data.
            BadRecord: a value cannot be stored.
        """
        ready = [check_row(*row) for row in rows]
        with self.transaction() as caller:
            for id_, text in ready:
                record(caller, saga, id_, text)

    def claim(self, saga: Saga, worker: str, id: str | None = None) -> Claim | None:  # noqa: A002
        """Take a saga that is due, so that nobody else runs it: this one, or any of its name and steps."""
        with self.transaction() as caller:
            now = NOW_MS[caller.dialect]
            one, values = ("AND id = ?", [caller.exact(id)]) if id is not None else ("", [])
            due = caller.execute(
                f"SELECT id, epoch FROM {SAGAS} WHERE status IN (?, ?) AND due_ms <= {now} AND saga = ? "
                f"AND steps = ? {one} ORDER BY due_ms LIMIT {_CANDIDATES}",
                (*_OPEN, saga.name, saga.signature, *values),
            ).rows
        for key, epoch in due:
            with self.transaction() as caller:
                claimed = caller.execute(
                    f"UPDATE {SAGAS} SET epoch = epoch + 1, worker = ?, due_ms = {now} + ? "
                    f"WHERE saga = ? AND id = ? AND epoch = ? AND status IN (?, ?) AND due_ms <= {now}",
                    (worker, int(saga.lease_s * 1000), saga.name, key, epoch, *_OPEN),
                ).count
                if claimed:
                    return self._read(caller, saga, key, int(epoch) + 1)
        return None

    def _read(self, caller: Caller, saga: Saga, key: Any, epoch: int) -> Claim:
        ((data, status),) = caller.execute(
            f"SELECT data, status FROM {SAGAS} WHERE saga = ? AND id = ?", (saga.name, key)
        ).rows  # fmt: skip
        entries = [
            Entry(step, Verb(verb), Event(event), None if value is None else json.loads(value), error or "")
            for step, verb, event, value, error in caller.execute(
                f"SELECT step, verb, event, value, error FROM {ENTRIES} WHERE saga = ? AND id = ? ORDER BY n",
                (saga.name, key),
            ).rows
        ]
        return Claim(saga, as_text(key), epoch, json.loads(data), Status(status), entries)

    def append(self, claim: Claim, entries: Sequence[Entry], status: Status, pause_s: float | None = None) -> None:
        """Write entries and the status that follows from them in one transaction, and keep the claim.

        Args:
            pause_s: give the claim up; the saga is due again after this long.

        Raises:
            Fenced: another worker claimed the saga, or a person resolved it. Nothing was written.
        """
        with self.transaction() as caller:
            now, key = NOW_MS[caller.dialect], caller.exact(claim.id)
            later = claim.saga.lease_s if pause_s is None else pause_s
            held = caller.execute(
                f"UPDATE {SAGAS} SET status = ?, entries = ?, due_ms = {now} + ? "
                "WHERE saga = ? AND id = ? AND epoch = ?",
                (status.value, len(claim.entries) + len(entries), int(later * 1000), claim.saga.name, key,
                 claim.epoch),
            )  # fmt: skip
            if not held.count:
                raise Fenced("SAGA_FENCED", saga=claim.saga.name, id=claim.id, epoch=claim.epoch)
            for n, entry in enumerate(entries, len(claim.entries) + 1):
                _insert(caller, claim.saga.name, key, n, claim.epoch, entry)
        claim.status = status
        claim.entries += entries

    def pause_s(self, sagas: Sequence[Saga]) -> float | None:
        """Seconds until the next of these sagas is due; None: all are at rest."""
        pauses: list[float] = []
        with self.transaction() as caller:
            for saga in sagas:
                ((due,),) = caller.execute(
                    f"SELECT MIN(due_ms) - {NOW_MS[caller.dialect]} FROM {SAGAS} "
                    "WHERE status IN (?, ?) AND saga = ? AND steps = ?",
                    (*_OPEN, saga.name, saga.signature),
                ).rows
                pauses += [] if due is None else [max(0.0, float(due) / 1000)]
        return min(pauses, default=None)

    def status(self, saga: Saga, id: str) -> Status | None:  # noqa: A002
        """None: no such saga.

        Raises:
            Refused: it was recorded with other steps, and no worker that has them took it when it was due.
        """
        with self.transaction() as caller:
            rows = caller.execute(
                f"SELECT status, steps, {NOW_MS[caller.dialect]} - due_ms FROM {SAGAS} WHERE saga = ? AND id = ?",
                (saga.name, caller.exact(id)),
            ).rows
        if not rows:
            return None
        status, steps, late_ms = Status(rows[0][0]), as_text(rows[0][1]), float(rows[0][2])
        if not status.at_rest and steps != saga.signature and late_ms > ABANDONED_S * 1000:
            raise Refused(
                "SAGA_STEPS", saga=saga.name, id=id, steps=steps, declared=saga.signature, late_s=late_ms / 1000
            )
        return status

    def rows(self, statuses: Sequence[Status], limit: int) -> list[Row]:
        """Sagas in these statuses, oldest first."""
        marks = ", ".join("?" * len(statuses))
        with self.transaction() as caller:
            sagas = caller.execute(
                f"SELECT saga, id, status, worker, {NOW_MS[caller.dialect]} - began_ms FROM {SAGAS} "
                f"WHERE status IN ({marks}) ORDER BY began_ms, saga, id LIMIT {int(limit)}",
                [s.value for s in statuses],
            ).rows
            listed = []
            for saga, key, status, worker, age_ms in sagas:
                newest = caller.execute(
                    f"SELECT step, error FROM {ENTRIES} WHERE saga = ? AND id = ? ORDER BY n DESC LIMIT 8",
                    (saga, key),
                ).rows
                step = newest[0][0] if newest else ""
                error = next((e for _, e in newest if e), "")
                listed.append(Row(saga, as_text(key), Status(status), step, error, float(age_ms) / 1000, worker))
        return listed

    def resolve(self, id: str, event: Event, saga: str | None = None) -> Row:  # noqa: A002
        """A person's answer to a stuck compensation: try it again (RETRY), skip it (SKIPPED), or it was done by
        hand (DONE). A worker goes on with what is left.

        Raises:
            UsageError: no such saga, or several; or it is not stuck.
        """
        with self.transaction() as caller:
            key = caller.exact(id)
            one, values = ("AND saga = ?", [saga]) if saga is not None else ("", [])
            matching = caller.execute(
                f"SELECT saga, status, epoch, entries FROM {SAGAS} WHERE id = ? {one}", (key, *values)
            ).rows  # fmt: skip
            if len(matching) != 1:
                what = "no saga" if not matching else "several sagas: " + ", ".join(str(r[0]) for r in matching)
                raise UsageError("SAGA_UNKNOWN", what=what, id=id)
            name, status, epoch, count = matching[0]
            if Status(status) is not Status.STUCK:
                raise Refused("SAGA_NOT_STUCK.STATUS", name=name, id=id, status=status)
            ((step,),) = caller.execute(
                f"SELECT step FROM {ENTRIES} WHERE saga = ? AND id = ? ORDER BY n DESC LIMIT 1", (name, key)
            ).rows  # fmt: skip
            changed = caller.execute(
                f"UPDATE {SAGAS} SET status = ?, entries = entries + 1, epoch = epoch + 1, "
                f"due_ms = {NOW_MS[caller.dialect]} WHERE saga = ? AND id = ? AND epoch = ? AND status = ?",
                (Status.COMPENSATING.value, name, key, epoch, Status.STUCK.value),
            ).count
            if not changed:
                raise Refused("SAGA_NOT_STUCK.RESOLVED", name=name, id=id)
            entry = Entry(step, Verb.UNDO, event, error="resolved by a person")
            _insert(caller, name, key, int(count) + 1, int(epoch) + 1, entry)
        return Row(name, id, Status.COMPENSATING, step, "", 0.0, "")

    def clean(self, age_s: float) -> int:
        """Delete sagas that have been complete or compensated for this long, at most `CLEANED_MAX`; call it again until
        it deletes fewer. An id that comes again afterwards begins a new saga. Stuck sagas stay.

        Returns: sagas deleted.
        """
        with self.transaction() as caller:
            old = caller.execute(
                f"SELECT saga, id FROM {SAGAS} WHERE status IN (?, ?) AND due_ms < {NOW_MS[caller.dialect]} - ? "
                f"ORDER BY due_ms LIMIT {CLEANED_MAX}",
                (Status.COMPLETE.value, Status.COMPENSATED.value, int(age_s * 1000)),
            ).rows
            for row in old:
                for table in (ENTRIES, SAGAS):
                    caller.execute(f"DELETE FROM {table} WHERE saga = ? AND id = ?", row)
        return len(old)


def _insert(caller: Caller, saga: str, key: Any, n: int, epoch: int, entry: Entry) -> None:
    value = None if entry.value is None else json.dumps(entry.value, ensure_ascii=False)
    caller.execute(
        f"INSERT INTO {ENTRIES} (saga, id, n, epoch, step, verb, event, value, error, at_ms) "
        f"VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, {NOW_MS[caller.dialect]})",
        (saga, key, n, epoch, entry.step, entry.verb.value, entry.event.value, value, entry.error),
    )


def check_tables(caller: Caller) -> None:
    """Raise Refused if the tables are not there, or a newer version of this package made them."""
    caller.check_format(FORMATS, "a saga log", FORMAT, no_tables(caller.dialect))


def no_tables(dialect: str) -> Refused:
    return Refused("SAGA_TABLES", dialect=dialect)


def check_row(id_: Any, data: Any) -> tuple[str, str]:
    """A saga's id, and its data as JSON text; data that is text must be JSON already.

    Raises:
        BadRecord: they cannot be stored.
    """
    fits = isinstance(id_, str) and not unstorable(id_) and 0 < len(id_.encode()) <= SAGA_ID_BYTES_MAX
    if not fits:
        raise BadRecord("SAGA_ID", id=id_, id_type=type(id_).__name__, saga_id_bytes_max=SAGA_ID_BYTES_MAX)
    try:
        text = json_text(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRecord("SAGA_DATA.INVALID", id=id_, error=error) from None
    if len(text.encode()) > SAGA_DATA_BYTES_MAX:
        raise BadRecord(
            "SAGA_DATA.TOO_LARGE", id=id_, bytes=len(text.encode()), saga_data_bytes_max=SAGA_DATA_BYTES_MAX
        )
    return id_, text

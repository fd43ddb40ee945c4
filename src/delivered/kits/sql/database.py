"""A database as the user declared it: its SQL dialect, connections, readable errors, queries, watched statements, and
values that it sends as text.

Statements are written once, with `:name` for values and `{table}` for the ledger's tables; a `Dialect` translates them
for the client. Tasks pool their connections in the reused worker: opening one costs the server a session.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.kits import WarmClients
from delivered.model.capability import WriteMode
from delivered.model.errors import BadRecord, DeliveredError, Unreachable, UsageError
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import TELL_AFTER_S, TELL_EVERY_S, patience_s, query_patience_s, wait_out
from delivered.model.rows import INT32, INT64
from delivered.model.work import STARTED

if TYPE_CHECKING:
    import psycopg

    from delivered.model.identity import Scope

T = TypeVar("T")
CLAIM_WAIT_S = 1
"""How long a claim waits for a decision in flight before it terminates the session."""
_PLAIN = ("owner", "decision", "marker", "memory", "seen", "archive", "dead_letter", "seal", "writer")
LEDGER_TABLES = {name: name for name in _PLAIN} | {"started": STARTED, "admitted": "noted", "skipped": "left_out"}
"""The ledger's tables: name in our statements -> name in databases, which is durable."""
STARTED_AT = "begun_at"
"""Durable, too: the column of `started` that holds the time, where a database has one."""


def create_statement(text: str, schema: str) -> str:
    """A statement of a migration, for this schema, which is quoted."""
    return text.format(s=schema, started_at=STARTED_AT, **LEDGER_TABLES)


class Connection(Protocol):
    """The subset of a client's connection used here."""

    def execute(self, statement: str, values: Any = ..., /) -> Any: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Database(ABC, Generic[C]):
    """One database. Holds no connection; picklable."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Its location, for messages: "at host:5432/shop"."""

    @abstractmethod
    def connect(self, role: str, *, writes: bool = True) -> C:
        """Open a connection. Raises DeliveredError within 15 s. Args: role: shown in the server's list of sessions."""

    @abstractmethod
    def errors(self) -> type[Exception]:
        """Base class of the client's errors; imported on first use."""

    @abstractmethod
    def explained(self, error: Exception) -> DeliveredError:
        """Translate the client's error, with the next step."""

    @abstractmethod
    def is_constraint(self, error: Exception) -> bool:
        """Whether a row violated a constraint: the statement had no effect, its transaction goes on."""

    def is_away(self, error: BaseException) -> bool:
        """Whether the server may answer later: it restarts, or fails over to another machine."""
        del error
        return False

    @property
    @abstractmethod
    def dialect(self) -> Dialect:
        """Of the ledger in this database."""

    @abstractmethod
    def version(self, connection: C) -> int:
        """Version of the ledger's tables; 0: they do not exist. Raises the client's error."""

    @abstractmethod
    def migrate(self, connection: C) -> None:
        """Create or migrate the ledger's tables; does nothing if they are up to date. Outside a transaction.

        Raises:
            UsageError: a newer version of this package created them.
            The client's error: the server rejected it.
        """

    @abstractmethod
    def begin(self, connection: C) -> None:
        """Begin a read-write transaction, durable once committed. Raises the client's error."""

    @abstractmethod
    def claiming(self, connection: C) -> contextlib.AbstractContextManager[None]:
        """One read-write transaction that waits at most `CLAIM_WAIT_S` for a lock, or, in a database without sessions
        to end, as long as a claim may; committed at its end, or rolled back."""

    @abstractmethod
    def idle(self, connection: C) -> bool:
        """Whether the connection is open and outside any transaction, by the client's state; no round trip. False for
        that to a file that was replaced."""

    @abstractmethod
    def may_commit(self, error: Exception) -> bool:
        """Whether a transaction may still be committed whose COMMIT raised this."""

    def is_locked(self, error: BaseException) -> bool:
        """Whether a lock wait timed out: the statement had no effect and may be retried."""
        del error
        return False

    def end_holders(self, connection: C, role: str, signature: Callable[[], str]) -> str:
        """Terminate idle sessions of this ledger that hold the owner's row: drivers paused mid-decision. Their
        transactions are rolled back, so they are fenced.

        Never terminates one that waits for a standby: it has committed locally, and readers would see rows that a
        fail-over loses. Returns what it waits for; empty: there is none.

        Args:
            role: of those sessions.
            signature: reads the one in the owner's row (`Dialect.sign`).
        """
        del connection, role, signature
        return ""

    def exists(self) -> bool:
        """False: connecting would create it."""
        return True

    @abstractmethod
    def borrow(self, *, writes: bool) -> contextlib.AbstractContextManager[C]:
        """A connection outside any transaction, for one statement, committed at its end. Translates errors."""

    def waiting(self, ask: Callable[[], T], *, kept: bool = False) -> T:
        """See `Server.waiting`."""
        del kept
        return ask()

    def discard(self, connection: C | None) -> None:
        """Close a connection, which rolls back its open transaction. Never raises."""
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def at_once(self, connection: C) -> None:
        """Make the open transaction check deferred constraints immediately."""
        del connection

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Translate the client's errors."""
        try:
            yield
        except self.errors() as error:
            raise self.explained(error) from error

    def ask(self, question: Callable[[C], T]) -> T:
        """Run a read-only query on its own connection."""
        connection = self.connect("read", writes=False)
        try:
            with self.explaining():
                return question(connection)
        finally:
            self.discard(connection)


def identify_file(path: str) -> tuple[int, int] | None:
    """The file that a path leads to; None: to none.

    If a copy takes a file's place, as a restore does, an SQLite connection keeps the old one open: nobody sees what it
    writes there, nor does it see what others write. SQLite itself notices only some writes.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - in each batch
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def scope_values(scope: Scope) -> dict[str, Any]:
    """Values of a ledger's rows."""
    return {"pipeline": scope.pipeline, "sink": scope.sink, "incarnation": scope.incarnation}


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def with_values(schema: str) -> str:
    """The ledger's schema, quoted for a statement with values."""
    return quoted(schema).replace("%", "%%")


def is_newest(version: int, known: int, ledger: str) -> bool:
    """Whether the ledger's tables need no migration.

    Args:
        ledger: for messages: "in schema 'delivered'".

    Raises:
        UsageError: a newer version of this package created them.
    """
    if version > known:
        raise UsageError("LEDGER_NEWER", ledger=ledger, version=version, known=known)
    return version == known


class Server(Database[C]):
    """One database of one server. Holds no connection; picklable; equal if declared alike.

    Attributes:
        system: the server's product, for messages.
    """

    system: ClassVar[str]

    def connect(self, role: str, *, writes: bool = True) -> C:
        """Open a connection; a running query waits until the server is back.

        Raises:
            DeliveredError: see `Database.connect`; in a running query once `OUTAGE_PATIENCE_S` is over.
        """
        return self.waiting(lambda: self._connect(role, writes))

    @abstractmethod
    def _connect(self, role: str, writes: bool) -> C:
        """Open a connection. See `Database.connect`."""

    def waiting(self, ask: Callable[[], T], *, kept: bool = False) -> T:
        """Ask until the server answers, within the patience of a running query; otherwise once.

        Args:
            ask: a query or an idempotent change, on a new connection after each error; called any number of times.
            kept: it uses a connection that a restart may have closed long ago: ask at least twice.

        Raises:
            The last error of `ask`; if the server stayed away, one that says for how long.
        """

        def twice() -> T:
            try:
                return ask()
            except Exception as error:
                if not self.is_away(error):
                    raise
            return ask()

        began = time.monotonic()
        try:
            return wait_out(f"{self.system} {self.where}", twice if kept else ask, self.is_away, query_patience_s())
        except Exception as error:
            waited_s = time.monotonic() - began
            if query_patience_s() == 0.0 or waited_s < 1.0 or not self.is_away(error):
                raise
            explained = error if isinstance(error, DeliveredError) else self.explained(error)
            raise explained.after(waited_s) from error

    def is_away(self, error: BaseException) -> bool:
        if isinstance(error, DeliveredError):
            return isinstance(error, Unreachable) and (error.may_come_back or error.code == _READ_ONLY)
        return isinstance(error, self.errors()) and self.is_away(self.explained(error))

    @contextlib.contextmanager
    def borrow(self, *, writes: bool = True) -> Iterator[C]:
        """A connection from `take`, and back."""
        del writes
        connection = take(self)
        try:
            with self.explaining():
                yield connection
        except BaseException:
            self.discard(connection)
            raise
        give(self, connection)

    @abstractmethod
    def check_writable(self, connection: C) -> None:
        """Check that the connection works, and leads to a server that accepts writes: a fail-over may have demoted it.

        Raises:
            Unreachable: it is read-only.
            The client's error: the connection is lost.
        """

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection was lost, so that the outcome of the last statement is unknown."""

    @abstractmethod
    def definition(self, connection: C, *, columns: bool = False) -> Definition:
        """What the target's definition does to rows. Raises the client's error.

        Args:
            columns: read limits and computed columns, too.
        """

    @abstractmethod
    def table(self, connection: C) -> str | None:
        """Full name of the target, quoted; None: there is none. Raises the client's error."""


_READ_ONLY = "DELIVERED_READ_ONLY"
_idle: WarmClients[Any] = WarmClients(4)


def take(server: Server[C]) -> C:
    """Take a live connection outside any transaction, for exclusive use until `give`.

    Raises:
        DeliveredError: see `Database.connect`.
    """
    connection: C | None = _idle.take(server)
    if connection is not None:
        try:
            server.check_writable(connection)
            return connection
        except (Unreachable, server.errors()):  # the server was restarted, or is a standby now
            server.discard(connection)
    return server.connect("task")


def give(server: Server[C], connection: C) -> None:
    """Return a connection for the next shard; it is closed if a transaction is open on it."""
    if server.idle(connection):
        _idle.give(server, connection)
    else:
        server.discard(connection)


@dataclass(frozen=True)
class Dialect:
    """
    Attributes:
        tables: the keys of `LEDGER_TABLES` -> their names in the database, quoted for SQL.
        value: ":name" in the client's notation.
        written: table -> column that increases with each insert.
        snapshot: statements that begin a read-only transaction on a consistent snapshot.
        see_holders: how a user ends the session that holds a lock.
        sign: statement that locks the owner's row and writes the session's nonce to it; others can read it before the
            commit. Empty: the server shows which session holds it.
        now: SQL of that column in a new row of `started`, if the database does not number rows by itself.
        hold: suffix of a SELECT that locks the row until the transaction ends.
        pack, unpack: convert a list of names to and from the client's form.
        hash: bytes as an SQL literal.
    """

    tables: dict[str, str]
    value: Callable[[str], str]
    written: dict[str, str]
    hold: str
    pack: Callable[[Sequence[str]], Any]
    unpack: Callable[[Any], Sequence[str]]
    hash: Callable[[bytes], str]
    snapshot: tuple[str, ...]
    see_holders: str = ""
    sign: str = ""
    now: str = ""

    @property
    def marks(self) -> bool:
        """Whether prepared transactions leave markers next to the ledger."""
        return "marker" in self.tables

    def __call__(self, statement: str) -> str:
        return self.value(statement).format(**self.tables)

    def known(self, keys: str, column: str | None) -> str:
        """Suffix of an INSERT that updates `column` of existing rows; None: leaves them unchanged."""
        return f"ON CONFLICT ({keys}) DO " + (f"UPDATE SET {column} = excluded.{column}" if column else "NOTHING")

    def delete(self, connection: Connection, table: str, where: str, values: Mapping[str, Any]) -> None:
        """Delete rows that are committed, or that this connection wrote. Inside an open transaction, or as its own."""
        connection.execute(self(f"DELETE FROM {{{table}}} WHERE {where}"), values)

    def forget(self, connection: Connection, table: str, index: str, where: str) -> None:
        """Bulk-delete rows that no other connection uses, by an index, inside an open transaction.

        Args:
            index: on the columns of `where`.
        """
        del index
        connection.execute(self(f"DELETE FROM {{{table}}} WHERE {where}"), {})


# What a table's definition does to rows besides storing them.


@dataclass(frozen=True)
class Definition:
    """What a table's definition does to rows besides storing them.

    Attributes:
        triggers: those that the write mode fires, and rules: those that replace its statements, each with its events.
        loose: key column -> why different keys are equal in it.
        row_security: a policy applies to this user.
        clauses: the table's conflict clauses would skip or replace rows.
        widths, filled: columns with a limit, and those that the server fills; for the plan.
        computed: of `filled`, those that no row may give.
        exists: there is such a table.
    """

    triggers: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    loose: dict[str, str] | None = None
    row_security: bool = False
    clauses: bool = False
    widths: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    exists: bool = True

    @property
    def loose_keys(self) -> tuple[str, ...]:
        return tuple(self.loose or ())

    @property
    def deceives(self) -> bool:
        """Whether as many rows as were sent may be stored under other keys."""
        return bool(self.triggers or self.rules or self.loose)

    @property
    def suspects(self) -> str:
        """What may have dropped rows, for messages."""
        parts = []
        if self.triggers:
            parts.append(f"triggers: {', '.join(self.triggers)}")
        if self.rules:
            parts.append(f"rules: {', '.join(self.rules)}")
        if self.loose:
            parts.append(f"keys: {list_keys(self.loose)}")
        if self.row_security:
            parts.append("row-level security applies to this user")
        return "; ".join(parts) or "no triggers, no rules"


def find_events(mode: WriteMode) -> tuple[str, ...]:
    """Of the statements that a mode runs on the table."""
    updates = mode.upserts and not mode.insert
    deletes = mode.delete is not None or mode.complete
    return ("INSERT", *(("UPDATE",) * updates), *(("DELETE",) * deletes))


def list_keys(loose: dict[str, str]) -> str:
    """Key columns and why different keys are equal in them, for messages."""
    return ", ".join(f"{column!r} ({why})" for column, why in loose.items())


# Statements in flight are watched from connections of their own. A commit may wait for a synchronous standby that is
# down, and a server that was paused or lost its machine answers nothing: in both cases the client waits without a word,
# for ever. Here both are logged, and end after a bounded time.

log = logging.getLogger("delivered.outage")

_LOOK_S = 0.5


@dataclass(frozen=True)
class Peer:
    """A server as one session reaches it.

    Attributes:
        label: for messages: "PostgreSQL at host:5432".
        waits: session ids -> what those that wait for a standby wait for, asked on a new connection. Raises
            TimeoutError: no answer within `CONNECT_TIMEOUT_S`.
    """

    label: str
    waits: Callable[[Sequence[int]], Mapping[int, str]] = field(compare=False)


@dataclass(eq=False)
class InFlight:
    """A statement whose end is awaited.

    Attributes:
        session: the session's id at the server.
        cut: ends the connection, so that the wait fails.
        reason: why it was cut; empty: it was not.
    """

    peer: Peer
    session: int
    cut: Callable[[], None]
    since: float
    reason: str = ""


_lock = threading.Lock()
_in_flight: set[InFlight] = set()
_silent: dict[str, float] = {}
"""Label -> since when new connections get no answer."""
_reported: dict[str, float] = {}
_watcher: tuple[int, threading.Thread] | None = None


@contextlib.contextmanager
def watch(peer: Peer, session: int, cut: Callable[[], None]) -> Iterator[InFlight]:
    """Watch the body's wait. Used by any thread, around each statement: costs a microsecond or two."""
    call = InFlight(peer, session, cut, time.monotonic())
    with _lock:
        _start()
        _in_flight.add(call)
    try:
        yield call
    finally:
        with _lock:
            _in_flight.discard(call)


def _start() -> None:
    """A forked process does not inherit its parent's thread, nor its statements."""
    global _watcher
    if _watcher is None or _watcher[0] != os.getpid():
        _in_flight.clear()
        thread = threading.Thread(target=_watch, daemon=True, name="delivered-statements")
        _watcher = (os.getpid(), thread)
        thread.start()


def _watch() -> None:
    pause = threading.Event()
    while not pause.wait(_LOOK_S):
        now = time.monotonic()
        with _lock:
            due: dict[str, list[InFlight]] = {}
            for call in _in_flight:
                if now - call.since >= TELL_AFTER_S and now - _reported.get(call.peer.label, 0.0) >= TELL_EVERY_S:
                    due.setdefault(call.peer.label, []).append(call)
            for label in due:
                _reported[label] = now
        for label, calls in due.items():
            try:
                _look_at(label, calls)
            except Exception as error:
                # It answers, if only with a refusal; the statement has its own error, or goes on.
                log.debug("%s: could not look: %s", label, error)


def _look_at(label: str, calls: Sequence[InFlight]) -> None:
    asked = time.monotonic()
    try:
        waits = calls[0].peer.waits([c.session for c in calls])
    except TimeoutError:
        now = time.monotonic()
        since = _silent.setdefault(label, asked)
        log.warning("%s does not answer (%.0f s)", label, now - min(c.since for c in calls))
        if now - since >= REQUEST_TIMEOUT_S:
            _cut(calls, f"no answer for {REQUEST_TIMEOUT_S:.0f} s, not to a new connection either")
        return
    _silent.pop(label, None)
    for call in calls:
        if call.session in waits:
            waited_s = time.monotonic() - call.since
            log.warning("%s: a commit has waited %.0f s for %s", label, waited_s, waits[call.session])
            if waited_s >= patience_s(answered=False):
                _cut([call], f"a commit waited {waited_s:.0f} s for {waits[call.session]}")


def _cut(calls: Sequence[InFlight], reason: str) -> None:
    with _lock:
        for call in calls:
            if call in _in_flight:
                call.reason = reason
                call.cut()


# Dates and times that PostgreSQL sends as text: as the numbers that Arrow stores, exact beyond Python's years.
#
# Logical decoding, COPY and casts to text follow the settings of the session that reads.

_DATE = r"(\d{4,})-(\d\d)-(\d\d)"
_CLOCK = r" (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
_ZONE = r"(?:([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?)?"
_TEXT = re.compile(rf"{_DATE}(?:{_CLOCK}{_ZONE})?( BC)?")
_EPOCH, _EPOCH_LOCAL = dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.datetime(1970, 1, 1)  # noqa: DTZ001
_MICROSECOND = dt.timedelta(microseconds=1)
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097
"""The Gregorian calendar repeats itself."""


def days(text: str) -> int:
    """
    Returns:
        Days since 1970-01-01.

    Raises:
        ValueError: no date that a number of 32 bits holds, such as infinity.
    """
    return _check_bounds(_parse(text)[0], INT32, text)


def micros(text: str, zoned: bool) -> int:
    """
    Args:
        zoned: the text ends with its offset from UTC.

    Returns:
        Microseconds since 1970-01-01, in UTC if zoned.

    Raises:
        ValueError: no time that a number of 64 bits holds, such as infinity.
    """
    try:
        found = dt.datetime.fromisoformat(text)
        return (found - (_EPOCH if zoned else _EPOCH_LOCAL)) // _MICROSECOND
    except TypeError:
        raise ValueError(f"{text!r} has an offset from UTC, or lacks it") from None
    except ValueError:  # outside the years 1 to 9999
        day, clock = _parse(text)
        return _check_bounds(day * 86_400_000_000 + clock, INT64, text)


def _parse(text: str) -> tuple[int, int]:
    """Days, and microseconds of the day in UTC, which may be of another day."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no date or time that Spark has")
    year, month, day, *clock, sign, hours, minutes, seconds, before = found.groups()
    number = 1 - int(year) if before else int(year)
    cycles, rest = divmod(number - 1, _CYCLE_YEARS)
    since = dt.date(rest + 1, int(month), int(day)) - _EPOCH_LOCAL.date()
    h, m, s, fraction = clock
    at = (int(h or 0) * 60 + int(m or 0)) * 60 + int(s or 0)
    offset = (int(hours or 0) * 60 + int(minutes or 0)) * 60 + int(seconds or 0)
    at = at + offset if sign == "-" else at - offset
    return since.days + cycles * _CYCLE_DAYS, at * 1_000_000 + int((fraction or "").ljust(6, "0"))


def _check_bounds(number: int, bounds: tuple[int, int], text: str) -> int:
    if not bounds[0] <= number <= bounds[1]:
        raise ValueError(f"{text!r} is later or earlier than Spark's dates and times")
    return number


POSTGRES = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmloption": "content",
}


def refuses_login(text: str) -> bool:
    """Whether PostgreSQL refused a login, by the message of an error without a code: while connecting, the client keeps
    none. A login that took the server too long was not refused."""
    words = ("authentication", "password", "pg_hba.conf", 'FATAL: role "')
    return "due to timeout" not in text and any(each in text for each in words)


def pin_postgres(connection: psycopg.Connection[Any], place: str) -> None:
    """Set them, outside any transaction, and check that it took. For walsenders, too, which take no parameters.

    Raises:
        UsageError: the session keeps another value.
        psycopg.Error: the server rejected it.
    """
    connection.execute("SELECT " + ", ".join(f"set_config('{k}', '{v}', false)" for k, v in POSTGRES.items()))
    row = connection.execute("SELECT " + ", ".join(f"current_setting('{k}')" for k in POSTGRES)).fetchone()
    if not connection.autocommit:
        connection.commit()  # a rollback would set them back
    for (name, value), found in zip(POSTGRES.items(), map(str, row or ()), strict=True):
        if found != value:
            raise setting_refused(name, found, place)


def setting_refused(name: str, value: str, place: str) -> UsageError:
    return UsageError("SETTING_REFUSED", place=place, name=name, value=value)


# Rows that a server sends as CSV, parsed by Arrow without loss.
#
# Timestamps and times are microseconds, dates are days since 1970, bytes are lower-case hexadecimal digits, null
# is an empty field, and an empty text is quoted.

BLOCK_BYTES = 1 << 20
"""Size of a block that Arrow parses."""


def read_csv(
    more: Callable[[], bytes | bytearray | memoryview], schema: pa.Schema, true: str, false: str
) -> Iterator[pa.RecordBatch]:
    """
    Args:
        more: returns the next piece of the text, of any length; empty at the end.
        true, false: the server's boolean literals.
    """
    from pyarrow import csv

    text = _Text(more)
    if text.empty:  # Arrow raises on empty input
        return
    read_options = csv.ReadOptions(column_names=schema.names, block_size=BLOCK_BYTES, use_threads=False)
    convert_options = csv.ConvertOptions(
        column_types={f.name: _parse_as(f.type) for f in schema},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        true_values=[true],
        false_values=[false],
    )
    try:
        reader = csv.open_csv(
            pa.PythonFile(text, "r"),
            read_options=read_options,
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=convert_options,
        )
        for batch in reader:
            arrays = [_restore(c, f.type) for c, f in zip(batch.columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
    except pa.ArrowInvalid as error:
        raise _unreadable(schema, error) from None


_COLUMN = re.compile(r"In CSV column #(\d+): (?:Row #\d+: )?")


def _unreadable(schema: pa.Schema, error: Exception) -> BadRecord:
    """A stored value without a counterpart, by Arrow's message."""
    text = str(error)
    found = _COLUMN.search(text)
    column = f"Column {schema.names[int(found[1])]!r}" if found else "A column"
    return BadRecord("VALUE_UNREADABLE.CSV", column=column, value=_COLUMN.sub("", text)[:300])


def _parse_as(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_timestamp(kind) or t.is_time(kind):
        return pa.int64()
    if t.is_date32(kind):
        return pa.int32()
    return kind if not t.is_binary(kind) else pa.string()


def _restore(column: pa.Array, kind: pa.DataType) -> pa.Array:
    t = pa.types
    if t.is_binary(kind):
        return _from_hex(column)
    if t.is_timestamp(kind) or t.is_time(kind) or t.is_date32(kind):
        return column.cast(kind)
    return pc.cast(column, kind) if not column.type.equals(kind) else column


def _from_hex(column: pa.Array) -> pa.Array:
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    digits = np.frombuffer(b"" if data is None else data, np.uint8)[offsets[0] : offsets[-1]]
    halves = np.where(digits >= ord("a"), digits - (ord("a") - 10), digits - ord("0")).astype(np.uint8)
    values = (halves[0::2] << 4 | halves[1::2]).astype(np.uint8)
    texts = pa.Array.from_buffers(
        pa.binary(),
        len(column),
        [None, pa.py_buffer(((offsets - offsets[0]) // 2).astype(np.int32)), pa.py_buffer(values)],
    )
    return texts if column.null_count == 0 else pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.binary()))


class _Text(io.RawIOBase):
    def __init__(self, more: Callable[[], bytes | bytearray | memoryview]) -> None:
        self._more = more
        self._rest = memoryview(b"")
        self._fill()
        self.empty = not self._rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._fill()
        wanted = len(self._rest) if size < 0 else min(size, len(self._rest))
        part, self._rest = self._rest[:wanted], self._rest[wanted:]
        return bytes(part)

    def _fill(self) -> None:
        """Collect a full block: servers send single rows."""
        parts, size = [], 0
        while size < BLOCK_BYTES and (data := self._more()):
            parts.append(bytes(data))
            size += len(data)
        self._rest = memoryview(b"".join(parts))

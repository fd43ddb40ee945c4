"""An event log: what happened to an aggregate, in order; its state is the fold of its events.

    account = Aggregate("account", apply, initial={"balance": 0}, snapshot_every=100)
    state, version = account.load(connection, "7")
    account.append(connection, "7", [Event(new_id(), "deposited", {"amount": 5})], expected=version)
    connection.commit()                  # the events, and whatever else this transaction wrote, or nothing

Needs neither Spark nor a connector.
"""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from delivered.model.errors import BadRecord, InvariantBroken, Refused, UsageError
from delivered.model.limits import EVENT_BYTES_MAX, EVENTS_APPENDED_MAX
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
from delivered.patterns.outbox import new_id

__all__ = ["Aggregate", "Appended", "Conflict", "DuplicateEvent", "Event", "Loaded", "ddl", "new_id"]

FORMAT = 1
EVENTS, SNAPSHOTS, FORMATS = "delivered_event", "delivered_event_snapshot", "delivered_event_format"
ID_BYTES_MAX = 128
NAME_BYTES_MAX = 64

# Exact text: MySQL's other collations ignore case and spaces at the end.
_TYPES = {
    "postgres": {
        "name": f'VARCHAR({NAME_BYTES_MAX}) COLLATE "C"', "key": f'VARCHAR({ID_BYTES_MAX}) COLLATE "C"', "id": "UUID",
        "json": "TEXT", "tail": "",
    },
    "mysql": {
        "name": f"VARCHAR({NAME_BYTES_MAX}) CHARACTER SET ascii COLLATE ascii_bin", "key": f"VARBINARY({ID_BYTES_MAX})",
        "id": "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
        "json": "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", "tail": " ENGINE=InnoDB",
    },
    "sqlite": {"name": "TEXT", "key": "TEXT", "id": "TEXT", "json": "TEXT", "tail": ""},
}  # fmt: skip
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_BYTES_MAX}}}")
_READ = 1_000


@dataclass(frozen=True)
class Event:
    """
    Attributes:
        id: from `new_id`, called before the first try; every try takes the same.
        type: at most 64 letters, digits, dots, dashes and underscores.
        payload: a JSON value.
    """

    id: uuid.UUID
    type: str
    payload: Any = None


class Loaded(NamedTuple):
    """
    Attributes:
        version: number of the aggregate's events; 0: there are none.
    """

    state: Any
    version: int


class Appended(NamedTuple):
    """
    Attributes:
        version: of the last event.
        stored: by this call; False: an earlier try with the same ids was committed.
    """

    version: int
    stored: bool


class Conflict(Refused):
    """The aggregate is not at the expected version. Nothing was written, and the transaction can go on.

    Attributes:
        found: its version; 0: it has no events.
    """

    found = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args, {"found": self.found})

    @classmethod
    def at(cls, what: str, expected: int, found: int) -> Conflict:
        conflict = cls("EVENTS_CONFLICT", what=what, actual=found, expected=expected)
        conflict.found = found
        return conflict


class DuplicateEvent(Refused):
    """The log has an event with this id already. Nothing was written, and the transaction can go on."""


@dataclass(frozen=True)
class Aggregate:
    """A kind of aggregate, such as an account.

    Attributes:
        apply: state and event -> the next state; deterministic, without I/O. States are JSON values.
        initial: the state before the first event.
        snapshot_every: events between two snapshots; 0: none.
        fold: version of `apply`. Snapshots of another one are ignored: raise it whenever `apply` changes.

    Raises:
        UsageError: a name or number is out of bounds.
    """

    name: str
    apply: Callable[[Any, Event], Any]
    initial: Any = None
    snapshot_every: int = 100
    fold: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.snapshot_every < 0:
            raise UsageError(
                "EVENTS_AGGREGATE", name=self.name, snapshot_every=self.snapshot_every, pattern=_NAME.pattern
            )

    def load(self, connection: Any, id: str) -> Loaded:  # noqa: A002
        """The state as this transaction sees it: the newest snapshot, and the events after it.

        Args:
            connection: of psycopg 3, PyMySQL or sqlite3; a SQLAlchemy Session or Connection.
        """
        return self._load(self._caller(connection, "events.load", writes=False), _key(id))

    def append(self, connection: Any, id: str, events: Sequence[Event], *, expected: int) -> Appended:  # noqa: A002
        """Write events, in the transaction that is open on `connection`. Commits nothing.

        A snapshot that is due is written in the same transaction. While another transaction appends to the same
        aggregate, this waits: if that one commits, it is a conflict.

        Args:
            connection: as `load`.
            expected: the version that the events were decided on; 0: a new aggregate.

        Raises:
            Conflict: the aggregate is at another version. The transaction can go on.
            DuplicateEvent: an id exists. The transaction can go on.
            Refused: the connection is in autocommit, or there are no tables.
            BadRecord: a value cannot be stored.
        """
        key, rows = _key(id), [_row(e) for e in events]
        if not 0 < len(rows) <= EVENTS_APPENDED_MAX or not isinstance(expected, int) or expected < 0:
            raise UsageError(
                "EVENTS_APPEND", event_count=len(rows), expected=expected, events_appended_max=EVENTS_APPENDED_MAX
            )
        caller = self._caller(connection, "events.append", writes=True)
        at, what = (self.name, caller.exact(key)), f"{self.name} {key!r}"
        where = f"FROM {EVENTS} WHERE aggregate = ? AND aggregate_id = ?"
        if expected and not caller.execute(f"SELECT 1 {where} AND version = ?{caller.latest}", (*at, expected)).rows:
            raise Conflict.at(what, expected, self._version(caller, at))
        columns = ("aggregate", "aggregate_id", "version", "id", "type", "payload", "at_ms")
        ((now,),) = caller.execute(f"SELECT {NOW_MS[caller.dialect]}").rows
        version = expected + len(rows)

        def ended() -> Exception:
            return InvariantBroken("EVENTS_TRANSACTION_ENDED")

        try:
            with caller.savepoint(ended):
                for number, row in enumerate(rows, expected + 1):
                    if not caller.insert(EVENTS, columns, (*at, number, *row, int(now))):
                        raise _Exists(row[0])
                if self.snapshot_every and version // self.snapshot_every > expected // self.snapshot_every:
                    self._snapshot(caller, key)
        except _Exists as exists:
            stored = caller.execute(
                f"SELECT id, type, payload {where} AND version > ? AND version <= ? ORDER BY version{caller.latest}",
                (*at, expected, version),
            ).rows
            with _stored(f"an event of {what} after version {expected}"):
                same = [_content(*map(as_text, row)) for row in stored] == [_content(*row) for row in rows]
            if same:
                return Appended(version, stored=False)
            own = caller.execute(
                f"SELECT aggregate, aggregate_id, version FROM {EVENTS} WHERE id = ?{caller.latest}", (exists.args[0],)
            ).rows
            if own:
                raise DuplicateEvent(
                    "EVENTS_DUPLICATE",
                    id=exists.args[0],
                    version=own[0][2],
                    aggregate=own[0][0],
                    aggregate_id=as_text(own[0][1]),
                ) from None
            if (found := self._version(caller, at)) == expected:
                raise Refused("EVENTS_ROW", id=exists.args[0], what=what) from None
            raise Conflict.at(what, expected, found) from None
        return Appended(version, stored=True)

    def _caller(self, connection: Any, what: str, *, writes: bool) -> Caller:
        caller = Caller(connection, what=what, writes=writes)
        _check_tables(caller)
        return caller

    def _load(self, caller: Caller, key: str, latest: str = "") -> Loaded:
        at = (self.name, caller.exact(key))
        kept = caller.execute(
            f"SELECT version, state FROM {SNAPSHOTS} WHERE aggregate = ? AND aggregate_id = ? AND fold = ?",
            (*at, self.fold),
        ).rows
        what = f"{self.name} {key!r}"
        version, state = 0, copy.deepcopy(self.initial)
        events = _events(caller, at, 0, what, latest)
        if kept:
            version = int(kept[0][0])
            with _stored(f"the snapshot of {what} at version {version}"):
                state = json.loads(kept[0][1])
            events = _events(caller, at, version - 1, what, latest)
            if next(events, (0, None))[0] != version:  # an append expects the event, and would be in conflict for ever
                raise InvariantBroken("EVENTS_SNAPSHOT", name=self.name, key=key, version=version)
        for number, event in events:
            if number != version + 1:
                raise InvariantBroken("EVENTS_GAP", name=self.name, key=key, version=version, number=number)
            version, state = number, self.apply(state, event)
        return Loaded(state, version)

    def _snapshot(self, caller: Caller, key: str) -> None:
        try:
            state, version = self._load(caller, key)
        except InvariantBroken:  # in MySQL, events were committed after this transaction's first read
            if not caller.latest:
                raise
            state, version = self._load(caller, key, caller.latest)
        text = _json(f"The state of {self.name} {key!r}", state)
        if json.loads(text) != state:
            raise BadRecord("EVENTS_STATE", name=self.name, key=key, state=state)
        kept = ("version", "fold", "state")
        if caller.dialect == "mysql":
            known = "ON DUPLICATE KEY UPDATE " + ", ".join(f"{c} = VALUES({c})" for c in kept)
        else:
            known = "ON CONFLICT (aggregate, aggregate_id) DO UPDATE SET " + ", ".join(
                f"{c} = excluded.{c}" for c in kept
            )
        caller.execute(
            f"INSERT INTO {SNAPSHOTS} (aggregate, aggregate_id, version, fold, state) VALUES (?, ?, ?, ?, ?) {known}",
            (self.name, caller.exact(key), version, self.fold, text),
        )

    def _version(self, caller: Caller, at: tuple[Any, ...]) -> int:
        """As committed now."""
        rows = caller.execute(
            f"SELECT version FROM {EVENTS} WHERE aggregate = ? AND aggregate_id = ? ORDER BY version DESC LIMIT 1"
            + caller.latest,
            at,
        ).rows
        return int(rows[0][0]) if rows else 0


def ddl(dialect: str) -> tuple[str, ...]:
    """The statements that make the tables, unless they are there.

    Args:
        dialect: postgres, mysql (and MariaDB), or sqlite.
    """
    t = _TYPES[check_dialect(dialect)]
    key = f"aggregate {t['name']} NOT NULL,\n  aggregate_id {t['key']} NOT NULL"
    make = "CREATE TABLE IF NOT EXISTS"
    return (
        f"{make} {EVENTS} (\n  {key},\n  version BIGINT NOT NULL,\n  id {t['id']} NOT NULL UNIQUE,\n"
        f"  type {t['name']} NOT NULL,\n  payload {t['json']} NOT NULL,\n  at_ms BIGINT NOT NULL,\n"
        f"  PRIMARY KEY (aggregate, aggregate_id, version)\n){t['tail']}",
        f"{make} {SNAPSHOTS} (\n  {key},\n  version BIGINT NOT NULL,\n  fold BIGINT NOT NULL,\n"
        f"  state {t['json']} NOT NULL,\n  PRIMARY KEY (aggregate, aggregate_id)\n){t['tail']}",
        *format_ddl(FORMATS, FORMAT, t["tail"]),
    )


def _check_tables(caller: Caller) -> None:
    """Raise Refused if the tables are not there, or a newer version of this package made them."""
    absent = Refused("EVENTS_TABLES", dialect=caller.dialect)
    caller.check_format(FORMATS, "an event log", FORMAT, absent)


class _Exists(Exception):
    """A version or an id exists."""


def _events(caller: Caller, at: tuple[Any, ...], after: int, what: str, latest: str) -> Iterator[tuple[int, Event]]:
    while True:
        rows = caller.execute(
            f"SELECT version, id, type, payload FROM {EVENTS} WHERE aggregate = ? AND aggregate_id = ? "
            f"AND version > ? ORDER BY version LIMIT {_READ}{latest}",
            (*at, after),
        ).rows
        for number, id_, type_, payload in rows:
            with _stored(f"version {number} of {what}"):
                event = Event(uuid.UUID(as_text(id_)), as_text(type_), json.loads(payload))
            yield int(number), event
        if len(rows) < _READ:
            return
        after = int(rows[-1][0])


@contextmanager
def _stored(what: str) -> Iterator[None]:
    """Raises InvariantBroken: it cannot be read, as another program wrote it, or changed it."""
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        raise InvariantBroken("EVENTS_DAMAGED", what=what, error_type=type(error).__name__, error=error) from None


def _key(id_: Any) -> str:
    if not isinstance(id_, str) or unstorable(id_) or not 0 < len(id_.encode()) <= ID_BYTES_MAX:
        raise BadRecord("EVENTS_ID", id=id_, id_type=type(id_).__name__, id_bytes_max=ID_BYTES_MAX)
    return id_


def _row(event: Event) -> tuple[str, str, str]:
    """Id, type and payload as they are stored."""
    if not isinstance(event.id, uuid.UUID) or not isinstance(event.type, str) or not _NAME.fullmatch(event.type):
        raise BadRecord("EVENTS_EVENT", id=event.id, type=event.type, pattern=_NAME.pattern)
    return str(event.id), event.type, _json(f"The payload of event {event.type}", event.payload)


def _content(id_: str, type_: str, payload: str) -> tuple[str, str, str]:
    """What makes two events equal."""
    return id_, type_, json_content(payload)


def _json(what: str, value: Any) -> str:
    try:
        text = json_text(json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRecord("EVENTS_JSON.INVALID", what=what, error=error) from None
    if len(text.encode()) > EVENT_BYTES_MAX:
        raise BadRecord("EVENTS_JSON.TOO_LARGE", what=what, bytes=len(text.encode()), event_bytes_max=EVENT_BYTES_MAX)
    return text

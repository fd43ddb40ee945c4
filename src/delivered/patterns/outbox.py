"""Transactional outbox: the message is a row, written in the transaction of the business rows.

    id = outbox.new_id()                 # before the first attempt; retries reuse it
    connection.execute("INSERT INTO orders ...")
    outbox.put(connection, id=id, aggregate_type="order", aggregate_id="7", type="created", payload={"total": 12})
    connection.commit()                  # both rows, or neither

The columns are those of Debezium's outbox event router. Needs neither Spark nor a connector.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from dataclasses import astuple, dataclass, replace
from types import NoneType
from typing import Any, Literal

from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.model.options import check_argument
from delivered.patterns.caller import Caller, as_text, check_dialect, json_content, json_text, quoted, unstorable

__all__ = ["DuplicateId", "Entry", "Layout", "ddl", "new_id", "put"]

_COUNTER_BITS = 42
_MS_BITS = 48
TEXT_LENGTH_MAX = 255
"""Characters of aggregate type, aggregate id and type."""

_TYPES = {
    "postgres": {"id": "UUID", "text": "VARCHAR(255)", "json": "JSONB", "bytes": "BYTEA", "tail": ""},
    "mysql": {
        "id": "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
        "text": "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        "json": "JSON",
        "bytes": "LONGBLOB",
        "tail": " ENGINE=InnoDB",  # others have no transactions
    },
    "sqlite": {"id": "TEXT", "text": "TEXT", "json": "TEXT", "bytes": "BLOB", "tail": ""},
}


@dataclass(frozen=True)
class Layout:
    """Names of the table and its columns; Debezium's defaults."""

    table: str = "outbox"
    id: str = "id"
    aggregate_type: str = "aggregatetype"
    aggregate_id: str = "aggregateid"
    type: str = "type"
    payload: str = "payload"

    def columns(self, dialect: str) -> tuple[str, ...]:
        """Quoted, the id first."""
        return tuple(quoted(dialect, name) for name in astuple(self)[1:])


@dataclass(frozen=True)
class Entry:
    """A row of the outbox.

    Attributes:
        payload: as stored; JSON as text.
        stored: this call inserted the row; False: it already existed, and these are its values.
    """

    id: uuid.UUID
    aggregate_type: str
    aggregate_id: str
    type: str
    payload: str | bytes | None
    stored: bool


class DuplicateId(Refused):
    """The outbox already has a row with this id, which the message describes. The transaction stays usable."""


def ddl(dialect: str, layout: Layout | None = None, *, payload: Literal["json", "bytes"] = "json") -> str:
    """The CREATE TABLE IF NOT EXISTS statement.

    Args:
        dialect: postgres, mysql (and MariaDB), or sqlite.
        payload: type of the payload column; bytes are stored unchanged, for example Avro.
    """
    types, layout = _TYPES[check_dialect(dialect)], _layout("ddl", layout)
    if payload not in ("json", "bytes"):
        raise UsageError("OUTBOX_PAYLOAD.TYPE", payload=payload)
    kinds = ("id", "text", "text", "text", payload)
    ends = (" PRIMARY KEY", " NOT NULL", " NOT NULL", " NOT NULL", "")
    columns = zip(layout.columns(dialect), kinds, ends, strict=True)
    rows = ",\n".join(
        f"  {name} {types[kind]}{' NOT NULL' if kind == 'id' else ''}{end}" for name, kind, end in columns
    )
    return f"CREATE TABLE IF NOT EXISTS {quoted(dialect, layout.table)} (\n{rows}\n){types['tail']}"


def _layout(call: str, layout: Layout | None) -> Layout:
    check_argument(call, "layout", layout, (Layout, NoneType), "a layout", '..., layout=Layout(table="outbox")')
    return Layout() if layout is None else layout


def put(
    connection: Any,
    *,
    id: uuid.UUID | str,  # noqa: A002
    aggregate_type: str,
    aggregate_id: str,
    type: str,  # noqa: A002
    payload: Any,
    on_duplicate: Literal["refuse", "ignore"] = "refuse",
    layout: Layout | None = None,
) -> Entry:
    """Write a message to the outbox, in the open transaction of `connection`. Never commits.

    Args:
        connection: of psycopg 3, PyMySQL or sqlite3; a SQLAlchemy Session or Connection.
        id: from `new_id`, called once, before the first attempt.
        payload: bytes, stored unchanged (if the table was created with payload="bytes"); str, which must be JSON; any
            other value is encoded as JSON; None: NULL, which Debezium sends as a tombstone.
        on_duplicate: what to do if the id exists with the *same* message; ignore: return the existing row. An id with a
            different message is always refused.

    Returns: the new row, or the existing one.

    Raises:
        DuplicateId: the id exists. The transaction stays usable.
        Refused: the connection is in autocommit, or the table does not exist.
        BadRecord: a value cannot be stored. Nothing was sent to the database.
    """
    layout = _layout("put", layout)
    if on_duplicate not in ("refuse", "ignore"):
        raise UsageError("OUTBOX_DUPLICATE.ARGUMENT", on_duplicate=on_duplicate)
    entry = Entry(
        _uuid(id),
        _text("aggregate_type", aggregate_type),
        _text("aggregate_id", aggregate_id),
        _text("type", type),
        _payload(payload),
        stored=True,
    )
    caller = Caller(connection, what="outbox.put")
    sent = [str(entry.id), *astuple(entry)[1:5]]
    columns, table = layout.columns(caller.dialect), caller.quoted(layout.table)
    try:
        # PostgreSQL reads a text for a column of bytes as escaped.
        if isinstance(sent[4], str) and "\\" in sent[4] and _holds_bytes(caller, layout):
            sent[4] = sent[4].encode()
        if caller.insert(table, columns, sent):
            return entry
        read = list(columns)
        if caller.dialect == "postgres" and not _holds_bytes(caller, layout):
            read[4] = f"CAST({read[4]} AS text)"  # the client would parse JSON, by functions that the caller chooses
        select = f"SELECT {', '.join(read)} FROM {table} WHERE {columns[0]} = ?{caller.latest}"  # noqa: S608
        rows = caller.execute(select, sent[:1]).rows
    except Exception as error:
        if not caller.missing(error):
            raise
        raise Refused("OUTBOX_TABLE.ENTRY", table=layout.table, dialect=caller.dialect) from error
    if not rows:  # another unique index of the table refused the row, or it was deleted meanwhile
        raise Refused("OUTBOX_ROW", table=layout.table, id=entry.id)
    first = _entry(rows[0])
    if isinstance(first.payload, bytes) and isinstance(entry.payload, str):  # JSON in a column of bytes
        with contextlib.suppress(UnicodeDecodeError):
            first = replace(first, payload=first.payload.decode())
    same = _content(first) == _content(entry)
    if same and on_duplicate == "ignore":
        return first
    row = f"{first.aggregate_type} {first.aggregate_id}, {first.type}"
    if same:
        raise DuplicateId("OUTBOX_DUPLICATE.ID", table=layout.table, id=entry.id, row=row)
    raise DuplicateId(
        "OUTBOX_ID_REUSED.ENTRY",
        table=layout.table,
        id=entry.id,
        row=row,
        aggregate_type=entry.aggregate_type,
        aggregate_id=entry.aggregate_id,
        type=entry.type,
        difference=" with another payload." if _content(first)[:3] == _content(entry)[:3] else ".",
    )


def _holds_bytes(caller: Caller, layout: Layout) -> bool:
    """The payload's column is PostgreSQL's bytea, or a domain over it."""
    return caller.dialect == "postgres" and bool(
        caller.execute(
            "SELECT 1 FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid WHERE a.attrelid = to_regclass(?) "
            "AND a.attname = ? AND 'bytea'::regtype IN (t.oid, t.typbasetype)",
            (caller.quoted(layout.table), layout.payload),
        ).rows
    )


def _uuid(value: uuid.UUID | str) -> uuid.UUID:
    if isinstance(value, uuid.UUID):
        return value
    try:
        return uuid.UUID(value)
    except (ValueError, TypeError, AttributeError):
        raise BadRecord("OUTBOX_ID.NOT_UUID", value=value, value_type=value.__class__.__name__) from None


def _text(name: str, value: str) -> str:
    if not isinstance(value, str) or not value or len(value) > TEXT_LENGTH_MAX or unstorable(value):
        raise BadRecord(
            "OUTBOX_VALUE.ENTRY",
            name=name,
            value=value,
            value_type=value.__class__.__name__,
            text_length_max=TEXT_LENGTH_MAX,
        )
    return value


def _payload(value: Any) -> str | bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    try:
        return json_text(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRecord("OUTBOX_PAYLOAD.VALUE", value=value, error=error) from None


def _entry(row: tuple[Any, ...]) -> Entry:
    id_, group, key, type_ = map(as_text, row[:4])
    payload = row[4]
    if isinstance(payload, memoryview | bytearray):
        payload = bytes(payload)
    return Entry(uuid.UUID(id_), group, key, type_, payload, stored=False)


def _content(entry: Entry) -> tuple[Any, ...]:
    """What makes two messages equal; JSON by value: PostgreSQL reorders keys."""
    payload: Any = entry.payload
    if isinstance(payload, str):
        try:
            payload = ("json", json_content(payload))
        except (ValueError, RecursionError):  # another writer's
            payload = ("text", payload)
    return (entry.aggregate_type, entry.aggregate_id, entry.type, payload)


class _State:
    """Time and counter of the last id of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ms = 0
        self.counter = 0


_states: dict[int, _State] = {}
"""Process id -> its state: a forked child must not inherit its parent's lock, which another thread may hold forever."""


def new_id() -> uuid.UUID:
    """A new id: milliseconds, a counter with a random start per ms, 32 random bits (RFC 9562, section 6.2, method 1).

    Ids of one process increase, even if its clock is set back. Thread-safe, and safe after a fork. Call it once per
    message, before the first attempt: with a new id per attempt, no consumer can recognise a duplicate.
    """
    state = _states.get(os.getpid()) or _states.setdefault(os.getpid(), _State())
    with state.lock:
        now = time.time_ns() // 1_000_000
        if now > state.ms:
            state.ms, state.counter = now, int.from_bytes(os.urandom(6), "big") >> (48 - _COUNTER_BITS + 1)
        else:
            state.counter += 1
            if state.counter >> _COUNTER_BITS:
                state.ms, state.counter = state.ms + 1, 0
        ms, counter = state.ms, state.counter
    high, low = counter >> 30, counter & ((1 << 30) - 1)
    random = int.from_bytes(os.urandom(4), "big")
    return uuid.UUID(int=(ms & ((1 << _MS_BITS) - 1)) << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low << 32 | random)

"""A table's changes as rows: its columns, and three that say what happened.

A sink that upserts takes them with keyColumns, versionColumn `_lsn` and deleteColumn `_deleted`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.outbox.options import OWNER, OutboxOptions
from delivered.connectors.outbox.pgoutput import UNCHANGED, Change, Op, Relation, Row, Value
from delivered.kits.caller import quoted
from delivered.model.errors import BadRecord, UsageError

if TYPE_CHECKING:
    import psycopg

OP, DELETED, LSN = "_op", "_deleted", "_lsn"
ADDED = (pa.field(OP, pa.string()), pa.field(DELETED, pa.bool_()), pa.field(LSN, pa.int64()))
_ROWS_MAX = 8_192
_BYTES_MAX = 16 << 20

_TYPES = {
    "bool": pa.bool_(), "int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64(), "oid": pa.int64(),
    "float4": pa.float32(), "float8": pa.float64(), "bytea": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"),
}  # fmt: skip
"""All others are text, as PostgreSQL writes it: uuid, json, arrays, enums, intervals, numeric without a precision."""


def described(connection: psycopg.Connection[Any], options: OutboxOptions) -> tuple[pa.Schema, tuple[str, ...]]:
    """The table's columns now, then the added ones; and the columns of its primary key, which may be none.

    Raises:
        UsageError: there is no such table.
    """
    rows = connection.execute(
        "SELECT a.attname, t.typname, a.atttypmod, EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = a.attrelid AND "
        "i.indisprimary AND a.attnum = ANY (i.indkey)) FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid "
        "WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' "
        "ORDER BY a.attnum",
        [quoted("postgres", options.table)],
    ).fetchall()
    if not rows:
        raise UsageError(
            "OUTBOX_TABLE",
            f"{OWNER}: {options.system} has no table {options.table}.",
            next_step="create it, or correct the option table",
        )
    columns = [pa.field(name, _type(kind, modifier)) for name, kind, modifier, _ in rows]
    return pa.schema([*columns, *ADDED]), tuple(row[0] for row in rows if row[3])


def _type(name: str, modifier: int) -> pa.DataType:
    if name == "numeric" and modifier >= 4:
        precision, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
        if precision <= 38 and scale <= precision:
            return pa.decimal128(precision, scale)
    return _TYPES.get(name, pa.string())


class Changes:
    """Collects changes as columns."""

    def __init__(self, options: OutboxOptions, schema: pa.Schema, keys: tuple[str, ...]) -> None:
        self._options = options
        self._keys = frozenset(keys)
        self._schema = schema
        self._table = pa.schema([f for f in schema if f not in ADDED])
        self._at: dict[Relation, list[int | None]] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows: list[list[bytes | None]] = []
        self._ops: list[str] = []
        self._lsns: list[int] = []
        self._bytes = 0

    @property
    def empty(self) -> bool:
        return not self._rows

    @property
    def full(self) -> bool:
        return len(self._rows) >= _ROWS_MAX or self._bytes >= _BYTES_MAX

    def add(self, position: int, change: Change) -> None:
        """
        Raises:
            BadRecord: the change cannot be given as rows.
        """
        relation = change.relation
        match change.op:
            case Op.INSERT:
                self._append("insert", position, relation, change.new)
            case Op.UPDATE:
                if change.old is not None and self._key(relation, change.old) != self._key(relation, change.new or ()):
                    self._append("delete", position, relation, change.old)
                self._append("update", position, relation, _filled(change))
            case Op.DELETE:
                self._append("delete", position, relation, change.old)
            case Op.TRUNCATE:
                raise BadRecord(
                    "OUTBOX_TRUNCATED",
                    f"{OWNER}: the table {self._options.table} was truncated; the log does not say which rows it had.",
                    next_step="truncate the sink's table too, then start a new checkpoint with another slot",
                )

    def take(self) -> pa.RecordBatch:
        """All changes since the last call."""
        columns = list(zip(*self._rows, strict=True)) if self._rows else [()] * len(self._table)
        arrays = [_array(f, list(values), self._options) for f, values in zip(self._table, columns, strict=True)]
        arrays += [
            pa.array(self._ops, pa.string()),
            pa.array([op == "delete" for op in self._ops], pa.bool_()),
            pa.array(self._lsns, pa.int64()),
        ]
        self._clear()
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _append(self, op: str, position: int, relation: Relation, row: Row | None) -> None:
        at = self._at.get(relation)
        if at is None:
            at = self._at[relation] = self._places(relation)
        values: list[bytes | None] = []
        for place, field in zip(at, self._table, strict=True):
            value = None if place is None or row is None else row[place]
            if value is UNCHANGED:
                raise BadRecord(
                    "OUTBOX_UNCHANGED",
                    f"{OWNER}: an update of {self._options.table} left the large column {field.name} alone, and "
                    "the log has no value for it: the sink would store null.",
                    next_step=f"ALTER TABLE {self._options.table} REPLICA IDENTITY FULL, then start a new checkpoint "
                    "with another slot",
                )
            values.append(value)  # type: ignore[arg-type]
            self._bytes += 16 + len(value or b"")  # type: ignore[arg-type]
        self._rows.append(values)
        self._ops.append(op)
        self._lsns.append(position)

    def _places(self, relation: Relation) -> list[int | None]:
        """Where each column is in the row; None: it was added to the table later."""
        new = [name for name in relation.columns if name not in self._table.names]
        if new:
            raise BadRecord(
                "OUTBOX_COLUMNS",
                f"{OWNER}: the table {self._options.table} got the column {new[0]}, which this query does not have.",
                next_step="restart the query: it takes the table's columns as they are then; the sink needs them too "
                "(mergeSchema)",
            )
        return [relation.columns.index(n) if n in relation.columns else None for n in self._table.names]

    def _key(self, relation: Relation, row: Row) -> list[Value]:
        """By the replica identity; FULL marks all columns, so then by the primary key."""
        if all(relation.keys):
            return [value for value, name in zip(row, relation.columns, strict=True) if name in self._keys]
        return [value for value, key in zip(row, relation.keys, strict=True) if key]


def _filled(change: Change) -> Row | None:
    """The new row; values that did not change from the old one, if the log has it."""
    if change.new is None or change.old is None:
        return change.new
    return tuple(o if n is UNCHANGED else n for n, o in zip(change.new, change.old, strict=True))


def _array(field: pa.Field, values: list[bytes | None], options: OutboxOptions) -> pa.Array:
    kind = field.type
    try:
        if pa.types.is_binary(kind):
            return pa.array([None if v is None else bytes.fromhex(v[2:].decode()) for v in values], kind)
        texts = pa.array(values, pa.binary()).cast(pa.string())
        if pa.types.is_string(kind):
            return texts
        if pa.types.is_boolean(kind):
            return pc.equal(texts, "t")
        if pa.types.is_decimal(kind):
            return pa.array([None if v is None else Decimal(v.decode()) for v in values], kind)
        if pa.types.is_timestamp(kind):
            return pa.array([_moment(v, kind.tz is not None) for v in values], kind)
        return texts.cast(kind)
    except (pa.ArrowInvalid, ValueError, ArithmeticError) as error:
        raise BadRecord(
            "OUTBOX_VALUE",
            f"{OWNER}: a value of the column {field.name} of {options.table} does not fit {kind}: {error}.",
            next_step="values such as infinity, NaN or years before 1 have no counterpart: correct the row, or make "
            "the column text",
        ) from error


def _moment(value: bytes | None, zoned: bool) -> dt.datetime | None:
    if value is None:
        return None
    found = dt.datetime.fromisoformat(value.decode())
    return found.astimezone(dt.UTC) if zoned else found


def batches(
    options: OutboxOptions, schema: pa.Schema, keys: tuple[str, ...], found: Iterator[tuple[int, Change]]
) -> Iterator[pa.RecordBatch]:
    """Changes, each with its position, as record batches."""
    changes = Changes(options, schema, keys)
    for position, change in found:
        changes.add(position, change)
        if changes.full:
            yield changes.take()
    if not changes.empty:
        yield changes.take()

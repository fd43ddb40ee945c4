"""The columns of a change stream: those of the rows that the log has next, else those of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.connectors.outbox import OutboxOptions, shape, slot
from delivered.connectors.outbox.shape import Shape, find_keys
from delivered.connectors.outbox.slot import State, check_slot, state
from delivered.model.errors import DeliveredError, UsageError
from delivered.patterns.caller import quoted

if TYPE_CHECKING:
    import psycopg

OP, DELETED, LSN = "_op", "_deleted", "_lsn"
ADDED = (pa.field(OP, pa.string()), pa.field(DELETED, pa.bool_()), pa.field(LSN, pa.int64()))

_TYPES = {
    "bool": pa.bool_(), "int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64(), "oid": pa.int64(),
    "float4": pa.float32(), "float8": pa.float64(), "bytea": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"),
}  # fmt: skip
"""All others are text, as PostgreSQL writes it: uuid, json, arrays, enums, intervals, numeric without a precision."""

_COLUMNS = """
SELECT a.attname, CASE WHEN (WITH RECURSIVE b(oid) AS (SELECT a.atttypid UNION SELECT p.typbasetype FROM b
    JOIN pg_type p ON p.oid = b.oid) SELECT bool_or(oid = 'bytea'::regtype) FROM b)
  THEN 'bytea'::regtype::oid ELSE a.atttypid END::bigint, a.atttypmod,
  a.atthasdef OR a.atthasmissing OR a.attidentity <> ''
FROM pg_attribute a WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped
  AND a.attname = ANY (%(carried)s) ORDER BY a.attnum
"""


@dataclass(frozen=True)
class Layout:
    """
    Attributes:
        columns: the table's, then `ADDED`.
        keys: of the primary key; none: it is not known.
        shape: names and types as the rows have them.
        optional: columns that older rows have not, and for which null is their value.
    """

    columns: pa.Schema
    keys: tuple[str, ...]
    shape: Shape
    optional: frozenset[str] = frozenset()


def layout(connection: psycopg.Connection[Any], options: OutboxOptions) -> Layout:
    """Raises UsageError: there is no such table."""
    now = state(connection, options)
    table = table_shape(connection, options, now)
    if not table[0]:
        raise UsageError("OUTBOX_TABLE.CHANGES", system=options.system, table=options.table)
    found, optional = _unread(connection, options, now, *table)
    return Layout(
        pa.schema([*_fields(connection, found), *ADDED]), _keys(connection, options, table[0], found), found, optional
    )


def table_shape(
    connection: psycopg.Connection[Any], options: OutboxOptions, now: State
) -> tuple[Shape, frozenset[str]]:
    """The table now, without its replica identity, of the columns that the log carries; and columns with a default."""
    given = {"table": quoted("postgres", options.table), "carried": list(now.carried)}
    rows = connection.execute(_COLUMNS, given).fetchall()
    return tuple((n, t, m, False) for n, t, m, _ in rows), frozenset(n for n, *_, default in rows if default)


def is_extended(before: Shape, after: Shape, defaults: frozenset[str]) -> bool:
    """Whether `after` has only more columns, which rows from before have null in."""
    more = shape.added(before, after)
    return more is not None and not more & defaults


def _unread(
    connection: psycopg.Connection[Any], options: OutboxOptions, now: State, table: Shape, defaults: frozenset[str]
) -> tuple[Shape, frozenset[str]]:
    """The shape of the next rows, extended as far as columns were only added since; and those columns."""
    seen = _seen(connection, options, now, table)
    if not seen:
        return table, frozenset()
    first = [s for before, s in seen if before is None]
    found, optional = first[-1], frozenset[str]()
    # A table that was changed within one transaction: its rows have all columns, some of them null.
    for other in first[:-1]:
        lost = tuple(c for c in other if c[0] not in shape.names(found))
        optional |= frozenset(shape.names(found)) ^ frozenset(shape.names(other))
        found += lost
    for one in [*(s for before, s in seen if before is not None), table]:
        base = found if one is not table else _plain(found)
        if not is_extended(base, one, defaults):
            break
        optional |= shape.added(base, one) or frozenset()
        found = one
    return found, optional


def _plain(of: Shape) -> Shape:
    return tuple((n, t, m, False) for n, t, m, _ in of)


def _seen(
    connection: psycopg.Connection[Any], options: OutboxOptions, now: State, table: Shape
) -> list[tuple[int | None, Shape]]:
    """Shapes of the table's unread rows, each with the end of the transaction before it; None: there is none."""
    try:
        check_slot(now, options, {"lsn": 0})
    except DeliveredError:
        return []  # said by preflight
    end = now.flushed or 0
    for count in (1, None):  # one transaction is enough if it has the shape that the table has
        found = slot.waiting(options, lambda count=count: slot.relations(connection, options, now.table, end, count))
        seen = [(s.before, shape.build_shape(s.relation)) for s in found if not s.truncates]
        if seen and all(_plain(s) == table for _, s in seen):
            break
    if seen and all(before is not None for before, _ in seen):
        seen[0] = (None, seen[0][1])  # transactions of other tables come first
    return seen


def _keys(connection: psycopg.Connection[Any], options: OutboxOptions, table: Shape, found: Shape) -> tuple[str, ...]:
    """Names of the primary key's columns in rows of the shape `found`; the table may have renamed them since."""
    keys, now, then = find_keys(connection, options), shape.names(table), shape.names(found)
    if set(keys) <= set(then):
        return keys
    if set(keys) <= set(now) and [c[1] for c in table] == [c[1] for c in found]:
        return tuple(then[now.index(key)] for key in keys)
    return tuple(c[0] for c in found if c[3])


def _fields(connection: psycopg.Connection[Any], of: Shape) -> list[pa.Field]:
    oids = [oid for _, oid, _, _ in of]
    known = dict(connection.execute("SELECT oid::bigint, typname FROM pg_type WHERE oid = ANY (%s)", [oids]).fetchall())
    return [pa.field(name, _type(known.get(oid, ""), modifier)) for name, oid, modifier, _ in of]


def _type(name: str, modifier: int) -> pa.DataType:
    if name == "numeric" and modifier >= 4:
        precision, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
        if precision <= 38 and scale <= precision:
            return pa.decimal128(precision, scale)
    return _TYPES.get(name, pa.string())

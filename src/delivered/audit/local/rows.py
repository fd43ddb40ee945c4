"""Both sides of an audit, read in this process by the connectors' own readers: records as hashes, in Arrow and C.

For ranges that fit in memory, of pipelines without SQL. What does not fit is Spark's (`NeedsSpark`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.audit.evidence import SHOWN_LENGTH
from delivered.audit.local.reconcile import Side, joined
from delivered.audit.places import ROW_BITS
from delivered.audit.request import NeedsSpark
from delivered.contract.source import Slice
from delivered.model.fingerprint import lanes, record_hashes
from delivered.model.ranges import fitted

Canonical = Callable[[pa.RecordBatch], pa.RecordBatch]
Read = Callable[[Slice], Iterator[pa.RecordBatch]]

_COLUMN = re.compile(r"[A-Za-z_]\w*|`[^`]+`")
_LITERALS = ("true", "false", "null")
_ROW_BYTES = 64
_CHARACTER_BYTES = 4


class Budget:
    """Bytes that both sides may hold together."""

    def __init__(self, bytes_max: int) -> None:
        self._left, self._max = bytes_max, bytes_max

    def take(self, count: int) -> None:
        """Raises NeedsSpark: there are no more."""
        self._left -= count
        if self._left < 0:
            raise NeedsSpark(f"its records need more than {self._max >> 20} MiB here")

    def check(self, records: int) -> None:
        """Raises NeedsSpark: so many records on either side certainly take more."""
        if 2 * records * _ROW_BYTES > self._left:
            raise NeedsSpark(f"{records:,} records need more than {self._max >> 20} MiB here")


@dataclass(frozen=True)
class Columns:
    """What is looked at in a record.

    Attributes:
        records: its columns and types.
        seed: of the fingerprints.
        id: column that identifies it; None: all do.
        key: column within which order is judged; None: no order.
        position: column that locates it for users, not among `records`.
    """

    records: pa.Schema
    seed: int
    id: str | None = None
    key: str | None = None
    position: str | None = None


def find_columns(records: pa.Schema, seed: int, id_sql: str | None, key_sql: str | None) -> Columns:
    """Raises NeedsSpark: the id or the key is more than the name of a column, or needs Spark's spelling as text."""
    named = _column(records, id_sql, "id") if id_sql is not None else None
    key = _column(records, key_sql, "key") if key_sql is not None else "key" if "key" in records.names else None
    return Columns(records, seed, named, key)


def _column(records: pa.Schema, sql: str, what: str) -> str:
    name = sql.strip()
    if not _COLUMN.fullmatch(name) or name.lower() in _LITERALS:
        raise NeedsSpark(f"the {what} {sql!r} is SQL")
    name = name.strip("`")
    found = [n for n in records.names if n.lower() == name.lower()]  # as Spark resolves it
    if len(found) != 1:
        raise NeedsSpark(f"the {what} {sql!r} is no column of its own")
    return str(found[0])


def read_slices(
    read: Read,
    slices: Sequence[Slice],
    canonical: Canonical,
    columns: Columns,
    first_slot: int,
    budget: Budget,
    only: Side | None = None,
) -> Side:
    """All records of these slices.

    Args:
        canonical: maps rows that were read to rows as a reader of the sink sees them.
        first_slot: of the first slice.
        only: records that share an id with one of these; None: all.

    Raises:
        NeedsSpark: they do not fit, or are of a type that has another value in Spark.
    """
    columns = replace(columns, records=plain_types(columns.records))
    nothing = _empty(columns)
    sides = [nothing]
    for slot, piece in enumerate(slices, first_slot):
        at = slot << ROW_BITS
        for batch in read(piece):
            records = canonical(batch)
            side = _hashed(fitted(records, columns.records), batch, at, columns)
            at += records.num_rows
            if only is not None:
                side = side.where(side.shares_id(only))
            budget.take(len(side) * _ROW_BYTES + sum(t.nbytes for t in (side.names, side.shown) if t is not None))
            sides.append(side)
    return joined(sides)


def _empty(columns: Columns) -> Side:
    position = [(columns.position, pa.int64())] if columns.position is not None else []
    return _hashed(empty_batch(columns.records), empty_batch(pa.schema(position)), 0, columns)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    # Not `from_pylist`, which imports pandas: 0.3 s.
    return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)


def _hashed(records: pa.RecordBatch, read: pa.RecordBatch, at: int, columns: Columns) -> Side:
    """Args: at: of the first row."""
    low, high = lanes(record_hashes(records, columns.seed))
    other = record_hashes(records, ~columns.seed)
    more: dict[str, Any] = {}
    if columns.id is not None:
        names = as_text(records.column(columns.id))
        nameless, text = np.asarray(names.is_null()), pa.RecordBatch.from_arrays([names], names=["id"])
        named = (record_hashes(text, seed) for seed in (columns.seed, ~columns.seed))
        ids, others = (np.where(nameless, value, name) for value, name in zip((low, other), named, strict=True))
        more.update(names=names, named=ids, other_named=others)
    if columns.key is not None:
        key = records.column(columns.key)
        more["key"] = record_hashes(pa.RecordBatch.from_arrays([key], names=["key"]), columns.seed)
        more["keyed"] = np.asarray(key.is_valid())
        more["shown"] = as_text(key, SHOWN_LENGTH * _CHARACTER_BYTES)
    if columns.position is not None:
        more["position"] = np.asarray(read.column(columns.position).cast(pa.int64()))
    return Side(low, high, other, np.arange(at, at + records.num_rows, dtype=np.int64), **more)


def as_text(column: pa.Array, bytes_max: int | None = None) -> pa.Array:
    """As Spark's cast to a string spells it, in bytes, which need not be valid UTF-8.

    Args:
        bytes_max: of each; longer ones are cut.

    Raises:
        NeedsSpark: a type that Spark spells in a way of its own.
    """
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        column = column.cast(pa.string())
    elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_binary(kind)):
        raise NeedsSpark(f"an id or a key of type {kind} is written as text by Spark alone")
    column = column.cast(pa.large_binary())
    # Copies: what it was a part of can be freed.
    return pa.concat_arrays([column, column[:0]]) if bytes_max is None else pc.binary_slice(column, 0, bytes_max)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def plain_types(schema: pa.Schema) -> pa.Schema:
    """The columns in the units that Spark has for them, so that equal values have equal hashes.

    Raises:
        NeedsSpark: units within a list, a map or a structure.
    """
    return pa.schema([f.with_type(_plain_type(f.type)) for f in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz is not None else None)
    if pa.types.is_time(kind):
        return pa.time64("ns")
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_nested(kind):
        parts = [kind.field(i).type for i in range(kind.num_fields)]
        if any(_plain_type(p) != p for p in parts):
            raise NeedsSpark(f"a column of type {kind} has other units in Spark")
    return kind

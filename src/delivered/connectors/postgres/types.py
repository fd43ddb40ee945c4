"""Arrow types as PostgreSQL keeps them, without loss.

Arrow                     created as         also fits
boolean                   boolean
int8, int16, uint8        smallint           integer, bigint
int32, uint16             integer            bigint
int64, uint32             bigint
float                     real               double precision
double                    double precision
decimal(p, s)             numeric(p, s)      numeric without precision; numeric(p', s) with p' >= p
string                    text               varchar, citext, enum, json, jsonb
binary                    bytea
date                      date
timestamp with time zone  timestamptz
timestamp without         timestamp
time                      time
null                      -                  any
list, struct, map, duration, uint64, others: refused
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.errors import UsageError

COLUMNS_MAX = 1_600
"""PostgreSQL's own limit."""
NAME_BYTES_MAX = 63
ENUM = "enum"
"""Stands for every enumerated type."""

_SQL = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float4": "real",
    "float8": "double precision",
}


def fitting(kind: pa.DataType) -> tuple[str, ...]:
    """Names of PostgreSQL's types that keep values of `kind` as they are, the natural one first; empty: none."""
    t = pa.types
    if t.is_boolean(kind):
        return ("bool",)
    if kind in (pa.int8(), pa.int16(), pa.uint8()):
        return ("int2", "int4", "int8")
    if kind in (pa.int32(), pa.uint16()):
        return ("int4", "int8")
    if kind in (pa.int64(), pa.uint32()):
        return ("int8",)
    if t.is_float32(kind):
        return ("float4", "float8")
    if t.is_float64(kind):
        return ("float8",)
    if t.is_decimal128(kind):
        return ("numeric",) if 0 <= kind.scale <= kind.precision else ()
    if t.is_string(kind):
        return ("text", "varchar", "citext", ENUM, "json", "jsonb")
    if t.is_binary(kind):
        return ("bytea",)
    if t.is_date32(kind):
        return ("date",)
    if t.is_timestamp(kind):
        return () if kind.unit == "ns" else ("timestamp",) if kind.tz is None else ("timestamptz",)
    if t.is_time(kind):
        return () if kind.unit == "ns" else ("time",)
    return ()


def declared(kind: pa.DataType) -> str:
    """SQL type of a column that is made for values of `kind`."""
    name = fitting(kind)[0]
    return f"numeric({kind.precision},{kind.scale})" if name == "numeric" else _SQL.get(name, name)


def plain(kind: pa.DataType) -> pa.DataType:
    """The one type that stands for all with the same values."""
    t = pa.types
    if t.is_dictionary(kind):
        return plain(kind.value_type)
    if t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_large_binary(kind) or t.is_binary_view(kind):
        return pa.binary()
    if t.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if t.is_time(kind) and kind.unit != "ns":
        return pa.time64("us")
    return kind


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of `schema` in their order, with plain types and nothing else."""
    return pa.schema([pa.field(f.name, plain(f.type)) for f in schema])


def canonical_schema(schema: pa.Schema) -> pa.Schema:
    """Plain types, columns by name: the order in which a table's columns were made does not count."""
    return pa.schema(sorted(plain_schema(schema), key=lambda f: f.name))


def with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The same rows with the columns of `schema`, in its order."""
    if batch.schema.equals(schema):
        return batch
    columns = []
    for f in schema:
        column = batch.column(batch.schema.get_field_index(f.name))
        columns.append(column if column.type.equals(f.type) else column.cast(f.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check(schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: a column cannot be kept.
    """
    if not 1 <= len(schema) <= COLUMNS_MAX:
        raise UsageError("COLUMNS", f"A row has {len(schema)} columns; a table has 1 to {COLUMNS_MAX}.")
    seen = set()
    for f in schema:
        if f.name in seen:
            raise UsageError("COLUMN_TWICE", f"Two columns are named {f.name!r}.", next_step="rename one of them")
        seen.add(f.name)
        if not f.name or "\0" in f.name or len(f.name.encode()) > NAME_BYTES_MAX:
            raise UsageError(
                "COLUMN_NAME",
                f"{f.name!r} is no name for a column: PostgreSQL's have 1 to {NAME_BYTES_MAX} bytes.",
                next_step="rename it: df.withColumnRenamed(...)",
            )
        kind = plain(f.type)
        if not fitting(kind) and not pa.types.is_null(kind):
            nested = pa.types.is_nested(kind)
            way = f'to_json("{f.name}")' if nested else f'col("{f.name}").cast("string")'
            raise UsageError(
                "TYPE_UNKNOWN",
                f"Column {f.name!r} is {f.type}; PostgreSQL has no type that this sink keeps it in without loss.",
                next_step=f'df.withColumn("{f.name}", {way}); a column of type jsonb takes JSON texts',
            )


def from_hex(column: pa.Array) -> pa.Array:
    """Texts of hexadecimal digits, in lower case, as bytes."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    digits = np.frombuffer(b"" if data is None else data, np.uint8)[offsets[0] : offsets[-1]]
    halves = np.where(digits >= ord("a"), digits - (ord("a") - 10), digits - ord("0")).astype(np.uint8)
    values = (halves[0::2] << 4 | halves[1::2]).astype(np.uint8)
    made = pa.Array.from_buffers(
        pa.binary(),
        len(column),
        [None, pa.py_buffer(((offsets - offsets[0]) // 2).astype(np.int32)), pa.py_buffer(values)],
    )
    return made if column.null_count == 0 else pc.if_else(column.is_valid(), made, pa.scalar(None, pa.binary()))


def refused(batch: pa.RecordBatch) -> pa.Array | None:
    """For each row why the server would refuse it whatever the table, null where it would not; None: it takes all.

    Constraints of the table are the server's to tell: a row that breaks one stops the query.
    """
    reasons: pa.Array | None = None
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)):
            continue
        zero = pc.fill_null(pc.match_substring(column, "\0"), False)
        if pc.any(zero).as_py():
            here = pc.if_else(zero, f"column {field.name!r}: text with a zero byte", pa.scalar(None, pa.string()))
            reasons = here if reasons is None else pc.coalesce(reasons, here)
    return reasons

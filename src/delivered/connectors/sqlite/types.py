"""Arrow types as SQLite stores them, and back, without loss.

Arrow                       declared   stored as
boolean                     INTEGER    0, 1
int8..int64, uint8..uint32  INTEGER    itself
float, double               REAL       itself; NaN as the text 'NaN' (SQLite would turn it into NULL); -0.0 as 0.0
string                      TEXT       itself
binary                      BLOB       itself
decimal                     TEXT       exact digits (SQLite has no decimal numbers)
date                        TEXT       YYYY-MM-DD
timestamp                   TEXT       YYYY-MM-DD HH:MM:SS.ffffff, with time zone: in UTC with a Z at the end
time, duration              INTEGER    in the type's unit (for Spark: microseconds)
list, struct, map, others   refused
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.errors import BadRecord, UsageError

COLUMNS_MAX = 2_000
"""SQLite's own default limit."""

_AFFINITIES = {
    "INTEGER": ("INTEGER", "NUMERIC", "BLOB"),
    "REAL": ("REAL", "BLOB"),
    "TEXT": ("TEXT", "BLOB"),
    "BLOB": ("BLOB",),
}
"""What we declare -> affinities of a user's column that keep our values as they are."""


def declared(kind: pa.DataType) -> str | None:
    """The SQL type of a column, or None if there is none."""
    t = pa.types
    if t.is_boolean(kind) or (t.is_integer(kind) and kind != pa.uint64()) or t.is_time(kind) or t.is_duration(kind):
        return "INTEGER"
    if t.is_float32(kind) or t.is_float64(kind):
        return "REAL"
    if t.is_string(kind) or t.is_decimal128(kind) or t.is_date32(kind) or t.is_timestamp(kind):
        return "TEXT"
    return "BLOB" if t.is_binary(kind) else None


def plain(kind: pa.DataType) -> pa.DataType:
    """The one type that stands for all with the same values."""
    t = pa.types
    if t.is_dictionary(kind):
        return plain(kind.value_type)
    if t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_large_binary(kind) or t.is_binary_view(kind):
        return pa.binary()
    if t.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
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
    for field in schema:
        column = batch.column(batch.schema.get_field_index(field.name))
        columns.append(column if column.type.equals(field.type) else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check(schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: a column cannot be stored.
    """
    if not 1 <= len(schema) <= COLUMNS_MAX:
        raise UsageError("COLUMNS", f"A row has {len(schema)} columns; a table has 1 to {COLUMNS_MAX}.")
    seen: dict[str, str] = {}
    for field in schema:
        if field.name.lower() in seen:
            raise UsageError(
                "COLUMN_TWICE",
                f"Columns {seen[field.name.lower()]!r} and {field.name!r} are one to SQLite, which knows no case in "
                "names.",
                next_step=f'rename one: df.withColumnRenamed("{field.name}", ...)',
            )
        seen[field.name.lower()] = field.name
        if not field.name or "\0" in field.name:
            raise UsageError("COLUMN_NAME", f"{field.name!r} is no name for a column.")
        if declared(plain(field.type)) is None:
            nested = pa.types.is_nested(field.type)
            way = f'to_json("{field.name}")' if nested else f'col("{field.name}").cast("string")'
            raise UsageError(
                "TYPE_UNKNOWN",
                f"Column {field.name!r} is {field.type}; SQLite has no type that keeps it without loss.",
                next_step=f'df.withColumn("{field.name}", {way})',
            )


def affinity(sql_type: str) -> str:
    """SQLite's rules for a declared type, in their order."""
    upper = sql_type.upper()
    if "INT" in upper:
        return "INTEGER"
    if any(word in upper for word in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if "BLOB" in upper or not upper or upper == "ANY":
        return "BLOB"
    return "REAL" if any(word in upper for word in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def fits(kind: pa.DataType, sql_type: str) -> bool:
    """Whether a column declared as `sql_type` keeps values of `kind` as they are."""
    return affinity(sql_type) in _AFFINITIES[declared(kind) or "BLOB"]


def check_values(batch: pa.RecordBatch) -> None:
    """
    Raises:
        BadRecord: a date or timestamp lies outside the years 1 to 9999, which text cannot hold.
    """
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not (pa.types.is_timestamp(field.type) or pa.types.is_date32(field.type)):
            continue
        bounds = pc.min_max(column)
        for end in ("min", "max"):
            if bounds[end].is_valid and not 1 <= pc.year(bounds[end]).as_py() <= 9999:
                raise BadRecord(
                    "DATE_OUT_OF_RANGE",
                    f"Column {field.name!r} holds a {field.type} outside the years 1 to 9999, which SQLite's text form "
                    "cannot hold.",
                    next_step=f'filter such rows, or store the number: df.withColumn("{field.name}", '
                    f'unix_micros("{field.name}"))',
                )


def refused(batch: pa.RecordBatch) -> pa.Array | None:
    """For each row why it cannot be written, null where it can; None: all can. What `check_values` raises for."""
    reasons: pa.Array | None = None
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not (pa.types.is_timestamp(field.type) or pa.types.is_date32(field.type)):
            continue
        year = pc.year(column)
        outside = pc.fill_null(pc.or_(pc.less(year, 1), pc.greater(year, 9999)), False)
        if not pc.any(outside).as_py():
            continue
        here = pc.if_else(outside, f"column {field.name!r}: outside the years 1 to 9999", pa.scalar(None, pa.string()))
        reasons = here if reasons is None else pc.coalesce(reasons, here)
    return reasons


def to_sql(column: pa.Array) -> list[Any]:
    """Values of a plain type as sqlite3 takes them."""
    kind, t = column.type, pa.types
    if t.is_timestamp(kind) or t.is_date32(kind) or t.is_decimal128(kind):
        column = column.cast(pa.string())
    elif t.is_time32(kind):
        column = column.cast(pa.int32())
    elif t.is_time64(kind) or t.is_duration(kind):
        column = column.cast(pa.int64())
    values: list[Any] = column.to_pylist()
    if t.is_floating(kind) and pc.any(pc.is_nan(column)).as_py():
        return ["NaN" if value is not None and math.isnan(value) else value for value in values]
    return values


def from_sql(values: list[Any], kind: pa.DataType) -> pa.Array:
    """What `to_sql` made, back in its type."""
    t = pa.types
    if t.is_timestamp(kind) or t.is_date32(kind) or t.is_decimal128(kind):
        return pa.array(values, pa.string()).cast(kind)
    if t.is_boolean(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if t.is_time32(kind):
        return pa.array(values, pa.int32()).cast(kind)
    if t.is_time64(kind) or t.is_duration(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if t.is_floating(kind):
        return pa.array([None if v is None else float(v) for v in values], pa.float64()).cast(kind)
    return pa.array(values, kind)

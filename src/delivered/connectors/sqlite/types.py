"""Arrow types as SQLite stores them, without loss.

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

from delivered.kits.sql.table import Types
from delivered.model.ranges import RANGES

_AFFINITIES = {
    "INTEGER": ("INTEGER", "NUMERIC", "BLOB"),
    "REAL": ("REAL", "BLOB"),
    "TEXT": ("TEXT", "BLOB"),
    "BLOB": ("BLOB",),
}
"""Declared type -> affinities of a user's column that store its values without loss."""


class SqliteTypes(Types):
    system = "SQLite"
    columns_max = 2_000  # SQLite's own default limit
    folds_case = True
    range = RANGES["sqlite"]

    def declared(self, kind: pa.DataType) -> str | None:
        t = pa.types
        if t.is_boolean(kind) or (t.is_integer(kind) and kind != pa.uint64()) or t.is_time(kind) or t.is_duration(kind):
            return "INTEGER"
        if t.is_float32(kind) or t.is_float64(kind):
            return "REAL"
        if t.is_string(kind) or t.is_decimal128(kind) or t.is_date32(kind) or t.is_timestamp(kind):
            return "TEXT"
        return "BLOB" if t.is_binary(kind) else None


TYPES = SqliteTypes()


def affinity(sql_type: str) -> str:
    """SQLite's affinity rules, in their order."""
    upper = sql_type.upper()
    if "INT" in upper:
        return "INTEGER"
    if any(word in upper for word in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if "BLOB" in upper or not upper or upper == "ANY":
        return "BLOB"
    return "REAL" if any(word in upper for word in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def fits(kind: pa.DataType, sql_type: str) -> bool:
    """Whether a column declared as `sql_type` stores values of `kind` without loss."""
    return affinity(sql_type) in _AFFINITIES[TYPES.declared(kind) or "BLOB"]


def to_sql(column: pa.Array) -> list[Any]:
    """Values of a plain type for sqlite3."""
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
    """Inverse of `to_sql`."""
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

"""Arrow types as PostgreSQL stores them, without loss.

Arrow                     created as         also accepted
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

import pyarrow as pa

from delivered.kits.sql.types import ServerTypes
from delivered.model.ranges import RANGES

ENUM = "enum"
"""Any enum type."""

_SQL = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float4": "real",
    "float8": "double precision",
}


class PostgresTypes(ServerTypes):
    system = "PostgreSQL"
    columns_max = 1_600  # PostgreSQL's own limits
    name_max = (63, "bytes")
    range = RANGES["postgres"]
    nested_hint = "; a jsonb column accepts JSON texts"

    def declared(self, kind: pa.DataType) -> str | None:
        fitting = self.fitting(kind)
        if not fitting:
            return None
        name = fitting[0]
        return f"numeric({kind.precision},{kind.scale})" if name == "numeric" else _SQL.get(name, name)

    def fitting(self, kind: pa.DataType) -> tuple[str, ...]:
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


TYPES = PostgresTypes()

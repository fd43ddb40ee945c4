"""Arrow types as MySQL and MariaDB store them, without loss.

Arrow                     created as           also accepted
boolean                   tinyint(1)
int8 .. int64             tinyint .. bigint    every wider one
uint8 .. uint64           the same, unsigned   every wider one; signed ones that are wide enough
float                     float                double
double                    double
decimal(p, s), s <= 30    decimal(p, s)        decimal(p', s) with p' >= p
string                    longtext             mediumtext, text, tinytext, varchar, in utf8mb4 or utf8mb3
binary                    longblob             mediumblob, blob, tinyblob, varbinary
date                      date
timestamp with time zone  datetime(6), in UTC  timestamp(6)
timestamp without         datetime(6)
time                      time(6)
null                      -                    any
list, struct, map, duration, others: refused

-0.0 becomes 0.0, which has the same fingerprint. Types that would silently change values are not accepted: fewer than
six fractional digits of seconds, float(m, d), enum ('2' means its second value), char and binary (trailing characters
are lost or added), texts in other charsets.
"""

from __future__ import annotations

import pyarrow as pa

from delivered.kits.sql.table import ServerTypes
from delivered.model.errors import UsageError
from delivered.model.ranges import RANGES

SCALE_MAX = 30
KEY_BYTES_MAX = 3_072
"""Maximum size of an InnoDB index."""
KEY_CHARACTERS = 255

CHARSETS = ("utf8mb4", "utf8mb3", "utf8")
"""Charsets that store UTF-8 bytes unchanged or reject them. With ascii the server does not check bytes."""

_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
_WIDTHS = {8: 0, 16: 1, 32: 3, 64: 4}
_SQL = {"datetime": "datetime(6)", "time": "time(6)"}


class MysqlTypes(ServerTypes):
    system = "MySQL"
    columns_max = 1_017  # InnoDB's own limit
    name_max = (64, "characters")
    folds_case = True
    range = RANGES["mysql"]

    def _check_name(self, name: str, seen: dict[str, str]) -> None:
        super()._check_name(name, seen)
        if name.endswith(" ") or any(c > "\uffff" for c in name):
            raise UsageError(
                "COLUMN_NAME",
                f"{name!r} is not a valid column name: MySQL allows no blank at its end, no character above U+FFFF.",
                next_step="rename it: df.withColumnRenamed(...)",
            )

    def declared(self, kind: pa.DataType) -> str | None:
        fitting = self.fitting(kind)
        if not fitting:
            return None
        if pa.types.is_boolean(kind):
            return "tinyint(1)"
        name = fitting[0]
        return f"decimal({kind.precision},{kind.scale})" if name == "decimal" else _SQL.get(name, name)

    def declared_key(self, kind: pa.DataType, keys: int) -> str | None:
        """As `declared`, for a key column: an index does not accept unbounded text.

        Args:
            keys: number of key columns.
        """
        characters = min(KEY_CHARACTERS, KEY_BYTES_MAX // 4 // keys)
        if pa.types.is_string(kind):
            return f"varchar({characters})"
        return f"varbinary({characters})" if pa.types.is_binary(kind) else self.declared(kind)

    def fitting(self, kind: pa.DataType) -> tuple[str, ...]:
        t = pa.types
        if t.is_boolean(kind):
            return ("tinyint",)
        if t.is_signed_integer(kind):
            return _INTEGERS[_WIDTHS[kind.bit_width] :]
        if t.is_unsigned_integer(kind):
            at = _WIDTHS[kind.bit_width]
            return (*(f"{n} unsigned" for n in _INTEGERS[at:]), *_INTEGERS[at + 1 :])
        if t.is_float32(kind):
            return ("float", "double")
        if t.is_float64(kind):
            return ("double",)
        if t.is_decimal128(kind):
            return ("decimal",) if 0 <= kind.scale <= min(kind.precision, SCALE_MAX) else ()
        if t.is_string(kind):
            return ("longtext", "mediumtext", "text", "tinytext", "varchar")
        if t.is_binary(kind):
            return ("longblob", "mediumblob", "blob", "tinyblob", "varbinary")
        if t.is_date32(kind):
            return ("date",)
        if t.is_timestamp(kind):
            return () if kind.unit == "ns" else ("datetime",) if kind.tz is None else ("datetime", "timestamp")
        if t.is_time(kind):
            return () if kind.unit == "ns" else ("time",)
        return ()


TYPES = MysqlTypes()

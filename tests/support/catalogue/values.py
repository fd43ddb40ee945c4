"""The catalogue: for each type of Spark's rows, values that systems, formats and clients are known to change.

Values are Arrow arrays of length 1, because Python has no date of the year 10000 and no text of invalid UTF-8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa

_DAY = 86_400_000_000
_YEAR_1, _YEAR_9999 = -719_162, 2_932_896
"""Days from 1970-01-01 to 0001-01-01 and 9999-12-31."""
DIGITS = Context(prec=1_100)
"""Python rounds to 28 digits by default."""
_MIN, _MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, eq=False)
class Kind:
    """A type of the rows.

    Attributes:
        spark: as Spark's SQL names it.
        values: by what is odd about them; "null" is a value of every type.
        column: in which tables have them.
    """

    name: str
    spark: str
    arrow: pa.DataType
    values: Mapping[str, pa.Array]
    column: str


def _kind(name: str, spark: str, arrow: pa.DataType, values: Mapping[str, Any]) -> Kind:
    made = {n: v if isinstance(v, pa.Array) else _one(v, arrow) for n, v in {**values, "null": None}.items()}
    return Kind(name, spark, arrow, made, f"v_{name.replace(' ', '_')}")


def _one(value: Any, arrow: pa.DataType) -> pa.Array:
    t = pa.types
    if value is not None and (t.is_timestamp(arrow) or t.is_time64(arrow) or t.is_duration(arrow)):
        return pa.array([value], pa.int64()).view(arrow)
    if value is not None and t.is_date32(arrow):
        return pa.array([value], pa.int32()).view(arrow)
    return pa.array([value], arrow)


def unchecked(data: bytes) -> pa.Array:
    """Text as Spark hands it over: `cast(x'..' AS string)` is not checked."""
    offsets = pa.array([0, len(data)], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(data)])


def _integer(name: str, spark: str, bits: int, arrow: pa.DataType) -> Kind:
    top = 2 ** (bits - 1)
    return _kind(name, spark, arrow, {"least": -top, "greatest": top - 1, "-1": -1, "0": 0})


_TEXTS: dict[str, Any] = {
    "empty": "",
    "blank": " ",
    "blanks at both ends": "  a b  ",
    "zero byte": "a\0b",
    "zero byte last": "a\0",
    "combining characters": "e\u0301 \u1e9b\u0323 \u212b",
    "4 bytes a character": "\U0001f600\U0010ffff",
    "U+D7FF last": "a" * 15 + "\ud7ff",
    "U+FFFF": "\uffff\ufffe",
    "byte order mark": "\ufeffa",
    "right to left": "\u202e\u05d0\u200f",
    "quotes": "'\"`''\"\"",
    "backslashes": "\\ \\n \\N \\. \\x41 \\",
    "control characters": "\x01\x02\x1b\x7f\x85",
    "line ends": "a\nb\rc\r\nd\u2028e",
    "tab": "a\tb",
    "comma and quote": 'a,"b",',
    "percent": "%s %% %41 100%",
    "like a number": "0123",
    "like null": "NULL",
    "like NaN": "NaN",
    "like a date": "infinity",
    "braces": '{"a": [1, null]} ${x} {{y}}',
    "255 bytes": "x" * 255,
    "256 bytes": "x" * 256,
    "10,000 digits": "9" * 10_000,
    "70,000 bytes": "ä" * 35_000,
    "lone surrogate": unchecked(b"a\xed\xa0\x80b"),
    "not UTF-8": unchecked(b"\xff\xfea"),
    "cut UTF-8": unchecked("a\U0001f600".encode()[:-1]),
}
_BYTES: dict[str, Any] = {
    "empty": b"",
    "zero byte": b"a\0b",
    "zero byte last": b"a\0",
    "not UTF-8": b"\xff\xfe\x80",
    "every byte": bytes(range(256)),
    "like hex": b"\\x6162",
    "backslashes": b"\\ \\N \\.",
    "blanks at both ends": b"  a  ",
    "line ends": b"a\nb\r\n",
    "quotes": b"'\"`",
    "70,000 bytes": bytes(range(250)) * 280,
}
_FLOATS: dict[str, Any] = {
    "NaN": math.nan,
    "infinity": math.inf,
    "-infinity": -math.inf,
    "-0.0": -0.0,
    "0.0": 0.0,
    "1": 1.0,
}
_DAYS: dict[str, Any] = {
    "1970-01-01": 0,
    "leap day": 11_016,
    "leap day of 1900, missing": -25_509,
    "before the Gregorian calendar": -141_428,
    "0001-01-01": _YEAR_1,
    "9999-12-31": _YEAR_9999,
    "10000-01-01": _YEAR_9999 + 1,
    "year 0": _YEAR_1 - 1,
    "year -1": _YEAR_1 - 367,
    "year 20000": 6_585_442,
    "0000-00-00 of MySQL": -719_528,
    "least": -(2**31),
    "greatest": 2**31 - 1,
}
_MOMENTS: dict[str, Any] = {
    "1970-01-01": 0,
    "a microsecond before 1970": -1,
    "leap day": 11_016 * _DAY + 1,
    "leap second": 1_483_228_799_999_999,
    "gap of daylight saving in New York": 1_772_955_000_000_000,
    "hour twice in Berlin": 1_792_890_000_000_000,
    "23:59:59.999999": _DAY - 1,
    "after 2038": 2**31 * 1_000_000,
    "0001-01-01": _YEAR_1 * _DAY,
    "9999-12-31 23:59:59.999999": (_YEAR_9999 + 1) * _DAY - 1,
    "10000-01-01": (_YEAR_9999 + 1) * _DAY,
    "20000-01-01": 6_585_442 * _DAY,
    "year 0": _YEAR_1 * _DAY - 1,
    "least": _MIN,
    "greatest": _MAX,
}
_PLACES = pa.struct([("a", pa.int64()), ("b", pa.string())])


def _nested(depth: int) -> pa.Array:
    kind: pa.DataType = pa.list_(pa.int64())
    value: Any = [1, None]
    for _ in range(depth):
        kind, value = pa.list_(kind), [value, None]
    return pa.array([value], kind)


_DEEP = _nested(30)
KINDS: tuple[Kind, ...] = (
    _kind("boolean", "boolean", pa.bool_(), {"true": True, "false": False}),
    _integer("byte", "tinyint", 8, pa.int8()),
    _integer("short", "smallint", 16, pa.int16()),
    _integer("int", "int", 32, pa.int32()),
    _kind(
        "long", "bigint", pa.int64(),
        {"least": _MIN, "greatest": _MAX, "-1": -1, "0": 0, "2^53 + 1": 2**53 + 1},
    ),
    _kind(
        "float", "float", pa.float32(),
        {**_FLOATS, "greatest": 3.4028234663852886e38, "least subnormal": 1e-45, "0.1": 0.1, "16777217": 16777216.0},
    ),
    _kind(
        "double", "double", pa.float64(),
        {**_FLOATS, "greatest": 1.7976931348623157e308, "least subnormal": 5e-324, "0.1 + 0.2": 0.1 + 0.2,
         "2^53": 2.0**53, "1e22": 1e22},
    ),
    _kind(
        "decimal", "decimal(38,18)", pa.decimal128(38, 18),
        {"greatest": Decimal("9" * 20 + "." + "9" * 18), "least": Decimal("-" + "9" * 20 + "." + "9" * 18),
         "smallest": Decimal("0.000000000000000001"), "0": Decimal(0), "1.10": Decimal("1.10")},
    ),
    _kind(
        "decimal of 38 digits", "decimal(38,0)", pa.decimal128(38, 0),
        {"greatest": Decimal("9" * 38), "least": Decimal("-" + "9" * 38), "0": Decimal(0)},
    ),
    _kind(
        "decimal of digits after the point alone", "decimal(38,38)", pa.decimal128(38, 38),
        {"greatest": Decimal("0." + "9" * 38), "smallest": Decimal("0." + "0" * 37 + "1"), "0": Decimal(0)},
    ),
    _kind("string", "string", pa.string(), _TEXTS),
    _kind("binary", "binary", pa.binary(), _BYTES),
    _kind("date", "date", pa.date32(), _DAYS),
    _kind("timestamp", "timestamp", pa.timestamp("us", "UTC"), _MOMENTS),
    _kind("timestamp_ntz", "timestamp_ntz", pa.timestamp("us"), _MOMENTS),
    _kind(
        "time", "time(6)", pa.time64("us"), {"00:00": 0, "23:59:59.999999": _DAY - 1, "12:00:00.000001": _DAY // 2 + 1}
    ),
    _kind(
        "interval", "interval day to second", pa.duration("us"),
        {"0": 0, "a microsecond": 1, "-1 day": -_DAY, "least": _MIN, "greatest": _MAX},
    ),
    _kind("void", "void", pa.null(), {}),
    _kind(
        "array", "array<bigint>", pa.list_(pa.int64()),
        {"empty": [], "of null": [None], "of sentinels": [_MIN, _MAX]},
    ),
    _kind(
        "array of strings", "array<string>", pa.list_(pa.string()),
        {"empty text": [""], "odd": ["a\0b", "{,}", "\\", '"', "NULL", None, "\U0001f600"]},
    ),
    _kind("array of doubles", "array<double>", pa.list_(pa.float64()), {"NaN": [math.nan, math.inf, None]}),
    _kind(
        "array of timestamps", "array<timestamp>", pa.list_(pa.timestamp("us", "UTC")),
        {"20000-01-01": pa.ListArray.from_arrays([0, 1], _one(6_585_442 * _DAY, pa.timestamp("us", "UTC")))},
    ),
    _kind("array of arrays", "array<array<...>>, 31 deep", _DEEP.type, {"31 deep": _DEEP}),
    _kind(
        "struct", "struct<a: bigint, b: string>", _PLACES,
        {"of nulls": {"a": None, "b": None}, "of sentinels": {"a": _MIN, "b": "a\0b"}},
    ),
    _kind(
        "struct of odd names", "struct<`a.b`, `A`, `a`>",
        pa.struct([("a.b", pa.int64()), ("A", pa.int64()), ("a", pa.int64())]), {"1, 2, 3": {"a.b": 1, "A": 2, "a": 3}},
    ),
    _kind(
        "map", "map<string, double>", pa.map_(pa.string(), pa.float64()),
        {"empty": [], "null and NaN": [("", None), ("a.b", math.nan)],
         "keys differing in case": [("a", 1.0), ("A", 2.0)], "a key twice": [("a", 1.0), ("a", 2.0)]},
    ),
    _kind(
        "map of numbers", "map<bigint, string>", pa.map_(pa.int64(), pa.string()),
        {"sentinels": [(_MIN, ""), (_MAX, None)]},
    ),
    _kind(
        "array of structs", "array<struct<a: bigint, b: string>>", pa.list_(_PLACES),
        {"empty": [], "of null": [None], "of nulls and sentinels": [{"a": None, "b": None}, {"a": _MAX, "b": "\0"}]},
    ),
    _kind(
        "map of structs", "map<string, struct<a: bigint, b: string>>", pa.map_(pa.string(), _PLACES),
        {"null and nulls": [("", None), ("a.b", {"a": None, "b": None}), ("c", {"a": _MIN, "b": "ä"})]},
    ),
    _kind(
        "map of lists of structs", "map<string, array<struct<a: bigint, b: string>>>",
        pa.map_(pa.string(), pa.list_(_PLACES)), {"empty, null": [("a", []), ("b", None), ("c", [None])]},
    ),
    _kind(
        "map of maps", "map<string, map<string, bigint>>", pa.map_(pa.string(), pa.map_(pa.string(), pa.int64())),
        {"empty inside": [("a", []), ("b", None)]},
    ),
)  # fmt: skip
BY_NAME = {k.name: k for k in KINDS}

NAMES: dict[str, str] = {
    "quote": "it's",
    "double quote": 'a"b',
    "backtick": "a`b",
    "dot": "a.b",
    "blank": "a b",
    "blanks at both ends": " a ",
    "percent": "100%s %(x)s",
    "reserved word": "select",
    "another reserved word": "user",
    "question mark": "a?b:c",
    "hash": "a#b",
    "equals sign": "a=b",
    "slash": "a/b\\c",
    "bracket": "[a]{b}",
    "comma": "a,b;c",
    "dollar": "$1",
    "digit first": "1a",
    "upper case": "Order",
    "4 bytes a character": "\U0001f600",
    "combining character": "e\u0301",
    "U+D7FF": "\ud7ff",
    "line end": "a\nb",
    "tab": "a\tb",
    "system column of PostgreSQL": "ctid",
    "system column of SQLite": "rowid",
    "column of dead letters": "reason",
    "column of readers of files": "batch",
    "hidden": "_a",
    "ours": "__delivered_batch",
    "63 bytes": "n" * 63,
    "64 bytes": "n" * 64,
    "255 bytes": "n" * 255,
    "256 bytes": "n" * 256,
    "empty": "",
    "zero byte": "a\0b",
}
"""Names of columns and of tables."""
CASES = ("a", "A")
"""Names that differ in case."""


def named(column: str, label: str) -> Kind:
    """A column of this name, with one number."""
    return Kind(label, "bigint", pa.int64(), {"as column": pa.array([7], pa.int64())}, column)


COLUMNS: tuple[Kind, ...] = tuple(named(column, label) for label, column in NAMES.items())


def canonical(values: pa.Array) -> list[Any]:
    """Each value in a form that compares exactly: bits of floats, bytes of texts, numbers of times."""
    kind, t = values.type, pa.types
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if t.is_dictionary(kind):
        return canonical(values.dictionary_decode())
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return [None if not v.is_valid else bytes(v.as_buffer()) for v in values]
    if t.is_large_binary(kind) or t.is_binary_view(kind):
        return values.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]
    if t.is_date32(kind):
        return values.view(pa.int32()).to_pylist()  # type: ignore[no-any-return]
    if t.is_temporal(kind):
        return values.view(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if t.is_floating(kind):
        return [number(v) for v in values.to_pylist()]
    if t.is_decimal(kind):
        return [None if v is None else v.normalize(DIGITS) for v in values.to_pylist()]
    if t.is_map(kind) or t.is_list(kind) or t.is_large_list(kind):
        return [None if not v.is_valid else _entries(v.values, kind) for v in values]
    if t.is_struct(kind):
        parts = [canonical(pc) for pc in values.flatten()]
        return [
            tuple(zip((f.name for f in kind), row, strict=True)) if v.is_valid else None
            for v, row in zip(values, zip(*parts, strict=True), strict=True)
        ]
    return values.to_pylist()  # type: ignore[no-any-return]


def _entries(values: Any, kind: pa.DataType) -> tuple[Any, ...]:
    if not pa.types.is_map(kind):
        return tuple(canonical(values))
    keys, items = (canonical(v) for v in values.flatten())
    return tuple(sorted(zip(keys, items, strict=True), key=repr))


def number(value: float | None) -> Any:
    """A float's value. Zero has no sign here: -0.0 equals 0.0 to Spark and to SQL."""
    return value if value is None else "NaN" if math.isnan(value) else value + 0.0

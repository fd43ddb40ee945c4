"""Values of records with a schema: as Python objects, as canonical text, and what reading one may cost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from delivered.model.errors import one_line
from delivered.model.limits import RECORD_VALUES_MAX, SCHEMA_DEPTH_MAX, SCHEMA_TYPES_MAX

_REASON_LENGTH_MAX = 300


class Unmappable(ValueError):
    """A schema that has no columns; the text names the field."""


class Unreadable(ValueError):
    """A value that does not match its schema; the text names the field."""


def in_words(error: BaseException) -> str:
    """Why a record cannot be read, for its dead letter: what a library raised may be anything, but is its record's."""
    match error:
        case RecursionError():
            text = "it is nested too deeply"
        case MemoryError():
            text = "it does not fit into memory"
        case UnicodeEncodeError():
            text = f"its text has half a surrogate pair (U+{ord(error.object[error.start]):04X}), which is no character"
        case UnicodeDecodeError():
            text = f"its text is not {error.encoding.upper()} at byte {error.start}: {error.reason}"
        case Unreadable() | Unmappable():
            text = str(error)
        case _:
            text = ": ".join(filter(None, (type(error).__name__, str(error)[:_REASON_LENGTH_MAX])))
    return one_line(text)[:_REASON_LENGTH_MAX]


class TypeCount:
    """Counts a schema's types while references are expanded: a kilobyte can stand for billions."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, path: str, depth: int) -> None:
        """Args: path: of the field, with a dot in front. Raises Unmappable: too many, or nested too deeply."""
        self._count += 1
        if self._count > SCHEMA_TYPES_MAX:
            raise Unmappable(f"it has more than {SCHEMA_TYPES_MAX:,} types, with references expanded")
        if depth > SCHEMA_DEPTH_MAX:
            raise Unmappable(f"field {path[1:80]!r} is recursive, or nested more than {SCHEMA_DEPTH_MAX} deep")


class Budget:
    """Counts the values of one record of this many bytes: a few can stand for many."""

    def __init__(self, size: int) -> None:
        self._limit = self._left = max(RECORD_VALUES_MAX, size)

    def spend(self, values: int) -> None:
        """Raises Unreadable."""
        self._left -= values
        if self._left < 0:
            raise too_many_values(self._limit)


def too_many_values(limit: int = RECORD_VALUES_MAX) -> Unreadable:
    return Unreadable(f"it stands for more than {limit:,} values")


_WIDER = {
    pa.int8(): (pa.int32(), pa.int64()),
    pa.int16(): (pa.int32(), pa.int64()),
    pa.int32(): (pa.int64(),),
    pa.float32(): (pa.float64(),),
    pa.large_string(): (pa.string(),),
    pa.large_binary(): (pa.binary(),),
}


class BadValue(ValueError):
    """A value that does not match its schema."""


def canonical(values: pa.Array) -> pa.Array:
    """Structs as text, equal for a row and the message read back, even if the schema has more fields, all null."""
    objects = plain(values.cast(in_units_of(values.type, None)))
    return pa.array(
        [None if v is None else json.dumps(_as_json(v), sort_keys=True).encode() for v in objects], pa.binary()
    )


def plain(values: pa.Array) -> list[Any]:
    """Python values; times as numbers in their unit, maps as dicts."""
    kind = _numbers(values.type)
    objects: list[Any] = values.cast(kind).to_pylist()
    return [_maps(v, kind) for v in objects] if "map<" in str(kind) else objects


def differences(path: str, row: pa.DataType, there: pa.DataType) -> Iterable[str]:
    """Compare a column with the schema's field, both as Arrow types."""
    if row.equals(there) or there in _WIDER.get(row, ()):
        return
    if pa.types.is_timestamp(row) and pa.types.is_timestamp(there) and (row.tz is None) == (there.tz is None):
        return
    if pa.types.is_decimal128(row) and pa.types.is_decimal128(there) and row.scale == there.scale:
        if row.precision <= there.precision:
            return
    elif pa.types.is_struct(row) and pa.types.is_struct(there):
        fields = {f.name: f.type for f in there}
        names = {f.name for f in row}
        yield from (f"{path}.{n!s} has no column" for n in fields if n not in names)
        for f in row:
            if f.name in fields:
                yield from differences(f"{path}.{f.name}", f.type, fields[f.name])
            else:
                yield f"{path}.{f.name} is not in the schema, and only top-level fields are added"
        return
    elif pa.types.is_map(row) and pa.types.is_map(there) and not _is_text(row.key_type):
        yield f"{path!r} has keys that are {row.key_type}; they must be text"
        return
    elif pa.types.is_map(row) and pa.types.is_map(there):
        yield from differences(f"{path}{{}}", row.item_type, there.item_type)
        return
    elif is_list(row) and is_list(there):
        yield from differences(f"{path}[]", row.value_type, there.value_type)
        return
    yield f"{path!r} is {there} there, and the column is {row}"


def in_units_of(row: pa.DataType, filled: pa.DataType | None) -> pa.DataType:
    """The row type with the schema's leaf types; None: microseconds."""
    if pa.types.is_struct(row):
        fields = {} if filled is None else {f.name: f.type for f in filled}
        return pa.struct([pa.field(f.name, in_units_of(f.type, fields.get(f.name))) for f in row])
    if pa.types.is_map(row):
        return pa.map_(pa.string(), in_units_of(row.item_type, None if filled is None else filled.item_type))
    if is_list(row):
        return pa.list_(in_units_of(row.value_type, None if filled is None else filled.value_type))
    if filled is not None:
        return filled
    return pa.timestamp("us", row.tz) if pa.types.is_timestamp(row) else row


def _as_json(value: Any) -> Any:
    match value:
        case dict():
            return {k: _as_json(v) for k, v in value.items() if v is not None}
        case list():
            return [_as_json(v) for v in value]
        case bytes():
            return value.hex()
        case bool() | int() | float() | str() | None:
            return value
    return str(value)


def text_that_is_none(values: pa.Array, path: str = "") -> str | None:
    """Which field of a value holds text that is not UTF-8, as Spark's casts of bytes make it; None: none does."""
    kind = values.type
    if _is_text(kind):
        try:
            values.validate(full=True)
        except pa.ArrowInvalid:
            return f"{f'field {path[1:]}' if path else 'it'} is text that is not UTF-8"
        return None
    parts: list[tuple[str, pa.Array]] = []
    if pa.types.is_struct(kind):
        parts = [(f"{path}.{f.name}", part) for f, part in zip(kind, values.flatten(), strict=True)]
    elif pa.types.is_map(kind):
        parts = [(f"{path}{{}}", values.keys), (f"{path}{{}}", values.items)]
    elif is_list(kind):
        parts = [(f"{path}[]", values.flatten())]
    return next((why for name, part in parts if (why := text_that_is_none(part, name))), None)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _numbers(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _numbers(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(pa.string(), _numbers(kind.item_type))
    if is_list(kind):
        return pa.list_(_numbers(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.int32() if pa.types.is_date32(kind) else kind


def _maps(value: Any, kind: pa.DataType) -> Any:
    """Maps as dicts: Arrow gives them as lists of pairs. Raises Unreadable: a map has a key twice."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {f.name: _maps(value[f.name], f.type) for f in kind}
    if pa.types.is_map(kind):
        mapping = {k: _maps(v, kind.item_type) for k, v in value}
        if len(mapping) < len(value):
            raise Unreadable("a map has a key twice")
        return mapping
    if pa.types.is_list(kind):
        return [_maps(v, kind.value_type) for v in value]
    return value


def array_of(objects: list[Any], filled: pa.DataType, arrow: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Values as a column of the type `arrow`, by way of `filled`; those that do not fit it become null.

    Returns:
        the column, and by place why a value does not fit: milliseconds that overflow as microseconds, half a surrogate
        pair.
    """
    try:
        return pa.array(objects, filled).cast(arrow), {}
    except Exception:
        unfit = dict[int, str]()
    for at, value in enumerate(objects):
        try:
            pa.array([value], filled).cast(arrow)
        except Exception as error:
            objects[at], unfit[at] = None, in_words(error)
    return pa.array(objects, filled).cast(arrow), unfit

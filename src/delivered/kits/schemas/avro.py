"""Avro schemas (Pulsar's JSON ones are in Avro notation too): a value's Arrow type, and its decoding.

Types are mapped as by Spark's `from_avro`, without recursive types and unions of several types.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache, lru_cache
from itertools import count
from typing import Any

import pyarrow as pa

from delivered.kits.schemas.json_schema import as_double, parsed
from delivered.kits.schemas.values import TypeCount, Unreadable, in_words, too_many_values
from delivered.kits.schemas.values import Unmappable as Unmappable
from delivered.model.errors import DeliveredError, extra
from delivered.model.limits import RECORD_VALUES_MAX

# Values in JSON for the types of a schema: fields of Pulsar's JSON messages, and defaults.

_BITS = {"int": 31, "long": 63}
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""As Java writes them in JSON."""


def of_object(path: str, fields: Sequence[tuple[str, Shape]], defaults: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Args: defaults: values of fields that a writer did not have."""

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, value, "object")
        members = {}
        for name, shape in fields:
            if name in value:
                members[name] = shape.of_json(value[name])
            elif name in defaults:
                members[name] = defaults[name]
            elif shape.optional:
                members[name] = None
            else:
                raise Unreadable(f"the field {path[1:] + '.' + name if path else name!r} is missing")
        return members

    return read


def of_array(path: str, items: Shape) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _wrong(path, value, "array")
        return [items.of_json(v) for v in value]

    return read


def of_map(path: str, values: Shape) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, value, "map")
        return {k: values.of_json(v) for k, v in value.items()}

    return read


def of_enum(path: str, symbols: frozenset[str]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in symbols:
            raise _wrong(path, value, "one of the enum's symbols")
        return value

    return read


def of_plain(path: str, what: str) -> Callable[[Any], Any]:
    bits = _BITS.get(what)

    def read(value: Any) -> Any:
        kind = type(value)
        if bits is not None:
            if kind is int and -(1 << bits) <= value < 1 << bits:
                return value
        elif what in ("float", "double"):
            if kind in (int, float, Decimal):
                return _floating(path, value, what)
            if kind is str and value in _NOT_FINITE:
                return _NOT_FINITE[value]
        elif kind is (bool if what == "boolean" else str):
            return value
        raise _wrong(path, value, what)

    return read


def _floating(path: str, value: Any, what: str) -> float:
    number = as_double(value)
    if number is not None and what == "float":
        try:
            (single,) = struct.unpack("<f", struct.pack("<f", number))
        except OverflowError:
            number = None
        else:
            number = None if type(value) is int and single != value else number
    if number is None:
        raise Unreadable(f"{_where(path)} is the number {str(value)[:40]}, which a {what} cannot hold exactly")
    return number


def of_bytes(path: str, size: int | None) -> Callable[[Any], bytes]:
    def read(value: Any) -> bytes:
        try:
            data = value.encode("latin-1") if isinstance(value, str) else None
        except UnicodeEncodeError:
            data = None
        if data is None or size not in (None, len(data)):
            raise _wrong(path, value, "characters U+0000 to U+00FF" + ("" if size is None else f", {size} of them"))
        return data

    return read


def of_decimal(path: str, scale: int, size: int | None) -> Callable[[Any], Decimal]:
    raw = of_bytes(path, size)

    def read(value: Any) -> Decimal:
        unscaled = int.from_bytes(raw(value), "big", signed=True)
        return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))

    return read


def _where(path: str) -> str:
    return f"field {path[1:]!r}" if path else "the value"


def _wrong(path: str, value: Any, wanted: str) -> Unreadable:
    return Unreadable(f"{_where(path)} is {type(value).__name__} {value!r:.40}; it must be {wanted}")


AVRO, JSON = "AVRO", "JSON"
KINDS = (AVRO, JSON)

_UTC = "UTC"
_PLAIN = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
_LOGICAL = {
    ("int", "date"): (pa.date32(), pa.date32()),
    ("long", "timestamp-millis"): (pa.timestamp("ms", _UTC), pa.timestamp("us", _UTC)),
    ("long", "timestamp-micros"): (pa.timestamp("us", _UTC), pa.timestamp("us", _UTC)),
    ("long", "local-timestamp-millis"): (pa.timestamp("ms"), pa.timestamp("us")),
    ("long", "local-timestamp-micros"): (pa.timestamp("us"), pa.timestamp("us")),
}
"""(type, logical type) -> Arrow type of Avro's numbers, Arrow type of the column."""
_DIGITS_MAX = 38  # of a decimal in Spark
_ANY_DIGITS = 1_000
"""Passed to fastavro as a decimal's precision: it rounds digits beyond that. The column's type refuses them."""


@dataclass(frozen=True)
class Shape:
    """One type of a schema.

    Attributes:
        avro: for fastavro: no logical types but decimal, and generated names, so that records match by position.
        filled: Arrow type for the codec's output.
        arrow: type of the column.
        of_json: a JSON value -> a value for `filled`; raises Unreadable.
        required: of a record: fields that may not be null.
        meanings: path of a leaf -> its logical type. Avro itself silently reads seconds as days.
        types: how many this one holds, with itself.
        repeated: the same, of the largest among the items of its arrays and values of its maps.
        empty: a value may take no bytes.
        defaults: of each record within, by its generated name: the values of fields that a writer did not have.
    """

    avro: Any
    filled: pa.DataType
    arrow: pa.DataType
    of_json: Callable[[Any], Any] = field(compare=False)
    optional: bool = False
    required: tuple[str, ...] = ()
    meanings: Mapping[str, str] = field(default_factory=dict, compare=False)
    types: int = 1
    repeated: int = 0
    empty: bool = False
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)


class _Walk:
    """One walk through a schema. Args: named: its named types."""

    def __init__(self, kind: str, named: Mapping[str, Any]) -> None:
        self.kind, self.named = kind, named
        self.names, self.types = count(), TypeCount()
        self.within: list[str] = []

    def name(self) -> str:
        """fastavro compares only the last part of a name, and a schema must not contain a name twice."""
        return f"n{next(self.names)}.part"


@lru_cache(maxsize=256)
def shape_of(kind: str, text: str) -> Shape:
    """
    Args:
        kind: AVRO or JSON; text: the registered schema.

    Raises:
        Unmappable: not a record schema, or a field has no column type.
    """
    return any_shape_of(kind, text, record=True)


@lru_cache(maxsize=256)
def any_shape_of(kind: str, text: str, references: tuple[str, ...] = (), *, record: bool = False) -> Shape:
    """As `shape_of`.

    Args:
        record: it must be one.
        references: schemas whose names it uses, each after those that it uses itself.
    """
    schema = fastavro().schema
    named: dict[str, Any] = {}
    try:
        for each in references:
            schema.parse_schema(_with_valid_logical_types(json.loads(each)), named)
        own = _with_valid_logical_types(json.loads(text))
        node = schema.parse_schema(own, named, _write_hint=False, _force=True)
        walk = _Walk(kind, named)
        if isinstance(node, str):
            node = named.get(node, node)
        if record and (not isinstance(node, dict) or node.get("type") != "record"):
            raise Unmappable("it is not a record")
        shape = _shape(walk, node, "")
        compiled = schema.parse_schema(shape.avro)
    except Unmappable as error:
        raise Unmappable(str(error).replace("field ''", "it")) from None
    except DeliveredError:
        raise
    except Exception as error:  # a schema is anybody's, and the library raises anything
        raise Unmappable(f"it is not an Avro schema: {in_words(error)[:200]}") from None
    if isinstance(compiled, dict):
        for name, values in shape.defaults.items():
            for part in compiled["__named_schemas"][name]["fields"]:
                if part["name"] in values:
                    part["default"] = values[part["name"]]
    return replace(shape, avro=compiled)


def _with_valid_logical_types(node: Any) -> Any:
    """The schema without invalid logical types, which a reader must ignore (Avro's specification)."""
    if isinstance(node, list):
        return [_with_valid_logical_types(n) for n in node]
    if not isinstance(node, dict):
        return node
    attributes = {k: v if k in ("default", "symbols") else _with_valid_logical_types(v) for k, v in node.items()}
    if "logicalType" in node and not _is_valid(node):
        del attributes["logicalType"]
    return attributes


def _is_valid(node: Mapping[str, Any]) -> bool:
    what, logical = node.get("type"), node["logicalType"]
    if logical != "decimal":
        return isinstance(logical, str)
    digits, scale = node.get("precision"), node.get("scale", 0)
    if type(digits) is not int or type(scale) is not int or digits < 1 or not 0 <= scale <= digits:
        return False
    if what == "fixed":
        size = node.get("size")
        return type(size) is int and digits <= _digits_of(size)
    return what == "bytes"


def _digits_of(size: int) -> int:
    """Digits of every decimal in so many bytes."""
    return len(str((1 << 8 * min(size, 32) - 1) - 1)) - 1 if size > 0 else 0


@cache
def fastavro() -> Any:
    """The library, imported on use. Raises MissingExtra."""
    with extra("schemas"):
        import fastavro
        import fastavro.schema
    return fastavro


def read_avro(data: bytes, writer: Shape, reader: Shape) -> Any:
    """Raises Unreadable, or what the library raises for the kind of garbage."""
    stream = io.BytesIO(data)
    # Items of a byte each may have any number of defaults.
    suspect = writer is not reader and len(data) * reader.repeated > RECORD_VALUES_MAX
    if suspect and _items(read_avro(data, writer, writer)) * reader.repeated > RECORD_VALUES_MAX:
        raise too_many_values()
    record = fastavro().schemaless_reader(stream, writer.avro, None if writer is reader else reader.avro)
    if stream.tell() != len(data):
        raise Unreadable(f"the record ends after {stream.tell()} of {len(data)} bytes")
    return record


def _items(value: Any) -> int:
    """Of all arrays and maps; a record counts as one, too."""
    if isinstance(value, dict):
        return len(value) + sum(_items(v) for v in value.values() if isinstance(v, (dict, list)))
    return len(value) + sum(_items(v) for v in value if isinstance(v, (dict, list))) if isinstance(value, list) else 0


def read_json(data: bytes, reader: Shape) -> Any:
    """Raises Unreadable, RecursionError."""
    document = parsed(data)
    if data.count(b"{") * reader.repeated > RECORD_VALUES_MAX:
        raise too_many_values()
    return reader.of_json(document)


def _shape(walk: _Walk, node: Any, path: str) -> Shape:
    walk.types.add(path, len(walk.within))
    if isinstance(node, list):
        return _union(walk, node, path)
    if isinstance(node, str):
        node = walk.named.get(node, {"type": node})
    what = node["type"]
    name = node.get("name", "")
    if what in ("record", "error") and name in walk.within:
        raise _unknown(path, name)
    walk.within.append(name)
    try:
        return _typed(walk, node, what, path)
    finally:
        walk.within.pop()


def _typed(walk: _Walk, node: Mapping[str, Any], what: Any, path: str) -> Shape:
    match what:
        case dict() | list():
            return _shape(walk, what, path)
        case "record" | "error":
            return _record(walk, node, path)
        case "array":
            items = _shape(walk, node["items"], f"{path}[]")
            if items.empty and walk.kind == AVRO:
                raise Unmappable(
                    f"field {path[1:]!r} is an array whose items take no bytes: a record could hold any number"
                )
            return _repeating(
                {"type": "array", "items": items.avro},
                items,
                pa.list_(items.filled),
                pa.list_(items.arrow),
                of_array(path, items),
            )
        case "map":
            values = _shape(walk, node["values"], f"{path}{{}}")
            return _repeating(
                {"type": "map", "values": values.avro},
                values,
                pa.map_(pa.string(), values.filled),
                pa.map_(pa.string(), values.arrow),
                of_map(path, values),
            )
        case "enum":
            symbols = frozenset(node["symbols"])
            avro = {"type": "enum", "name": walk.name(), "symbols": node["symbols"]}
            if "default" in node:
                avro["default"] = node["default"]
            return Shape(avro, pa.string(), pa.string(), of_enum(path, symbols), meanings={path: ""})
    return _leaf(walk, node, path)


def _repeating(
    avro: Any, inner: Shape, filled: pa.DataType, arrow: pa.DataType, of_json: Callable[[Any], Any]
) -> Shape:
    return Shape(
        avro,
        filled,
        arrow,
        of_json,
        meanings=inner.meanings,
        types=inner.types + 1,
        repeated=max(inner.types, inner.repeated),
        defaults=inner.defaults,
    )


def _leaf(walk: _Walk, node: Mapping[str, Any], path: str) -> Shape:
    what, logical = node["type"], node.get("logicalType", "")
    if what in ("bytes", "fixed") and walk.kind == JSON:
        raise Unmappable(
            f"field {path[1:]!r} is {what}, which clients encode in JSON in different ways (Java base64, Python text)"
        )
    avro: Any = what
    size = None
    if what == "fixed":
        size = int(node["size"])
        avro = {"type": "fixed", "name": walk.name(), "size": size}
        what = "bytes"
    if what == "bytes" and logical == "decimal":
        digits, scale = int(node["precision"]), int(node.get("scale", 0))
        if digits > _DIGITS_MAX:
            raise Unmappable(f"field {path[1:]!r} is a decimal of {digits} digits; columns hold at most {_DIGITS_MAX}")
        room = _ANY_DIGITS if size is None else max(digits, _digits_of(size))
        decimal = {"logicalType": "decimal", "precision": room, "scale": scale}
        avro = {**(avro if isinstance(avro, dict) else {"type": avro}), **decimal}
        type_ = pa.decimal128(digits, scale)
        meaning = f"decimal, {scale} digits after the point"
        return Shape(avro, type_, type_, of_decimal(path, scale, size), meanings={path: meaning})
    if what not in _PLAIN:
        if what == "null":
            raise Unmappable(f"field {path[1:]!r} is null alone")
        raise _unknown(path, what)
    filled, arrow = _LOGICAL.get((what, logical), (_PLAIN[what], _PLAIN[what]))
    meaning = logical if (what, logical) in _LOGICAL else ""
    of_json = of_bytes(path, size) if what == "bytes" else of_plain(path, what)
    return Shape(avro, filled, arrow, of_json, meanings={path: meaning}, empty=size == 0)


def _unknown(path: str, what: Any) -> Unmappable:
    return Unmappable(f"field {path[1:]!r} is of type {what!r}, which is recursive or unknown")


def _union(walk: _Walk, node: Sequence[Any], path: str) -> Shape:
    others = [t for t in node if t != "null"]
    if len(others) != 1:
        kinds = ", ".join(str(t["type"] if isinstance(t, dict) else t) for t in node)
        raise Unmappable(
            f"field {path[1:]!r} is a union of {kinds}; only a union of null and one other type has a column type"
        )
    inner = _shape(walk, others[0], path)
    if len(node) == 1:
        return inner
    inner_of_json = inner.of_json
    return replace(
        inner,
        avro=["null" if t == "null" else inner.avro for t in node],
        of_json=lambda value: None if value is None else inner_of_json(value),
        optional=True,
        required=(),
        empty=False,
    )


def _record(walk: _Walk, node: Mapping[str, Any], path: str) -> Shape:
    name = walk.name()
    fields: list[tuple[str, Shape, dict[str, Any]]] = []
    for part in node["fields"]:
        shape = _shape(walk, part["type"], f"{path}.{part['name']}")
        fields.append((part["name"], shape, {k: part[k] for k in ("default", "aliases") if k in part}))
    own = {n: _default(s, more["default"], f"{path}.{n}") for n, s, more in fields if "default" in more}
    parts = [{"name": n, "type": s.avro, **{k: v for k, v in m.items() if k != "default"}} for n, s, m in fields]
    return Shape(
        {"type": "record", "name": name, "fields": parts},
        pa.struct([pa.field(n, s.filled) for n, s, _ in fields]),
        pa.struct([pa.field(n, s.arrow) for n, s, _ in fields]),
        of_object(path, [(n, s) for n, s, _ in fields], own),
        required=tuple(n for n, s, _ in fields if not s.optional),
        meanings={p: m for _, s, _ in fields for p, m in s.meanings.items()},
        types=1 + sum(s.types + _items(own.get(n)) for n, s, _ in fields),
        repeated=max((s.repeated for _, s, _ in fields), default=0),
        empty=all(s.empty for _, s, _ in fields),
        defaults={k: v for _, s, _ in fields for k, v in s.defaults.items()} | {name: own},
    )


def _default(shape: Shape, written: Any, path: str) -> Any:
    """A default in JSON, as a value: bytes are written as the characters U+0000 to U+00FF."""
    try:
        return shape.of_json(written)
    except Unreadable as error:
        raise Unmappable(f"field {path[1:]!r} has a default that is not of its type: {error}") from None

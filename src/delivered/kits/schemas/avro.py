"""Avro schemas (Pulsar's JSON ones are in Avro notation too): a value's Arrow type, and its decoding.

Types are mapped as by Spark's `from_avro`, without recursive types and unions of several types.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import count
from typing import Any

import pyarrow as pa

from delivered.model.errors import MissingExtra

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
_BITS = {"int": 31, "long": 63}
_DIGITS_MAX = 38  # of a decimal in Spark


class Unmappable(ValueError):
    """A schema that has no columns; the text names the field."""


class Unreadable(ValueError):
    """A value that does not match its schema; the text names the field."""


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
    """

    avro: Any
    filled: pa.DataType
    arrow: pa.DataType
    of_json: Callable[[Any], Any] = field(compare=False)
    optional: bool = False
    required: tuple[str, ...] = ()
    meanings: Mapping[str, str] = field(default_factory=dict, compare=False)


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
            schema.parse_schema(json.loads(each), named)
        node = schema.parse_schema(json.loads(text), named, expand=True, _write_hint=False, _force=True)
    except (ValueError, KeyError, TypeError, schema.SchemaParseException, schema.UnknownType) as error:
        raise Unmappable(f"it is not an Avro schema: {error!r:.200}") from None
    if record and (not isinstance(node, dict) or node.get("type") != "record"):
        raise Unmappable("it is not a record")
    try:
        found = _shape(kind, node, "", count())
    except Unmappable as error:
        raise Unmappable(str(error).replace("field ''", "it")) from None
    return replace(found, avro=schema.parse_schema(found.avro))


@cache
def fastavro() -> Any:
    """The library, imported on use. Raises MissingExtra."""
    try:
        import fastavro
        import fastavro.schema
    except ImportError:
        raise MissingExtra("schemas") from None
    return fastavro


def read_avro(data: bytes, writer: Shape, reader: Shape) -> Any:
    """Raises Unreadable."""
    stream = io.BytesIO(data)
    try:
        found = fastavro().schemaless_reader(stream, writer.avro, None if writer is reader else reader.avro)
    except Exception as error:  # the exception depends on the kind of garbage
        raise Unreadable(f"{type(error).__name__}: {str(error)[:200]}") from None
    if stream.tell() != len(data):
        raise Unreadable(f"the record ends after {stream.tell()} of {len(data)} bytes")
    return found


def read_json(data: bytes, reader: Shape) -> Any:
    """Raises Unreadable."""
    try:
        return reader.of_json(json.loads(data))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise Unreadable(f"it is not JSON: {error}") from None


def _shape(kind: str, node: Any, path: str, names: Iterator[int]) -> Shape:
    if isinstance(node, list):
        return _union(kind, node, path, names)
    if isinstance(node, str):
        node = {"type": node}
    what = node["type"]
    match what:
        case dict() | list():
            return _shape(kind, what, path, names)
        case "record" | "error":
            return _record(kind, node, path, names)
        case "array":
            items = _shape(kind, node["items"], f"{path}[]", names)
            return Shape(
                {"type": "array", "items": items.avro},
                pa.list_(items.filled),
                pa.list_(items.arrow),
                _array(path, items),
                meanings=items.meanings,
            )
        case "map":
            values = _shape(kind, node["values"], f"{path}{{}}", names)
            return Shape(
                {"type": "map", "values": values.avro},
                pa.map_(pa.string(), values.filled),
                pa.map_(pa.string(), values.arrow),
                _map(path, values),
                meanings=values.meanings,
            )
        case "enum":
            symbols = frozenset(node["symbols"])
            avro = {"type": "enum", "name": _name(names), "symbols": node["symbols"]}
            if "default" in node:
                avro["default"] = node["default"]
            return Shape(avro, pa.string(), pa.string(), _among(path, symbols), meanings={path: ""})
    return _leaf(kind, node, path, names)


def _leaf(kind: str, node: Mapping[str, Any], path: str, names: Iterator[int]) -> Shape:
    what, logical = node["type"], node.get("logicalType", "")
    if what in ("bytes", "fixed") and kind == JSON:
        raise Unmappable(
            f"field {path[1:]!r} is {what}, which clients encode in JSON in different ways (Java base64, Python text)"
        )
    avro: Any = what
    if what == "fixed":
        avro = {"type": "fixed", "name": _name(names), "size": node["size"]}
        what = "bytes"
    if what == "bytes" and logical == "decimal":
        digits, scale = int(node["precision"]), int(node.get("scale", 0))
        if digits > _DIGITS_MAX:
            raise Unmappable(f"field {path[1:]!r} is a decimal of {digits} digits; columns hold at most {_DIGITS_MAX}")
        size = {"logicalType": "decimal", "precision": digits, "scale": scale}
        avro = {**(avro if isinstance(avro, dict) else {"type": avro}), **size}
        found = pa.decimal128(digits, scale)
        return Shape(avro, found, found, _never, meanings={path: f"decimal, {scale} digits after the point"})
    if what not in _PLAIN:
        why = "is null alone" if what == "null" else f"is of type {what!r}, which is recursive or unknown"
        raise Unmappable(f"field {path[1:]!r} {why}")
    filled, arrow = _LOGICAL.get((what, logical), (_PLAIN[what], _PLAIN[what]))
    meaning = logical if (what, logical) in _LOGICAL else ""
    return Shape(avro, filled, arrow, _value(path, what), meanings={path: meaning})


def _union(kind: str, node: list[Any], path: str, names: Iterator[int]) -> Shape:
    others = [t for t in node if t != "null"]
    if len(others) != 1:
        kinds = ", ".join(str(t["type"] if isinstance(t, dict) else t) for t in node)
        raise Unmappable(
            f"field {path[1:]!r} is a union of {kinds}; only a union of null and one other type has a column type"
        )
    inner = _shape(kind, others[0], path, names)
    if len(node) == 1:
        return inner
    inner_of_json = inner.of_json
    return replace(
        inner,
        avro=["null" if t == "null" else inner.avro for t in node],
        of_json=lambda value: None if value is None else inner_of_json(value),
        optional=True,
        required=(),
    )


def _record(kind: str, node: Mapping[str, Any], path: str, names: Iterator[int]) -> Shape:
    name = _name(names)
    fields: list[tuple[str, Shape, dict[str, Any]]] = []
    for part in node["fields"]:
        shape = _shape(kind, part["type"], f"{path}.{part['name']}", names)
        fields.append((part["name"], shape, {k: part[k] for k in ("default", "aliases") if k in part}))
    return Shape(
        {"type": "record", "name": name, "fields": [{"name": n, "type": s.avro, **more} for n, s, more in fields]},
        pa.struct([pa.field(n, s.filled) for n, s, _ in fields]),
        pa.struct([pa.field(n, s.arrow) for n, s, _ in fields]),
        _object(path, fields),
        required=tuple(n for n, s, _ in fields if not s.optional),
        meanings={p: m for _, s, _ in fields for p, m in s.meanings.items()},
    )


def _name(names: Iterator[int]) -> str:
    """fastavro compares only the last part of a name, and a schema must not contain a name twice."""
    return f"n{next(names)}.part"


def _object(path: str, fields: list[tuple[str, Shape, dict[str, Any]]]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, value, "object")
        found = {}
        for name, shape, more in fields:
            if name in value:
                found[name] = shape.of_json(value[name])
            elif "default" in more:
                found[name] = shape.of_json(more["default"])
            elif shape.optional:
                found[name] = None
            else:
                raise Unreadable(f"the field {path[1:] + '.' + name if path else name!r} is missing")
        return found

    return read


def _array(path: str, items: Shape) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _wrong(path, value, "array")
        return [items.of_json(v) for v in value]

    return read


def _map(path: str, values: Shape) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, value, "map")
        return {k: values.of_json(v) for k, v in value.items()}

    return read


def _among(path: str, symbols: frozenset[str]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in symbols:
            raise _wrong(path, value, "one of the enum's symbols")
        return value

    return read


def _value(path: str, what: str) -> Callable[[Any], Any]:
    bits = _BITS.get(what)

    def read(value: Any) -> Any:
        kind = type(value)
        if bits is not None:
            if kind is int and -(1 << bits) <= value < 1 << bits:
                return value
        elif what in ("float", "double"):
            if kind is float:
                return value
            if kind is int:
                return float(value)
        elif kind is (bool if what == "boolean" else str):
            return value
        raise _wrong(path, value, what)

    return read


def _never(value: Any) -> Any:
    raise Unreadable(f"decimals are not supported in JSON: {type(value).__name__}")


def _wrong(path: str, value: Any, wanted: str) -> Unreadable:
    where = f"field {path[1:]!r}" if path else "the value"
    return Unreadable(f"{where} is {type(value).__name__} {value!r:.40}; it must be {wanted}")

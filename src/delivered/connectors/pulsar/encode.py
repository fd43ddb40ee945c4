"""Schemas in the sink: the one to write with, and the encoding of rows.

A topic's schema is kept if the rows match; missing columns are added to it as nullable fields. A topic without a schema
gets one derived from the columns.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.pulsar.admin import Admin, Registered
from delivered.connectors.pulsar.options import SINK, PulsarSinkOptions
from delivered.kits.schemas.avro import JSON, Unmappable, Unreadable, fastavro, shape_of
from delivered.kits.schemas.values import BadValue, differences, in_units_of, is_list, plain
from delivered.model.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KINDS: tuple[tuple[pa.DataType, Any], ...] = (
    (pa.bool_(), "boolean"),
    *((t, "int") for t in (pa.int8(), pa.int16(), pa.int32())),
    (pa.int64(), "long"),
    (pa.float32(), "float"),
    (pa.float64(), "double"),
    *((t, "string") for t in (pa.string(), pa.large_string())),
    *((t, "bytes") for t in (pa.binary(), pa.large_binary())),
    (pa.date32(), {"type": "int", "logicalType": "date"}),
)


class Unfit(ValueError):
    """Rows that do not match the registered schema; the text names the difference."""


@dataclass(frozen=True)
class Settled:
    """The schema that rows are written with.

    Attributes:
        text: of the schema, registered or to be registered.
        added: fields missing from the registered one.
    """

    kind: str
    text: str
    added: tuple[str, ...]


def settled(kind: str, rows: pa.StructType, known: Registered | None) -> Settled:
    """
    Args:
        rows: type of the column value.
        known: the topic's schema.

    Raises:
        Unfit: the rows do not match it, even with added fields.
        Unmappable: a column has no Avro type, or a registered field no column type.
    """
    made = derived(kind, rows)
    if known is None:
        return Settled(kind, json.dumps(made), ())
    if known.kind != kind:
        raise Unfit(f"it is {known.kind}, but the option schema is {kind.lower()}")
    shape = shape_of(kind, known.text)
    document = json.loads(known.text)
    there = {f.name: f for f in shape.arrow}
    wrong = [w for f in rows if f.name in there for w in differences(f.name, f.type, there[f.name].type)]
    columns = {f.name for f in rows}
    wrong += [f"{n!r} may not be null there, and has no column" for n in shape.required if n not in columns]
    if wrong:
        raise Unfit("; ".join(wrong))
    added = [f for f in made["fields"] if f["name"] not in there]
    if not added:
        return Settled(kind, known.text, ())
    document["fields"] = [*document["fields"], *added]
    return Settled(kind, json.dumps(document), tuple(f["name"] for f in added))


def derived(kind: str, rows: pa.DataType) -> dict[str, Any]:
    """A schema derived from a struct type, all fields nullable. Raises Unmappable."""
    if not pa.types.is_struct(rows):
        raise Unmappable(f"it is {rows}")
    found: dict[str, Any] = _avro(rows, "", "Value")
    shape_of(kind, json.dumps(found))
    return found


class Encoder:
    """Encodes rows of one type."""

    def __init__(self, made: Settled, rows: pa.StructType) -> None:
        self._kind = made.kind
        self._shape = shape_of(made.kind, made.text)
        # A missing column is written as null, whatever the schema's default: that is what is read back.
        self._absent = dict.fromkeys(f.name for f in self._shape.filled if f.name not in {r.name for r in rows})
        self._units = in_units_of(rows, self._shape.filled)

    def encode(self, values: pa.Array) -> list[bytes | None]:
        """Raises BadValue for the first value that does not match."""
        try:
            found = plain(values.cast(self._units))
        except pa.ArrowInvalid as error:
            raise BadValue(str(error)) from None
        encoded: list[bytes | None] = []
        for value in found:
            try:
                encoded.append(None if value is None else self._one({**self._absent, **value}))
            except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
                kind = "" if isinstance(error, Unreadable) else f"{type(error).__name__}: "
                raise BadValue(f"{kind}{error}") from None
        return encoded

    def _one(self, value: dict[str, Any]) -> bytes:
        if self._kind == JSON:
            self._shape.of_json(value)  # what a reader does
            return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        stream = io.BytesIO()
        fastavro().schemaless_writer(stream, self._shape.avro, value)
        return stream.getvalue()


def _avro(kind: pa.DataType, path: str, name: str) -> Any:
    """Not nullable: the caller adds that."""
    for known, avro in _KINDS:
        if kind.equals(known):
            return avro
    if pa.types.is_timestamp(kind):
        return {"type": "long", "logicalType": f"{'local-' if kind.tz is None else ''}timestamp-micros"}
    if pa.types.is_decimal128(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if pa.types.is_map(kind) and (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)):
        return {"type": "map", "values": _optional(kind.item_type, f"{path}{{}}", name)}
    if is_list(kind):
        return {"type": "array", "items": _optional(kind.value_type, f"{path}[]", name)}
    if pa.types.is_struct(kind):
        return {"type": "record", "name": name, "fields": [_field(f, path, name) for f in kind]}
    raise Unmappable(f"column {path[1:]!r} is {kind}, which has no Avro type")


def _field(field: pa.Field, path: str, name: str) -> dict[str, Any]:
    if not _NAME.fullmatch(field.name):
        raise Unmappable(
            f"column {(path + '.' + field.name)[1:]!r}: Avro names consist of ASCII letters, digits and underscores"
        )
    kind = _optional(field.type, f"{path}.{field.name}", f"{name}_{field.name}")
    return {"name": field.name, "type": kind, "default": None}


def _optional(kind: pa.DataType, path: str, name: str) -> list[Any]:
    return ["null", _avro(kind, path, name)]


def check_type(options: PulsarSinkOptions, rows: pa.DataType) -> None:
    """Raise UsageError if rows of this type have no schema. Sends no request."""
    try:
        derived(str(options.schema), rows)
    except Unmappable as error:
        raise UsageError(
            "COLUMN_TYPE",
            f"{SINK}: with schema={str(options.schema).lower()}, the column 'value' must be a struct with a "
            f"schema: {error}.",
            next_step="select the fields into it, for example selectExpr('key', 'struct(*) AS value'), cast or "
            "renamed as the schema requires",
        ) from None


def settle(admin: Admin, options: PulsarSinkOptions, rows: pa.StructType) -> Settled:
    """The schema to write with, given the topic's current one. Does not register it.

    Raises:
        UsageError: the rows do not match the registered schema.
    """
    known = admin.schema(options.topic)
    try:
        return settled(str(options.schema), rows, known)
    except (Unfit, Unmappable) as error:
        version = "" if known is None else f", version {known.version},"
        raise UsageError(
            "SCHEMA_INCOMPATIBLE",
            f"{SINK}: rows do not match the schema registered for {options.label}{version}: {error}.",
            next_step="cast or rename columns in the transform to match, or write to another topic",
        ) from None

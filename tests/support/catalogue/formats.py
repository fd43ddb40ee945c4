"""Paths into Kafka's values with a registered schema, decoded by the formats' own libraries."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path as Folder
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from tests.support.catalogue.kafka import consumed
from tests.support.catalogue.run import Path, Read, Row
from tests.support.catalogue.values import DIGITS, number

from delivered.contract.sink import Sink
from delivered.pipeline.registry import find_sink

_t = pa.types
_AVRO: dict[pa.DataType, Any] = {
    pa.bool_(): "boolean", pa.int8(): "int", pa.int16(): "int", pa.int32(): "int", pa.int64(): "long",
    pa.float32(): "float", pa.float64(): "double", pa.string(): "string", pa.binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.timestamp("us", "UTC"): {"type": "long", "logicalType": "timestamp-micros"},
    pa.timestamp("us"): {"type": "long", "logicalType": "local-timestamp-micros"},
}  # fmt: skip
_JSON = {
    pa.bool_(): "boolean", pa.int8(): "integer", pa.int16(): "integer", pa.int32(): "integer", pa.int64(): "integer",
    pa.float32(): "number", pa.float64(): "number", pa.string(): "string",
}  # fmt: skip
_PROTO = {
    pa.bool_(): "bool", pa.int8(): "int32", pa.int16(): "int32", pa.int32(): "int32", pa.int64(): "int64",
    pa.float32(): "float", pa.float64(): "double", pa.string(): "string", pa.binary(): "bytes",
    pa.timestamp("us", "UTC"): "google.protobuf.Timestamp",
}  # fmt: skip


def avro(kind: pa.DataType, name: str = "Row") -> Any:
    """A schema that a user would declare for a column; one without a counterpart is text."""
    if _t.is_list(kind):
        return {"type": "array", "items": ["null", avro(kind.value_type, name)]}
    if _t.is_map(kind):
        return {"type": "map", "values": ["null", avro(kind.item_type, name)]}
    if _t.is_struct(kind):
        fields = [{"name": f.name, "type": ["null", avro(f.type, f"{name}_{f.name}")]} for f in kind]
        return {"type": "record", "name": name, "fields": fields}
    if _t.is_decimal(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    return _AVRO.get(kind, "string")


def json_schema(kind: pa.DataType) -> dict[str, Any]:
    if _t.is_list(kind):
        return {"type": "array", "items": _or_null(json_schema(kind.value_type))}
    if _t.is_map(kind):
        return {"type": "object", "additionalProperties": _or_null(json_schema(kind.item_type))}
    if _t.is_struct(kind):
        return {"type": "object", "properties": {f.name: _or_null(json_schema(f.type)) for f in kind}}
    return {"type": _JSON.get(kind, "string")}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, schema]}


def protobuf(kind: pa.DataType) -> str:
    messages: list[str] = []

    def of(kind: pa.DataType, name: str) -> str:
        if _t.is_struct(kind):
            fields = " ".join(_field(f, of(f.type, f"{name}_{n}"), n) for n, f in enumerate(kind, 1))
            messages.append(f"message {name} {{ {fields} }}")
            return name
        if _t.is_list(kind):
            return f"repeated {of(kind.value_type, name)}"
        if _t.is_map(kind):
            return f"map<{of(kind.key_type, name)}, {of(kind.item_type, name)}>"
        return _PROTO.get(kind, "string")

    of(kind, "Row")
    return 'syntax = "proto3"; import "google/protobuf/timestamp.proto"; ' + " ".join(reversed(messages))


def _field(field: pa.Field, kind: str, number: int) -> str:
    return f"{'' if kind.startswith(('repeated', 'map')) else 'optional '}{kind} {field.name} = {number};"


TEXTS: dict[str, Callable[[pa.DataType], str]] = {
    "avro": lambda kind: json.dumps(avro(kind)),
    "json_schema": lambda kind: json.dumps(json_schema(kind)),
    "protobuf": protobuf,
}


def plain(value: Any, kind: pa.DataType) -> Any:
    """A library's value in canonical form."""
    if value is None:
        return None
    if _t.is_list(kind):
        return tuple(plain(v, kind.value_type) for v in value)
    if _t.is_map(kind):
        return tuple(sorted(((k.encode(), plain(v, kind.item_type)) for k, v in value.items()), key=repr))
    if _t.is_struct(kind):
        return tuple((f.name, plain(value.get(f.name), f.type)) for f in kind)
    if _t.is_floating(kind):
        return number(float(value))
    if _t.is_decimal(kind) and isinstance(value, bytes):
        return Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-kind.scale, DIGITS).normalize(DIGITS)
    return value.encode() if isinstance(value, str) else value


def _unlogical(node: Any) -> Any:
    """The schema without logical types: Python has no date of the year 10000."""
    if isinstance(node, list):
        return [_unlogical(n) for n in node]
    if not isinstance(node, dict):
        return node
    return {
        k: _unlogical(v) if k in ("type", "items", "values") else [{**f, "type": _unlogical(f["type"])} for f in v]
        if k == "fields" else v
        for k, v in node.items() if k != "logicalType"
    }  # fmt: skip


def of_avro(data: bytes, kind: pa.DataType) -> Any:
    return plain(fastavro.schemaless_reader(io.BytesIO(data[5:]), _unlogical(avro(kind)), None), kind)


def of_json(data: bytes, kind: pa.DataType) -> Any:
    return plain(json.loads(data[5:]), kind)


@cache
def message_class(text: str) -> Any:
    import grpc_tools
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        (Folder(folder) / "row.proto").write_text(text)
        own = Folder(str(grpc_tools.__file__)).parent / "_proto"
        made = Folder(folder) / "made"
        assert not protoc.main(
            ["protoc", f"-I{folder}", f"-I{own}", "--include_imports", f"--descriptor_set_out={made}", "row.proto"]
        )
        files = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Row"))


def of_protobuf(data: bytes, kind: pa.DataType) -> Any:
    return plain(_fields(message_class(protobuf(kind)).FromString(data[6:])), kind)


def _fields(value: Any) -> Any:
    if not hasattr(value, "DESCRIPTOR"):
        if hasattr(value, "items"):
            return {k: _fields(v) for k, v in value.items()}
        return [_fields(v) for v in value] if hasattr(value, "append") else value
    if value.DESCRIPTOR.full_name == "google.protobuf.Timestamp":
        value.ToJsonString()  # raises outside the years that it stands for
        return value.seconds * 1_000_000 + value.nanos // 1_000
    return {
        f.name: None if f.has_presence and not value.HasField(f.name) else _fields(getattr(value, f.name))
        for f in value.DESCRIPTOR.fields
    }


READ = {"avro": of_avro, "json_schema": of_json, "protobuf": of_protobuf}


def formatted(request: pytest.FixtureRequest, format: str) -> Path:  # noqa: A002
    """A struct with the value as its only field."""
    kafka: Any = request.getfixturevalue("kafka")
    registry: Any = request.getfixturevalue("registry")
    read_one = READ[format]

    def make(schema: pa.Schema) -> tuple[Sink, Read]:
        topic, kind = kafka.topic(1), schema.field("value").type

        def read(_: pa.Schema) -> list[Row]:
            found = [(int(m.key()), read_one(m.value(), kind)) for m in consumed(kafka.bootstrap, topic)]
            return [{"id": i, "value": dict(row)["v"]} for i, row in found]

        options = {
            "kafka.bootstrap.servers": kafka.bootstrap, "topic": topic, "schema.registry.url": registry.url,
            "value.format": format, "value.schema": TEXTS[format](kind),
        }  # fmt: skip
        return find_sink("kafka", options), read

    def rows(ids: pa.Array, values: pa.Array) -> pa.RecordBatch:
        value = pa.StructArray.from_arrays([values], names=["v"])
        return pa.RecordBatch.from_arrays([ids.cast(pa.string()), value], names=["key", "value"])

    return Path(make, rows, "value")

"""Schemas of Pulsar's registry, written and read by independent clients."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pyarrow as pa
from tests.broker.send_help import writer
from tests.support.scans import scanned
from tests.support.servers import Pulsar

from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.work import Promise


def record(*fields: tuple[str, Any], name: str = "Order") -> dict[str, Any]:
    """A schema; each field may be null."""
    return {
        "type": "record",
        "name": name,
        "namespace": "com.example",
        "fields": [{"name": n, "type": ["null", t], "default": None} for n, t in fields],
    }


V0 = record(("id", "long"), ("name", "string"))


V1 = record(("id", "long"), ("name", "string"), ("paid", "boolean"))


def registers(schema: dict[str, Any], kind: str = "AVRO") -> Any:
    """The schema for the client's `create_producer`; values are encoded bytes."""
    import _pulsar
    import pulsar

    class Encoded(pulsar.schema.BytesSchema):
        def __init__(self) -> None:
            super().__init__()
            self._schema_info = _pulsar.SchemaInfo(getattr(_pulsar.SchemaType, kind), "Order", json.dumps(schema))

    return Encoded()


def avro(schema: dict[str, Any], value: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, schema, value)
    return stream.getvalue()


def send(pulsar: Pulsar, topic: str, schema: dict[str, Any], values: list[dict[str, Any]], kind: str = "AVRO") -> None:
    encoded = [avro(schema, v) if kind == "AVRO" else json.dumps(v, indent=1).encode() for v in values]
    pulsar.send(topic, encoded, schema=registers(schema, kind))


def told(table: pa.Table) -> list[Any]:
    return table.column("value").to_pylist()  # type: ignore[no-any-return]


def batch(kind: pa.DataType, *values: dict[str, Any] | None) -> pa.RecordBatch:
    keys = pa.array([f"k{n}" for n in range(len(values))])
    return pa.record_batch([keys, pa.array(list(values), kind)], names=["key", "value"])


def write(made: Any, rows: pa.RecordBatch) -> None:
    made.check_schema(rows.schema)
    made.ready_target(rows.schema)
    task = writer(made)
    try:
        task.stage(rows)
        assert task.prepare(Fingerprint()) == Promise()
    finally:
        task.abort()


def read_back(made: Any) -> Fingerprint:
    """Of what the audit finds."""
    assert made.scan().schema().field("value").type == pa.binary()
    return sum((fingerprint(b.select(["key", "value"]), 1) for b in scanned(made)), Fingerprint())


def versions(pulsar: Pulsar, topic: str) -> list[Any]:
    found = pulsar.admin("GET", f"schemas/public/default/{topic}/schemas")["getSchemaResponses"]
    return [(v["type"], json.loads(v["data"])) for v in found]

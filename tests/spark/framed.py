"""Avro records in the registry's format, and a pipeline that runs to its end."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any

import fastavro

import delivered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "city", "type": "string"}],
}
TOTAL = {
    "type": "record",
    "name": "Total",
    "fields": [{"name": "id", "type": "long"}, {"name": "cents", "type": "long"}],
}


def framed(number: int, schema: dict[str, Any], value: object) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return struct.pack(">bI", 0, number) + stream.getvalue()


def unframed(data: bytes, schema: dict[str, Any]) -> tuple[int, Any]:
    return struct.unpack(">bI", data[:5])[1], fastavro.schemaless_reader(
        io.BytesIO(data[5:]), fastavro.parse_schema(schema), None
    )


def run(pipeline: delivered.Pipeline, spark: SparkSession) -> None:
    query = pipeline.start(spark)
    assert query.awaitTermination(120)
    if query.exception() is not None:
        raise query.exception()

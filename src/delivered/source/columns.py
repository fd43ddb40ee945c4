"""Columns that a message has in Spark, whatever system it comes from: those of Spark's own Kafka source."""

from __future__ import annotations

import pyarrow as pa

HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
HEADERS = pa.field("headers", pa.list_(HEADER))
"""Behind the others, where `includeHeaders` asks for it."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
COLUMNS = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", TIMESTAMP),
        pa.field("timestampType", pa.int32()),
    ]
)
"""timestampType: -1 none, 0 set by the producer, 1 set by the broker."""


def columns(headers: bool, given: pa.Schema = COLUMNS) -> pa.Schema:
    """`given`, with the headers behind it if they were asked for."""
    return given.append(HEADERS) if headers else given

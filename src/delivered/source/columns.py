"""A message's columns in Spark, for any system: those of Spark's own Kafka source."""

from __future__ import annotations

import pyarrow as pa

HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
HEADERS = pa.field("headers", pa.list_(HEADER))
"""Last column, if `includeHeaders` is set."""

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


US_MIN, US_MAX = -(2**63), 2**63 - 1
"""The earliest and latest microsecond that Arrow and Spark can represent: years -290308 and 294247."""


def micros(count: int, us_per: int) -> int:
    """A producer's time in microseconds, saturated: a time in the wrong unit must not wrap around to another date.

    Args:
        count: since 1970, in units of `us_per` microseconds.
    """
    return min(max(count * us_per, US_MIN), US_MAX)


def columns(headers: bool, base: pa.Schema = COLUMNS) -> pa.Schema:
    """`base`, followed by the headers if requested."""
    return base.append(HEADERS) if headers else base

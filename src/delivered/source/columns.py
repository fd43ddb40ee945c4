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


REPRESENTED = ("b'", 'b"')
"""How the name of a header starts whose bytes are not UTF-8; see `header_name`."""
UNKNOWN_BYTES = "\ufffd"
"""What Java puts in place of bytes that are not UTF-8: different bytes become the same text."""


def header_name(name: bytes) -> str:
    """A header's name as text: as it is if it is UTF-8, else as Python writes bytes, b'caf\\xe9'. Different names stay
    different: so does a text that starts as such bytes do."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return repr(name)
    return repr(name) if text.startswith(REPRESENTED) else text


def intact(message_id: str | None) -> str | None:
    """A sender's id, where a broker in Java handed it on. None: none, or one whose bytes were replaced: two messages
    with different such ids would count as one."""
    return message_id if message_id and UNKNOWN_BYTES not in message_id else None


def id_text(message_id: bytes | None) -> str | None:
    """A sender's id as text. Bytes that are not UTF-8 become lone surrogates: see `id_bytes`."""
    return None if message_id is None else message_id.decode("utf-8", "surrogateescape")


def id_bytes(message_id: str) -> bytes:
    """The id as it was sent."""
    return message_id.encode("utf-8", "surrogateescape")


def columns(headers: bool, base: pa.Schema = COLUMNS) -> pa.Schema:
    """`base`, followed by the headers if requested."""
    return base.append(HEADERS) if headers else base

"""A message's properties and headers, whatever bytes its sender gave.

The client's own decoder (pika 1.4) makes text of what is UTF-8 and leaves the rest bytes, cuts off the fractions of
numbers, and raises on NaN, on a time after the year 9999, and on tables nested a thousand deep: a receiver could
neither take such a message nor pass it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

from delivered.model.bad_row import bytes_as_json
from delivered.source import header_name

OFFSET = "x-stream-offset"
"""Header with which RabbitMQ says a message's place in a stream."""
UNREADABLE = "amqp.headers"
"""Header that holds a table of headers as it was sent, if it is none."""
_DEPTH_MAX = 64
"""Of tables and arrays within a header; one that is nested deeper stays encoded."""
_FLAGS = (
    *("content_type", "content_encoding", "table", "delivery_mode", "priority", "correlation_id", "reply_to"),
    *("expiration", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id"),
)
"""In the order of their flags, from the highest bit."""
_NUMBERS = {"delivery_mode": ">B", "priority": ">B", "timestamp": ">Q"}
_HEADERS = tuple((n, f"amqp.{n}") for n in ("content_type", "correlation_id", "type", "reply_to", "app_id"))
"""Properties that become headers."""

_NESTED = (b"F", b"A")


class Unreadable(ValueError):
    """Bytes that are no field of AMQP, or one nested too deeply."""


class Properties:
    """Attributes are None if the sender did not set them.

    Attributes:
        table: the headers, encoded.
        timestamp: seconds since 1970.
    """

    __slots__ = ("app_id", "content_type", "correlation_id", "message_id", "reply_to", "table", "timestamp", "type")

    def __init__(self, encoded: bytes) -> None:
        """Raises struct.error if the bytes end early."""
        self.content_type: bytes | None = None
        self.table: bytes | None = None
        self.correlation_id: bytes | None = None
        self.reply_to: bytes | None = None
        self.message_id: bytes | None = None
        self.timestamp: int | None = None
        self.type: bytes | None = None
        self.app_id: bytes | None = None
        (flags,) = struct.unpack_from(">H", encoded)
        at, bit = 2, 15
        if flags & 1:
            raise struct.error("more flags than AMQP 0-9-1 has properties")
        for name in _FLAGS:
            if flags >> bit & 1:
                value, at = _property(name, encoded, at)
                if name in self.__slots__:
                    setattr(self, name, value)
            bit -= 1

    @property
    def headers(self) -> Table | None:
        """Names and values in the sender's order; None: its table is unreadable."""
        try:
            return Table() if self.table is None else _table(self.table, _header)
        except (Unreadable, struct.error):
            return None


def headers(properties: Properties, but: str | None = None) -> list[tuple[str, bytes | None]]:
    """A message's headers, and AMQP's properties as `amqp.*`. Args: but: name of a header to leave out."""
    found: list[tuple[str, bytes | None]] = []
    if properties.table is not None:
        pairs, skipped = properties.headers, but and but.encode()
        if pairs is None:
            found.append((UNREADABLE, properties.table))
        else:
            found += [(header_name(name), _bytes(value)) for name, value in pairs if name != skipped]
    for name, header in _HEADERS:
        value = getattr(properties, name)
        if value is not None:
            found.append((header, value))
    return found


def routing_key(method: Any) -> bytes:
    """A delivery's. The client gives text if it is UTF-8, else bytes."""
    key = method.routing_key
    return key if isinstance(key, bytes) else key.encode()


def _property(name: str, encoded: bytes, at: int) -> tuple[Any, int]:
    if name == "table":
        return _long(encoded, at)
    if kind := _NUMBERS.get(name):
        return struct.unpack_from(kind, encoded, at)[0], at + struct.calcsize(kind)
    return _short(encoded, at)


def _short(encoded: bytes, at: int) -> tuple[bytes, int]:
    return _cut(encoded, at + 1, struct.unpack_from(">B", encoded, at)[0])


def _long(encoded: bytes, at: int) -> tuple[bytes, int]:
    return _cut(encoded, at + 4, struct.unpack_from(">I", encoded, at)[0])


def _cut(encoded: bytes, start: int, length: int) -> tuple[bytes, int]:
    if start + length > len(encoded):
        raise struct.error(f"{length} bytes, but {len(encoded) - start} are left")
    return encoded[start : start + length], start + length


def _table(encoded: bytes, read: Callable[[bytes, int], tuple[Any, int]]) -> Table:
    """Args: read: a value at a place; it returns the value and the place after it."""
    found, at = Table(), 0
    while at < len(encoded):
        name, at = _short(encoded, at)
        value, at = read(encoded, at)
        found.append((name, value))
    return found


def _header(encoded: bytes, at: int) -> tuple[Any, int]:
    """As `_value`; a table or an array that is unreadable stays encoded."""
    try:
        return _value(encoded, at, _DEPTH_MAX)
    except Unreadable:
        if encoded[at : at + 1] not in _NESTED:
            raise
        return _long(encoded, at + 1)


def _value(encoded: bytes, at: int, depth: int) -> tuple[Any, int]:
    """A field's value: a table as `Table`, an array as a list."""
    kind, at = encoded[at : at + 1], at + 1
    if (number := _FIXED.get(kind)) is not None:
        layout, size, convert = number
        return convert(*layout.unpack_from(encoded, at)), at + size
    if kind in (b"S", b"x"):
        return _long(encoded, at)
    if kind == b"V":
        return None, at
    if kind not in _NESTED or depth == 0:
        raise Unreadable(f"a field of type {kind!r}")
    inner, at = _long(encoded, at)
    if kind == b"F":
        return _table(inner, partial(_value, depth=depth - 1)), at
    items, place = [], 0
    while place < len(inner):
        item, place = _value(inner, place, depth - 1)
        items.append(item)
    return items, at


class Table(list[tuple[bytes, Any]]):
    """A table within headers."""


def _fixed(kind: str, convert: Callable[..., Any] = lambda number: number) -> tuple[struct.Struct, int, Any]:
    layout = struct.Struct(f">{kind}")
    return layout, layout.size, convert


def _time(seconds: int) -> datetime | int:
    """A number if Python has no such time."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return seconds


_FIXED = {
    b"t": _fixed("B", bool),
    b"b": _fixed("b"),
    b"B": _fixed("B"),
    b"U": _fixed("h"),
    b"s": _fixed("h"),
    b"u": _fixed("H"),
    b"I": _fixed("i"),
    b"i": _fixed("I"),
    b"L": _fixed("q"),
    b"l": _fixed("q"),
    b"f": _fixed("f"),
    b"d": _fixed("d"),
    b"D": _fixed("Bi", lambda scale, number: Decimal(number).scaleb(-scale)),
    b"T": _fixed("Q", _time),
}
"""Numbers, as RabbitMQ encodes them."""


def _bytes(value: Any) -> bytes | None:
    """Bytes as they are, null as null, any other value as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    return json.dumps(_plain(value), default=str).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Table):
        return {header_name(name): _plain(inner) for name, inner in value}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return bytes_as_json(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def stream_offset(properties: Properties) -> int | None:
    """A message's place in its stream; None: it came from a queue."""
    found = [value for name, value in properties.headers or () if name == OFFSET.encode() and isinstance(value, int)]
    return found[0] if found else None

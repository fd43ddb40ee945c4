"""Properties of RabbitMQ messages as bytes that the client library's encoder does not send."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

_ORDER = (
    *("content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to"),
    *("expiration", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id"),
)


class Encoded:
    """Stands for the client's BasicProperties.

    Args:
        given: short strings as bytes, headers as an encoded table (`table`), numbers.
    """

    INDEX = 60

    def __init__(self, **given: Any) -> None:
        self.given = {"delivery_mode": 2, **given}

    def encode(self) -> list[bytes]:
        flags, parts = 0, []
        for bit, name in enumerate(_ORDER):
            value = self.given.get(name)
            if value is None:
                continue
            flags |= 1 << (15 - bit)
            if isinstance(value, int):
                parts.append(struct.pack(">Q" if name == "timestamp" else ">B", value))
            else:
                parts.append(value if name == "headers" else bytes([len(value)]) + value)
        return [struct.pack(">H", flags), *parts]


def table(fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    """An encoded table of names and encoded values (`text`, ...)."""
    inner = b"".join(bytes([len(name)]) + name + value for name, value in fields)
    return struct.pack(">I", len(inner)) + inner


def text(value: bytes) -> bytes:
    return b"S" + struct.pack(">I", len(value)) + value


def nested(value: bytes, depth: int) -> bytes:
    """A field that holds `value` in tables of tables."""
    for _ in range(depth):
        value = b"F" + table([(b"t", value)])
    return value

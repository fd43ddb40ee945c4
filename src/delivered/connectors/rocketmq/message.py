"""Converts RocketMQ messages to rows of the log."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from delivered.connectors.rocketmq.client import library
from delivered.model.limits import RECEIVE_BYTES_MAX
from delivered.source.columns import intact, micros

_GROUP_PROPERTY = "__SHARDINGKEY"
"""Also holds the message group."""
_ZLIB_OR_GZIP = 47


@dataclass(frozen=True)
class Content:
    """
    Attributes:
        id: None: no usable id.
        key: the message group, else the sender's keys separated by spaces; None: neither.
    """

    id: str | None
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes | None]]
    time_us: int | None


def content(message: Any, by_key: bool) -> Content:
    """Raises ValueError for a corrupt body, or one that cannot be decompressed."""
    system = message.system_properties
    keys = [k for k in system.keys if k != system.message_id]
    named = list(system.keys)
    key = system.message_group or " ".join(keys)
    born = system.born_timestamp
    return Content(
        id=intact((named[0] if len(named) == 1 else None) if by_key else system.message_id),
        key=key.encode() if key else None,
        value=_body(message),
        headers=_headers(message, keys),
        time_us=micros(born.seconds * 1_000_000 + born.nanos // 1_000, 1) if born.seconds else None,
    )


def _headers(message: Any, keys: Sequence[str]) -> list[tuple[str, bytes | None]]:
    system = message.system_properties
    headers: list[tuple[str, bytes | None]] = [
        (name, value.encode()) for name, value in message.user_properties.items() if name != _GROUP_PROPERTY
    ]
    own = {
        "rocketmq.message_id": system.message_id,
        "rocketmq.tag": system.tag,
        "rocketmq.keys": " ".join(keys),
        "rocketmq.message_group": system.message_group,
        "rocketmq.topic": message.topic.name,
    }
    return headers + [(name, value.encode()) for name, value in own.items() if value]


def _body(message: Any) -> bytes:
    system, of = message.system_properties, library().of
    digest, body = system.body_digest, bytes(message.body)
    made = {
        of.CRC32: lambda: format(zlib.crc32(body) & 0xFFFFFFFF, "08X"),
        of.MD5: lambda: hashlib.md5(body, usedforsecurity=False).hexdigest(),
        of.SHA1: lambda: hashlib.sha1(body, usedforsecurity=False).hexdigest(),
    }.get(digest.type)
    if made is not None and made().upper().lstrip("0") != digest.checksum.upper().lstrip("0"):
        raise ValueError(f"its body does not match its checksum {digest.checksum}")
    if system.body_encoding == of.GZIP:
        unpacker = zlib.decompressobj(_ZLIB_OR_GZIP)
        try:
            body = unpacker.decompress(body, RECEIVE_BYTES_MAX)
        except zlib.error as error:
            raise ValueError(f"its body cannot be decompressed: {error}") from error
        if not unpacker.eof:
            raise ValueError(f"its decompressed body is truncated or exceeds {RECEIVE_BYTES_MAX} bytes")
    elif system.body_encoding not in (of.IDENTITY, of.ENCODING_UNSPECIFIED):
        raise ValueError(f"its body has the encoding {system.body_encoding}, which this version does not support")
    return body

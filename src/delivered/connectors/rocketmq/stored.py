"""A message as a broker stores it and hands it to who reads by offset."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEAD = struct.Struct(">iiiiiqqiq")  # size, magic, checksum, queue, flag, queue offset, log offset, system flag, born
_LONG_TOPIC = -626843477  # magic of the second version, whose topic may have more than 127 bytes
_BORN_6, _STORED_6 = 0x10, 0x20
_ADDRESS, _ADDRESS_6 = 8, 20


@dataclass(frozen=True)
class Stored:
    """
    Attributes:
        offset: in its queue; place: in the broker's log.
        half: for a message that a commit made visible, the place of its half message; else 0.
    """

    offset: int
    place: int
    half: int
    born_ms: int
    body: bytes
    properties: dict[str, str]


def stored(data: bytes) -> Iterator[Stored]:
    """What a broker answers to a pull, message by message."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, magic, _, _, _, offset, place, flag, born = _HEAD.unpack_from(data, at)
        here = at + _HEAD.size
        here += (_ADDRESS_6 if flag & _BORN_6 else _ADDRESS) + 8  # who sent it, when it was stored
        here += (_ADDRESS_6 if flag & _STORED_6 else _ADDRESS) + 4  # who stored it, attempts
        half, length = struct.unpack_from(">qi", data, here)
        here += 12
        body = data[here : here + length]
        here += length
        wide = magic == _LONG_TOPIC
        named = struct.unpack_from(">h" if wide else ">b", data, here)[0]
        here += (2 if wide else 1) + named
        length = struct.unpack_from(">h", data, here)[0]
        text = data[here + 2 : here + 2 + length].decode(errors="replace")
        yield Stored(offset, place, half, born, body, parsed(text))
        at += size


def parsed(text: str) -> dict[str, str]:
    """Properties of a message, from RocketMQ's own way to write them."""
    pairs = (pair.split("\x01", 1) for pair in text.split("\x02"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def joined(properties: dict[str, str]) -> str:
    """The way back."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())

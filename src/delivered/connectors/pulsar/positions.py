"""Positions in the partitions of Pulsar's topics, as in options and checkpoints.

A position is the last message read, identified by its entry. An entry is what a producer sent at once: a message, a
batch, or a chunk of a message.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from delivered.contract.source import Offsets
from delivered.model.errors import InvariantBroken, UsageError

PREFIX = "persistent://public/default/"
"""Namespace of short topic names."""

Partition = tuple[str, int]
"""Full topic name and partition number; -1: the topic has no partitions."""

_TEXT = re.compile(r"(-1|\d+):(-1|\d+)(?::(\d+))?(?:>(\d+))?")


def full_name(owner: str, topic: str) -> str:
    """`persistent://tenant/namespace/topic`. Raises UsageError: the topic is not persistent, or a partition."""
    name = topic if "://" in topic else f"{PREFIX}{topic}"
    if not re.fullmatch(r"persistent://[^/\s]+/[^/\s]+/[^/\s]+", name) or re.search(r"-partition-\d+$", name):
        raise UsageError("OPTION_VALUE.PULSAR_TOPIC", owner=owner, topic=topic)
    return name


def short_name(topic: str) -> str:
    return topic.removeprefix(PREFIX)


def physical(partition: Partition) -> str:
    """The partition's topic name."""
    topic, number = partition
    return topic if number < 0 else f"{topic}-partition-{number}"


_TURN_ROWS = 1_000


class Router:
    """Keys to partitions as in the Java client; rows without a key round-robin."""

    def __init__(self) -> None:
        self._turn = 0

    def partition(self, key: str | None, partitions: int) -> int:
        if key:
            return _java_hash(key) % partitions
        self._turn += 1
        return self._turn // _TURN_ROWS % partitions


@lru_cache(maxsize=65_536)
def _java_hash(key: str) -> int:
    hash_ = 0
    units = key.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(units), 2):
        hash_ = (31 * hash_ + (units[at] << 8 | units[at + 1])) & 0xFFFFFFFF
    return hash_ & 0x7FFFFFFF


@dataclass(frozen=True)
class Position:
    """
    Attributes:
        index: of the message in its batch; None: the entry was read to its end.
        follower: the next ledger, known only if `ledger` is closed and was read to its end.
    """

    ledger: int
    entry: int
    index: int | None = None
    follower: int | None = None

    @property
    def order(self) -> tuple[int, int, float]:
        return (self.ledger, self.entry, math.inf if self.index is None else self.index)

    def __str__(self) -> str:
        index = "" if self.index is None else f":{self.index}"
        follower = "" if self.follower is None else f">{self.follower}"
        return f"{self.ledger}:{self.entry}{index}{follower}"

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Raises ValueError if the text is not a position."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(text)
        index, follower = (None if x is None else int(x) for x in match.group(3, 4))
        return cls(int(match[1]), int(match[2]), index, follower)


START = Position(-1, -1)
"""Before the first message."""


Ledgers = Sequence[tuple[int, int]]
"""Id and number of entries of each, oldest first."""


def ranges(start: Position, end: Position, ledgers: Ledgers) -> list[tuple[int, int, int]]:
    """(ledger, first entry, last entry + 1) of the ranges after `start`, up to `end`."""
    pieces = []
    for ledger, count in ledgers:
        if ledger < start.ledger or ledger > end.ledger:
            continue
        first = 0
        if ledger == start.ledger:
            first = start.entry + (1 if start.index is None else 0)
        stop = end.entry + 1 if ledger == end.ledger else count
        if first < stop:
            pieces.append((ledger, first, stop))
    return pieces


def rest(start: Position, end: Position, ledgers: Ledgers) -> int:
    """Number of entries after `start`, up to `end`."""
    return sum(stop - first for _, first, stop in ranges(start, end, ledgers))


@dataclass(frozen=True)
class Timestamp:
    """The first message published at or after a time.

    Attributes:
        ms: since 1970.
    """

    ms: int


EARLIEST, LATEST = "earliest", "latest"
Spot = Position | Timestamp | str
"""A position, a time, EARLIEST or LATEST."""


@dataclass(frozen=True)
class Where:
    """Where to start or end reading.

    Attributes:
        everywhere: for all partitions; None: see `each`.
        option: where it was set, for errors.
        stored: positions from a driver's earlier `initial`, used as they are, whatever Pulsar has now.
    """

    option: str
    everywhere: Spot | None = None
    each: Mapping[Partition, Spot] = field(default_factory=dict)
    stored: bool = False

    def spot(self, partition: Partition) -> Spot | None:
        """None: not set for this partition."""
        return self.each.get(partition) if self.everywhere is None else self.everywhere


_MARK = "#positions"
# No full topic name starts with "#".


def to_json(at: Mapping[Partition, Position]) -> Offsets:
    """`{"persistent://public/default/orders": {"0": "12:34"}, "#positions": 1}`."""
    encoded: Offsets = {_MARK: 1}
    for (topic, number), position in sorted(at.items()):
        encoded.setdefault(topic, {})[str(number)] = str(position)
    return encoded


def from_json(encoded: Offsets) -> dict[Partition, Position]:
    """Raise InvariantBroken if a checkpoint holds something else."""
    try:
        return {
            (topic, int(n)): Position.from_text(text)
            for topic, partitions in encoded.items()
            if topic != _MARK
            for n, text in partitions.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise InvariantBroken("CHECKPOINT_OFFSETS.PULSAR", offsets=json.dumps(encoded)[:200]) from None


def parse_offsets(owner: str, option: str, text: str) -> Where:
    """Read "earliest", "latest", JSON like {"orders": {"0": "12:34"}}, or the result of a driver's `initial`."""
    word = text.strip().lower()
    if word in (EARLIEST, LATEST):
        return Where(option, word)
    wrong = UsageError("OPTION_VALUE.PULSAR_OFFSETS", owner=owner, option=option, text=text[:200])
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or not data:
            raise wrong
        each = {
            (full_name(owner, topic), int(number)): _spot(spot)
            for topic, partitions in data.items()
            if topic != _MARK
            for number, spot in partitions.items()
        }
    except (ValueError, AttributeError, TypeError, binascii.Error):
        raise wrong from None
    if not each:
        raise wrong
    return Where(option, each=each, stored=_MARK in data)


def parse_timestamp(owner: str, option: str, text: str) -> Where:
    """Read milliseconds since 1970, for all partitions."""
    if not re.fullmatch(r"\d{1,16}", text.strip()):
        raise UsageError("OPTION_VALUE.TIMESTAMP", owner=owner, option=option, text=text)
    return Where(option, Timestamp(int(text)))


def _spot(spot: Any) -> Spot:
    if not isinstance(spot, str):
        raise TypeError(spot)
    if spot.lower() in (EARLIEST, LATEST):
        return spot.lower()
    if _TEXT.fullmatch(spot):
        return Position.from_text(spot)
    numbers = fields(base64.b64decode(spot, validate=True))
    if 1 not in numbers or 2 not in numbers:
        raise ValueError(spot)
    return Position(numbers[1], numbers[2], numbers.get(4) if numbers.get(4, -1) >= 0 else None)


def fields(serialized: bytes) -> dict[int, int]:
    """The integers in a serialized message id: 1 ledger, 2 entry, 3 partition, 4 index in batch, 6 size of batch.

    Raises:
        ValueError: not a message id.
    """
    numbers: dict[int, int] = {}
    at = 0
    try:
        while at < len(serialized):
            tag, at = _varint(serialized, at)
            if tag & 7 == 0:
                value, at = _varint(serialized, at)
                numbers[tag >> 3] = value - (1 << 64) if value >> 63 else value
            elif tag & 7 == 2:  # the id of a first chunk
                size, at = _varint(serialized, at)
                at += size
            else:
                raise ValueError("not a message id")
    except IndexError:
        raise ValueError("not a message id") from None
    return numbers


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at

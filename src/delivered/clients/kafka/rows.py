"""Rows to produce, as Arrow columns; partitions of topics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Partition = tuple[str, int]
"""Topic and number."""

RECORD_OVERHEAD = 128
"""Upper bound of what the client adds to key and value before it checks message.max.bytes, without headers."""

Headers = Sequence[tuple[str, bytes | None]]
"""Of one record."""

T = TypeVar("T")


def by_topic(items: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Items by their topic, as requests list them."""
    found: dict[str, list[T]] = {}
    for topic, item in items:
        found.setdefault(topic, []).append(item)
    return found


@dataclass(frozen=True)
class Rows:
    """Rows for one topic.

    Attributes:
        key, value: binary or large_binary; key None: every key is null.
        headers: list<struct<key: string, value: binary>>, or None.
        partition: int32, -1: by key; or None.
    """

    topic: str
    key: pa.Array | None
    value: pa.Array
    headers: pa.Array | None = None
    partition: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.value)

    def slice(self, start: int, length: int) -> Rows:
        if start == 0 and length >= len(self):
            return self
        return Rows(
            self.topic,
            None if self.key is None else self.key.slice(start, length),
            self.value.slice(start, length),
            None if self.headers is None else self.headers.slice(start, length),
            None if self.partition is None else self.partition[start : start + length],
        )

"""Packs the data files of a table into slices, for a scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
SLICE_BYTES = 64 << 20
"""Approximate size of a slice; files are never split."""


def packed(files: Iterable[T], size: Callable[[T], int]) -> list[list[T]]:
    """Group files to about `SLICE_BYTES`, in order; a larger file is a group of its own."""
    groups: list[list[T]] = []
    room = 0
    for file in files:
        if not groups or size(file) > room:
            groups.append([])
            room = SLICE_BYTES
        groups[-1].append(file)
        room -= size(file)
    return groups

"""Data files of a table in slices, for a scan of all its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
SLICE_BYTES = 64 << 20
"""Of data files in one slice, about; a file is never split."""


def packed(files: Iterable[T], size: Callable[[T], int]) -> list[list[T]]:
    """Files in groups of about `SLICE_BYTES`, in their order; a larger one stands alone."""
    groups: list[list[T]] = []
    room = 0
    for file in files:
        if not groups or size(file) > room:
            groups.append([])
            room = SLICE_BYTES
        groups[-1].append(file)
        room -= size(file)
    return groups

"""What is read as a whole and not as a stream: tables and folders, for the audit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.contract.source import Offsets, Slice
from delivered.model.errors import DeliveredError, UsageError

T = TypeVar("T")
SLICE_BYTES = 64 << 20
"""Of data files in one slice, about; a file is never split."""


class BoundedScan(ABC):
    """A source without admission control, which can be read if its columns are known."""

    @property
    def rows_per_batch_max(self) -> int | None:
        return None

    def preflight(self) -> Sequence[Finding]:
        try:
            self.schema()
        except DeliveredError as error:
            return [Finding.refusal(error)]
        return []

    @abstractmethod
    def schema(self) -> pa.Schema:
        """
        Raises:
            DeliveredError: there is nothing to read, or it cannot be read.
        """


class BoundedScanDriver(ABC):
    """See `delivered.contract.source.SourceDriver`; a stream is refused.

    Args:
        what: names it, for the refusal: "the table 'orders'".
    """

    def __init__(self, what: str) -> None:
        self._what = what

    @abstractmethod
    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]: ...

    @abstractmethod
    def batch(self) -> tuple[Offsets, Offsets]: ...

    def initial(self) -> Offsets:
        raise self._no_stream()

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:  # noqa: ARG002
        raise self._no_stream()

    def newest(self) -> Offsets | None:
        return None

    def freeze(self) -> None:
        raise self._no_stream()

    def acknowledge(self, end: Offsets) -> None:  # noqa: B027 - there is nothing to do
        """Nothing needs telling."""

    def close(self) -> None:  # noqa: B027 - there is nothing to do
        """Nothing is held."""

    def _no_stream(self) -> UsageError:
        return UsageError("NO_STREAM", f"{self._what[0].upper()}{self._what[1:]} is read as a whole, not as a stream.")


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

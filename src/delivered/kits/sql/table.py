"""A scan of all rows of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pyarrow as pa

from delivered.model.errors import UsageError

SLICES_MAX = 256


class TableScan(ABC):
    """See `delivered.contract.sink.BoundedScan`. Rows keep the Arrow types they were written with."""

    def schema(self) -> pa.Schema:
        """
        Raises:
            UsageError: this package never wrote to the table.
        """
        schema = self._stored_schema()
        if schema is None:
            raise self._never_written()
        return schema

    @abstractmethod
    def _stored_schema(self) -> pa.Schema | None:
        """The table's schema according to the ledger; None: unknown."""

    @abstractmethod
    def _never_written(self) -> UsageError: ...


def steps(first: int, stop: int, at_least: int, whole: int | None = None) -> list[tuple[int, int]]:
    """Split a range into at most `SLICES_MAX` pieces, the last one shorter.

    Args:
        whole: total length of all ranges; None: this is the only one.
    """
    step = max(at_least, -(-(stop - first if whole is None else whole) // SLICES_MAX))
    return [(at, min(at + step, stop)) for at in range(first, stop, step)]

"""A scan of all rows of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pyarrow as pa

from delivered.model.errors import UsageError

SLICES_MAX = 256


class TableScan(ABC):
    """See `delivered.contract.sink.BoundedScan`. The rows have the Arrow types that they were written with."""

    def schema(self) -> pa.Schema:
        """
        Raises:
            UsageError: nothing was ever written to the table by this package.
        """
        schema = self._stored_schema()
        if schema is None:
            raise self._never_written()
        return schema

    @abstractmethod
    def _stored_schema(self) -> pa.Schema | None:
        """What the ledger keeps of the table; None: nothing."""

    @abstractmethod
    def _never_written(self) -> UsageError: ...


def steps(first: int, stop: int, at_least: int, whole: int | None = None) -> list[tuple[int, int]]:
    """Cut a range into at most `SLICES_MAX` pieces, the last one shorter.

    Args:
        whole: of all ranges together; None: this is the only one.
    """
    step = max(at_least, -(-(stop - first if whole is None else whole) // SLICES_MAX))
    return [(at, min(at + step, stop)) for at in range(first, stop, step)]

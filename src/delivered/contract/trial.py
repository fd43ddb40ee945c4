"""An optional protocol of sinks, checked with `isinstance`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import pyarrow as pa


@runtime_checkable
class TriesRows(Protocol):
    """A sink whose target refuses rows for reasons that only its server knows."""

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """As `delivered.contract.powers.ValidatesRows.invalid_rows`, of rows that are valid; asks the server, and
        changes nothing there.

        Runs on an executor, only if bad rows do not stop the query. Constraints are not tried. May be called for rows
        that are not written.
        """

"""What a Delta table requires of its rows: NOT NULL, in columns and within them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from delivered.connectors.delta.client import open_table
from delivered.connectors.delta.options import DeltaOptions
from delivered.kits.table import bad_rows


class Required:
    """Reads the table when rows have the first null that it may refuse."""

    def __init__(self, options: DeltaOptions) -> None:
        self._options = options
        self._table: pa.Schema | None = None

    def check(self, batch: pa.RecordBatch) -> None:
        """Raises BadRecord for a null within a column. Nulls of columns themselves are found by the files' statistics
        when they are committed, which reads the table anyway."""
        if bad_rows.has_nested_nulls(batch):
            bad_rows.check(
                self._options.where, batch, self._within(batch, [f.with_nullable(True) for f in self._schema])
            )

    def reasons(self, batch: pa.RecordBatch) -> pa.Array | None:
        """For each row, why the table refuses a null of it."""
        if not any(c.null_count for c in batch.columns) and not bad_rows.has_nested_nulls(batch):
            return None
        return self._within(batch, list(self._schema))

    @property
    def _schema(self) -> pa.Schema:
        if self._table is None:
            table = open_table(self._options)  # none yet: the commit says so
            self._table = pa.schema([] if table is None else table.schema().to_arrow())
        return self._table

    def _within(self, batch: pa.RecordBatch, fields: Sequence[pa.Field]) -> pa.Array | None:
        return bad_rows.unfilled(self._options.write, pa.schema(fields), batch)

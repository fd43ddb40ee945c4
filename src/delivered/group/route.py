"""Which rows and columns a sink gets."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from delivered.model.errors import UsageError


@dataclass(frozen=True)
class Columns:
    """A route by columns that the batch has already: what an expression gives is computed before.

    Attributes:
        take: (name at the sink, column of the batch), in the sink's order.
        where: column of type boolean; rows in which it is not true are left out. None: all rows.
    """

    take: tuple[tuple[str, str], ...]
    where: str | None = None

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        places = [self._place(batch.schema, column) for _, column in self.take]
        fields = [batch.schema.field(i).with_name(name) for i, (name, _) in zip(places, self.take, strict=True)]
        schema = pa.schema(fields)
        taken = pa.RecordBatch.from_arrays([batch.column(i) for i in places], schema=schema)
        if self.where is None:
            return taken
        mask = batch.column(self._place(batch.schema, self.where))
        if mask.null_count == 0 and mask.true_count == batch.num_rows:
            return taken
        return taken.filter(mask)  # null is not true

    @staticmethod
    def _place(schema: pa.Schema, column: str) -> int:
        place: int = schema.get_field_index(column)
        if place < 0:
            raise UsageError(
                "SELECT_COLUMN",
                f"A sink's select names the column {column!r}; the rows have {', '.join(schema.names)}.",
            )
        return place

"""Which rows and columns a sink gets."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa

from delivered.contract.sink import DEAD_LETTERS, Route, Sink
from delivered.model.errors import UsageError


@dataclass(frozen=True)
class Columns:
    """A route over columns that the batch already has; expressions are computed before.

    Attributes:
        take: (name at the sink, column of the batch), in the sink's order.
        where: boolean column; rows in which it is not true are dropped. None: all rows.
    """

    take: tuple[tuple[str, str], ...]
    where: str | None = None

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        places = [self._place(batch.schema, column) for _, column in self.take]
        fields = [batch.schema.field(i).with_name(name) for i, (name, _) in zip(places, self.take, strict=True)]
        schema = pa.schema(fields)
        selected = pa.RecordBatch.from_arrays([batch.column(i) for i in places], schema=schema)
        if self.where is None:
            return selected
        mask = batch.column(self._place(batch.schema, self.where))
        if mask.null_count == 0 and mask.true_count == batch.num_rows:
            return selected
        return selected.filter(mask)  # null is not true

    @staticmethod
    def _place(schema: pa.Schema, column: str) -> int:
        place: int = schema.get_field_index(column)
        if place < 0:
            raise UsageError(
                "SELECT_COLUMN",
                f"A sink's select names the column {column!r}, but the rows have {', '.join(schema.names)}.",
            )
        return place


def dead_letters_route(sink: Sink) -> Route | None:
    """How dead letters are written to a sink: as columns, or as one JSON value if it only accepts key and value."""
    try:
        sink.check_schema(DEAD_LETTERS)
    except UsageError:
        return as_key_and_value
    return None


def as_key_and_value(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rejecting sink as the key, the whole dead letter as JSON."""
    texts = [json.dumps(row, ensure_ascii=False) for row in rows.to_pylist()]
    columns = [rows.column(0).cast(pa.binary()), pa.array([t.encode() for t in texts], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value"])

"""Rows by the partitions of a table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from delivered.kits.table.parquet import split

Part = tuple[Any, ...]
"""Values of the partition fields, as a manifest holds them: dates and times as whole numbers."""


def parts(table: Any, batch: pa.RecordBatch, rows: pa.RecordBatch) -> list[tuple[Part, pa.RecordBatch]]:
    """`rows` by the table's partition spec, whose fields are computed from `batch`, which has the same rows."""
    spec, schema = table.spec(), table.schema()
    if not spec.fields:
        return [((), rows)]
    keys = []
    for field in spec.fields:
        source = schema.find_field(field.source_id)
        column = batch.column(schema.find_column_name(field.source_id))
        keys.append(_plain(field.transform.pyarrow_transform(source.field_type)(column)))
    return split(pa.RecordBatch.from_arrays(keys, [str(i) for i in range(len(keys))]), rows)


def _plain(values: Any) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    if pa.types.is_timestamp(values.type) or pa.types.is_time64(values.type):
        return values.cast(pa.int64())
    return values

"""Casts rows to another schema; names of columns in Spark SQL."""

from __future__ import annotations

import pyarrow as pa

from delivered.model.errors import BadRecord


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with exactly the columns and types of `schema`, matched by name; no copy if they already fit.

    Raises:
        BadRecord: a value does not fit its column.
    """
    if batch.schema.equals(schema):
        return batch
    columns = [_cast(batch.column(batch.schema.get_field_index(f.name)), f) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise BadRecord(
            "VALUE",
            f"A value of column {field.name!r}, which is {column.type}, does not fit {field.type}: {str(error)[:300]}",
            next_step="cast the column, or filter such rows",
        ) from None


def backquoted(name: str) -> str:
    """A column's name in Spark SQL."""
    return "`" + name.replace("`", "``") + "`"

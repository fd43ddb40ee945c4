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
    columns = [batch.column(batch.schema.get_field_index(f.name)) for f in schema]
    try:
        cast = [c if c.type.equals(f.type) else c.cast(f.type) for c, f in zip(columns, schema, strict=True)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise BadRecord(
            "VALUE",
            f"A value does not fit its column: {str(error)[:300]}",
            next_step="cast the column, or filter such rows",
        ) from None
    return pa.RecordBatch.from_arrays(cast, schema=schema)


def backquoted(name: str) -> str:
    """A column's name in Spark SQL."""
    return "`" + name.replace("`", "``") + "`"

"""Columns as a Delta table keeps them, without loss: see `delivered.kits.table.columns`."""

from __future__ import annotations

import pyarrow as pa

from delivered.kits.table import columns
from delivered.model.errors import UsageError

TABLE = "a Delta table"


def canonical_schema(schema: pa.Schema) -> pa.Schema:
    """
    Raises:
        UsageError: a column's type cannot be kept.
    """
    return columns.canonical_schema(schema, TABLE)


def check(schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: no column, two of one name (Delta does not tell capital letters), or a type that cannot be kept.
    """
    if not columns.named_once(schema):
        lower = [name.lower() for name in schema.names]
        double = sorted({name for name in lower if lower.count(name) > 1})
        raise UsageError(
            "COLUMNS",
            f"Rows have the columns {schema.names}; a Delta table needs at least one, each of its own name, capital "
            f"letters apart{': ' + str(double) if double else ''}.",
            next_step="rename columns",
        )
    canonical_schema(schema)

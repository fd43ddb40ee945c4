"""What an Iceberg table requires of its rows: columns, fields, elements and entries that are not optional."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from delivered.kits.table import bad_rows
from delivered.model.capability import WriteMode


def unfilled(mode: WriteMode, table: Any, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.kits.table.bad_rows.unfilled`."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return bad_rows.unfilled(mode, schema_to_pyarrow(table.schema()), batch)

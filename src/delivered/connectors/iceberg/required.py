"""What an Iceberg table requires of its rows: columns, fields, elements and entries that are not optional."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from delivered.kits.table import required
from delivered.model.capability import WriteMode


def unfilled(mode: WriteMode, table: Any, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.kits.table.required.unfilled`."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return required.unfilled(mode, schema_to_pyarrow(table.schema()), batch)

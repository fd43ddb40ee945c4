"""Columns of rows that are written as messages: text or bytes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from delivered.model.errors import UsageError

TEXT = (pa.types.is_string, pa.types.is_large_string)
TEXT_OR_BYTES = (pa.types.is_binary, pa.types.is_large_binary, *TEXT)

_TYPES = {"value": TEXT_OR_BYTES, "key": TEXT_OR_BYTES, "message_id": TEXT}
COLUMNS = tuple(_TYPES)
"""In a reader's order. message_id: set by the user, replacing the generated one."""


def check_types(schema: pa.Schema) -> None:
    """Raise UsageError for a column of `COLUMNS` that is neither text nor bytes."""
    for field in schema:
        if not any(fits(field.type) for fits in _TYPES[field.name]):
            raise UsageError("COLUMNS", f"Column {field.name!r} is {field.type}; it must be text or binary.")


def check_names(
    system: str, schema: pa.Schema, needed: Collection[str], known: Collection[str], next_step: str
) -> None:
    """Raise UsageError if a needed column is missing, or a column is unknown."""
    names = set(schema.names)
    if not set(needed) <= names <= set(known):
        raise UsageError(
            "COLUMNS",
            f"delivered_{system} writes the columns {', '.join(sorted(needed))}, and optionally "
            f"{', '.join(sorted(set(known) - set(needed)))}; the rows have {', '.join(schema.names) or 'no columns'}.",
            next_step=next_step,
        )


def as_bytes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch's columns that are in `COLUMNS`, as bytes, as a reader sees them."""
    names = [n for n in COLUMNS if n in batch.schema.names]
    return pa.RecordBatch.from_arrays([batch.column(n).cast(pa.binary()) for n in names], names=names)


def body(value: str | bytes | None) -> bytes:
    """A message's body; empty for null."""
    return b"" if value is None else value.encode() if isinstance(value, str) else value


def column(rows: pa.RecordBatch, name: str, *casts: pa.DataType) -> list[Any]:
    """A column's values after these casts, in sequence; nulls if the column is missing."""
    if name not in rows.schema.names:
        return [None] * rows.num_rows
    values = rows.column(name)
    for kind in casts:
        values = values.cast(kind)
    return values.to_pylist()  # type: ignore[no-any-return]

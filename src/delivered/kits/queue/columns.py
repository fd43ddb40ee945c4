"""Columns of rows that become messages: text or bytes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from delivered.model.errors import UsageError

TEXT = (pa.types.is_string, pa.types.is_large_string)
TEXT_OR_BYTES = (pa.types.is_binary, pa.types.is_large_binary, *TEXT)

_TYPES = {"value": TEXT_OR_BYTES, "key": TEXT_OR_BYTES, "message_id": TEXT}
COLUMNS = tuple(_TYPES)
"""In the order in which a reader gets them. message_id: given by the user in place of ours."""


def check_types(schema: pa.Schema) -> None:
    """Raises UsageError for a column of `COLUMNS` that is neither text nor bytes."""
    for field in schema:
        if not any(fits(field.type) for fits in _TYPES[field.name]):
            raise UsageError("COLUMNS", f"Column {field.name!r} is {field.type}; it must be text or binary.")


def check_names(
    system: str, schema: pa.Schema, needed: Collection[str], known: Collection[str], next_step: str
) -> None:
    """Raises UsageError unless all needed columns are there, and none that is not known."""
    names = set(schema.names)
    if not set(needed) <= names <= set(known):
        raise UsageError(
            "COLUMNS",
            f"delivered_{system} writes the columns {', '.join(sorted(needed))}, and optionally "
            f"{', '.join(sorted(set(known) - set(needed)))}; it was given {', '.join(schema.names) or 'no column'}.",
            next_step=next_step,
        )


def as_bytes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Those of `COLUMNS` that are there, as bytes, as a reader finds them."""
    names = [n for n in COLUMNS if n in batch.schema.names]
    return pa.RecordBatch.from_arrays([batch.column(n).cast(pa.binary()) for n in names], names=names)


def body(value: str | bytes | None) -> bytes:
    """Of a message: nothing for null."""
    return b"" if value is None else value.encode() if isinstance(value, str) else value


def column(rows: pa.RecordBatch, name: str, *casts: pa.DataType) -> list[Any]:
    """Its values, after these casts one by one; as many nulls if there is no such column."""
    if name not in rows.schema.names:
        return [None] * rows.num_rows
    values = rows.column(name)
    for kind in casts:
        values = values.cast(kind)
    return values.to_pylist()  # type: ignore[no-any-return]

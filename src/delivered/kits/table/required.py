"""Nulls where a table requires a value: in a column, or in a field, element or entry within one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.capability import WriteMode
from delivered.model.errors import BadRecord
from delivered.model.ranges import because, first_reason, rows_of_values

_Mask = npt.NDArray[np.bool_]


def unfilled(mode: WriteMode, table: pa.Schema, batch: pa.RecordBatch) -> pa.Array | None:
    """The reason for each row with such a null, null for the others; None: there are none.

    Args:
        mode: rows that delete others need no values.
        table: its columns, with the nullability of all of their parts.
        batch: its columns in the table's order of fields within structs.
    """
    reasons: pa.Array | None = None
    for field in table:
        if field.name in batch.schema.names and _requires(field):
            for path, mask in _unfilled(field, batch.column(field.name), field.name):
                why = f"column {path!r}: null, where the table requires a value"
                reasons = because(reasons, pa.array(mask), why)
    if reasons is None or mode.delete is None:
        return reasons
    deletes = pc.fill_null(batch.column(mode.delete), False)
    return pc.if_else(deletes, pa.scalar(None, pa.string()), reasons)


def has_nested_nulls(batch: pa.RecordBatch) -> bool:
    """Whether a field, an element or an entry within a column is null."""
    return any(_null_within(column) for column in batch.columns)


def check(where: str, batch: pa.RecordBatch, reasons: pa.Array | None) -> None:
    """
    Args:
        where: the table, for the error.
        reasons: as `unfilled` returns them.

    Raises:
        BadRecord: a row has a reason.
    """
    if (found := first_reason(reasons)) is None:
        return
    row, reason = found
    raise BadRecord(
        "COLUMN_REQUIRED",
        f"Row {row} of {batch.num_rows} cannot be written to the table {where}: {reason}. Nothing of its batch counts.",
        next_step="filter such rows, or fill in a value; or set on_bad_row: dead_letter with a dead_letter sink "
        "(docs/dead-letters.md)",
    )


def _requires(field: pa.Field) -> bool:
    """Whether a null may be missing a value anywhere in the field. The keys of maps are never null."""
    return not field.nullable or any(_requires(f) for f in _parts(field.type))


def _parts(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_map(kind):
        return [kind.item_field]
    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _unfilled(field: pa.Field, column: pa.Array, path: str) -> Iterator[tuple[str, _Mask]]:
    """Paths and rows of such nulls."""
    if not field.nullable and column.null_count:
        yield path, np.asarray(column.is_null())
    kind, t = field.type, pa.types
    if t.is_struct(kind):
        valid = np.asarray(column.is_valid())
        for at, part in enumerate(kind):
            if _requires(part):
                for inner, mask in _unfilled(part, column.field(at), f"{path}.{part.name}"):
                    if (mask & valid).any():
                        yield inner, mask & valid
    elif t.is_map(kind) and _requires(kind.item_field):
        for inner, mask in _unfilled(kind.item_field, column.items, f"{path}.value"):
            yield inner, rows_of_values(column, mask)
    elif (t.is_list(kind) or t.is_large_list(kind)) and _requires(kind.value_field):
        for inner, mask in _unfilled(kind.value_field, column.values, f"{path}[]"):
            yield inner, rows_of_values(column, mask)


def _null_within(column: pa.Array) -> bool:
    kind, t = column.type, pa.types
    if t.is_struct(kind):
        parts = [column.field(i) for i in range(kind.num_fields)]
    elif t.is_map(kind):
        parts = [column.items]
    elif t.is_list(kind) or t.is_large_list(kind):
        parts = [column.values]
    else:
        return False
    return any(part.null_count or _null_within(part) for part in parts)

"""Rows that a table, or the library that writes its files, refuses.

Nulls where the table requires a value, in a column or in a field, element or entry within one, are found by looking;
what the library refuses, by writing the rows nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.kits.sql.trial import refused
from delivered.kits.table.store import Store
from delivered.model.bad_row import NOT_OF_A_ROW, reason_of
from delivered.model.capability import WriteMode
from delivered.model.errors import BadRecord
from delivered.model.identity import Scope, Work
from delivered.model.ranges import because, first_of, first_reason, rows_of_values

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
    raise BadRecord("COLUMN_REQUIRED.ROW", row=row, num_rows=batch.num_rows, where=where, reason=reason)


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


def nobody() -> Work:
    """Whose files are written nowhere."""
    return Work(Scope("trial", "trial", "trial"), 0, 0)


class Nowhere(Store):
    """Files that are counted, not kept."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def create(self, name: str) -> Any:
        del name
        return pa.MockOutputStream()

    def remove(self, names: object) -> None:
        """There are none."""


class Trial(Protocol):
    """Judges rows by the table as it was when it was first asked."""

    def refused(self, batch: pa.RecordBatch) -> pa.Array | None:
        """See `delivered.contract.sink.Sink.refused_rows`."""


def unwritable(
    batch: pa.RecordBatch, write: Callable[[pa.RecordBatch], None], known: pa.Array | None = None
) -> pa.Array | None:
    """The reason for each row for which `write` raises alone, null for the others; None: there are none.

    Of n rows with b bad ones, `write` is called about b * log2(n) times.

    Args:
        write: does with rows what a writer would do, but changes nothing. Also called with a row of nulls.
        known: reasons that rows have already; these are not tried.

    Raises:
        Exception: `write` raises for a row of nulls, too, or because of the machine: it is not because of a row.
    """
    tries = _Tries(write)
    suspects = pa.repeat(True, batch.num_rows) if known is None else pc.is_null(known)
    return first_of(known, refused(batch, suspects, tries.load))


@dataclass
class _Tries:
    write: Callable[[pa.RecordBatch], None]
    last: list[str] = dataclasses.field(default_factory=list)
    """The column of the last bad row: often that of the next one, too."""
    checked: bool = False

    def load(self, rows: pa.RecordBatch) -> str | None:
        why = self._raised(rows)
        if why is None:
            return None
        if not self.checked:
            self.write(_only(rows.slice(0, 1), None))
            self.checked = True
        return self._column(rows) + why if rows.num_rows == 1 else why

    def _raised(self, rows: pa.RecordBatch) -> str | None:
        try:
            self.write(rows)
        except BadRecord as error:
            return reason_of(error.__cause__) if isinstance(error.__cause__, Exception) else error.message
        except NOT_OF_A_ROW:
            raise
        except Exception as error:
            return reason_of(error)
        return None

    def _column(self, row: pa.RecordBatch) -> str:
        """The column whose value is refused where all others are null, in front of the reason."""
        for name in (*self.last, *row.schema.names):
            if self._raised(_only(row, name)) is not None:
                self.last = [name]
                return f"column {name!r}: "
        return ""


def _only(row: pa.RecordBatch, name: str | None) -> pa.RecordBatch:
    """The row with nulls in all other columns."""
    columns = [c if n == name else pa.nulls(1, c.type) for n, c in zip(row.schema.names, row.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=row.schema.names)

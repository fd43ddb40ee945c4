"""Rows that a table, or the library that writes its files, refuses: found by writing them nowhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from delivered.kits.sql.trial import refused
from delivered.kits.table.store import Store
from delivered.model.bad_row import NOT_OF_A_ROW, reason_of
from delivered.model.errors import BadRecord
from delivered.model.identity import Scope, Work
from delivered.model.ranges import first_of


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
        """See `delivered.contract.trial.TriesRows`."""


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
    last: list[str] = field(default_factory=list)
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

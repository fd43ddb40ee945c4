"""Partition values: as text in the table's log, and as folders."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.ranges import RANGES, because, unstorable

NULL = "__HIVE_DEFAULT_PARTITION__"
FOLDER_BYTES_MAX = 200
"""Of one folder's name: file systems allow 255, object stores about 1,000 for the complete path."""

Part = tuple[tuple[str, str | None], ...]
"""Partition columns with their values, as in the log."""


def unstorable_parts(names: Sequence[str], batch: pa.RecordBatch) -> pa.Array | None:
    """The reason for each row whose partition values the log cannot hold; None: there are none.

    Args:
        names: partition columns; the rows may lack some.
    """
    names = [n for n in names if n in batch.schema.names]
    reasons = unstorable(RANGES["delta partition"], batch.select(names))
    for name in names:
        column = batch.column(name)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            why = f"column {name!r}: an empty text in a partition column, which Delta would read back as null"
            reasons = because(reasons, pc.equal(column, ""), why)
    return reasons


def folder_of(part: Part) -> str:
    """`day=2024-05-01/`, in Hive style. Readers use the log, not this name, so a long one is shortened."""
    return "".join(
        f"{_short(f'{quote(k, safe=str())}={NULL if v is None else quote(v, safe=str())}')}/" for k, v in part
    )


def _short(name: str) -> str:
    if len(name) <= FOLDER_BYTES_MAX:
        return name
    return f"{name[:100].rstrip('%')}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


def text(value: Any) -> str | None:
    """A partition value, as in the log."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        return value.isoformat(" ", "microseconds")  # with a T, the client can no longer open the table
    return value.isoformat() if isinstance(value, dt.date) else str(value)

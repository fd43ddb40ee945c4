"""Rows that a server itself refuses, found before they are sent: loaded into an empty copy of the table.

What a server refuses depends on its version, the table's indexes, types and functions. Some of it shows only when the
rows move into the table, at the decision: too late to choose others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.ranges import because


def refused(batch: pa.RecordBatch, suspects: pa.Array, load: Callable[[pa.RecordBatch], str | None]) -> pa.Array | None:
    """The reason for each row that `load` refuses, null for the others; None: all are fine.

    Args:
        suspects: which rows to try.
        load: tries rows and takes them back; why it was refused one of them. Of n rows with b refused ones, called
            about b * log2(n) times.
    """
    rows = pc.indices_nonzero(suspects)
    tried, found = batch.take(rows), dict[int, str]()
    left = [(0, tried.num_rows)] if tried.num_rows else []
    while left:
        at, count = left.pop()
        why = load(tried.slice(at, count))
        if why is not None and count == 1:
            found[rows[at].as_py()] = long_values(tried.slice(at, 1)) + why
        elif why is not None:
            left += [(at + count // 2, count - count // 2), (at, count // 2)]
    return pa.array([found.get(i) for i in range(batch.num_rows)], pa.string()) if found else None


def too_long(batch: pa.RecordBatch, widths: Mapping[str, int], unit: str) -> pa.Array | None:
    """As `refused`: values longer than their column.

    Args:
        widths: column -> maximum length.
        unit: "characters" or "bytes".
    """
    reasons: pa.Array | None = None
    for name, width in widths.items():
        column = batch.column(name)
        if pa.types.is_null(column.type):
            continue
        length = pc.utf8_length(column) if unit == "characters" else pc.binary_length(column)
        beyond = pc.greater(length, width)
        if pc.any(beyond).as_py():
            text = pc.binary_join_element_wise(
                f"column {name!r} has ", length.cast(pa.string()), f" {unit}; the table's column holds {width}", ""
            )
            reasons = because(reasons, beyond, text)
    return reasons


LONG_BYTES = 2_000
"""A value that an index may refuse: PostgreSQL's accept 2,704 bytes of all columns."""


def bytes_of(batch: pa.RecordBatch, names: Sequence[str]) -> pa.Array:
    """How long the texts and bytes of these columns are together, by row."""
    total = pa.repeat(0, batch.num_rows)
    for name in names:
        column = batch.column(name)
        if _is_bytes(column.type):
            total = pc.add(total, pc.fill_null(pc.binary_length(column), 0).cast(pa.int64()))
    return total


def long_values(row: pa.RecordBatch) -> str:
    """The columns of a row that an index, or a limit of the server, may be about: in front of its reason."""
    lengths = {n: bytes_of(row, [n])[0].as_py() for n in row.schema.names}
    return "".join(f"column {name!r} has {length} bytes: " for name, length in lengths.items() if length > LONG_BYTES)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))

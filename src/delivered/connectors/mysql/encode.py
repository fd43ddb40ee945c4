"""Encodes Arrow record batches as text for LOAD DATA or INSERT, with no Python object per value.

Every column becomes an Arrow array of texts; one call of Arrow's `binary_join_element_wise` joins the rows, and the
data buffer of its result is the block. Text and binary columns are copied, with a few bytes escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BLOCK_ROWS = 16_384
BLOCK_BYTES = 4 << 20
"""Approximate bytes of values per block."""


@dataclass(frozen=True)
class Form:
    """Text format of rows.

    Attributes:
        first, between, last: delimiters of a row.
        null: text for null.
        quote: around everything but numbers.
        binary: before quoted binary values.
        escapes: bytes to escape and their replacements, in order.
    """

    first: bytes
    between: bytes
    last: bytes
    null: bytes
    quote: bytes
    binary: bytes
    escapes: tuple[tuple[bytes, bytes], ...]


LOAD = Form(
    b"", b"\t", b"\n", b"\\N", b"", b"",
    ((b"\\", b"\\\\"), (b"\t", b"\\t"), (b"\n", b"\\n"), (b"\0", b"\\0")),
)  # fmt: skip
INSERT = Form(b"(", b",", b"),", b"NULL", b"'", b"_binary", ((b"\\", b"\\\\"), (b"'", b"\\'"), (b"\0", b"\\0")))


def blocks(batch: pa.RecordBatch, form: Form) -> Iterator[tuple[int, memoryview]]:
    """Rows of `batch` as text, in bounded blocks, each with its number of rows.

    Args:
        batch: of plain types, with values that the server can store (`model.ranges`).
    """
    size = batch.nbytes
    rows = BLOCK_ROWS if size <= BLOCK_BYTES else max(1, min(BLOCK_ROWS, batch.num_rows * BLOCK_BYTES // size))
    for start in range(0, batch.num_rows, rows):
        part = batch.slice(start, rows)
        yield part.num_rows, _block(part, form)


def _block(batch: pa.RecordBatch, form: Form) -> memoryview:
    fields = [_field(column, form) for column in batch.columns]
    # Append the row delimiter to a column: one array less to join.
    fields[0] = _around(fields[0], form.first, b"", form.null)
    fields[-1] = _around(fields[-1], b"", form.last, form.null)
    joined = pc.binary_join_element_wise(
        *fields, pa.scalar(form.between, pa.binary()), null_handling="replace", null_replacement=form.null.decode()
    )
    _, offsets, data = joined.buffers()
    ends = np.frombuffer(offsets, np.int32)
    return memoryview(data)[ends[joined.offset] : ends[joined.offset + batch.num_rows]]


def _around(column: pa.Array, before: bytes, after: bytes, null: bytes) -> pa.Array:
    if not before and not after:
        return column
    parts = [pa.scalar(x, pa.binary()) for x in (before, after, b"")]
    return pc.binary_join_element_wise(
        parts[0], column, parts[1], parts[2], null_handling="replace", null_replacement=null.decode()
    )


def _field(column: pa.Array, form: Form) -> pa.Array:
    """Encoded values; null stays null."""
    t = pa.types
    if t.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if t.is_null(kind):
        return pa.nulls(len(column), pa.binary())
    if t.is_string(kind) or t.is_binary(kind):
        return _quoted(_escaped(column.view(pa.binary()), form), form, form.binary if t.is_binary(kind) else b"")
    if t.is_boolean(kind):
        return column.cast(pa.uint8()).cast(pa.string()).view(pa.binary())
    if t.is_timestamp(kind):
        column = column.view(pa.int64()).view(pa.timestamp(kind.unit))  # in UTC, without a trailing Z
    if t.is_float32(kind):
        column = column.cast(pa.float64())  # the shortest text of the largest float parses to a larger double
    text = column.cast(pa.string()).view(pa.binary())
    number = t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind)
    return text if number else _quoted(text, form, b"")


def _quoted(column: pa.Array, form: Form, before: bytes) -> pa.Array:
    if not form.quote:
        return column
    parts = [pa.scalar(x, pa.binary()) for x in (before + form.quote, form.quote, b"")]
    return pc.binary_join_element_wise(parts[0], column, parts[1], parts[2], null_handling="emit_null")


def _escaped(column: pa.Array, form: Form) -> pa.Array:
    """One scan over the bytes of all values usually shows that nothing needs escaping."""
    _, offsets, data = column.buffers()
    if data is None:
        return column
    ends = np.frombuffer(offsets, np.int32)
    values = np.frombuffer(data, np.uint8)[ends[column.offset] : ends[column.offset + len(column)]]
    for plain, escaped in form.escapes:
        if (values == plain[0]).any():
            column = pc.replace_substring(column, plain, escaped)
    return column

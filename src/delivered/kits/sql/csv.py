"""Rows that a server sends as CSV, parsed by Arrow without loss.

Timestamps and times are whole microseconds, dates are days since 1970, bytes are lower-case hexadecimal digits, null is
an empty field, and an empty text is quoted.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.errors import BadRecord

BLOCK_BYTES = 1 << 20
"""Size of a block that Arrow parses."""


def batches(
    more: Callable[[], bytes | bytearray | memoryview], schema: pa.Schema, true: str, false: str
) -> Iterator[pa.RecordBatch]:
    """
    Args:
        more: returns the next piece of the text, of any length; empty at the end.
        true, false: the server's boolean literals.
    """
    from pyarrow import csv

    text = _Text(more)
    if text.empty:  # Arrow raises on empty input
        return
    read_options = csv.ReadOptions(column_names=schema.names, block_size=BLOCK_BYTES, use_threads=False)
    convert_options = csv.ConvertOptions(
        column_types={f.name: _parsed(f.type) for f in schema},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        true_values=[true],
        false_values=[false],
    )
    try:
        reader = csv.open_csv(
            pa.PythonFile(text, "r"),
            read_options=read_options,
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=convert_options,
        )
        for batch in reader:
            arrays = [_restored(c, f.type) for c, f in zip(batch.columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
    except pa.ArrowInvalid as error:
        raise _unreadable(schema, error) from None


_COLUMN = re.compile(r"In CSV column #(\d+): (?:Row #\d+: )?")


def _unreadable(schema: pa.Schema, error: Exception) -> BadRecord:
    """A stored value without a counterpart, by Arrow's message."""
    text = str(error)
    found = _COLUMN.search(text)
    column = f"Column {schema.names[int(found[1])]!r}" if found else "A column"
    return BadRecord(
        "VALUE_UNREADABLE",
        f"{column} of the table has a value that this package does not write and Arrow does not have: "
        f"{_COLUMN.sub('', text)[:300]}.",
        next_step="correct the row in the table: another client wrote it, such as infinity or 0000-00-00",
    )


def _parsed(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_timestamp(kind) or t.is_time(kind):
        return pa.int64()
    if t.is_date32(kind):
        return pa.int32()
    return kind if not t.is_binary(kind) else pa.string()


def _restored(column: pa.Array, kind: pa.DataType) -> pa.Array:
    t = pa.types
    if t.is_binary(kind):
        return _from_hex(column)
    if t.is_timestamp(kind) or t.is_time(kind) or t.is_date32(kind):
        return column.cast(kind)
    return pc.cast(column, kind) if not column.type.equals(kind) else column


def _from_hex(column: pa.Array) -> pa.Array:
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    digits = np.frombuffer(b"" if data is None else data, np.uint8)[offsets[0] : offsets[-1]]
    halves = np.where(digits >= ord("a"), digits - (ord("a") - 10), digits - ord("0")).astype(np.uint8)
    values = (halves[0::2] << 4 | halves[1::2]).astype(np.uint8)
    texts = pa.Array.from_buffers(
        pa.binary(),
        len(column),
        [None, pa.py_buffer(((offsets - offsets[0]) // 2).astype(np.int32)), pa.py_buffer(values)],
    )
    return texts if column.null_count == 0 else pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.binary()))


class _Text(io.RawIOBase):
    def __init__(self, more: Callable[[], bytes | bytearray | memoryview]) -> None:
        self._more = more
        self._rest = memoryview(b"")
        self._fill()
        self.empty = not self._rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._fill()
        wanted = len(self._rest) if size < 0 else min(size, len(self._rest))
        part, self._rest = self._rest[:wanted], self._rest[wanted:]
        return bytes(part)

    def _fill(self) -> None:
        """Collect a full block: servers send single rows."""
        parts, size = [], 0
        while size < BLOCK_BYTES and (data := self._more()):
            parts.append(bytes(data))
            size += len(data)
        self._rest = memoryview(b"".join(parts))

"""Values that a server sends as text: PostgreSQL's dates and times, whatever role, database or server set; and CSV.

Dates and times become the numbers that Arrow stores: exact beyond Python's years.

PostgreSQL's logical decoding, COPY and casts to text follow the settings of the session that reads.
"""

from __future__ import annotations

import datetime as dt
import io
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.errors import BadRecord, UsageError
from delivered.model.ranges import INT32, INT64

if TYPE_CHECKING:
    import psycopg

_DATE = r"(\d{4,})-(\d\d)-(\d\d)"
_CLOCK = r" (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
_ZONE = r"(?:([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?)?"
_TEXT = re.compile(rf"{_DATE}(?:{_CLOCK}{_ZONE})?( BC)?")
_EPOCH, _EPOCH_LOCAL = dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.datetime(1970, 1, 1)  # noqa: DTZ001
_MICROSECOND = dt.timedelta(microseconds=1)
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097
"""The Gregorian calendar repeats itself."""


def days(text: str) -> int:
    """
    Returns:
        Days since 1970-01-01.

    Raises:
        ValueError: no date that a number of 32 bits holds, such as infinity.
    """
    return _check_bounds(_parse(text)[0], INT32, text)


def micros(text: str, zoned: bool) -> int:
    """
    Args:
        zoned: the text ends with its offset from UTC.

    Returns:
        Microseconds since 1970-01-01, in UTC if zoned.

    Raises:
        ValueError: no time that a number of 64 bits holds, such as infinity.
    """
    try:
        found = dt.datetime.fromisoformat(text)
        return (found - (_EPOCH if zoned else _EPOCH_LOCAL)) // _MICROSECOND
    except TypeError:
        raise ValueError(f"{text!r} has an offset from UTC, or lacks it") from None
    except ValueError:  # outside the years 1 to 9999
        day, clock = _parse(text)
        return _check_bounds(day * 86_400_000_000 + clock, INT64, text)


def _parse(text: str) -> tuple[int, int]:
    """Days, and microseconds of the day in UTC, which may be of another day."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no date or time that Spark has")
    year, month, day, *clock, sign, hours, minutes, seconds, before = found.groups()
    number = 1 - int(year) if before else int(year)
    cycles, rest = divmod(number - 1, _CYCLE_YEARS)
    since = dt.date(rest + 1, int(month), int(day)) - _EPOCH_LOCAL.date()
    h, m, s, fraction = clock
    at = (int(h or 0) * 60 + int(m or 0)) * 60 + int(s or 0)
    offset = (int(hours or 0) * 60 + int(minutes or 0)) * 60 + int(seconds or 0)
    at = at + offset if sign == "-" else at - offset
    return since.days + cycles * _CYCLE_DAYS, at * 1_000_000 + int((fraction or "").ljust(6, "0"))


def _check_bounds(number: int, bounds: tuple[int, int], text: str) -> int:
    if not bounds[0] <= number <= bounds[1]:
        raise ValueError(f"{text!r} is later or earlier than Spark's dates and times")
    return number


POSTGRES = {
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmloption": "content",
}


def pin_postgres(connection: psycopg.Connection[Any], place: str) -> None:
    """Set them, outside any transaction, and check that it took. For walsenders, too, which take no parameters.

    Raises:
        UsageError: the session keeps another value.
        psycopg.Error: the server rejected it.
    """
    connection.execute("SELECT " + ", ".join(f"set_config('{k}', '{v}', false)" for k, v in POSTGRES.items()))
    row = connection.execute("SELECT " + ", ".join(f"current_setting('{k}')" for k in POSTGRES)).fetchone()
    if not connection.autocommit:
        connection.commit()  # a rollback would set them back
    for (name, value), found in zip(POSTGRES.items(), map(str, row or ()), strict=True):
        if found != value:
            raise setting_refused(name, found, place)


def setting_refused(name: str, value: str, place: str) -> UsageError:
    return UsageError("SETTING_REFUSED", place=place, name=name, value=value)


# Rows that a server sends as CSV, parsed by Arrow without loss.
#
# Timestamps and times are microseconds, dates are days since 1970, bytes are lower-case hexadecimal digits, null
# is an empty field, and an empty text is quoted.

BLOCK_BYTES = 1 << 20
"""Size of a block that Arrow parses."""


def read_csv(
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
        column_types={f.name: _parse_as(f.type) for f in schema},
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
            arrays = [_restore(c, f.type) for c, f in zip(batch.columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
    except pa.ArrowInvalid as error:
        raise _unreadable(schema, error) from None


_COLUMN = re.compile(r"In CSV column #(\d+): (?:Row #\d+: )?")


def _unreadable(schema: pa.Schema, error: Exception) -> BadRecord:
    """A stored value without a counterpart, by Arrow's message."""
    text = str(error)
    found = _COLUMN.search(text)
    column = f"Column {schema.names[int(found[1])]!r}" if found else "A column"
    return BadRecord("VALUE_UNREADABLE.CSV", column=column, value=_COLUMN.sub("", text)[:300])


def _parse_as(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_timestamp(kind) or t.is_time(kind):
        return pa.int64()
    if t.is_date32(kind):
        return pa.int32()
    return kind if not t.is_binary(kind) else pa.string()


def _restore(column: pa.Array, kind: pa.DataType) -> pa.Array:
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

"""Rows on their way from a source to the sinks: those that were rejected, as text and back, and which values each
system stores."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.errors import BadRecord, DeliveredError


class Origin(Enum):
    """Where a row was rejected. The value stands for the sink in a stored dead letter; no sink has such a name."""

    SOURCE = "(source)"
    """It is a record that never became a row."""
    TRANSFORM = "(transform)"
    """The transform raised for it."""
    SINK = ""
    """A sink or its server cannot hold it. A dead letter has the sink's name instead."""

    @classmethod
    def parse(cls, sink: str) -> Origin:
        """Of what a stored dead letter has as its sink."""
        return next((o for o in (cls.SOURCE, cls.TRANSFORM) if o.value == sink), cls.SINK)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A record or row that goes no further than to the dead letters.

    Attributes:
        record: its columns; of what the source or the transform rejected, those of the source's record, undecoded.
        topic, partition, offset: where its source has it, if known.
        row: index among the rows that a sink was given with it.
    """

    origin: Origin
    reason: str
    record: Mapping[str, Any]
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    row: int = 0

    @property
    def text(self) -> str:
        """The record as a dead letter has it: JSON."""
        keys = {"key": None, "value": None} if self.origin is Origin.SOURCE else {}
        return as_json_text({**keys, **self.record})


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of rows, or a part of one. Its length counts the rejected ones, too.

    Attributes:
        rejected: in the order in which they were rejected.
        records: for each good row what its dead letter would have of its source's record (key and value before they
            were decoded, topic, partition, offset), as far as `good` does not have it. None: nothing more.
    """

    good: pa.RecordBatch
    rejected: Sequence[Rejection] = ()
    records: pa.RecordBatch | None = None

    def __len__(self) -> int:
        return int(self.good.num_rows) + len(self.rejected)


# What happens to a row that is invalid for a sink; such a row as text, and back.

NOT_OF_A_ROW = (OSError, MemoryError, ImportError, DeliveredError)
"""What code raises because of the machine or a server, not of the row."""

_ADDRESS = re.compile(r"(?<= at )0x[0-9a-fA-F]+(?=>)")
_REASON_LENGTH_MAX = 1_000
_BASE64 = "base64"
_MICROSECOND = timedelta(microseconds=1)
_NUMBERS = {32: pa.int32(), 64: pa.int64()}


class OnBadRow(StrEnum):
    """The pipeline's choice."""

    FAIL = "fail"
    """The query stops; nothing of the batch counts."""
    DEAD_LETTER = "dead_letter"
    """The row goes to the dead-letter sink, in the same batch, with the reason and its source coordinates."""
    DROP = "drop"
    """at_most_once: the row is dropped and counted as given up."""


def reason_of(error: Exception) -> str:
    """Type and message, the same whenever a row fails in the same way; as text that every system stores."""
    text = ": ".join(filter(None, (type(error).__qualname__, " ".join(str(error).split()))))
    text = _ADDRESS.sub("0x...", text).replace("\0", "\\x00")[:_REASON_LENGTH_MAX]
    return text.encode("utf-8", "backslashreplace").decode()


def as_json_text(row: Mapping[str, Any]) -> str:
    """A row in a dead letter: bytes as UTF-8 if valid, else as {"base64": ...}; durations in microseconds; other values
    as text."""
    return json.dumps(row, default=_plain, ensure_ascii=False)


def plain_rows(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """As `to_pylist`, where a row has a value that Python cannot represent with the numbers that times are stored as,
    and the bytes of texts. What becomes of a row does not depend on the others."""
    try:
        return rows.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        if rows.num_rows > 1:
            return [row for at in range(rows.num_rows) for row in plain_rows(rows.slice(at, 1))]
        named = zip(rows.schema.names, rows.columns, strict=True)
        return [{name: _plain_column(column) for name, column in named}]


def _plain_column(column: pa.Array) -> Any:
    try:
        return column[0].as_py()
    except (OverflowError, ValueError):
        return column.cast(_stored_as(column.type))[0].as_py()


def _stored_as(kind: pa.DataType) -> pa.DataType:
    """The type of what a value of `kind` is stored as: of times numbers, of texts bytes."""
    t = pa.types
    if t.is_dictionary(kind):
        return _stored_as(kind.value_type)
    if t.is_temporal(kind):
        return _NUMBERS[kind.bit_width]
    if t.is_string(kind) or t.is_large_string(kind):
        return pa.binary() if t.is_string(kind) else pa.large_binary()
    if t.is_map(kind):
        return pa.map_(_stored_as(kind.key_type), _stored_as(kind.item_type))
    if t.is_list(kind) or t.is_large_list(kind):
        return pa.list_(_stored_as(kind.value_type))
    if t.is_struct(kind):
        return pa.struct([(f.name, _stored_as(f.type)) for f in kind])
    return kind


def from_json_texts(texts: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
    """The rows that `as_json_text` wrote, in the columns of `schema`; null where a row lacks a column.

    Raises:
        ValueError: a value does not suit its column.
    """
    rows = [json.loads(text) for text in texts]
    columns = [pa.array([_typed(row.get(f.name), f.type) for row in rows], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def bytes_as_json(value: bytes) -> str | dict[str, str]:
    """Bytes within JSON: their text if they are UTF-8, else {"base64": ...}."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {_BASE64: base64.b64encode(value).decode()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return bytes_as_json(value)
    if isinstance(value, timedelta):
        return value // _MICROSECOND
    return str(value)


def _typed(value: Any, kind: pa.DataType) -> Any:
    t = pa.types
    if value is None:
        return None
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind):
        return base64.b64decode(value[_BASE64]) if isinstance(value, dict) else str(value).encode()
    if t.is_string(kind) and isinstance(value, dict):
        raise ValueError(f"it is not UTF-8: {base64.b64decode(value[_BASE64])!r}")
    if t.is_struct(kind):
        return {f.name: _typed(value.get(f.name), f.type) for f in kind}
    if t.is_map(kind):
        return [(_typed(k, kind.key_type), _typed(v, kind.item_type)) for k, v in value]
    if t.is_list(kind) or t.is_large_list(kind):
        return [_typed(v, kind.value_type) for v in value]
    if t.is_duration(kind):
        return timedelta(microseconds=value)
    for suits, parse in _PARSED:
        if suits(kind):
            return parse(value) if isinstance(value, str) else value
    return bool(value) if t.is_boolean(kind) else value


_PARSED: tuple[tuple[Callable[[pa.DataType], bool], Callable[[str], Any]], ...] = (
    (pa.types.is_timestamp, datetime.fromisoformat),
    (pa.types.is_date, date.fromisoformat),
    (pa.types.is_time, time.fromisoformat),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_floating, float),
)
"""By type of the column. A number stands for itself: a database may keep times as such."""


# Which values each system stores exactly, and how long they may be: the one place that knows.
#
# Spark and Arrow have more dates than Python and most text forms (20000-01-01, the year 0), and texts that are not
# UTF-8. A value outside a system's range is a bad row, which names its column. So is one within a list, struct or map.
#
# Types are not decided here: a column whose type a system lacks is refused before the start.

ROW_UNWRITABLE = "DELIVERED_ROW_UNWRITABLE"
"""Code of the error when a library fails for a value."""
Bounds = tuple[int, int]
"""Least and greatest value."""
_Mask = npt.NDArray[np.bool_]

_DAY_US = 86_400_000_000
INT32: Bounds = (-(1 << 31), (1 << 31) - 1)
INT64: Bounds = (-(1 << 63), (1 << 63) - 1)
_UNITS_US = {"s": 1_000_000, "ms": 1_000, "us": 1}
YEAR_1, YEAR_10000 = -719_162, 2_932_897
"""In days since 1970-01-01, as Arrow's dates are. Python's datetime begins and ends there."""


@dataclass(frozen=True)
class Range:
    """
    Attributes:
        days: dates, in days since 1970-01-01.
        micros: timestamps, in microseconds since 1970-01-01.
        said: these bounds, for a reason.
        finite: neither NaN nor infinity.
        zero_byte: whether a text may have one.
        row_bytes: of a row's texts and bytes together; None: as many as Arrow has.
    """

    days: Bounds = INT32
    micros: Bounds = INT64
    said: str = "outside the years -290308 to 294247"
    finite: bool = False
    zero_byte: bool = True
    row_bytes: int | None = None


_YEARS_OF_FOUR_DIGITS = ((YEAR_1, YEAR_10000 - 1), (YEAR_1 * _DAY_US, YEAR_10000 * _DAY_US - 1))
_FOUR_DIGITS = Range(*_YEARS_OF_FOUR_DIGITS, "outside the years 1 to 9999")

EVERYTHING = Range()
RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "parquet": EVERYTHING,
        "delta": EVERYTHING,
        "iceberg": EVERYTHING,
        "json": _FOUR_DIGITS,
        "csv": _FOUR_DIGITS,
        "sqlite": _FOUR_DIGITS,
        "mysql": Range(*_YEARS_OF_FOUR_DIGITS, "outside the years 1 to 9999", finite=True),
        # Dates to 5874897-12-31. The least 64-bit number would be -infinity.
        "postgres": Range(
            (-2_440_588, 2_145_042_905), (-2_440_588 * _DAY_US, INT64[1]), "before 4714-11-24 BC, or after the "
            "greatest date of PostgreSQL", zero_byte=False,
            # The server holds a row in one piece of memory, of at most 0x3fffffff bytes: less what it adds itself.
            row_bytes=0x3FFF0000,
        ),
        # Partition values are also written as text: in Delta's log, and in the summary of Iceberg's snapshots.
        "delta partition": _FOUR_DIGITS,
        "iceberg partition": _FOUR_DIGITS,
    }
)  # fmt: skip
"""By system; files by their format."""


def unstorable(limits: Range, batch: pa.RecordBatch) -> pa.Array | None:
    """The reason for each row with a value outside `limits`, null for the others; None: there are none."""
    reasons: pa.Array | None = None
    for field, column in zip(batch.schema, batch.columns, strict=True):
        for path, mask, why in _outside(limits, column, field.name):
            reasons = because(reasons, pa.array(mask), f"column {path!r}: {why}")
    if limits.row_bytes is not None and batch.nbytes > limits.row_bytes:
        reasons = first_of(reasons, _too_long(batch, limits.row_bytes))
    return reasons


def _too_long(batch: pa.RecordBatch, limit: int) -> pa.Array | None:
    """Names the longest column of such a row."""
    t, lengths = pa.types, dict[str, npt.NDArray[np.int64]]()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if any(is_one(column.type) for is_one in (t.is_string, t.is_binary, t.is_large_string, t.is_large_binary)):
            lengths[name] = np.asarray(pc.fill_null(pc.binary_length(column), 0)).astype(np.int64)
    total = sum(lengths.values(), np.zeros(batch.num_rows, np.int64))
    reasons: list[str | None] = [None] * batch.num_rows
    for at in map(int, np.flatnonzero(total > limit)):
        longest = max(lengths, key=lambda name: lengths[name][at])
        reasons[at] = (
            f"column {longest!r}: {lengths[longest][at]} bytes, and {total[at]} with the row's other columns; a row "
            f"holds {limit}"
        )
    return pa.array(reasons, pa.string()) if any(reasons) else None


def because(reasons: pa.Array | None, mask: pa.Array, text: str | pa.Array) -> pa.Array | None:
    """Set the reason `text` where `mask` is true and no reason is set. No Python object per row."""
    mask = pc.fill_null(mask, False)
    if not pc.any(mask).as_py():
        return reasons
    return first_of(reasons, pc.if_else(mask, text, pa.scalar(None, pa.string())))


def first_of(reasons: pa.Array | None, more: pa.Array | None) -> pa.Array | None:
    """Each row's reason, from the first that has one."""
    return more if reasons is None else reasons if more is None else pc.coalesce(reasons, more)


def first_reason(reasons: pa.Array | None) -> tuple[int, str] | None:
    """The first row that has a reason, and the reason; None: no row has one."""
    if reasons is None or reasons.null_count == len(reasons):
        return None
    row = pc.index(pc.is_valid(reasons), True).as_py()
    return row, reasons[row].as_py()


def check_storable(system: str, batch: pa.RecordBatch, reasons: pa.Array | None) -> None:
    """
    Args:
        system: for the error.
        reasons: as `unstorable` returns them.

    Raises:
        BadRecord: a row has a reason.
    """
    if (found := first_reason(reasons)) is None:
        return
    row, reason = found
    raise BadRecord("VALUE_UNSTORABLE", row=row, num_rows=batch.num_rows, system=system, reason=reason)


@contextmanager
def of_values(writer: str) -> Iterator[None]:
    """Within, an error of a library about a value is one of the rows, not of the system or the network.

    Args:
        writer: what wrote them, for the error.

    Raises:
        BadRecord: such an error.
    """
    try:
        yield
    except (DeliveredError, OSError, MemoryError):
        raise
    except (ValueError, ArithmeticError, pa.ArrowException) as error:
        raise unwritable(
            f"{writer} failed for a value of the rows: {type(error).__name__}: {str(error)[:500]}"
        ) from error


def unwritable(what: str) -> BadRecord:
    """Args: what: failed for which value, without a full stop."""
    return BadRecord("ROW_UNWRITABLE.VALUE", what=what)


def _outside(limits: Range, column: pa.Array, path: str) -> Iterator[tuple[str, _Mask, str]]:
    """Path, rows and reason of what does not fit."""
    kind, t = column.type, pa.types
    if t.is_dictionary(kind):
        yield from _outside(limits, column.dictionary_decode(), path)
    elif t.is_timestamp(kind) and kind.unit in _UNITS_US:
        per = _UNITS_US[kind.unit]
        bounds = (-(-limits.micros[0] // per), limits.micros[1] // per)
        yield from _beyond(column.view(pa.int64()), bounds, path, f"a timestamp {limits.said}")
    elif t.is_date32(kind):
        yield from _beyond(column.view(pa.int32()), limits.days, path, f"a date {limits.said}")
    elif t.is_floating(kind) and limits.finite:
        yield from _any(pc.invert(pc.is_finite(column)), path, "NaN or infinity")
    elif t.is_string(kind) or t.is_large_string(kind):
        yield from _texts(limits, column, path)
    elif t.is_struct(kind):
        for at, field in enumerate(kind):
            yield from _outside(limits, pc.struct_field(column, [at]), f"{path}.{field.name}")
    elif t.is_map(kind):
        for part, child in (("key", column.keys), ("value", column.items)):
            yield from _within(limits, column, child, f"{path}.{part}")
        yield from _any(pa.array(_with_key_twice(column)), path, "a map has a key twice")
    elif t.is_list(kind) or t.is_large_list(kind):
        yield from _within(limits, column, column.values, f"{path}[]")


def rows_of_values(column: pa.Array, mask: _Mask) -> _Mask:
    """The rows of a list's or map's column that have a value of `mask`.

    Args:
        mask: of its `values`, or of a map's `items` or `keys`.
    """
    width = np.int64 if pa.types.is_large_list(column.type) else np.int32
    offsets = np.frombuffer(column.buffers()[1], width)[column.offset : column.offset + len(column) + 1]
    before = np.concatenate([[0], np.cumsum(mask)])
    found: _Mask = (before[offsets[1:]] > before[offsets[:-1]]) & np.asarray(column.is_valid())
    return found


def _with_key_twice(column: pa.Array) -> _Mask:
    """The rows of a map's column that no reader gives back: each would keep another entry of the key."""
    found = np.zeros(len(column), np.bool_)
    if len(column.keys) < 2:
        return found
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    sizes = np.diff(offsets)
    if sizes.max(initial=0) < 2:
        return found
    keys = column.keys.slice(offsets[0], offsets[-1] - offsets[0])
    rows = np.repeat(np.arange(len(column), dtype=np.int64), sizes)
    if pa.types.is_nested(keys.type):
        numbers: dict[str, int] = {}
        codes = np.array([numbers.setdefault(repr(key), len(numbers)) for key in keys.to_pylist()], np.int64)
    else:
        codes = np.asarray(keys.dictionary_encode().indices, np.int64)
    pairs = np.sort(rows * (codes.max(initial=0) + 1) + codes)
    found[pairs[1:][pairs[1:] == pairs[:-1]] // (codes.max(initial=0) + 1)] = True
    found &= np.asarray(column.is_valid())
    return found


def _within(limits: Range, column: pa.Array, child: pa.Array, path: str) -> Iterator[tuple[str, _Mask, str]]:
    """What does not fit of a list's or map's values, by its rows."""
    for inner, mask, why in _outside(limits, child, path):
        rows = rows_of_values(column, mask)
        if rows.any():
            yield inner, rows, why


def _beyond(numbers: pa.Array, bounds: Bounds, path: str, why: str) -> Iterator[tuple[str, _Mask, str]]:
    full = INT64 if numbers.type.bit_width == 64 else INT32
    if bounds[0] <= full[0] and bounds[1] >= full[1]:
        return
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is not None and (ends["min"] < bounds[0] or ends["max"] > bounds[1]):
        low, high = max(bounds[0], full[0]), min(bounds[1], full[1])
        yield from _any(pc.or_(pc.less(numbers, low), pc.greater(numbers, high)), path, why)


def _texts(limits: Range, column: pa.Array, path: str) -> Iterator[tuple[str, _Mask, str]]:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raw = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
        mask = np.array([not _is_utf8(v) for v in raw.to_pylist()])
        if mask.any():
            yield path, mask, "text that is not UTF-8"
    if not limits.zero_byte and _has_zero(column):
        yield from _any(pc.match_substring(column, "\0"), path, "text with a zero byte")


def _has_zero(column: pa.Array) -> bool:
    """One scan over the bytes of all values; usually there is none."""
    _, offsets, data = column.buffers()
    if data is None:
        return False
    ends = np.frombuffer(offsets, np.int64 if pa.types.is_large_string(column.type) else np.int32)
    values = np.frombuffer(data, np.uint8)[ends[column.offset] : ends[column.offset + len(column)]]
    return not values.all()


def _is_utf8(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _any(found: pa.Array, path: str, why: str) -> Iterator[tuple[str, _Mask, str]]:
    mask = np.asarray(pc.fill_null(found, False))
    if mask.any():
        yield path, mask, why


# Lengths that RabbitMQ, ActiveMQ and RocketMQ accept. A longer value is a bad row.
#
# The size of a value can be configured: RabbitMQ and RocketMQ are asked for it (`kits/queue.py`). Kafka's and
# Pulsar's limits are options of their sinks.

BYTES_MAX: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # AMQP 0-9-1: a short string has one byte for its length. max_message_size cannot be set above 512 MiB.
        "rabbitmq": {"key": 255, "message_id": 255, "value": 512 << 20},
        # Classic's STOMP reads header lines of 10 KiB. Artemis stores headers as UTF-16: together 490 KiB
        # (journal-buffer-size), and 100 KiB with a value of 100 KiB and more (minLargeMessageSize).
        "activemq": {"key": 10_000, "message_id": 10_000, "value": 2**31 - 1},
        # The proxy says that 64 bytes are the limit, and refuses them.
        "rocketmq": {"message_group": 63, "value": 2**31 - 1},
    }
)
"""By system, by column of the sink, in bytes of UTF-8."""

ROCKETMQ_WORDS_BYTES_MAX = 16 << 10
"""Of a message's keys, with the id among them, and its tag: the proxy's maxUserPropertySize."""
ROCKETMQ_PROPERTIES_BYTES_MAX = 32_000
"""Of all that a broker stores of a message except the value: 32,767, minus what proxy and broker add themselves."""


def check_lengths(system: str, **columns: str | bytes | None) -> None:
    """
    Args:
        columns: a row's values.

    Raises:
        BadRecord: one is longer than the system accepts.
    """
    limits = BYTES_MAX[system]
    for name, value in columns.items():
        # A text has at most four bytes for each character.
        if value is None or len(value) * 4 <= limits[name]:
            continue
        length = bytes_of(value)
        if length > limits[name]:
            raise too_long(system, name, length, limits[name])


def bytes_of(value: str | bytes | None) -> int:
    return 0 if value is None else len(value if isinstance(value, bytes) else value.encode())


def too_long(system: str, column: str, length: int, limit: int) -> BadRecord:
    return BadRecord("VALUE_TOO_LONG.COLUMN", column=column, length=length, system=system, limit=limit)


# Rows in another schema; names of columns in Spark SQL.


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with exactly the columns and types of `schema`, matched by name; no copy if they already fit.

    Raises:
        BadRecord: a value does not fit its column.
    """
    if batch.schema.equals(schema):
        return batch
    columns = [_cast(batch.column(batch.schema.get_field_index(f.name)), f) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise BadRecord(
            "VALUE.COLUMN", column=field.name, type=column.type, field_type=field.type, error=str(error)[:300]
        ) from None


def backquoted(name: str) -> str:
    """A column's name in Spark SQL."""
    return "`" + name.replace("`", "``") + "`"

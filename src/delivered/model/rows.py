"""Rows on their way from a source to the sinks, with those that were rejected on the way; such a row as
text, and back."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any

import pyarrow as pa

from delivered.model.errors import DeliveredError


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

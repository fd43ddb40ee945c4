"""Columns of the source: Kafka's, and Pulsar's own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.pulsar.schemas import Values
from delivered.contract.source import RAW, REJECTED
from delivered.model.errors import BadRecord
from delivered.source.columns import COLUMNS as OF_MESSAGES
from delivered.source.columns import HEADERS, TIMESTAMP, columns, header_name, micros

log = logging.getLogger("delivered.pulsar")

UNREADABLE = "pulsar.unreadable"
"""Header in place of properties that the client library cannot decode."""

NATIVE = pa.struct(
    [
        pa.field("ledger_id", pa.int64()),
        pa.field("entry_id", pa.int64()),
        pa.field("batch_index", pa.int32()),
        pa.field("producer_name", pa.string()),
        pa.field("event_time", TIMESTAMP),
    ]
)
COLUMNS = OF_MESSAGES.append(pa.field("native", NATIVE))
_ENTRY_BITS = 28
_OFFSET_MAX = (1 << 63) - 1


def columns_of(headers: bool, value: pa.DataType | None) -> pa.Schema:
    """
    Args:
        value: type of the column; None: bytes.
    """
    found = columns(headers, COLUMNS)
    return found if value is None else found.set(found.get_field_index("value"), pa.field("value", value))


VERSION = pa.field("schemaVersion", pa.int64())
"""Of a message that is not decoded, among its columns; null: it is decoded by the version that is read."""


@dataclass(frozen=True)
class Rejecting:
    """What becomes of messages that cannot be decoded.

    Attributes:
        kept: rows with the column REJECTED; else they are left out.
        raw: rows have the column RAW.
    """

    kept: bool
    raw: bool

    def columns(self, schema: pa.Schema) -> pa.Schema:
        schema = schema.append(RAW) if self.raw else schema
        return schema.append(REJECTED) if self.kept else schema

    def rows(
        self, decoded: pa.RecordBatch, sent: Sequence[Any], rejected: Sequence[Mapping[str, Any] | None]
    ) -> pa.RecordBatch:
        """
        Args:
            decoded: every message.
            sent: their keys and values, as bytes.
            rejected: for REJECTED; None: it was decoded.
        """
        if self.raw:
            raw = pa.StructArray.from_arrays([pa.array(s, pa.binary()) for s in sent], fields=list(RAW.type))
            decoded = decoded.append_column(RAW, raw)
        if self.kept:
            return decoded.append_column(REJECTED, pa.array(rejected, REJECTED.type))
        good = pa.array([each is None for each in rejected], pa.bool_())
        return decoded if good.true_count == len(good) else decoded.filter(good)


class Rows:
    """Messages of one partition, collected as lists per column."""

    def __init__(
        self, topic: str, number: int, headers: bool, typed: Values | None = None, rejects: Rejecting | None = None
    ) -> None:
        """
        Args:
            typed: decodes values by a schema; None: bytes.
            rejects: None: a message that cannot be decoded is an error.
        """
        self._rejects = rejects
        self._topic = topic
        self._typed = typed
        self._columns = columns_of(headers, None if typed is None else typed.type)
        self._number = max(number, 0)
        self._with_headers = headers
        self.bytes = 0
        self._clear()

    def _clear(self) -> None:
        self.bytes = 0
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._versions: list[int] = []
        self._times: list[int] = []
        self._ids: list[tuple[int, int, int]] = []
        self._producers: list[str] = []
        self._events: list[int | None] = []
        self._headers: list[Any] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, message: Any, place: tuple[int, int, int]) -> None:
        """
        Args:
            message: of the client library.
            place: ledger, entry, index in the batch.
        """
        value = None if message.has_null_value() else message.data()
        self.bytes += 64 + (0 if value is None else len(value))
        self._keys.append(_sent(message.partition_key) or None)
        self._values.append(value)
        if self._typed is not None:
            self._versions.append(message.value())  # see client.version_schema
        self._times.append(micros(message.publish_timestamp(), 1000))
        self._ids.append(place)
        self._producers.append(header_name(_sent(message.producer_name)))
        event = message.event_timestamp()
        self._events.append(micros(event, 1000) if event else None)
        if self._with_headers:
            self._headers.append(_properties(message))

    def take(self) -> pa.RecordBatch:
        """All rows since the last call. Raises BadRecord: a message cannot be decoded, and that is an error."""
        n = len(self)
        bad = dict[int, BadRecord]()
        if self._typed is None:
            values = pa.array(self._values, pa.binary())
        else:
            values, bad = self._typed.column(self._values, self._versions, self._ids)
        if bad and self._rejects is None:
            raise next(iter(bad.values()))
        ledgers, entries, indexes = ([i[at] for i in self._ids] for at in range(3))
        native = pa.StructArray.from_arrays(
            [
                pa.array(ledgers, pa.int64()),
                pa.array(entries, pa.int64()),
                pa.array(indexes, pa.int32()),
                pa.array(self._producers, pa.string()),
                pa.array(self._events, pa.int64()).cast(TIMESTAMP),
            ],
            fields=list(NATIVE),
        )
        arrays = [
            pa.array(self._keys, pa.binary()),
            values,
            pa.array([self._topic] * n, pa.string()),
            pa.array([self._number] * n, pa.int32()),
            pa.array(_offsets(self._ids), pa.int64()),
            pa.array(self._times, pa.int64()).cast(TIMESTAMP),
            pa.array([0] * n, pa.int32()),
            native,
        ]
        if self._with_headers:
            arrays.append(pa.array(self._headers, HEADERS.type))
        made = pa.RecordBatch.from_arrays(arrays, schema=self._columns)
        if self._rejects is not None and self._typed is not None:
            made = self._rejects.rows(made, [self._keys, self._values], self._rejected(bad))
        self._clear()
        return made

    def _rejected(self, bad: Mapping[int, BadRecord]) -> list[dict[str, Any] | None]:
        offsets = _offsets(self._ids)
        return [
            {
                "reason": bad[at].message,
                "topic": self._topic,
                "partition": self._number,
                "offset": offsets[at],
                "key": self._keys[at],
                "value": self._values[at],
                "more": json.dumps({VERSION.name: self._versions[at]}),
            }
            if at in bad
            else None
            for at in range(len(self))
        ]


def _sent(text: Callable[[], str]) -> bytes:
    """A text of the client as the sender's bytes, which need not be UTF-8."""
    try:
        return text().encode()
    except UnicodeDecodeError as error:
        return bytes(error.object)


def _properties(message: Any) -> list[tuple[str, bytes]] | None:
    """A message's properties as headers; if the client cannot give them, a header that says why."""
    try:
        properties = message.properties()
    except UnicodeDecodeError as error:
        log.warning("the properties of message %s are not UTF-8: %r", message.message_id(), error.object)
        return [(UNREADABLE, f"its properties are not UTF-8, first {error.object!r}".encode())]
    return [(header_name(k.encode()), v.encode()) for k, v in properties.items()] if properties else None


def _offsets(ids: Sequence[tuple[int, int, int]]) -> list[int | None]:
    """Ledger and entry in one number, increasing along a partition, equal within an entry; null if too large."""
    found = [(ledger << _ENTRY_BITS) + entry for ledger, entry, _ in ids]
    return [n if n <= _OFFSET_MAX and entry < 1 << _ENTRY_BITS else None
            for n, (_, entry, _) in zip(found, ids, strict=True)]  # fmt: skip

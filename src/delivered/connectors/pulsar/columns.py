"""Columns of the source: Kafka's, Pulsar's own, and `value` decoded by the topic's registered schemas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import Any

import pyarrow as pa

from delivered.connectors.pulsar import short_name
from delivered.connectors.pulsar.client import Admin, Registered
from delivered.kits.schemas.avro import AVRO, KINDS, Shape, read_avro, read_json, shape_of
from delivered.kits.schemas.values import Unmappable, Unreadable, array_of, in_words
from delivered.model.errors import BadRecord, DeliveredError, UsageError
from delivered.model.rows import Origin, Rejection, Rows
from delivered.source import COLUMNS as OF_MESSAGES
from delivered.source import HEADERS, TIMESTAMP, columns, header_name, micros

# A topic's registered schemas, and the column `value` decoded by them.
#
# Each message names the version it was written with. A query converts all to the version it was planned with.

NAMES_NONE = -1
"""Version of a message without a schema."""


def registered(admin: Admin, owner: str, topic: str, version: int | None) -> Registered:
    """A topic's schema, checked to have columns.

    Args:
        version: None: the newest.

    Raises:
        UsageError: there is none, or it has no columns.
    """
    schema = admin.schema(topic, version)
    if schema is None:
        which = "no schema" if version is None else f"no version {version} of its schema"
        raise UsageError("SCHEMA_MISSING.PULSAR", owner=owner, which=which, topic=short_name(topic))
    shape(owner, topic, schema)
    return schema


def shape(owner: str, topic: str, schema: Registered) -> Shape:
    """Raises UsageError if the schema has no columns."""
    what = f"version {schema.version} of the {schema.kind} schema of {short_name(topic)!r}"
    try:
        if schema.kind not in KINDS:
            raise Unmappable(f"only {' and '.join(KINDS)} have")
        return shape_of(schema.kind, schema.text)
    except Unmappable as error:
        raise UsageError("SCHEMA_UNMAPPABLE.PULSAR", owner=owner, what=what, error=error) from None


class Values:
    """Decodes values of one topic on an executor."""

    def __init__(
        self,
        owner: str,
        topic: str,
        planned: Registered,
        ask: Callable[[int], Registered | None],
        text: Callable[[pa.Array], pa.Array] | None = None,
    ) -> None:
        """
        Args:
            ask: for the schema of a version.
            text: encodes the structs as bytes; None: they stay structs.
        """
        self._owner = owner
        self._topic = topic
        self._planned = planned
        self._ask = ask
        self._reader = shape(owner, topic, planned)
        self._text = text
        self._known = {planned.version: self._reader}

    @property
    def type(self) -> pa.DataType:
        return self._reader.arrow if self._text is None else pa.binary()

    def column(
        self, values: Sequence[bytes | None], versions: Sequence[int], places: Sequence[tuple[int, int, int] | None]
    ) -> tuple[pa.Array, dict[int, BadRecord]]:
        """The decoded values, and those that cannot be read, by their number; they are null.

        Args:
            versions: schema version of each value.
            places: ledger, entry, index in the batch, for errors; None: unknown.
        """
        decoded: list[Any] = []
        bad: dict[int, str] = {}
        for value, version in zip(values, versions, strict=True):
            try:
                decoded.append(None if value is None else self._read(value, version))
            except DeliveredError:
                raise
            except Exception as error:  # whatever decoding raises is this message's fault
                bad[len(decoded)] = in_words(error)
                decoded.append(None)
        array, unfit = array_of(decoded, self._reader.filled, self._reader.arrow)
        errors = {at: self._bad(places[at], versions[at], why) for at, why in sorted((bad | unfit).items())}
        return array if self._text is None else self._text(array), errors

    def _read(self, value: bytes, version: int) -> object:
        writer = self._known.get(version) or self._written(version)
        if self._planned.kind == AVRO:
            return read_avro(value, writer, self._reader)
        return read_json(value, self._reader)

    def _written(self, version: int) -> Shape:
        if version == NAMES_NONE:
            raise Unreadable("it was sent without a schema, as bytes")
        schema = self._ask(version)
        if schema is None:
            raise Unreadable("that version is no longer registered")
        if schema.kind != self._planned.kind:
            raise Unreadable(f"that version is {schema.kind}")
        try:
            writer = shape_of(schema.kind, schema.text)
        except Unmappable as error:
            raise Unreadable(f"that version has no columns: {error}") from None
        for path, meaning in writer.meanings.items():
            now = self._reader.meanings.get(path, meaning)
            if now != meaning:
                raise Unreadable(
                    f"there, field {path[1:]!r} is {meaning or 'a plain number'}; in version {self._planned.version}, "
                    f"which the query reads, {now or 'a plain number'}"
                )
        self._known[version] = writer
        return writer

    def _bad(self, place: tuple[int, int, int] | None, version: int, why: str) -> BadRecord:
        which = "a message"
        if place is not None:
            which = f"message {':'.join(str(n) for n in (place if place[2] >= 0 else place[:2]))}"
        names = "no version" if version == NAMES_NONE else f"version {version}"
        return BadRecord(
            "MESSAGE_UNREADABLE",
            owner=self._owner,
            which=which,
            topic=short_name(self._topic),
            names=names,
            kind=self._planned.kind,
            reason=why,
        )


# Columns of the source: Kafka's, and Pulsar's own.

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
    """Args: value: type of the column; None: bytes."""
    schema = columns(headers, COLUMNS)
    return schema if value is None else schema.set(schema.get_field_index("value"), pa.field("value", value))


VERSION = pa.field("schemaVersion", pa.int64())
"""Of a message that is not decoded, among its columns; null: it is decoded by the version that is read."""


class Messages:
    """Messages of one partition, collected as lists per column."""

    def __init__(
        self, topic: str, number: int, headers: bool, typed: Values | None = None, rejects: bool = False
    ) -> None:
        """
        Args:
            typed: decodes values by a schema; None: bytes.
            rejects: a message that cannot be decoded is no error.
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

    def take(self) -> Rows:
        """All rows since the last call. Raises BadRecord: a message cannot be decoded, and that is an error."""
        n = len(self)
        bad = dict[int, BadRecord]()
        if self._typed is None:
            values = pa.array(self._values, pa.binary())
        else:
            values, bad = self._typed.column(self._values, self._versions, self._ids)
        if bad and not self._rejects:
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
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._columns)
        rows = Rows(batch)
        if self._rejects and self._typed is not None:
            sent = pa.record_batch({"key": arrays[0], "value": pa.array(self._values, pa.binary())})
            rows = rejected_rows(batch, sent, [self._rejection(at, why) for at, why in bad.items()], bad)
        self._clear()
        return rows

    def _rejection(self, at: int, why: BadRecord) -> Rejection:
        record = {"key": self._keys[at], "value": self._values[at], VERSION.name: self._versions[at]}
        (offset,) = _offsets(self._ids[at : at + 1])
        return Rejection(Origin.SOURCE, why.message, record, self._topic, self._number, offset)


def rejected_rows(
    decoded: pa.RecordBatch, sent: pa.RecordBatch, rejected: Sequence[Rejection], bad: Container[int]
) -> Rows:
    """
    Args:
        decoded: every message.
        sent: their keys and values, as bytes.
        bad: numbers of the rejected ones.
    """
    good = pa.array([at not in bad for at in range(decoded.num_rows)], pa.bool_())
    return Rows(decoded.filter(good), rejected, sent.filter(good)) if rejected else Rows(decoded, (), sent)


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
    offsets = [(ledger << _ENTRY_BITS) + entry for ledger, entry, _ in ids]
    return [n if n <= _OFFSET_MAX and entry < 1 << _ENTRY_BITS else None
            for n, (_, entry, _) in zip(offsets, ids, strict=True)]  # fmt: skip

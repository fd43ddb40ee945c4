"""Rows of an outbox as messages, routed as by Debezium's outbox event router."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from delivered.connectors.outbox import ROUTE, OutboxOptions
from delivered.connectors.outbox.changes import MESSAGE
from delivered.connectors.outbox.pgoutput import BYTEA, UNCHANGED, Relation, Row, Value, unhexed
from delivered.connectors.outbox.positions import text
from delivered.model.errors import BadRecord, InvariantBroken
from delivered.model.rows import Origin, Rejection, Rows
from delivered.source import COLUMNS as OF_MESSAGES
from delivered.source import HEADERS, TIMESTAMP, id_bytes, id_text

COLUMNS = pa.schema([f for f in OF_MESSAGES if f.name != "partition"]).append(HEADERS)
"""No partition, so that a sink chooses it by the key. offset: where the commit record begins, or the row's number.
timestamp: of the commit; null if polled."""
BYTES_MAX = 16 << 20
ROWS_MAX = 16_384
Message = Sequence[bytes | None]
"""Id, aggregate type, aggregate id, type, payload: as they are if they are bytes; else as the database writes them."""


class Events:
    """Collects messages; an id that comes twice in one slice is refused.

    Args:
        options: with the route, and whether payloads must be JSON.
        rejects: a message that cannot be delivered does not end the read; it is rejected.
    """

    def __init__(self, options: OutboxOptions, *, rejects: bool) -> None:
        self._options = options
        self._rejects = rejects
        self._seen: set[bytes] = set()
        self._topics: dict[bytes | None, str | None] = {}
        self._clear()

    def _clear(self) -> None:
        self._bytes = 0
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._topic: list[str | None] = []
        self._offsets: list[int] = []
        self._times: list[int | None] = []
        self._headers: list[list[tuple[str, bytes]]] = []
        self._rejected: list[Rejection] = []

    @property
    def empty(self) -> bool:
        return not self._keys and not self._rejected

    @property
    def full(self) -> bool:
        return len(self._keys) + len(self._rejected) >= ROWS_MAX or self._bytes >= BYTES_MAX

    def add(self, offset: int, time_us: int | None, message: Message) -> None:
        """
        Raises:
            BadRecord: the id is null or came before, the aggregate type is no text, or the payload is not JSON; and it
                is not rejected.
        """
        id_, kind, key, type_, payload = message
        self._bytes += 100 + len(payload or b"")
        try:
            known = self._checked(id_, kind, key, payload)
        except BadRecord as error:
            if not self._rejects:
                raise
            named = dict(zip(MESSAGE.type.names, message, strict=True))
            record = {"key": key, "value": payload, "timestamp": time_us, MESSAGE.name: named}
            self._rejected.append(Rejection(Origin.SOURCE, error.message, record, offset=offset))
            return
        self._keys.append(key)
        self._values.append(payload)
        self._topic.append(self._topics[kind])
        self._offsets.append(offset)
        self._times.append(time_us)
        self._headers.append([("id", known), *([("type", type_)] if type_ is not None else [])])

    def _checked(self, id_: bytes | None, kind: bytes | None, key: bytes | None, payload: bytes | None) -> bytes:
        """The id."""
        if id_ is None or id_ in self._seen:
            name = self._options.columns[0]
            raise BadRecord(
                "OUTBOX_ID.NULL_OR_TWICE",
                outbox=self._options.outbox,
                rows=f"a row whose {name} is null" if id_ is None else f"two rows with {name} {text(id_)}",
                kind=text(kind),
                key=text(key),
                name=name,
            )
        self._seen.add(id_)
        if self._options.json and payload is not None:
            self._check_json(id_, payload)
        if kind not in self._topics:
            self._topics[kind] = self._routed(id_, kind)
        return id_

    def _routed(self, id_: bytes, kind: bytes | None) -> str | None:
        """None: the row names no aggregate type to route by; the sink decides what happens to it."""
        if ROUTE not in self._options.topic:
            return self._options.topic
        try:
            return None if kind is None else self._options.topic.replace(ROUTE, kind.decode())
        except UnicodeDecodeError as error:
            name = self._options.columns[1]
            raise BadRecord(
                "OUTBOX_TOPIC", id=text(id_), outbox=self._options.outbox, name=name, kind=kind, error=error
            ) from None

    def take(self) -> Rows:
        """All messages since the last call."""
        times = self._times
        arrays = [
            pa.array(self._keys, pa.binary()),
            pa.array(self._values, pa.binary()),
            pa.array(self._topic, pa.string()),
            pa.array(self._offsets, pa.int64()),
            pa.array(times, pa.int64()).cast(TIMESTAMP),
            pa.array([-1 if t is None else 1 for t in times], pa.int32()),
            pa.array(self._headers, HEADERS.type),
        ]
        rows = Rows(pa.RecordBatch.from_arrays(arrays, schema=COLUMNS), self._rejected)
        self._clear()
        return rows

    def restored(self, raw: pa.RecordBatch) -> Iterator[Rows]:
        """Dead letters, in `COLUMNS` and MESSAGE, one by one."""
        for at in range(raw.num_rows):
            row = raw.slice(at, 1)
            message = row.column(MESSAGE.name)[0].as_py()
            if message is None:
                yield Rows(row.select(COLUMNS.names))
                continue
            offset, time_us = (row.column(n).cast(pa.int64())[0].as_py() for n in ("offset", "timestamp"))
            self.add(offset, time_us, [message[n] for n in MESSAGE.type.names])
            yield self.take()

    def _check_json(self, id_: bytes, payload: bytes) -> None:
        try:
            json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise BadRecord(
                "OUTBOX_PAYLOAD.ROW", id=text(id_), outbox=self._options.outbox, payload=payload[:200], error=error
            ) from None

    def batches(self, rows: Iterator[Sequence[tuple[Any, ...]]]) -> Iterator[Rows]:
        """Rows as the client returns them: number, id, aggregate type, aggregate id, type, payload."""
        for some in rows:
            for number, *message in some:
                self.add(int(number), None, [_bytes(value) for value in message])
                if self.full:
                    yield self.take()
        if not self.empty:
            yield self.take()


class Reader:
    """Reads the columns of an outbox from decoded rows, by name: columns may be added and dropped."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        self._at: dict[Relation, list[tuple[int, bool]]] = {}

    def read(self, relation: Relation, row: Row) -> Message:
        known = self._at.get(relation)
        if known is None:
            known = self._at[relation] = self._places(relation)
        return [_value(row[at], is_bytes) for at, is_bytes in known]

    def id_of(self, relation: Relation, row: Row) -> bytes | str | None:
        """As a parameter of a statement: bytes for bytea, otherwise PostgreSQL's text."""
        id_ = self.read(relation, row)[0]
        return id_ if self._at[relation][0][1] else id_text(id_)

    def _places(self, relation: Relation) -> list[tuple[int, bool]]:
        """Where each column is, and whether it is bytea. A renamed column has its former name in older rows."""
        places = []
        for names in self._options.names:
            at = next((relation.columns.index(name) for name in names if name in relation.columns), None)
            if at is None:
                raise BadRecord(
                    "OUTBOX_COLUMN",
                    outbox=self._options.outbox,
                    names=" or ".join(names),
                    columns=", ".join(relation.columns),
                    first_name=names[0],
                )
            places.append((at, relation.types[at] == BYTEA))
        return places


def _value(value: Value, is_bytes: bool) -> bytes | None:
    if isinstance(value, bytes):
        return unhexed(value) if is_bytes else value
    if value is UNCHANGED:
        raise InvariantBroken("PGOUTPUT.NO_VALUE")
    return None


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return bytes(value) if isinstance(value, memoryview | bytearray) else id_bytes(str(value))

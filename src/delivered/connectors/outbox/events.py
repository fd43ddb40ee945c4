"""Rows of an outbox as messages, routed as by Debezium's outbox event router."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from delivered.connectors.outbox.options import OWNER, ROUTE, OutboxOptions
from delivered.connectors.outbox.pgoutput import UNCHANGED, Relation, Row
from delivered.connectors.outbox.positions import text
from delivered.model.errors import BadRecord, InvariantBroken
from delivered.source.columns import COLUMNS as OF_MESSAGES
from delivered.source.columns import HEADERS, TIMESTAMP

COLUMNS = pa.schema([f for f in OF_MESSAGES if f.name != "partition"]).append(HEADERS)
"""No partition, so that a sink chooses it by the key. offset: where the commit record begins, or the row's number.
timestamp: of the commit; null if polled."""
BYTES_MAX = 16 << 20
ROWS_MAX = 16_384
_BYTEA = 17


class Events:
    """Collects messages; an id that comes twice in one slice is refused.

    Args:
        options: with the route, and whether payloads must be JSON.
    """

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        self._seen: set[str] = set()
        self._topics: dict[str, str] = {}
        self._clear()

    def _clear(self) -> None:
        self._bytes = 0
        self._keys: list[bytes] = []
        self._values: list[bytes | None] = []
        self._topic: list[str] = []
        self._offsets: list[int] = []
        self._times: list[int | None] = []
        self._headers: list[list[tuple[str, bytes]]] = []

    @property
    def empty(self) -> bool:
        return not self._keys

    @property
    def full(self) -> bool:
        return len(self._keys) >= ROWS_MAX or self._bytes >= BYTES_MAX

    def add(
        self, offset: int, time_us: int | None, id_: Any, kind: str, key: bytes, type_: bytes, payload: bytes | None
    ) -> None:
        """
        Raises:
            BadRecord: the id is null or came before, or the payload is not JSON.
        """
        name = self._options.columns[0]
        if id_ is None or id_ in self._seen:
            raise BadRecord(
                "OUTBOX_ID",
                f"{OWNER}: the outbox {self._options.outbox} has "
                + (f"a row whose {name} is null" if id_ is None else f"two rows with {name} {id_}")
                + f" (aggregate {kind} {key.decode(errors='replace')}): a consumer could not tell repeats.",
                next_step=f"make {name} a primary key; give each message one id, by delivered.outbox.new_id()",
            )
        self._seen.add(id_)
        if self._options.json and payload is not None:
            self._check_json(id_, payload)
        topic = self._topics.get(kind)
        if topic is None:
            topic = self._topics[kind] = self._options.topic.replace(ROUTE, kind)
        self._keys.append(key)
        self._values.append(payload)
        self._topic.append(topic)
        self._offsets.append(offset)
        self._times.append(time_us)
        self._headers.append([("id", id_.encode()), ("type", type_)])
        self._bytes += 100 + len(payload or b"")

    def take(self) -> pa.RecordBatch:
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
        self._clear()
        return pa.RecordBatch.from_arrays(arrays, schema=COLUMNS)

    def _check_json(self, id_: str, payload: bytes) -> None:
        try:
            json.loads(payload)
        except ValueError as error:
            raise BadRecord(
                "OUTBOX_PAYLOAD",
                f"{OWNER}: the payload of the message {id_} in {self._options.outbox} is not JSON: {payload[:200]!r} "
                f"({error}).",
                next_step='correct the row; or write .option("payloadFormat", "any") and filter it in the transform',
            ) from None

    def batches(self, rows: Iterator[Sequence[tuple[Any, ...]]]) -> Iterator[pa.RecordBatch]:
        """Rows as the client returns them: number, id, aggregate type, aggregate id, type, payload."""
        for some in rows:
            for number, id_, kind, key, type_, payload in some:
                self.add(int(number), None, text(id_), text(kind), _bytes(key), _bytes(type_), _payload(payload))
                if self.full:
                    yield self.take()
        if not self.empty:
            yield self.take()


class Reader:
    """Reads the columns of an outbox from decoded rows, by name: columns may be added and dropped."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        self._at: dict[Relation, tuple[list[int], bool]] = {}

    def read(self, relation: Relation, row: Row) -> tuple[Any, ...]:
        """Id, aggregate type, aggregate id, type, payload; the id as text, the rest as for `Events.add`."""
        known = self._at.get(relation)
        if known is None:
            known = self._at[relation] = self._places(relation)
        at, hexadecimal = known
        id_, kind, key, type_, payload = (row[i] for i in at)
        if UNCHANGED in (id_, kind, key, type_, payload):
            raise InvariantBroken("PGOUTPUT", f"An inserted row has no value for a column: {row!r}.")
        if hexadecimal and isinstance(payload, bytes):
            payload = bytes.fromhex(payload[2:].decode())
        return None if id_ is None else _text(id_), _text(kind), _bytes(key), _bytes(type_), payload

    def _places(self, relation: Relation) -> tuple[list[int], bool]:
        names = self._options.columns
        missing = [name for name in names if name not in relation.columns]
        if missing:
            raise BadRecord(
                "OUTBOX_COLUMN",
                f"{OWNER}: the table {self._options.outbox} had no column {missing[0]} when a row was written; it had "
                f"{', '.join(relation.columns)}.",
                next_step='name the column, .option("columns", "payload=..."), or restore it',
            )
        at = [relation.columns.index(name) for name in names]
        return at, relation.types[at[4]] == _BYTEA


def _text(value: Any) -> str:
    return "" if value is None else bytes(value).decode()


def _bytes(value: Any) -> bytes:
    return b"" if value is None else value if isinstance(value, bytes) else str(value).encode()


def _payload(value: Any) -> bytes | None:
    return (
        value
        if value is None or isinstance(value, bytes)
        else (bytes(value) if isinstance(value, memoryview | bytearray) else str(value).encode())
    )

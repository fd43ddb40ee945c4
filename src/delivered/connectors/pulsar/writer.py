"""Executor side: rows to messages.

Each message has the property delivered.id. The broker's deduplication is not used against replays: it compares only
sequence numbers, and would drop rows that come in another order.
"""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.pulsar.admin import Admin
from delivered.connectors.pulsar.encode import BadValue, Encoder, Settled, settle
from delivered.connectors.pulsar.options import PulsarSinkOptions
from delivered.connectors.pulsar.publish import Message, Publisher
from delivered.kits.queue.columns import column
from delivered.kits.queue.writer import SendingWriter
from delivered.model.errors import BadRecord
from delivered.model.identity import Work

ID = "delivered.id"


class PulsarWriter(SendingWriter[Message]):
    def __init__(self, options: PulsarSinkOptions, work: Work, gives_up: bool) -> None:
        super().__init__(work, gives_up)
        self._options = options
        self._settled: Settled | None = None
        self._encoder: Encoder | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        if self._encoder is None and self._options.schema is not None:
            rows = batch.schema.field("value").type
            self._settled = settle(Admin(self._options, patient=True), self._options, rows)
            self._encoder = Encoder(self._settled, rows)
        super().stage(batch)

    def _connect(self) -> Publisher:
        made = self._settled
        return Publisher(self._options, None if made is None else (made.kind, made.text))

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        encoder = self._encoder
        columns = (
            column(rows, "value", pa.binary()) if encoder is None else self._encoded(encoder, rows.column("value")),
            column(rows, "key", pa.binary()),
            column(rows, "headers"),
            column(rows, "event_time", pa.timestamp("ms"), pa.int64()),
        )
        messages = []
        for value, key, pairs, time in zip(*columns, strict=True):
            properties = {h["key"]: _text(h["value"], "a header") for h in pairs} if pairs else {}
            row = self._rows
            properties[ID] = self._next_id()
            self._check_size(row, value, key, properties)
            messages.append(
                {
                    "content": value,
                    "partition_key": _text(key, "the key") if key else None,
                    "properties": properties,
                    "event_timestamp": time,
                }
            )
        return messages

    def _encoded(self, encoder: Encoder, values: pa.Array) -> list[bytes | None]:
        try:
            return encoder.encode(values)
        except BadValue as error:
            where = f"Row {self._rows + error.row}" if error.row is not None else f"A row from row {self._rows}"
            raise BadRecord(
                "VALUE",
                f"{where} of a shard for {self._options.label} does not match the schema of the topic: {error}",
                next_step="adapt the transform to the schema; `pulsar-admin schemas get` shows it",
            ) from None

    def _check_size(self, row: int, value: bytes | None, key: bytes | None, properties: dict[str, str]) -> None:
        """Check before the client does, so that the error names the row."""
        longest = self._options.bytes_max
        if longest is None:
            return
        size = len(value or b"") + len(key or b"") + sum(len(k) + len(v.encode()) for k, v in properties.items())
        if size > longest:
            raise BadRecord(
                "RECORD_TOO_LARGE",
                f"Row {row} of a shard for {self._options.label} has {size} bytes; the limit is {longest}.",
                next_step="set the option chunking to true, or write smaller messages; messageBytesMax may be as large "
                "as the brokers' maxMessageSize",
            )


def _text(value: bytes | None, what: str) -> str:
    try:
        return "" if value is None else value.decode()
    except UnicodeDecodeError:
        raise BadRecord(
            "NOT_TEXT",
            f"{what} of a row is {value!r:.80}, which is not UTF-8; Pulsar's keys and properties are text.",
            next_step="encode it, for example with base64 or hex",
        ) from None

"""A task's side: how rows become messages.

Each message has the property delivered.id. The broker's own deduplication is not used to find repeats: it compares
numbers alone, and would drop what another order of the rows moved.
"""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.pulsar.publish import Message, Publisher
from delivered.connectors.pulsar.sink_options import PulsarSinkOptions
from delivered.model.errors import BadRecord
from delivered.model.identity import Work
from delivered.sending.columns import column
from delivered.sending.writer import SendingWriter

ID = "delivered.id"


class PulsarWriter(SendingWriter[Message]):
    def __init__(self, options: PulsarSinkOptions, work: Work, gives_up: bool) -> None:
        super().__init__(work, gives_up)
        self._options = options

    def _connect(self) -> Publisher:
        return Publisher(self._options)

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        columns = (
            column(rows, "value", pa.binary()),
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

    def _check_size(self, row: int, value: bytes | None, key: bytes | None, properties: dict[str, str]) -> None:
        """Before the client does: this error can name the row."""
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
            f"{what} of a row is {value!r:.80}, which is no UTF-8; Pulsar's keys and properties are text.",
            next_step="encode it, for instance with base64 or hex",
        ) from None

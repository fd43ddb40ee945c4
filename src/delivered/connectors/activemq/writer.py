"""Executor side: rows to messages."""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.activemq.options import ActivemqSinkOptions
from delivered.connectors.activemq.publish import Message, Publisher
from delivered.kits.queue.columns import body, column
from delivered.kits.queue.writer import SendingWriter
from delivered.model.identity import Work


class ActivemqWriter(SendingWriter[Message]):
    def __init__(self, options: ActivemqSinkOptions, work: Work, gives_up: bool) -> None:
        super().__init__(work, gives_up)
        self._options = options

    def _connect(self) -> Publisher:
        return Publisher(self._options)

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        options = self._options
        columns = (column(rows, name) for name in ("value", "message_id", "key"))
        kind = {} if "::" in options.queue else {"destination-type": "ANYCAST"}
        messages = []
        for value, chosen, key in zip(*columns, strict=True):
            own = self._next_id()
            message_id = own if chosen is None else chosen
            headers = {**kind, "persistent": "true", options.id_header: message_id}
            if options.key_header is not None and key is not None:
                headers[options.key_header] = key if isinstance(key, str) else key.decode()
            # With a length, even 0, it is a bytes message: NUL truncates a text message.
            content = body(value)
            headers["content-length"] = str(len(content))
            messages.append(Message(content, headers))
        return messages

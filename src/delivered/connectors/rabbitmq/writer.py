"""Executor side: rows to messages."""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.rabbitmq.client import pika
from delivered.connectors.rabbitmq.options import RabbitmqSinkOptions
from delivered.connectors.rabbitmq.publish import Message, Publisher
from delivered.kits.queue.columns import body, column
from delivered.kits.queue.writer import SendingWriter
from delivered.model.identity import Work


class RabbitmqWriter(SendingWriter[Message]):
    def __init__(self, options: RabbitmqSinkOptions, work: Work, gives_up: bool) -> None:
        super().__init__(work, gives_up)
        self._options = options

    def _connect(self) -> Publisher:
        return Publisher(self._options)

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        make = pika().BasicProperties
        fixed = self._options.routing_key
        keys = column(rows, "key") if fixed is None else [fixed] * rows.num_rows
        messages = []
        for key, value, given in zip(keys, column(rows, "value"), column(rows, "message_id"), strict=True):
            own = self._next_id()
            message_id = own if given is None else given
            routing_key = "" if key is None else key if isinstance(key, str) else key.decode()
            messages.append(Message(routing_key, body(value), make(message_id=message_id, delivery_mode=2)))
        return messages

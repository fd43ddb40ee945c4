"""RabbitMQ over AMQP 0-9-1: a source through the write-ahead receiver, a source of streams, and a sink.

options.py   what the user named
client.py    connections, and errors in plain words
receiver.py  messages in, acknowledgements out
queue.py     the queue as the contract sees it; can it be received from
kind.py      what kind a queue is
publish.py   messages out, confirmed, many in flight
writer.py    a task's side of the sink
sink.py      the sink: at_least_once and at_most_once, with a ledger elsewhere

Streams are another format, rabbitmq_stream, since they can be read again:

stream_options.py  what the user named
follow.py          one consumer of a stream; where it begins and ends
stream.py          the driver's side of the source
stream_reader.py   a task's side
"""

from __future__ import annotations

from delivered.connectors.rabbitmq.options import RabbitmqOptions, RabbitmqSinkOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "rabbitmq",
    "rabbitmq",
    queues=Made(RabbitmqOptions, "delivered.connectors.rabbitmq.queue:RabbitmqQueue"),
    sinks=Made(RabbitmqSinkOptions, "delivered.connectors.rabbitmq.sink:RabbitmqSink"),
    external_ledger=True,
)

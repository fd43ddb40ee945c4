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

from collections.abc import Mapping
from typing import TYPE_CHECKING

from delivered.connectors.rabbitmq.options import SINK_OPTIONS, SOURCE_OPTIONS, parse, parse_sink
from delivered.kits.queue.connector import QueueConnector

if TYPE_CHECKING:
    from delivered.contract.queue import Queue
    from delivered.contract.sink import Sink


class RabbitmqConnector(QueueConnector):
    def queue(self, options: Mapping[str, str]) -> Queue:
        from delivered.connectors.rabbitmq.queue import RabbitmqQueue

        return RabbitmqQueue(parse(options))

    def sink_with_external_ledger(self, options: Mapping[str, str], ledger_sink: Sink) -> Sink:
        from delivered.connectors.rabbitmq.sink import RabbitmqSink

        return RabbitmqSink(parse_sink(options), ledger_sink)


CONNECTOR = RabbitmqConnector(
    name="rabbitmq",
    extra="rabbitmq",
    system="RabbitMQ",
    source_options=SOURCE_OPTIONS,
    sink_options=SINK_OPTIONS,
    queue_options=SOURCE_OPTIONS,
    forgets="A RabbitMQ queue forgets what is acknowledged, and cannot be read again",
)

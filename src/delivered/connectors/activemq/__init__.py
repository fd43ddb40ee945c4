"""ActiveMQ over STOMP 1.2, Artemis first: a source through the write-ahead receiver, and a sink.

options.py   what the user named
client.py    connections, and errors in plain words
manage.py    what a broker says of its queues, for preflight
receiver.py  messages in, acknowledgements out
queue.py     the queue as the contract sees it; can it be received from
publish.py   messages out, with receipts, many in flight
writer.py    a task's side of the sink
sink.py      the sink: at_least_once and at_most_once, with a ledger elsewhere
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from delivered.connectors.activemq.options import SINK_OPTIONS, SOURCE_OPTIONS, parse, parse_sink
from delivered.kits.queue.connector import QueueConnector

if TYPE_CHECKING:
    from delivered.contract.queue import Queue
    from delivered.contract.sink import Sink


class ActivemqConnector(QueueConnector):
    def queue(self, options: Mapping[str, str]) -> Queue:
        from delivered.connectors.activemq.queue import ActivemqQueue

        return ActivemqQueue(parse(options))

    def sink_with_external_ledger(self, options: Mapping[str, str], ledger_sink: Sink) -> Sink:
        from delivered.connectors.activemq.sink import ActivemqSink

        return ActivemqSink(parse_sink(options), ledger_sink)


CONNECTOR = ActivemqConnector(
    name="activemq",
    extra="activemq",
    system="ActiveMQ",
    source_options=SOURCE_OPTIONS,
    sink_options=SINK_OPTIONS,
    queue_options=SOURCE_OPTIONS,
    forgets="An ActiveMQ queue forgets what is acknowledged, and cannot be read again",
)

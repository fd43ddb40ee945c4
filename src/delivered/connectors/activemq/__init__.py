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

from delivered.connectors.activemq.options import ActivemqOptions, ActivemqSinkOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "activemq",
    "activemq",
    queues=Made(ActivemqOptions, "delivered.connectors.activemq.queue:ActivemqQueue"),
    sinks=Made(ActivemqSinkOptions, "delivered.connectors.activemq.sink:ActivemqSink"),
    external_ledger=True,
)

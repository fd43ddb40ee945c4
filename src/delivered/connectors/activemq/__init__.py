"""ActiveMQ over STOMP 1.2, Artemis first: a source through the write-ahead receiver, and a sink."""

from __future__ import annotations

from delivered.connectors.activemq.options import ActivemqOptions, ActivemqSinkOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "activemq",
    "activemq",
    queues=Made(ActivemqOptions, "delivered.connectors.activemq.queue:ActivemqQueue"),
    sinks=Made(ActivemqSinkOptions, "delivered.connectors.activemq.sink:ActivemqSink"),
    external_ledger=True,
    messaging=True,
)

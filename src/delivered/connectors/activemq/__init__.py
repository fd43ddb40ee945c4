"""ActiveMQ over STOMP 1.2, Artemis first: a source through the write-ahead receiver, and a sink."""

from __future__ import annotations

from delivered.connectors.activemq.options import ActivemqOptions, ActivemqSinkOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "activemq",
    "activemq",
    queues=Factory(ActivemqOptions, "delivered.connectors.activemq.queue:ActivemqQueue"),
    sinks=Factory(ActivemqSinkOptions, "delivered.connectors.activemq.sink:ActivemqSink"),
    external_ledger=True,
    messaging=True,
)

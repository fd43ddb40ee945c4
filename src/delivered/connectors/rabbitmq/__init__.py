"""RabbitMQ over AMQP 0-9-1: a source through the write-ahead receiver, a source of streams, and a sink. Streams are
replayable, so they have a format of their own, rabbitmq_stream (see `options.py`).
"""

from __future__ import annotations

from delivered.connectors.rabbitmq.options import RabbitmqOptions, RabbitmqSinkOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "rabbitmq",
    "rabbitmq",
    queues=Factory(RabbitmqOptions, "delivered.connectors.rabbitmq.queue:RabbitmqQueue"),
    sinks=Factory(RabbitmqSinkOptions, "delivered.connectors.rabbitmq.sink:RabbitmqSink"),
    external_ledger=True,
    messaging=True,
)

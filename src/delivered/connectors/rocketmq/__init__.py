"""Apache RocketMQ 5 over gRPC: a source through the write-ahead receiver, and a sink.

With messageType=transaction, which exactly_once needs, the sink connects to the brokers directly (`remoting.py`).
"""

from __future__ import annotations

from delivered.connectors.rocketmq.options import RocketmqOptions, RocketmqSinkOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "rocketmq",
    "rocketmq",
    queues=Factory(RocketmqOptions, "delivered.connectors.rocketmq.queue:RocketmqQueue"),
    sinks=Factory(RocketmqSinkOptions, "delivered.connectors.rocketmq.sink:RocketmqSink"),
    external_ledger=True,
    transactions="messageType=transaction",
    messaging=True,
)

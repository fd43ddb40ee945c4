"""Apache RocketMQ 5 over gRPC: a source through the write-ahead receiver, and a sink.

options.py   what the user named
client.py    a session with the proxies, and errors in plain words
message.py   what a message of RocketMQ is in the log
receiver.py  messages in, acknowledgements out, hidden from others for as long as they are held
queue.py     topic and group as the contract sees them; can they be received from
publish.py   messages out, confirmed, many in flight
writer.py    a task's side of the sink
sink.py      the sink, with a ledger elsewhere

With messageType=transaction, which exactly_once needs, brokers are spoken to themselves:

remoting.py  RocketMQ's own protocol: where a topic's queues are, requests to brokers
half_messages.py  half messages sent, and ended by their place in a broker's log
end_journal.py     what the driver knows of their ends, and who may end them
committer.py  the driver's hand on them
topic.py     queues read by offset; stored.py: a message as it lies there
read.py      a scan of the topic, for the audit
"""

from __future__ import annotations

from delivered.connectors.rocketmq.options import RocketmqOptions, RocketmqSinkOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "rocketmq",
    "rocketmq",
    queues=Made(RocketmqOptions, "delivered.connectors.rocketmq.queue:RocketmqQueue"),
    sinks=Made(RocketmqSinkOptions, "delivered.connectors.rocketmq.sink:RocketmqSink"),
    external_ledger=True,
)

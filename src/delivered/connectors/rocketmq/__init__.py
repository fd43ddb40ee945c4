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
read.py      the topic as a whole, for the audit
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from delivered.connectors.rocketmq.options import SINK_OPTIONS, SOURCE_OPTIONS, parse, parse_sink
from delivered.kits.queue.connector import QueueConnector

if TYPE_CHECKING:
    from delivered.contract.queue import Queue
    from delivered.contract.sink import Sink


class RocketmqConnector(QueueConnector):
    def queue(self, options: Mapping[str, str]) -> Queue:
        from delivered.connectors.rocketmq.queue import RocketmqQueue

        return RocketmqQueue(parse(options))

    def sink_with_external_ledger(self, options: Mapping[str, str], ledger_sink: Sink) -> Sink:
        from delivered.connectors.rocketmq.sink import RocketmqSink

        return RocketmqSink(parse_sink(options), ledger_sink)


CONNECTOR = RocketmqConnector(
    name="rocketmq",
    extra="rocketmq",
    system="RocketMQ",
    source_options=SOURCE_OPTIONS,
    sink_options=SINK_OPTIONS,
    queue_options=SOURCE_OPTIONS,
    forgets="A group of RocketMQ is handed no message again that it acknowledged, and its client reads by no offset",
)

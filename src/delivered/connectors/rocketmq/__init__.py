"""Apache RocketMQ 5 over gRPC: a source through the write-ahead receiver, and a sink.

options.py   what the user named
client.py    a session with the proxies, and errors in plain words
message.py   what a message of RocketMQ is in the log
receiver.py  messages in, acknowledgements out, hidden from others for as long as they are held
queue.py     topic and group as the contract sees them; can they be received from
publish.py   messages out, confirmed, many in flight
writer.py    a task's side of the sink
sink.py      the sink: at_least_once and at_most_once, with a ledger elsewhere
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.rocketmq.options import SINK_OPTIONS, SOURCE_OPTIONS, parse, parse_sink
from delivered.model.errors import Refused
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract import Sink, Source
    from delivered.contract_queue import Queue


@dataclass(frozen=True)
class RocketmqConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "rocketmq"
    extra: str = "rocketmq"
    source_options: OptionTable | None = SOURCE_OPTIONS
    sink_options: OptionTable | None = SINK_OPTIONS
    queue_options: OptionTable = SOURCE_OPTIONS

    def queue(self, options: Mapping[str, str]) -> Queue:
        from delivered.connectors.rocketmq.queue import RocketmqQueue

        return RocketmqQueue(parse(options))

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise Refused(
            "QUEUE_FORGETS",
            "A group of RocketMQ is handed no message again that it acknowledged, and its client reads by no offset; "
            "only the log behind its receivers can be read again.",
            next_step="make the source with delivered.endpoint('rocketmq', ...), which puts the two together",
        )

    def sink(self, options: Mapping[str, str]) -> Sink:
        del options
        raise Refused(
            "LEDGER_ELSEWHERE",
            "RocketMQ has no place that one driver can own, so batches are recorded in a ledger of another system.",
            next_step="make the sink with delivered.endpoint('rocketmq', ...), which puts the two together",
        )

    def kept_sink(self, options: Mapping[str, str], keeper: Sink) -> Sink:
        from delivered.connectors.rocketmq.sink import RocketmqSink

        return RocketmqSink(parse_sink(options), keeper)


CONNECTOR = RocketmqConnector()

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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.activemq.options import SINK_OPTIONS, SOURCE_OPTIONS, parse, parse_sink
from delivered.model.errors import Refused
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract import Sink, Source
    from delivered.contract_queue import Queue


@dataclass(frozen=True)
class ActivemqConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "activemq"
    extra: str = "activemq"
    source_options: OptionTable | None = SOURCE_OPTIONS
    sink_options: OptionTable | None = SINK_OPTIONS
    queue_options: OptionTable = SOURCE_OPTIONS

    def queue(self, options: Mapping[str, str]) -> Queue:
        from delivered.connectors.activemq.queue import ActivemqQueue

        return ActivemqQueue(parse(options))

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise Refused(
            "QUEUE_FORGETS",
            "An ActiveMQ queue forgets what is acknowledged, and cannot be read again; only the log behind its "
            "receivers can.",
            next_step="make the source with delivered.endpoint('activemq', ...), which puts the two together",
        )

    def sink(self, options: Mapping[str, str]) -> Sink:
        del options
        raise Refused(
            "LEDGER_ELSEWHERE",
            "ActiveMQ has no place that one driver can own, so batches are recorded in a ledger of another system.",
            next_step="make the sink with delivered.endpoint('activemq', ...), which puts the two together",
        )

    def kept_sink(self, options: Mapping[str, str], keeper: Sink) -> Sink:
        from delivered.connectors.activemq.sink import ActivemqSink

        return ActivemqSink(parse_sink(options), keeper)


CONNECTOR = ActivemqConnector()

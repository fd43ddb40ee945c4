"""Apache Pulsar, over its C++ client: a source that can be read again, and a sink.

options.py    what the user named
positions.py  where a stream stands: ledger and entry
admin.py      questions to the brokers' HTTP service
client.py     clients, and errors in plain words
tokens.py     the token, and what may be told of it
trust.py      TLS: whose certificates are trusted
entries.py    how many entries lie between two positions; where a batch ends
source.py     the driver's side of the source
reader.py     a task's side of the source
columns.py    what a message becomes
sink_options.py, writer.py, sink.py  the sink: at_least_once and at_most_once, with a ledger elsewhere
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from delivered.connectors.pulsar.options import SOURCE_OPTIONS, parse
from delivered.connectors.pulsar.sink_options import SINK_OPTIONS, parse_sink
from delivered.kits.queue.connector import SendingConnector

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


class PulsarConnector(SendingConnector):
    def source(self, options: Mapping[str, str]) -> Source:
        from delivered.connectors.pulsar.source import PulsarSource

        return PulsarSource(parse(options))

    def sink_with_external_ledger(self, options: Mapping[str, str], ledger_sink: Sink) -> Sink:
        from delivered.connectors.pulsar.sink import PulsarSink

        return PulsarSink(parse_sink(options), ledger_sink)


CONNECTOR = PulsarConnector(
    name="pulsar",
    extra="pulsar",
    system="Pulsar",
    source_options=SOURCE_OPTIONS,
    sink_options=SINK_OPTIONS,
)

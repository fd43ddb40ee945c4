"""Apache Pulsar, over its C++ client: a source that can be read again, and a sink.

options.py    what the user named
positions.py  where a stream stands: ledger and entry
admin.py      questions to the brokers' HTTP service
client.py     clients, and errors in plain words
entries.py    how many entries lie between two positions; where a batch ends
source.py     the driver's side of the source
reader.py     a task's side of the source
columns.py    what a message becomes
sink_options.py, writer.py, sink.py  the sink: at_least_once and at_most_once, with a ledger elsewhere
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.pulsar.options import SOURCE_OPTIONS, parse
from delivered.connectors.pulsar.sink_options import SINK_OPTIONS, parse_sink
from delivered.model.errors import Refused
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract import Sink, Source


@dataclass(frozen=True)
class PulsarConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "pulsar"
    extra: str = "pulsar"
    source_options: OptionTable | None = SOURCE_OPTIONS
    sink_options: OptionTable | None = SINK_OPTIONS

    def source(self, options: Mapping[str, str]) -> Source:
        from delivered.connectors.pulsar.source import PulsarSource

        return PulsarSource(parse(options))

    def sink(self, options: Mapping[str, str]) -> Sink:
        del options
        raise Refused(
            "LEDGER_ELSEWHERE",
            "Pulsar has no place that one driver can own, so batches are recorded in a ledger of another system.",
            next_step="make the sink with delivered.endpoint('pulsar', ...), which puts the two together",
        )

    def kept_sink(self, options: Mapping[str, str], keeper: Sink) -> Sink:
        from delivered.connectors.pulsar.sink import PulsarSink

        return PulsarSink(parse_sink(options), keeper)


CONNECTOR = PulsarConnector()

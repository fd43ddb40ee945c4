"""Apache Pulsar through its C++ client: a replayable source, and a sink."""

from __future__ import annotations

from delivered.connectors.pulsar.options import PulsarSinkOptions, SourceOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "pulsar",
    "pulsar",
    sources=Factory(SourceOptions, "delivered.connectors.pulsar.source:PulsarSource"),
    sinks=Factory(PulsarSinkOptions, "delivered.connectors.pulsar.sink:PulsarSink"),
    external_ledger=True,
    messaging=True,
)

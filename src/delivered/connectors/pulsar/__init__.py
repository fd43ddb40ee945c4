"""Apache Pulsar through its C++ client: a replayable source, and a sink."""

from __future__ import annotations

from delivered.connectors.pulsar.options import PulsarSinkOptions, SourceOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "pulsar",
    "pulsar",
    sources=Made(SourceOptions, "delivered.connectors.pulsar.source:PulsarSource"),
    sinks=Made(PulsarSinkOptions, "delivered.connectors.pulsar.sink:PulsarSink"),
    external_ledger=True,
    messaging=True,
)

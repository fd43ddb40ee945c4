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
writer.py, sink.py  the sink: at_least_once and at_most_once, with a ledger elsewhere
"""

from __future__ import annotations

from delivered.connectors.pulsar.options import PulsarSinkOptions, SourceOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "pulsar",
    "pulsar",
    sources=Made(SourceOptions, "delivered.connectors.pulsar.source:PulsarSource"),
    sinks=Made(PulsarSinkOptions, "delivered.connectors.pulsar.sink:PulsarSink"),
    external_ledger=True,
)

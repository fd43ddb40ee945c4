"""SQLite as a sink, the embedded default: one transaction writes rows and decision to one database file."""

from __future__ import annotations

from delivered.connectors.sqlite.options import SqliteOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "sqlite",
    "sqlite",
    sinks=Factory(SqliteOptions, "delivered.connectors.sqlite.sink:SqliteSink"),
    transactions="",
    key_table=True,
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)

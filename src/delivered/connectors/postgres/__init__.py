"""PostgreSQL as a sink: rows, written by binary COPY, and decisions in one database."""

from __future__ import annotations

from delivered.connectors.postgres.sink import PostgresOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "postgres",
    "postgres",
    sinks=Factory(PostgresOptions, "delivered.connectors.postgres.sink:PostgresSink"),
    transactions="",
    key_table=True,
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)

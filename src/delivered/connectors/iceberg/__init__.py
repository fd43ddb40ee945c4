"""Iceberg as a sink, using the package `pyiceberg`, without a JAR: a batch is one snapshot of the table."""

from __future__ import annotations

from delivered.connectors.iceberg.options import IcebergOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "iceberg",
    "iceberg",
    sinks=Factory(IcebergOptions, "delivered.connectors.iceberg.sink:IcebergSink"),
    transactions="",
    instead='read an Iceberg table with format("iceberg"), or a log with delivered_log',
)

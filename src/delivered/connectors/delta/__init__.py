"""Delta Lake as a sink, using the package `deltalake`, without a JAR: a batch is one commit of the table's log."""

from __future__ import annotations

from delivered.connectors.delta.options import DeltaOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "delta",
    "delta",
    sinks=Factory(DeltaOptions, "delivered.connectors.delta.sink:DeltaSink"),
    transactions="",
    instead='read a Delta table with format("delta"), or a log with delivered_log',
)

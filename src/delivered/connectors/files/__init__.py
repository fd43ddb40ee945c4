"""Folders of Parquet, JSON or CSV files as a sink: a batch is a folder, committed by one rename."""

from __future__ import annotations

from delivered.connectors.files.options import FilesOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "files",
    "files",
    sinks=Factory(FilesOptions, "delivered.connectors.files.sink:FilesSink"),
    transactions="",
    instead='read a folder with Spark\'s own format("parquet"), format("json") or format("csv")',
)

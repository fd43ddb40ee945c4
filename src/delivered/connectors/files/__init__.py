"""Folders of Parquet, JSON or CSV files as a sink: a batch is one folder, and appears by one rename.

options.py  what the user named
types.py    Arrow types as each format keeps them
formats.py  rows into files, and back
disk.py     names, and what makes them durable
writer.py   a task's side
store.py    the ledger beside the batches: owner, decisions. The line that decides is there.
committer.py staged files of undecided shards
read.py     a scan of the folder, for the audit
sink.py     all of these as the contract's sink
"""

from __future__ import annotations

from delivered.connectors.files.options import FilesOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "files",
    "files",
    sinks=Made(FilesOptions, "delivered.connectors.files.sink:FilesSink"),
    instead='read a folder with Spark\'s own format("parquet"), format("json") or format("csv")',
)

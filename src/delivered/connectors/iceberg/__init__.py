"""Iceberg as a sink, by the package `pyiceberg`, without a JAR: a batch is one snapshot of the table.

options.py   what the user named
client.py    the client library, catalogs, the files of a table, errors in plain words
disk.py      what the client writes to a local disk, made durable
types.py     Arrow types as Iceberg keeps them, and back
target.py    the table: create, compare; whether it can keep the promise
partition.py rows by the table's partitions
manifest.py  what a task tells the driver of its data files
writer.py    a task's side
records.py   what the ledger knows, in the table's properties and in the summaries of its snapshots
store.py     the ledger in the table: owner, decisions. The line that decides is there.
merge.py     what a batch replaces
staged.py    rows of an upsert, as tasks leave them
commit.py    one commit to the table, and what became of it
committer.py  files of undecided shards
read.py      a scan of the table, for the audit
sink.py      all of these as the contract's sink
"""

from __future__ import annotations

from delivered.connectors.iceberg.options import IcebergOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "iceberg",
    "iceberg",
    sinks=Made(IcebergOptions, "delivered.connectors.iceberg.sink:IcebergSink"),
    instead='read an Iceberg table with format("iceberg"), or a log with delivered_log',
)

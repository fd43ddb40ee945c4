"""Delta Lake as a sink, by the package `deltalake`, without a JAR: a batch is one commit of the table's own log.

options.py   what the user named
client.py    the client library, the files beside the table, errors in plain words
target.py    the table: create, compare, add columns; whether it can keep the promise
statistics.py  what the log says about a file
writer.py    a task's side
records.py   what the ledger knows, in files that the log points to
store.py     the ledger in the table: owner, decisions. The line that decides is there.
commit.py    one commit to the table's log, and what became of it
committer.py  files of undecided shards
read.py      a scan of the table, for the audit
sink.py      all of these as the contract's sink
"""

from __future__ import annotations

from delivered.connectors.delta.options import DeltaOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "delta",
    "delta",
    sinks=Made(DeltaOptions, "delivered.connectors.delta.sink:DeltaSink"),
    instead='read a Delta table with format("delta"), or a log with delivered_log',
)

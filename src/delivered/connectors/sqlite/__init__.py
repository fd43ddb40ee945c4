"""SQLite as a sink, the embedded default: rows and the decision get in by one transaction of one database file.

options.py   what the user named
types.py     Arrow types as SQLite stores them, and back
database.py  connections, and errors in plain words
migrate.py   the ledger's tables, versioned
target.py    the user's table: create, check, insert
merge.py     upserts
stage.py     files in which tasks leave their shards
writer.py    a task's side
keys.py      keys that a dedup remembers, over `delivered.kits.sql.keys`
store.py     the driver's side: owner, decisions, over `delivered.kits.sql.store`, where the line that decides is
committer.py  staged files of decided and undecided shards
read.py      a scan of the table, for the audit
sink.py      all of these as the contract's sink
"""

from __future__ import annotations

from delivered.connectors.sqlite.options import SqliteOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "sqlite",
    "sqlite",
    sinks=Made(SqliteOptions, "delivered.connectors.sqlite.sink:SqliteSink"),
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)

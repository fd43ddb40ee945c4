"""PostgreSQL as a sink: rows by binary COPY, and decisions, in one database.

options.py       what the user named
types.py         Arrow types as PostgreSQL keeps them
encode.py        record batches as blocks of binary COPY
client.py        connections, and errors in plain words
target.py        the user's table: create, check, name its columns
migrate.py       the ledger's tables, versioned
stage.py         tables in which tasks leave their shards
transactions.py  two_phase: ids of prepared transactions; list, commit, roll back
writer.py        a task's side
store.py         the driver's side: owner, decisions, over `delivered.kits.sql.store`, where the line that decides is
committer.py      the driver's hand on what tasks prepared
preflight.py     can this server keep the promise
read.py          a scan of the table, for the audit
sink.py          all of these as the contract's sink
"""

from __future__ import annotations

from delivered.connectors.postgres.options import PostgresOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "postgres",
    "postgres",
    sinks=Made(PostgresOptions, "delivered.connectors.postgres.sink:PostgresSink"),
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)

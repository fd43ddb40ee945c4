"""MySQL and MariaDB as a sink: rows by LOAD DATA LOCAL, and decisions, on one server.

options.py       what the user named
types.py         Arrow types as the server keeps them
encode.py        record batches as the text of LOAD DATA, or of INSERT
wire.py          a connection that loads from memory
client.py        connections and their settings
errors.py        the server's errors in plain words
load.py          rows into a table, in bounded blocks
target.py        the user's table: create, check, name its columns
migrate.py       the ledger's tables, versioned
merge.py         upserts
stage.py         tables in which tasks leave their shards
transactions.py  two_phase: ids of XA transactions; list, commit, roll back
sessions.py      which session holds something up, and the end of it
writer.py        a task's side
store.py         the driver's side: owner, decisions, over `delivered.kits.sql.store`, where the line that decides is
committer.py      the driver's hand on what tasks prepared
preflight.py     can this server keep the promise
read.py          a scan of the table, for the audit
sink.py          all of these as the contract's sink

Every session runs with ANSI_QUOTES, so that names are quoted as in standard SQL; and READ COMMITTED, so that a lock is
a lock of rows and not of what lies between them.
"""

from __future__ import annotations

from delivered.connectors.mysql.options import MysqlOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "mysql",
    "mysql",
    sinks=Made(MysqlOptions, "delivered.connectors.mysql.sink:MysqlSink"),
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)

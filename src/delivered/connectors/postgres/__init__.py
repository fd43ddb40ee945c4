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
read.py          the table as a source, for the audit
sink.py          all of these as the contract's sink
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from delivered.connectors.postgres.options import SINK_OPTIONS, parse
from delivered.kits.sql.connector import SinkConnector

if TYPE_CHECKING:
    from delivered.contract.sink import Sink


class PostgresConnector(SinkConnector):
    def sink(self, options: Mapping[str, str]) -> Sink:
        from delivered.connectors.postgres.sink import PostgresSink

        return PostgresSink(parse(options))


CONNECTOR = PostgresConnector("postgres", "postgres", SINK_OPTIONS)

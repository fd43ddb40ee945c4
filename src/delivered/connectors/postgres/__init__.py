"""PostgreSQL as a sink: rows by binary COPY, and decisions, in one database.

options.py       what the user named
types.py         Arrow types as PostgreSQL keeps them
encode.py        record batches as blocks of binary COPY
client.py        connections, and errors in plain words
warm.py          connections of tasks, kept open between shards
target.py        the user's table: create, check, name its columns
migrate.py       the ledger's tables, versioned
stage.py         one_transaction: tables in which tasks leave their shards
transactions.py  two_phase: ids of prepared transactions; list, commit, roll back
writer.py        a task's side
ledger.py        the driver's side: owner, decisions. The line that decides is there.
resource.py      the driver's hand on what tasks prepared
preflight.py     can this server keep the promise
read.py          the table as a source, for the audit
sink.py          all of these as the contract's sink
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.postgres.options import SINK_OPTIONS, parse
from delivered.model.errors import UsageError
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract import Sink, Source


@dataclass(frozen=True)
class PostgresConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "postgres"
    extra: str = "postgres"
    source_options: OptionTable | None = None
    sink_options: OptionTable | None = SINK_OPTIONS

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise UsageError(
            "NO_SOURCE",
            "delivered_postgres is a sink; a table has no offsets that a stream could replay.",
            next_step="read from delivered_log or delivered_kafka",
        )

    def sink(self, options: Mapping[str, str]) -> Sink:
        from delivered.connectors.postgres.sink import PostgresSink

        return PostgresSink(parse(options))


CONNECTOR = PostgresConnector()

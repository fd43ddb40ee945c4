"""The sink `delivered_postgres`."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.connectors.postgres.options import PostgresOptions
from delivered.connectors.postgres.types import TYPES
from delivered.kits.sink import Parts
from delivered.kits.sql.sink import ServerSink, ServerTerms


@dataclass(frozen=True)
class PostgresSink(ServerSink):
    options: PostgresOptions

    types = TYPES
    parts = Parts(
        __package__,
        look="preflight:look",
        add_columns="target:add_columns",
        writer="writer:CopyWriter",
        scan="read:PostgresScan",
        store="stage:build_store",
        committer="transactions:build_committer",
        database="client:PostgresDatabase",
        refused_rows="trial:refused_rows",
    )
    terms = ServerTerms(
        load="COPY",
        transaction="a transaction",
        prepare="PREPARE TRANSACTION, durable",
        commit="COMMIT PREPARED",
        moved="nothing to do; the decision made the rows visible",
        holds="hold locks and stop VACUUM",
        assumes=("the database is backed up and restored as a whole, with the ledger's schema",),
        limits=("the server's max_prepared_transactions must exceed the number of shards",),
    )

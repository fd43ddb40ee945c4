"""The sink `delivered_mysql`."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.connectors.mysql import MysqlOptions
from delivered.connectors.mysql.target import TYPES
from delivered.kits.sink import Parts
from delivered.kits.sql.sink import ServerSink, ServerTerms


@dataclass(frozen=True)
class MysqlSink(ServerSink):
    options: MysqlOptions

    types = TYPES
    parts = Parts(
        __package__,
        look="preflight:look",
        add_columns="target:add_columns",
        writer="writer:LoadWriter",
        scan="read:MysqlScan",
        store="store:build_store",
        committer="committer:build_committer",
        database="store:MysqlDatabase",
        refused_rows="writer:refused_rows",
    )
    terms = ServerTerms(
        load="LOAD DATA",
        transaction="an XA transaction",
        prepare="XA PREPARE, durable; the session ends",
        commit="XA COMMIT",
        moved="drop the staging tables; the decision made the rows visible",
        holds="hold locks",
        assumes=(
            "the server is backed up and restored as one, with the ledger's database",
            "triggers of the table only write to InnoDB tables",
        ),
    )

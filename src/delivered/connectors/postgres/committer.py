"""Commits and aborts prepared shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres import stage, target, transactions
from delivered.connectors.postgres.options import PostgresOptions
from delivered.kits.sql.committer import ServerCommitter
from delivered.kits.sql.names import Names
from delivered.kits.sql.transactions import OpenTransaction
from delivered.model.identity import Scope, Target

if TYPE_CHECKING:
    import psycopg


class PostgresCommitter(ServerCommitter["psycopg.Connection[Any]"]):
    """COMMIT PREPARED and ROLLBACK PREPARED, from any session of the database."""

    def __init__(self, options: PostgresOptions, scope: Scope) -> None:
        super().__init__(stage.build_staging(options), Names(scope, options.ledger_schema))
        self._options = options

    def _list(self, connection: psycopg.Connection[Any]) -> list[OpenTransaction]:
        return transactions.listed(connection, self._scope, self._options)

    def _end_prepared(self, connection: psycopg.Connection[Any], gid: str, commit: bool) -> bool:
        return transactions.end(connection, gid, commit)

    @property
    def _id_prefix(self) -> str:
        return transactions.id_prefix(self._scope, self._options.ledger_schema)

    def _is_ours(self, gid: str) -> bool:
        return transactions.is_ours(self._scope, self._options.ledger_schema, gid)

    def _target(self, connection: psycopg.Connection[Any]) -> Target | None:
        found = target.find(connection, self._options)
        return None if found is None else Target(f"table {self._options.table_text}", str(found[0]))

    def _staged(self, connection: psycopg.Connection[Any]) -> list[str]:
        return stage.listed(connection, self._names)

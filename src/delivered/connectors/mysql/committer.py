"""Commits and aborts prepared shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivered.connectors.mysql import sessions, stage, target, transactions
from delivered.connectors.mysql.options import MysqlOptions
from delivered.kits.sql.committer import ServerCommitter
from delivered.kits.sql.transactions import OpenTransaction, PreparedRows
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.prepared import Prepared

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session


class MysqlCommitter(ServerCommitter["Session"]):
    """XA COMMIT and XA ROLLBACK, from any session of the server."""

    def __init__(self, options: MysqlOptions, scope: Scope) -> None:
        super().__init__(stage.build_staging(options), transactions.names_of(scope, options.ledger_schema))
        self._options = options

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Also drops the staging table: the server cannot drop tables inside a transaction.

        Failed, too: the server acknowledged the commit, and the transaction's marker is not there (seen with MariaDB
        10.11, in 1 of 30 commits right after the session that prepared was killed).
        """
        outcome, gid = super().commit(work, prepared), PreparedRows.of(prepared).gid
        if isinstance(outcome, Ok) and gid:
            try:
                if not self._has_marker(work, gid):
                    return Failed(f"the server acknowledged the commit of {gid}, and lost it")
            except DeliveredError as error:
                return Unknown(str(error))
        return self._drop_staged(PreparedRows.of(prepared)) if isinstance(outcome, Ok) else outcome

    def abort(self, prepared: Prepared) -> Outcome[None]:
        outcome = super().abort(prepared)
        return self._drop_staged(PreparedRows.of(prepared)) if isinstance(outcome, Ok) else outcome

    def _drop_staged(self, rows: PreparedRows) -> Outcome[None]:
        """Also drops the staging table of a prepared shard."""
        if rows.gid and self._options.write.merges:
            rows = PreparedRows(staged=transactions.staging_of(self._names, rows.gid))
        return super()._drop_staged(rows)

    def _list(self, connection: Session) -> list[OpenTransaction]:
        return transactions.listed(connection, self._scope, self._options)

    def _end_prepared(self, connection: Session, gid: str, commit: bool) -> bool:
        return transactions.end(connection, gid, commit)

    @property
    def _id_prefix(self) -> str:
        return transactions.id_prefix(self._scope, self._options.ledger_schema)

    def _is_ours(self, gid: str) -> bool:
        return transactions.is_ours(self._scope, self._options.ledger_schema, gid)

    def _target(self, connection: Session) -> Target | None:
        known = target.identity(connection, self._options)
        return None if known is None else Target(f"table {self._options.table_text}", known)

    def _staged(self, connection: Session) -> list[str]:
        return stage.listed(connection, self._names)

    def _drop(self, connection: Session, table: str) -> None:
        """Terminates the session of a hanging task, whose locks on the table would block the drop."""
        nonce = stage.nonce_of(table)
        if not sessions.gone(connection, nonce, 0):
            sessions.end(connection, nonce)
            sessions.gone(connection, nonce, transactions.KILLED_S)
        super()._drop(connection, table)

"""Staging tables for shards, in the ledger's database: `s_<check>_<batch>_<shard>_<nonce>`.

DDL commits implicitly, so a staging table is created before its transaction, and dropped after the one that moved its
rows: by `Committer.commit`, or by the next start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivered.connectors.mysql.client import MysqlDatabase
from delivered.connectors.mysql.options import MysqlOptions
from delivered.connectors.mysql.target import MysqlMerge, Target
from delivered.kits.sql.database import quoted
from delivered.kits.sql.ledger import SqlLedger
from delivered.kits.sql.merge import ORDER, ROUND, Merge
from delivered.kits.sql.stage import Staging
from delivered.kits.sql.transactions import Names, PreparedRows
from delivered.model.identity import Scope
from delivered.model.prepared import Prepared

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session


class MysqlStaging(Staging):
    def _merge(self, prepared: Prepared) -> Merge:
        handle = PreparedRows.of(prepared)
        return MysqlMerge(self.options.write, handle.target, handle.stored, handle.index)


def build_staging(options: MysqlOptions) -> MysqlStaging:
    return MysqlStaging(options, MysqlDatabase(options))


def build_store(options: MysqlOptions, scope: Scope) -> SqlLedger[Session]:
    """The ledger of a pipeline and sink, on the server that holds the rows."""
    return SqlLedger(MysqlDatabase(options), scope, build_staging(options))


def create(session: Session, options: MysqlOptions, table: str, target: Target) -> None:
    """Create a table with the columns of the rows, all nullable. Raises MySQLError."""
    write = options.write
    columns = [f"{quoted(n)} {target.shown[n]} NULL" for n in target.merge.columns]
    if write.expected is not None:
        columns.append(f"{quoted(write.expected)} {target.shown[str(write.version)]} NULL")
    if write.conditional:
        columns.append(f"{quoted(ROUND)} bigint NOT NULL DEFAULT 1")
    if write.delete is not None:
        columns.append(f"{quoted(write.delete)} tinyint(1) NULL")
    if write.merges:
        columns.append(f"{quoted(ORDER)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY")
    session.execute(
        f"CREATE TABLE {quoted(options.ledger_schema)}.{quoted(table)} ({', '.join(columns)}) ENGINE = InnoDB"
    )


def listed(session: Session, names: Names) -> list[str]:
    """Every staging table of this pipeline and sink. Raises MySQLError."""
    like = names.staging_prefix.replace("_", r"\_") + "%"
    rows = session.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND table_name LIKE %s",
        [names.ledger_schema, like],
    ).fetchall()
    return [name for (name,) in rows if names.is_staging(name)]


def nonce_of(table: str) -> str:
    """Nonce of the session that fills a staging table."""
    return table.rpartition("_")[2]

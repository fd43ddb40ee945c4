"""Mechanism one_transaction: tasks commit shards to staging tables, and the driver moves them.

Upserts of any mechanism also use one, in the task's own transaction. Each attempt of a shard creates its own table,
named `s_<check>_<batch>_<shard>_<nonce>` in the ledger's schema.

All are logged tables: prepared rows must survive a server crash; and if the postmaster is killed while a transaction
that created an unlogged table is open, the server may have to be started twice (docs/decisions/030).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres.options import PostgresOptions
from delivered.connectors.postgres.target import Target
from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import ORDER, ROUND
from delivered.kits.sql.names import Names

if TYPE_CHECKING:
    import psycopg


def create(connection: psycopg.Connection[Any], options: PostgresOptions, table: str, target: Target) -> None:
    """Create a table with the columns of the rows, inside the open transaction. Raises psycopg.Error."""
    name = f"{quoted(options.ledger_schema)}.{quoted(table)}"
    write = options.write
    columns = ", ".join(map(quoted, target.merge.columns))
    if write.expected is not None:
        columns += f", {quoted(str(write.version))} AS {quoted(write.expected)}"
    connection.execute(
        f"CREATE TABLE {name} WITH (autovacuum_enabled = false) "  # noqa: S608
        f"AS SELECT {columns} FROM {target.name} WITH NO DATA"
    )
    if write.merges:
        more = f"ADD COLUMN {quoted(ORDER)} bigint GENERATED ALWAYS AS IDENTITY"
        if write.delete is not None:
            more += f", ADD COLUMN {quoted(write.delete)} boolean"
        if write.conditional:
            more += f", ADD COLUMN {quoted(ROUND)} bigint NOT NULL DEFAULT 1"
        connection.execute(f"ALTER TABLE {name} {more}")


def listed(connection: psycopg.Connection[Any], names: Names) -> list[str]:
    """Every staging table of this pipeline and sink. Raises psycopg.Error."""
    rows = connection.execute(
        "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE nspname = %s AND starts_with(relname::text, %s) AND relkind = 'r'",
        [names.ledger_schema, names.staging_prefix],
    ).fetchall()
    return [name for (name,) in rows if names.is_staging(name)]

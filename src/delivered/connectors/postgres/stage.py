"""Mechanism one_transaction: tasks commit shards to staging tables, and the driver moves them.

Upserts of any mechanism also use one, in the task's own transaction. Each attempt of a shard creates its own table,
named `s_<check>_<batch>_<shard>_<nonce>` in the ledger's schema.

All are logged tables: prepared rows must survive a server crash; and if the postmaster is killed while a transaction
that created an unlogged table is open, the server may have to be started twice (docs/decisions/030).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres.client import PostgresDatabase
from delivered.connectors.postgres.options import PostgresOptions
from delivered.connectors.postgres.target import Target, find
from delivered.kits.sql.database import quoted
from delivered.kits.sql.ledger import SwappingLedger
from delivered.kits.sql.merge import ORDER, ROUND
from delivered.kits.sql.stage import Staging
from delivered.kits.sql.target import missing_at_server
from delivered.kits.sql.transactions import Names
from delivered.ledger.store import Swap
from delivered.model.identity import Scope

if TYPE_CHECKING:
    import psycopg


class PostgresStaging(Staging):
    options: PostgresOptions
    drops = True

    def swap(self, connection: psycopg.Connection[Any], swap: Swap) -> None:
        found = find(connection, self.options)
        if found is None:
            raise missing_at_server(self.options)
        full = found[1]
        schema = full[: -len(quoted(self.options.table)) - 1]
        connection.execute(f"ALTER TABLE {full} RENAME TO {quoted(swap.kept)}")
        connection.execute(f"ALTER TABLE {schema}.{quoted(swap.new)} RENAME TO {quoted(self.options.table)}")

    def has_swapped(self, swap: Swap) -> bool:
        """They change places in one transaction."""
        schema = "" if self.options.schema is None else f"{quoted(self.options.schema)}."

        def question(connection: psycopg.Connection[Any]) -> bool:
            row = connection.execute("SELECT to_regclass(%s)", [schema + quoted(swap.kept)]).fetchone()
            return row is not None and row[0] is not None

        return self.server.ask(question)

    def cannot_swap(self) -> str | None:
        """Views and foreign keys would stay with the old table's rows."""

        def question(connection: psycopg.Connection[Any]) -> str | None:
            found = find(connection, self.options)
            if found is None:
                return f"there is no table {self.options.table_text!r}"
            row = connection.execute(
                "SELECT r.ev_class::regclass::text FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid "
                "WHERE d.refobjid = %(table)s AND d.classid = 'pg_rewrite'::regclass AND r.ev_class <> %(table)s UNION "
                "SELECT conname FROM pg_constraint WHERE confrelid = %(table)s LIMIT 1",
                {"table": found[0]},
            ).fetchone()
            return None if row is None else f"{row[0]!r} refers to the table, and would go on referring to its old rows"

        return self.server.ask(question)


def build_staging(options: PostgresOptions) -> PostgresStaging:
    return PostgresStaging(options, PostgresDatabase(options))


def build_store(options: PostgresOptions, scope: Scope) -> SwappingLedger[psycopg.Connection[Any]]:
    """The ledger of a pipeline and sink, in the database that holds the rows."""
    role = f"ledger {Names(scope, options.ledger_schema).check}"
    return SwappingLedger(PostgresDatabase(options), scope, build_staging(options), role)


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

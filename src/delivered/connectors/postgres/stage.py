"""mechanism one_transaction: tables in which tasks leave their shards, committed, for the driver to move.

They are logged: what a task promised must survive a crash of the server. A table is made for one attempt of one
shard, and its name says so: `s_<check>_<batch>_<shard>_<nonce>` in the ledger's schema.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres.client import check_of
from delivered.connectors.postgres.migrate import quoted
from delivered.connectors.postgres.options import PostgresOptions
from delivered.connectors.postgres.target import Target
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope, Work
from delivered.model.work import Prepared

if TYPE_CHECKING:
    import psycopg

KEY = "staged"
"""Name of the staging table in a participant's handle."""


def _prefix(scope: Scope, ledger_schema: str) -> str:
    return f"s_{check_of(scope, ledger_schema)}_"


def new_table(options: PostgresOptions, work: Work) -> str:
    """A name that nobody else has."""
    return f"{_prefix(work.scope, options.ledger_schema)}{work.batch}_{work.shard}_{secrets.token_hex(8)}"


def create(connection: psycopg.Connection[Any], options: PostgresOptions, table: str, target: Target) -> None:
    """Inside the open transaction, make a table with the target's columns. Raises psycopg.Error."""
    connection.execute(
        f"CREATE TABLE {quoted(options.ledger_schema)}.{quoted(table)} WITH (autovacuum_enabled = false) "  # noqa: S608
        f"AS SELECT {target.columns} FROM {target.name} WITH NO DATA"
    )


def move(connection: psycopg.Connection[Any], options: PostgresOptions, prepared: Prepared) -> None:
    """Inside the open transaction, move a shard's rows into the target.

    Raises:
        InvariantBroken: the rows are not those that were prepared.
        psycopg.Error: the server said no; 42P01: the staged rows are gone.
    """
    staged = f"{quoted(options.ledger_schema)}.{quoted(str(prepared.handle[KEY]))}"
    columns, name = prepared.handle["columns"], prepared.handle["target"]
    rows = connection.execute(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {staged}").rowcount  # noqa: S608
    if rows != prepared.fingerprint.count:
        raise InvariantBroken(
            "STAGED_ROWS_DIFFER",
            f"Shard {prepared.shard}: {rows} rows got into {name}, prepared were {prepared.fingerprint.count}. Does a "
            "trigger or rule of the table take rows away?",
            next_step="start the pipeline again; the batch runs again",
        )
    connection.execute(f"DROP TABLE {staged}")


def listed(connection: psycopg.Connection[Any], options: PostgresOptions, scope: Scope) -> list[str]:
    """Every staging table of this sink of this pipeline. Raises psycopg.Error."""
    prefix = _prefix(scope, options.ledger_schema)
    rows = connection.execute(
        "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE nspname = %s AND starts_with(relname::text, %s) AND relkind = 'r'",
        [options.ledger_schema, prefix],
    ).fetchall()
    return [name for (name,) in rows if re.fullmatch(r"\d+_\d+_[0-9a-f]{16}", name[len(prefix) :])]


def drop(connection: psycopg.Connection[Any], options: PostgresOptions, table: str) -> None:
    """Give staged rows back. Raises psycopg.Error."""
    connection.execute(f"DROP TABLE IF EXISTS {quoted(options.ledger_schema)}.{quoted(table)}")

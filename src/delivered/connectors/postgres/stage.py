"""mechanism one_transaction: tables in which tasks leave their shards, committed, for the driver to move.

They are logged: what a task promised must survive a crash of the server. A table is made for one attempt of one
shard, and its name says so: `s_<check>_<batch>_<shard>_<nonce>` in the ledger's schema.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres.client import check_of
from delivered.connectors.postgres.options import PostgresOptions
from delivered.connectors.postgres.target import Target
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope, Work
from delivered.model.work import Prepared
from delivered.sql.database import quoted
from delivered.sql.merge import ORDER, Merge, key_in_two_shards

if TYPE_CHECKING:
    import psycopg

KEY = "staged"
"""Name of the staging table in a participant's handle."""


def _prefix(scope: Scope, ledger_schema: str) -> str:
    return f"s_{check_of(scope, ledger_schema)}_"


def new_table(options: PostgresOptions, work: Work) -> str:
    """A name that nobody else has."""
    return f"{_prefix(work.scope, options.ledger_schema)}{work.batch}_{work.shard}_{secrets.token_hex(8)}"


def create(
    connection: psycopg.Connection[Any], options: PostgresOptions, table: str, target: Target, kept: bool
) -> None:
    """Inside the open transaction, make a table with the columns of the rows. Raises psycopg.Error.

    Args:
        kept: it outlives the transaction, and must outlive a crash of the server.
    """
    name = f"{quoted(options.ledger_schema)}.{quoted(table)}"
    write = options.write
    columns = ", ".join(map(quoted, target.merge.columns))
    connection.execute(
        f"CREATE {'' if kept else 'UNLOGGED '}TABLE {name} WITH (autovacuum_enabled = false) "  # noqa: S608
        f"AS SELECT {columns} FROM {target.name} WITH NO DATA"
    )
    if write.upserts:
        more = f"ADD COLUMN {quoted(ORDER)} bigint GENERATED ALWAYS AS IDENTITY"
        if write.delete is not None:
            more += f", ADD COLUMN {quoted(write.delete)} boolean"
        connection.execute(f"ALTER TABLE {name} {more}")


def reduced(
    connection: psycopg.Connection[Any], options: PostgresOptions, table: str, target: Target, rows: int
) -> int:
    """Inside the open transaction, of each key keep the staged row that counts; return how many there are.

    Args:
        rows: that are staged.
    """
    name = f"{quoted(options.ledger_schema)}.{quoted(table)}"
    return rows - connection.execute(target.merge.reduce(name)).rowcount


def merge(connection: psycopg.Connection[Any], options: PostgresOptions, table: str, target: Target) -> None:
    """Inside a task's own transaction, make reduced rows those of the target."""
    name = f"{quoted(options.ledger_schema)}.{quoted(table)}"
    connection.execute(target.merge.upsert(name))
    if options.write.delete is not None:
        connection.execute(target.merge.delete(name))
    connection.execute(f"DROP TABLE {name}")


def move(connection: psycopg.Connection[Any], options: PostgresOptions, prepared: Prepared) -> None:
    """Inside the open transaction, move a shard's rows into the target.

    Raises:
        InvariantBroken: the rows are not those that were prepared.
        psycopg.Error: the server said no; 42P01: the staged rows are gone.
    """
    staged = f"{quoted(options.ledger_schema)}.{quoted(str(prepared.handle[KEY]))}"
    columns, name = prepared.handle["columns"], prepared.handle["target"]
    if options.write.upserts:
        row = connection.execute(f"SELECT count(*) FROM {staged}").fetchone()  # noqa: S608
        rows, wanted = row[0] if row else 0, prepared.handle["kept"]
        connection.execute(_merge(options, prepared).upsert(staged))
    else:
        rows = connection.execute(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {staged}").rowcount  # noqa: S608
        wanted = prepared.fingerprint.count
    if rows != wanted:
        raise InvariantBroken(
            "STAGED_ROWS_DIFFER",
            f"Shard {prepared.shard}: {rows} rows got into {name}, prepared were {wanted}. Does a trigger or rule of "
            "the table take rows away?",
            next_step="start the pipeline again; the batch runs again",
        )


def check_keys(connection: psycopg.Connection[Any], options: PostgresOptions, staged: Sequence[Prepared]) -> None:
    """Inside the open transaction, before the first `move`.

    Raises:
        UsageError: a key lies in two shards, and nothing tells which of its rows is the last.
    """
    if len(staged) > 1 and options.write.upserts and options.write.version is None:
        tables = [f"{quoted(options.ledger_schema)}.{quoted(str(p.handle[KEY]))}" for p in staged]
        found = connection.execute(_merge(options, staged[0]).key_in_two(tables)).fetchone()
        if found is not None:
            raise key_in_two_shards(options.write, found, options.table_text)


def finish(connection: psycopg.Connection[Any], options: PostgresOptions, staged: Sequence[Prepared]) -> None:
    """Inside the open transaction, after the last `move`: deletions of all shards; the staging tables go.

    Deletions come last: with a version, a row of any shard that is older than one is found by it.
    """
    for prepared in staged:
        name = f"{quoted(options.ledger_schema)}.{quoted(str(prepared.handle[KEY]))}"
        if options.write.delete is not None:
            connection.execute(_merge(options, prepared).delete(name))
        connection.execute(f"DROP TABLE {name}")


def _merge(options: PostgresOptions, prepared: Prepared) -> Merge:
    return Merge(options.write, prepared.handle["target"], tuple(prepared.handle["stored"]))


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

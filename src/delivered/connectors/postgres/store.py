"""What tasks prepared at the server, and the committer and ledger that decide it.

Mechanism two_phase: prepared transactions.

An id is `delivered.<pipeline>.<sink>.<check>.<batch>.<shard>.<nonce>`, at most 191 of the 199 bytes that PostgreSQL
allows. Names may contain dots, so joined names of two sinks can be equal: the check, a hash of pipeline, sink and the
ledger's schema, distinguishes them. The nonce is new for each attempt: ids are never reused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres import PostgresOptions, target
from delivered.connectors.postgres.client import PostgresDatabase
from delivered.connectors.postgres.target import find
from delivered.contract.sink import OpenTransaction
from delivered.kits.sql.database import quoted
from delivered.kits.sql.ledger import SwappingLedger
from delivered.kits.sql.sink import Names, ServerCommitter, Shards, Staging, new_nonce, open_transaction
from delivered.kits.sql.table import missing_at_server, text_of
from delivered.ledger import Swap
from delivered.model.errors import Refused
from delivered.model.identity import Scope, Work

if TYPE_CHECKING:
    import psycopg

NO_SUCH_TRANSACTION = "42704"
"""SQLSTATE: no prepared transaction with this id: it was committed, rolled back, or never existed."""


def id_prefix(scope: Scope, ledger_schema: str) -> str:
    """Prefix of all ids of this pipeline and sink, in any incarnation, and of no others."""
    return f"{scope.prefix}{Names(scope, ledger_schema).check}."


def new_id(work: Work, ledger_schema: str) -> str:
    """A new, unique id."""
    return f"{id_prefix(work.scope, ledger_schema)}{work.batch}.{work.shard}.{new_nonce()}"


def is_ours(scope: Scope, ledger_schema: str, candidate: str) -> bool:
    """Whether an id belongs to a shard of this pipeline and sink."""
    prefix = id_prefix(scope, ledger_schema)
    return (
        candidate.startswith(prefix) and re.fullmatch(r"\d+\.\d+\.[0-9a-f]{16}", candidate[len(prefix) :]) is not None
    )


def open_transactions(
    connection: psycopg.Connection[Any], scope: Scope, options: PostgresOptions
) -> list[OpenTransaction]:
    """Every prepared transaction of this pipeline and sink in this database, oldest first. Raises psycopg.Error."""
    rows = connection.execute(
        "SELECT gid, (extract(epoch FROM prepared) * 1000)::bigint FROM pg_prepared_xacts "
        "WHERE database = current_database() AND starts_with(gid, %s) ORDER BY prepared, gid",
        [id_prefix(scope, options.ledger_schema)],
    ).fetchall()
    own = [(gid, prepared_ms) for gid, prepared_ms in rows if is_ours(scope, options.ledger_schema, gid)]
    return [open_transaction(gid, prepared_ms, options) for gid, prepared_ms in own]


def give_up_earlier(connection: psycopg.Connection[Any], work: Work, options: PostgresOptions) -> None:
    """Roll back transactions that earlier attempts of this shard left prepared: an upsert would wait for their locks.

    If the driver has decided one of them in the meantime, the shard is rewritten.
    """
    prefix = f"{id_prefix(work.scope, options.ledger_schema)}{work.batch}.{work.shard}."
    for transaction in open_transactions(connection, work.scope, options):
        if transaction.transactional_id.startswith(prefix):
            end(connection, transaction.transactional_id, commit=False)


def end(connection: psycopg.Connection[Any], gid: str, commit: bool) -> bool:
    """Commit or roll back a prepared transaction, from any session of this database. Raises psycopg.Error.

    Returns:
        False: no transaction is prepared under this id any more.
    """
    import psycopg
    from psycopg import sql

    verb = "COMMIT PREPARED {}" if commit else "ROLLBACK PREPARED {}"
    try:
        connection.execute(sql.SQL(verb).format(sql.Literal(gid)))
    except psycopg.Error as error:
        if error.sqlstate != NO_SUCH_TRANSACTION:
            raise
        return False
    return True


def build_committer(options: PostgresOptions, scope: Scope) -> ServerCommitter[psycopg.Connection[Any]]:
    """COMMIT PREPARED and ROLLBACK PREPARED, from any session of the database."""
    schema, names = options.ledger_schema, Names(scope, options.ledger_schema)

    def identity(connection: psycopg.Connection[Any]) -> str | None:
        found = target.find(connection, options)
        return None if found is None else str(found[0])

    staging = PostgresStaging(options, PostgresDatabase(options))
    shards = Shards(
        id_prefix(scope, schema),
        partial(is_ours, scope, schema),
        open=lambda connection: open_transactions(connection, scope, options),
        end=end,
        staged=lambda connection: staging_tables(connection, names),
        drop=staging.drop,
        identity=identity,
    )
    return ServerCommitter(staging.server, options, scope, shards)


def slots(connection: psycopg.Connection[Any], options: PostgresOptions) -> int:
    """Number of prepared transactions that the server allows.

    Raises:
        Refused: none.
        psycopg.Error: the server rejected it.
    """
    row = connection.execute("SELECT current_setting('max_prepared_transactions')::int").fetchone()
    if row is not None and row[0] > 0:
        return int(row[0])
    raise Refused("PREPARED_TRANSACTIONS_OFF.START", place=options.place)


# Mechanism one_transaction: tasks commit shards to staging tables, and the driver moves them.
#
# Upserts of any mechanism also use one, in the task's own transaction. Each attempt of a shard creates its own table,
# named `s_<check>_<batch>_<shard>_<nonce>` in the ledger's schema.
#
# All are logged tables: prepared rows must survive a server crash; and if the postmaster is killed while a transaction
# that created an unlogged table is open, the server may have to be started twice (docs/decisions/030).


class PostgresStaging(Staging):
    options: PostgresOptions
    drops = True

    def altered(self, connection: psycopg.Connection[Any], tables: Sequence[str]) -> Iterable[tuple[str, str, str]]:
        return connection.execute(
            """SELECT DISTINCT t.attname::text, format_type(s.atttypid, s.atttypmod),
                      format_type(t.atttypid, t.atttypmod)
               FROM unnest(%s::text[]) AS staged (name) JOIN pg_attribute s ON s.attrelid = to_regclass(staged.name)
               JOIN pg_attribute t ON t.attrelid = to_regclass(%s) AND t.attname = s.attname AND NOT t.attisdropped
               WHERE s.attnum > 0 AND (s.atttypid, s.atttypmod) <> (t.atttypid, t.atttypmod)""",
            [[self.full(name) for name in tables], text_of(self.options)],
        ).fetchall()

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


def build_store(options: PostgresOptions, scope: Scope) -> SwappingLedger[psycopg.Connection[Any]]:
    """The ledger of a pipeline and sink, in the database that holds the rows."""
    role = f"ledger {Names(scope, options.ledger_schema).check}"
    staging = PostgresStaging(options, PostgresDatabase(options))
    return SwappingLedger(PostgresDatabase(options), scope, staging, role)


def staging_tables(connection: psycopg.Connection[Any], names: Names) -> list[str]:
    """Every staging table of this pipeline and sink. Raises psycopg.Error."""
    rows = connection.execute(
        "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE nspname = %s AND starts_with(relname::text, %s) AND relkind = 'r'",
        [names.ledger_schema, names.staging_prefix],
    ).fetchall()
    return [name for (name,) in rows if names.is_staging(name)]

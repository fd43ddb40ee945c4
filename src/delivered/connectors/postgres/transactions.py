"""Mechanism two_phase: prepared transactions at the server.

An id is `delivered.<pipeline>.<sink>.<check>.<batch>.<shard>.<nonce>`, at most 191 of the 199 bytes that PostgreSQL
allows. Names may contain dots, so joined names of two sinks can be equal: the check, a hash of pipeline, sink and the
ledger's schema, distinguishes them. The nonce is new for each attempt: ids are never reused.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres import stage, target
from delivered.connectors.postgres.options import PostgresOptions
from delivered.kits.sql.committer import ServerCommitter, Shards
from delivered.kits.sql.transactions import Names, OpenTransaction, new_nonce
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


def listed(connection: psycopg.Connection[Any], scope: Scope, options: PostgresOptions) -> list[OpenTransaction]:
    """Every prepared transaction of this pipeline and sink in this database, oldest first. Raises psycopg.Error."""
    rows = connection.execute(
        "SELECT gid, (extract(epoch FROM prepared) * 1000)::bigint, owner, database FROM pg_prepared_xacts "
        "WHERE database = current_database() AND starts_with(gid, %s) ORDER BY prepared, gid",
        [id_prefix(scope, options.ledger_schema)],
    ).fetchall()
    found = []
    for gid, prepared_ms, user, database in rows:
        if is_ours(scope, options.ledger_schema, gid):
            batch, shard = gid.rsplit(".", 3)[1:3]
            found.append(
                OpenTransaction(gid, int(batch), int(shard), prepared_ms, (options.table_text,), user, database)
            )
    return found


def give_up_earlier(connection: psycopg.Connection[Any], work: Work, options: PostgresOptions) -> None:
    """Roll back transactions that earlier attempts of this shard left prepared: an upsert would wait for their locks.

    If the driver has decided one of them in the meantime, the shard is rewritten.
    """
    prefix = f"{id_prefix(work.scope, options.ledger_schema)}{work.batch}.{work.shard}."
    for transaction in listed(connection, work.scope, options):
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

    staging = stage.build_staging(options)
    shards = Shards(
        id_prefix(scope, schema),
        partial(is_ours, scope, schema),
        open=lambda connection: listed(connection, scope, options),
        end=end,
        staged=lambda connection: stage.listed(connection, names),
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
    raise Refused(
        "PREPARED_TRANSACTIONS_OFF",
        f"PostgreSQL at {options.place} has max_prepared_transactions = 0, its default, so it does not support the "
        "prepared transactions of mechanism two_phase.",
        next_step="set it in postgresql.conf to at least twice the number of shards and restart the server, or write "
        '.option("mechanism", "one_transaction"), which needs no setting',
    )

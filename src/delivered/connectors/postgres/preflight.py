"""Whether this server, this table and this user can keep the promise. Changes nothing but the ledger's own tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres import target
from delivered.connectors.postgres.client import connect, explained
from delivered.connectors.postgres.migrate import migrate
from delivered.connectors.postgres.options import Mechanism, PostgresOptions
from delivered.connectors.postgres.transactions import OLD_S, slots
from delivered.contract import Finding
from delivered.model.errors import DeliveredError
from delivered.model.guarantee import Guarantee

if TYPE_CHECKING:
    import psycopg

SLOTS_WANTED = 32
"""Free slots for prepared transactions below which the number is printed: a batch needs one for each shard."""


def preflight(options: PostgresOptions, guarantee: Guarantee) -> list[Finding]:
    """Ask the server. Findings that refuse come last: what is behind them could not be asked."""
    import psycopg

    findings: list[Finding] = []
    try:
        connection = connect(options, "preflight")
        try:
            findings.extend(_look(connection, options, guarantee))
        except psycopg.Error as error:
            raise explained(error, options) from error
        finally:
            connection.close()
    except DeliveredError as error:
        findings.append(Finding(error.code.removeprefix("DELIVERED_"), error.message, True, error.next_step))
    return findings


def _look(connection: psycopg.Connection[Any], options: PostgresOptions, guarantee: Guarantee) -> Iterator[Finding]:
    row = connection.execute(
        "SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', current_setting('fsync') = 'off'"
    ).fetchone()
    replica, read_only, unsafe = row or (False, False, False)
    if replica or read_only:
        what = "is a replica that only reads" if replica else "takes no changes (default_transaction_read_only)"
        yield Finding(
            "READ_ONLY", f"PostgreSQL at {options.place} {what}.", True, "point the url at the primary server"
        )
        return
    if unsafe and guarantee is not Guarantee.AT_MOST_ONCE:
        yield Finding(
            "FSYNC_OFF",
            f"PostgreSQL at {options.place} runs with fsync = off: what it calls durable, a crash of its machine can "
            "take away.",
            False,
            "set fsync = on",
        )
    if guarantee is Guarantee.EXACTLY_ONCE and options.mechanism is Mechanism.TWO_PHASE:
        yield from _prepared(connection, options, slots(connection, options))
    migrate(connection, options.ledger_schema)
    yield from _table(connection, options, guarantee)


def _prepared(connection: psycopg.Connection[Any], options: PostgresOptions, allowed: int) -> Iterator[Finding]:
    row = connection.execute(
        "SELECT count(*), coalesce(max(extract(epoch FROM now() - prepared)), 0)::float8 FROM pg_prepared_xacts"
    ).fetchone()
    used, oldest_s = row or (0, 0.0)
    if allowed - used <= 0:
        yield Finding(
            "PREPARED_TRANSACTIONS_FULL",
            f"All {allowed} prepared transactions that PostgreSQL at {options.place} allows are in use; the oldest is "
            f"{oldest_s:.0f} s old.",
            True,
            "see whose they are: SELECT * FROM pg_prepared_xacts; raise max_prepared_transactions",
        )
    elif allowed - used < SLOTS_WANTED:
        yield Finding(
            "PREPARED_TRANSACTIONS_FEW",
            f"PostgreSQL at {options.place} allows {allowed} prepared transactions, {used} are in use: a batch has "
            f"at most {allowed - used} shards, half of that if tasks are tried again.",
            False,
            "raise max_prepared_transactions, or write with fewer partitions",
        )
    if oldest_s > OLD_S:
        yield Finding(
            "PREPARED_TRANSACTION_OLD",
            f"A prepared transaction at {options.place} is {oldest_s / 3600:.1f} hours old: it holds its locks and "
            "keeps VACUUM from cleaning up until somebody ends it.",
            False,
            "see whose it is: SELECT * FROM pg_prepared_xacts ORDER BY prepared; those of this pipeline are ended by "
            "its next start",
        )


def _table(connection: psycopg.Connection[Any], options: PostgresOptions, guarantee: Guarantee) -> Iterator[Finding]:
    found = target.find(connection, options)
    if found is None:
        if not options.create:
            raise target.missing_table(options)
        return
    row = connection.execute(
        "SELECT relkind, relpersistence, has_table_privilege(oid, 'INSERT'), has_table_privilege(oid, 'SELECT') "
        "FROM pg_class WHERE oid = %s",
        [found[0]],
    ).fetchone()
    kind, persistence, may_insert, may_read = row or ("r", "p", True, True)
    staged = guarantee is Guarantee.EXACTLY_ONCE and options.mechanism is Mechanism.ONE_TRANSACTION
    if kind not in ("r", "p"):
        yield Finding(
            "NOT_A_TABLE", f"{options.table_text!r} at {options.place} is a view, not a table.", True, "name a table"
        )
    elif not may_insert or (staged and not may_read):
        right = "INSERT" if not may_insert else "SELECT"
        user = connection.info.user
        yield Finding(
            "PERMISSION",
            f"User {user!r} has no right to {right} on {options.table_text!r} at {options.place}.",
            True,
            f"GRANT SELECT, INSERT ON {options.table_text} TO {user}",
        )
    elif persistence == "u" and guarantee is not Guarantee.AT_MOST_ONCE:
        yield Finding(
            "TABLE_UNLOGGED",
            f"Table {options.table_text!r} at {options.place} is unlogged: a crash of the server empties it.",
            True,
            f"ALTER TABLE {options.table_text} SET LOGGED",
        )

"""Checks whether server, table and user support the guarantee. Changes only the ledger's own tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres import target
from delivered.connectors.postgres.committer import slots
from delivered.connectors.postgres.sink import PostgresOptions
from delivered.connectors.postgres.target import migrate
from delivered.contract.finding import Finding
from delivered.kits.sql.merge import check_rules, findings, no_unique_index
from delivered.kits.sql.options import Mechanism
from delivered.kits.sql.table import missing_at_server, permission
from delivered.kits.sql.transactions import check_deletions
from delivered.model.guarantee import Guarantee
from delivered.model.limits import OPEN_TRANSACTION_OLD_S

if TYPE_CHECKING:
    import psycopg

SLOTS_WANTED = 32
"""Report the number of free slots for prepared transactions below this: a batch needs one per shard."""


def look(connection: psycopg.Connection[Any], options: PostgresOptions, guarantee: Guarantee) -> Iterator[Finding]:
    row = connection.execute(
        "SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', current_setting('fsync') = 'off'"
    ).fetchone()
    replica, read_only, unsafe = row or (False, False, False)
    if replica or read_only:
        what = "is a read-only replica" if replica else "is read-only (default_transaction_read_only)"
        yield Finding(
            "READ_ONLY", f"PostgreSQL at {options.place} {what}.", True, "point the url at the primary server"
        )
        return
    if unsafe and guarantee is not Guarantee.AT_MOST_ONCE:
        yield Finding(
            "FSYNC_OFF",
            f"PostgreSQL at {options.place} runs with fsync = off: a crash of its machine can lose committed "
            "transactions.",
            False,
            "set fsync = on",
        )
    if guarantee is not Guarantee.AT_MOST_ONCE:
        yield from _standbys(connection, options)
    if guarantee is Guarantee.EXACTLY_ONCE and options.mechanism is Mechanism.TWO_PHASE:
        yield from _prepared(connection, options, slots(connection, options))
        yield from check_deletions(options)
    migrate(connection, options.ledger_schema)
    yield from _table(connection, options, guarantee)


def _standbys(connection: psycopg.Connection[Any], options: PostgresOptions) -> Iterator[Finding]:
    """Whether a fail-over can lose a decision, and whether a decision would wait for a standby that is down.

    Names and states are shown to superusers and members of pg_read_all_stats alone; others see how many there are.
    """
    row = connection.execute(
        "SELECT current_setting('synchronous_standby_names'), count(*), "
        "count(*) FILTER (WHERE coalesce(sync_state, 'sync') IN ('sync', 'quorum')), string_agg(application_name, ', ')"
        " FROM pg_stat_replication AS r WHERE coalesce(state, '') <> 'backup' AND NOT EXISTS "
        "(SELECT FROM pg_replication_slots AS s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')"
    ).fetchone()
    wanted, there, synchronous, names = row or ("", 0, 0, None)
    if not wanted and there:
        yield Finding(
            "STANDBY_ASYNCHRONOUS",
            f"PostgreSQL at {options.place} has {there} standby(s){f' ({names})' if names else ''}, none of them "
            "synchronous: a fail-over can lose the last decided batches. The next start then stops (LEDGER_BEHIND) "
            "and says how to write them again.",
            False,
            "set synchronous_standby_names, for example to 'ANY 1 (*)', and reload the configuration",
        )
    elif wanted and not synchronous:
        yield Finding(
            "STANDBY_MISSING",
            f"PostgreSQL at {options.place} has synchronous_standby_names = '{wanted}', but no such standby is "
            "connected: every commit waits for it.",
            False,
            "start the standby, or take it out of synchronous_standby_names and reload the configuration",
        )


def _prepared(connection: psycopg.Connection[Any], options: PostgresOptions, allowed: int) -> Iterator[Finding]:
    row = connection.execute(
        "SELECT count(*), coalesce(max(extract(epoch FROM now() - prepared)), 0)::float8 FROM pg_prepared_xacts"
    ).fetchone()
    used, oldest_s = row or (0, 0.0)
    if allowed - used <= 0:
        yield Finding(
            "PREPARED_TRANSACTIONS_FULL",
            f"PostgreSQL at {options.place} allows {allowed} prepared transactions, and all are in use; the oldest is "
            f"{oldest_s:.0f} s old.",
            True,
            "find their owners: SELECT * FROM pg_prepared_xacts; raise max_prepared_transactions",
        )
    elif allowed - used < SLOTS_WANTED:
        yield Finding(
            "PREPARED_TRANSACTIONS_FEW",
            f"PostgreSQL at {options.place} allows {allowed} prepared transactions, and {used} are in use: a batch can "
            f"have at most {allowed - used} shards, or half of that if tasks are retried.",
            False,
            "raise max_prepared_transactions, or write with fewer partitions",
        )
    if oldest_s > OPEN_TRANSACTION_OLD_S:
        yield Finding(
            "PREPARED_TRANSACTION_OLD",
            f"A prepared transaction at {options.place} is {oldest_s / 3600:.1f} hours old: it holds locks and blocks "
            "VACUUM until it is ended.",
            False,
            "find its owner: SELECT * FROM pg_prepared_xacts ORDER BY prepared; the next start of a pipeline ends its "
            "own",
        )


def _table(connection: psycopg.Connection[Any], options: PostgresOptions, guarantee: Guarantee) -> Iterator[Finding]:
    found = target.find(connection, options)
    if found is None:
        if not options.create:
            raise missing_at_server(options)
        yield from _may_create(connection, options)
        return
    target.check_kind(options, found[2])
    row = connection.execute("SELECT relpersistence FROM pg_class WHERE oid = %s", [found[0]]).fetchone()
    denied = _denied(connection, options, guarantee, found[0])
    if denied:
        user = connection.info.user
        yield permission(options, user, denied, options.table_text)
    elif options.write.upserts and not target.has_unique_index(connection, found[0], options.write.keys):
        raise no_unique_index(options.write, options.table_text, options.where)
    elif row is not None and row[0] == "u" and guarantee is not Guarantee.AT_MOST_ONCE:
        yield Finding(
            "TABLE_UNLOGGED",
            f"Table {options.table_text!r} at {options.place} is unlogged: a crash of the server empties it.",
            True,
            f"ALTER TABLE {options.table_text} SET LOGGED",
        )
    copies = not options.write.merges and not _staged(options, guarantee)
    known = target.read_definition(connection, options, copies=copies)
    yield from findings(options, known, loads=copies)
    check_rules(options, known)


def _staged(options: PostgresOptions, guarantee: Guarantee) -> bool:
    """Whether rows reach the table by INSERT, from staging tables."""
    return guarantee is Guarantee.EXACTLY_ONCE and options.mechanism is Mechanism.ONE_TRANSACTION


def _may_create(connection: psycopg.Connection[Any], options: PostgresOptions) -> Iterator[Finding]:
    """Whether the missing table can be created with the first rows."""
    schema, user = options.schema or "public", connection.info.user
    row = connection.execute(
        "SELECT nspname, has_schema_privilege(oid, 'CREATE') FROM pg_namespace "
        "WHERE nspname = coalesce(%s, current_schema())",
        [options.schema],
    ).fetchone()
    if row is None:
        yield Finding(
            "SCHEMA_MISSING",
            f"The schema {schema!r} for {options.table_text!r} does not exist at {options.place}.",
            True,
            f"CREATE SCHEMA {schema}, or correct the option dbtable",
        )
    elif not row[1]:
        yield Finding(
            "PERMISSION",
            f"User {user!r} lacks the privilege to create {options.table_text!r} in schema {row[0]!r} at "
            f"{options.place}.",
            True,
            f"GRANT CREATE ON SCHEMA {row[0]} TO {user}, or create the table",
        )


def _denied(
    connection: psycopg.Connection[Any], options: PostgresOptions, guarantee: Guarantee, relation: int
) -> list[str]:
    """Privileges on the table that this user lacks."""
    needed = ["INSERT"]
    if _staged(options, guarantee) or options.write.merges:  # a staging table takes its columns from the target
        needed.append("SELECT")
    if options.write.upserts and not options.write.insert:
        needed.append("UPDATE")
    if options.write.delete is not None:
        needed.append("DELETE")
    rows = connection.execute(
        "SELECT wanted FROM unnest(%s::text[]) AS wanted WHERE NOT has_table_privilege(%s::oid, wanted)",
        [needed, relation],
    ).fetchall()
    return [right for (right,) in rows]

"""Checks whether server, table and user support the guarantee. Changes only the ledger's own tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres import position, target
from delivered.connectors.postgres.committer import slots
from delivered.connectors.postgres.sink import PostgresOptions
from delivered.connectors.postgres.target import migrate
from delivered.contract.source import Finding
from delivered.kits.sql.merge import findings, no_unique_index
from delivered.kits.sql.sink import check_deletions, check_rules
from delivered.kits.sql.table import Mechanism, check_column, missing_at_server, permission
from delivered.model.capability import Guarantee
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
        yield Finding.build("READ_ONLY.POSTGRES_START", refuses=True, place=options.place, what=what)
        return
    if unsafe and guarantee is not Guarantee.AT_MOST_ONCE:
        yield Finding.build("FSYNC_OFF", refuses=False, place=options.place)
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
        yield Finding.build(
            "STANDBY_ASYNCHRONOUS.POSTGRES",
            refuses=False,
            place=options.place,
            standbys=there,
            names=f" ({names})" if names else "",
        )
    elif wanted and not synchronous:
        yield Finding.build("STANDBY_MISSING", refuses=False, place=options.place, wanted=wanted)


def _prepared(connection: psycopg.Connection[Any], options: PostgresOptions, allowed: int) -> Iterator[Finding]:
    row = connection.execute(
        "SELECT count(*), coalesce(max(extract(epoch FROM now() - prepared)), 0)::float8 FROM pg_prepared_xacts"
    ).fetchone()
    used, oldest_s = row or (0, 0.0)
    if allowed - used <= 0:
        yield Finding.build(
            "PREPARED_TRANSACTIONS_FULL.START", refuses=True, place=options.place, allowed=allowed, oldest_s=oldest_s
        )
    elif allowed - used < SLOTS_WANTED:
        yield Finding.build(
            "PREPARED_TRANSACTIONS_FEW",
            refuses=False,
            place=options.place,
            allowed=allowed,
            used=used,
            free=allowed - used,
        )
    if oldest_s > OPEN_TRANSACTION_OLD_S:
        yield Finding.build(
            "PREPARED_TRANSACTION_OLD.POSTGRES", refuses=False, place=options.place, hours=oldest_s / 3600
        )


def _table(connection: psycopg.Connection[Any], options: PostgresOptions, guarantee: Guarantee) -> Iterator[Finding]:
    found = target.find(connection, options)
    if found is None:
        if not options.create:
            tables = connection.execute(
                "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
                "WHERE relkind IN ('r', 'p') AND nspname <> %s AND left(nspname, 3) <> 'pg_' "
                "AND CASE WHEN %s::text IS NULL THEN pg_table_is_visible(c.oid) ELSE nspname = %s END LIMIT 10000",
                [options.ledger_schema, options.schema, options.schema],
            )
            raise missing_at_server(options, [str(name) for (name,) in tables])
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
        yield Finding.build("TABLE_UNLOGGED", refuses=True, table=options.table_text, place=options.place)
    relation = found[0]
    indexed = partial(target.starts_index, connection, relation)
    yield from check_column(options, target.table_columns(connection, relation), indexed)
    yield from position.findings(connection, options, relation)
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
        yield Finding.build(
            "SCHEMA_MISSING.NAMESPACE", refuses=True, schema=schema, table=options.table_text, place=options.place
        )
    elif not row[1]:
        yield Finding.build(
            "PERMISSION.CREATE", refuses=True, user=user, table=options.table_text, schema=row[0], place=options.place
        )


def _denied(
    connection: psycopg.Connection[Any], options: PostgresOptions, guarantee: Guarantee, relation: int
) -> list[str]:
    """Privileges on the table that this user lacks."""
    needed = ["INSERT"]
    if _staged(options, guarantee) or options.write.merges or options.batch_column is not None:
        # A staging table takes its columns from the target; the newest batch in it is looked up.
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

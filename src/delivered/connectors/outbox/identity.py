"""Whether PostgreSQL's log can identify the rows of a table, and of each partition, that a change stream publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivered.connectors.outbox.options import OWNER, OutboxOptions
from delivered.model.errors import Refused
from delivered.patterns.caller import quoted

if TYPE_CHECKING:
    import psycopg

_TABLES = """
SELECT c.oid::regclass::text,
       c.relkind = 'p',
       c.relreplident::text,
       CASE WHEN c.relkind = 'f' THEN 'foreign' WHEN c.relpersistence <> 'p' THEN 'unlogged' END,
       ARRAY(SELECT a.attname::text FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid
             AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
             WHERE i.indrelid = c.oid AND i.indisprimary ORDER BY a.attname),
       EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary AND indimmediate AND indisvalid),
       EXISTS (SELECT FROM pg_index i JOIN pg_index k ON k.indrelid = c.oid AND k.indisprimary
               WHERE i.indrelid = c.oid AND i.indisreplident AND i.indisvalid
               AND (k.indkey::int2[])[0:k.indnkeyatts - 1] <@ (i.indkey::int2[])[0:i.indnkeyatts - 1])
FROM pg_class c
WHERE c.oid = to_regclass(%(table)s) AND c.relkind IN ('r', 'p')
   OR c.oid IN (SELECT relid FROM pg_partition_tree(to_regclass(%(table)s))
    WHERE isleaf AND relid <> to_regclass(%(table)s))
ORDER BY c.oid <> to_regclass(%(table)s), 1
"""
"""The table first, then its partitions that have rows."""


def check_identity(connection: psycopg.Connection[Any], options: OutboxOptions, *, published: bool = False) -> None:
    """Check it before a publication is made: publishing updates that the log cannot identify makes the application's
    own UPDATE and DELETE fail. And again later: keys and identities are dropped and altered.

    Args:
        published: the publication is there.

    Raises:
        Refused: names the table or partition, and what it lacks.
    """
    keys, tables = _described(connection, options)
    for name, has_no_rows, *facts in tables:
        lacks = None if has_no_rows else _lacks(keys, *facts)
        if lacks is not None:
            of = "" if name == options.table else f" (of {options.table})"
            raise Refused(
                "OUTBOX_IDENTITY",
                f"{OWNER}: {name}{of} {lacks[0]}. "
                + (
                    "Its UPDATE and DELETE fail while published, or the log does not say which rows they changed."
                    if published
                    else "A publication of its changes would make UPDATE and DELETE of the application fail, or a copy "
                    "keep rows that were deleted. Nothing was created."
                ),
                next_step=f"in the database: {lacks[1].format(name)}; then start the pipeline again"
                + (", which goes on where it stood" if published else ""),
            )


def keys_of(connection: psycopg.Connection[Any], options: OutboxOptions) -> tuple[str, ...]:
    """Columns of the primary key: the table's, else that which its partitions have; none: there is none."""
    return tuple(_described(connection, options)[0])


def _described(connection: psycopg.Connection[Any], options: OutboxOptions) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The key, and the rows of `_TABLES`."""
    tables = connection.execute(_TABLES, {"table": quoted("postgres", options.table)}).fetchall()
    return next((key for _, _, _, _, key, *_ in tables if key), []), tables


def _lacks(
    keys: list[str], identity: str, unlogged: str | None, key: list[str], key_usable: bool, index_usable: bool
) -> tuple[str, str] | None:
    """What is missing, and what to do; None: nothing."""
    if unlogged is not None:
        return (
            f"is {'a foreign table' if unlogged == 'foreign' else 'not logged'}, and its changes are not in the log",
            "ALTER TABLE {} SET LOGGED" if unlogged != "foreign" else "detach {}, or read it by other means",
        )
    if not key:
        return "has no primary key, by which a sink finds the row of a change", "ALTER TABLE {} ADD PRIMARY KEY (...)"
    if key != keys:
        return (
            f"has the primary key ({', '.join(key)}), where another one has ({', '.join(keys)}): a sink has one key",
            f"give {{}} the primary key ({', '.join(keys)})",
        )
    if identity == "n":
        return "has REPLICA IDENTITY NOTHING", "ALTER TABLE {} REPLICA IDENTITY DEFAULT"
    if identity == "d" and not key_usable:
        return (
            "has a deferrable primary key, which is no replica identity",
            "ALTER TABLE {} REPLICA IDENTITY FULL, or make its primary key NOT DEFERRABLE",
        )
    if identity == "i" and not index_usable:
        return (
            "has REPLICA IDENTITY USING INDEX, and that index lacks columns of the primary key, or was dropped",
            "ALTER TABLE {} REPLICA IDENTITY DEFAULT",
        )
    return None

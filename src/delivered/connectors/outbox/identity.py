"""Whether PostgreSQL's log can identify the rows of a table, and of each partition, that a change stream publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivered.connectors.outbox.options import OWNER, OutboxOptions
from delivered.kits.caller import quoted
from delivered.model.errors import Refused

if TYPE_CHECKING:
    import psycopg

_TABLES = """
SELECT c.oid::regclass::text,
       c.relreplident::text,
       EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary),
       EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary AND indimmediate AND indisvalid),
       EXISTS (SELECT FROM pg_index i JOIN pg_index k ON k.indrelid = c.oid AND k.indisprimary
               WHERE i.indrelid = c.oid AND i.indisreplident AND i.indisvalid
               AND k.indkey::int2[] <@ i.indkey::int2[])
FROM pg_class c
WHERE c.oid = to_regclass(%(table)s) AND c.relkind = 'r'
   OR c.oid IN (SELECT relid FROM pg_partition_tree(to_regclass(%(table)s)) WHERE isleaf)
ORDER BY 1
"""


def check_identity(connection: psycopg.Connection[Any], options: OutboxOptions) -> None:
    """Check it before a publication is made: publishing updates that the log cannot identify makes the application's
    own UPDATE and DELETE fail.

    Raises:
        Refused: names the table or partition, and what it lacks.
    """
    rows = connection.execute(_TABLES, {"table": quoted("postgres", options.table)}).fetchall()
    for name, *facts in rows:
        lacks = _lacks(*facts)
        if lacks is not None:
            of = "" if name == options.table else f" (of {options.table})"
            raise Refused(
                "OUTBOX_IDENTITY",
                f"{OWNER}: {name}{of} {lacks[0]}. A publication of its changes would make UPDATE and DELETE of the "
                "application fail, or a copy keep rows that were deleted. Nothing was created.",
                next_step=f"in the database: {lacks[1].format(name)}; then start the pipeline again",
            )


def _lacks(identity: str, has_key: bool, key_usable: bool, index_usable: bool) -> tuple[str, str] | None:
    """What is missing, and what to do; None: nothing."""
    if not has_key:
        return "has no primary key, by which a sink finds the row of a change", "ALTER TABLE {} ADD PRIMARY KEY (...)"
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

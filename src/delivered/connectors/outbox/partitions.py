"""Partitions that a table got or lost: their rows come and go without a change in the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delivered.connectors.outbox.options import OutboxOptions
from delivered.patterns.caller import quoted

if TYPE_CHECKING:
    import psycopg

_LEAVES = """
SELECT relid::oid::bigint FROM pg_partition_tree(to_regclass(%s)) WHERE isleaf AND relid <> to_regclass(%s) ORDER BY 1
"""
_ATTACHED = """
SELECT oid::regclass::text, age, command FROM pg_class c, LATERAL (
  SELECT age(i.xmin), i.cmin::text::bigint AS command FROM pg_inherits i
  WHERE i.inhrelid IN (SELECT pg_partition_ancestors(c.oid)) ORDER BY 1, 2 DESC LIMIT 1) AS last
WHERE c.oid = %s
"""


def leaves(connection: psycopg.Connection[Any], options: OutboxOptions) -> list[int]:
    """Oids of the partitions that have rows; none: the table is not partitioned."""
    name = quoted("postgres", options.table)
    return [oid for (oid,) in connection.execute(_LEAVES, [name, name]).fetchall()]


def differences(connection: psycopg.Connection[Any], known: Sequence[int], now: Sequence[int]) -> list[str]:
    """What brought or took rows, in words. A new partition that was empty when it became one is no difference."""
    found = []
    for oid in sorted(set(known) - set(now)):
        row = connection.execute("SELECT oid::regclass::text FROM pg_class WHERE oid = %s", [oid]).fetchone()
        found.append(f"the partition {row[0]} was detached" if row else f"a partition (oid {oid}) was dropped")
    for oid in sorted(set(now) - set(known)):
        row = connection.execute(_ATTACHED, [oid]).fetchone()
        if row is not None and _brought(connection, *row):
            found.append(f"the partition {row[0]} was attached with rows")
    return found


def _brought(connection: psycopg.Connection[Any], name: str, age: int, command: int) -> bool:
    """Whether it has rows that were written before it was attached."""
    row = connection.execute(
        f"SELECT EXISTS (SELECT FROM ONLY {name} WHERE age(xmin) > %s OR age(xmin) = %s AND cmin::text::bigint < %s)",
        [age, age, command],
    ).fetchone()
    return bool(row is None or row[0])

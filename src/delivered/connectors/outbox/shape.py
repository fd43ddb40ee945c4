"""A table as PostgreSQL's log describes it: columns, what identifies its rows, partitions, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from delivered.connectors.outbox import OutboxOptions
from delivered.connectors.outbox.pgoutput import Relation
from delivered.model.errors import Refused
from delivered.patterns.caller import quoted

if TYPE_CHECKING:
    import psycopg


# The columns of a table as PostgreSQL's log gives them with its rows, and what differs between two of them.
#
# A row in the log has the columns that the table had when it was written, whatever the table has by now. So a batch of
# a change stream has rows of one shape, except that columns may be added to it: a row from before has null there, as in
# the table.

Column = tuple[str, int, int, bool]
"""Name, oid of its type, modifier of the type, and whether it belongs to the replica identity."""
Shape = tuple[Column, ...]


def build_shape(relation: Relation) -> Shape:
    return tuple(zip(relation.columns, relation.types, relation.modifiers, relation.keys, strict=True))


def restored(value: Sequence[Sequence[Any]] | None) -> Shape | None:
    """From offsets, as JSON; None: no row was read yet, or by a release that did not keep it."""
    return None if value is None else tuple((str(n), int(t), int(m), bool(k)) for n, t, m, k in value)


def names(shape: Shape) -> tuple[str, ...]:
    return tuple(column[0] for column in shape)


def added(before: Shape, after: Shape) -> frozenset[str] | None:
    """Columns that `after` has more, if nothing else differs; None: something does."""
    more = frozenset(names(after)) - frozenset(names(before))
    return more if tuple(c for c in after if c[0] not in more) == before else None


def differences(before: Shape, after: Shape, type_name: Callable[[int, int], str]) -> list[str]:
    """What changed, in words: "the column name was renamed to title".

    Args:
        type_name: oid and modifier of a type -> its name.
    """
    old, new = {c[0]: c for c in before}, {c[0]: c for c in after}
    lost, more = [n for n in old if n not in new], [n for n in new if n not in old]
    texts = []
    for name in list(lost):
        at = names(before).index(name)
        if len(before) == len(after) and after[at][0] in more and after[at][1:3] == before[at][1:3]:
            texts.append(f"the column {name} was renamed to {after[at][0]}")
            lost.remove(name)
            more.remove(after[at][0])
    texts += [f"the column {name} was dropped" for name in lost]
    texts += [f"the column {name} was added" for name in more]
    for name in set(old) & set(new):
        if old[name][1:3] != new[name][1:3]:
            types = " to ".join(type_name(*c[1:3]) for c in (old[name], new[name]))
            texts.append(f"the type of the column {name} changed from {types}")
    identities = [", ".join(c[0] for c in shape if c[3]) or "nothing" for shape in (before, after)]
    if identities[0] != identities[1] and {c[0] for c in before if c[3]} - set(lost) != {c[0] for c in after if c[3]}:
        texts.append(f"the replica identity changed from {identities[0]} to {identities[1]}")
    return texts or ["the order of the columns changed"]


# Whether PostgreSQL's log can identify the rows of a table, and of each partition, that a change stream publishes.

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
                "OUTBOX_IDENTITY.PUBLISHED" if published else "OUTBOX_IDENTITY.UNPUBLISHED",
                name=name,
                of_table=of,
                reason=lacks[0],
                statement=lacks[1].format(name),
            )


def find_keys(connection: psycopg.Connection[Any], options: OutboxOptions) -> tuple[str, ...]:
    """Columns of the primary key: the table's, else that which its partitions have; none: there is none."""
    return tuple(_described(connection, options)[0])


def _described(connection: psycopg.Connection[Any], options: OutboxOptions) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The key, and the rows of `_TABLES`."""
    tables = connection.execute(_TABLES, {"table": quoted("postgres", options.table)}).fetchall()
    return next((key for _, _, _, _, key, *_ in tables if key), []), tables


def _lacks(
    keys: list[str], identity: str, unlogged: str | None, key: list[str], key_usable: bool, index_usable: bool
) -> tuple[str, str] | None:
    """What is missing, and how to add it; None: nothing."""
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


# Partitions that a table got or lost: their rows come and go without a change in the log.

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


def partition_differences(connection: psycopg.Connection[Any], known: Sequence[int], now: Sequence[int]) -> list[str]:
    """What brought or took rows, in words. A new partition that was empty when it became one is no difference."""
    texts = []
    for oid in sorted(set(known) - set(now)):
        row = connection.execute("SELECT oid::regclass::text FROM pg_class WHERE oid = %s", [oid]).fetchone()
        texts.append(f"the partition {row[0]} was detached" if row else f"a partition (oid {oid}) was dropped")
    for oid in sorted(set(now) - set(known)):
        row = connection.execute(_ATTACHED, [oid]).fetchone()
        if row is not None and _brought(connection, *row):
            texts.append(f"the partition {row[0]} was attached with rows")
    return texts


def _brought(connection: psycopg.Connection[Any], name: str, age: int, command: int) -> bool:
    """Whether it has rows that were written before it was attached."""
    row = connection.execute(
        f"SELECT EXISTS (SELECT FROM ONLY {name} WHERE age(xmin) > %s OR age(xmin) = %s AND cmin::text::bigint < %s)",
        [age, age, command],
    ).fetchone()
    return bool(row is None or row[0])

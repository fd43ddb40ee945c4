"""Positions in a table by the transactions that wrote its rows: no column is needed, and VACUUM keeps them.

A position is a snapshot, as `pg_current_snapshot` gives it: transactions that it shows lie before it, others behind.
Each row has the number of its transaction in `xmin`, which freezing keeps; 32 of its 64 bits. So positions are given
until the server has used 2^32 numbers, and hold for 2^31 further ones.

The server's snapshot lacks subtransactions (savepoints, exception blocks), whose numbers rows have too: `_SNAPSHOT`
adds those in progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from delivered.connectors.postgres import target
from delivered.connectors.postgres.sink import PostgresOptions
from delivered.contract.sink import Changes
from delivered.contract.source import Finding, Offsets
from delivered.kits.sql.database import quoted
from delivered.kits.sql.table import RowSum, difference, spread

if TYPE_CHECKING:
    import psycopg

NUMBERS = 2**32
"""Of transactions, before `xmin` repeats them."""
APART_MAX = 2**31 - 2**20
"""Transactions since a position, for which it holds; short of the server's own limit, like its warnings."""
OPEN_MAX = 5_000_000
"""Transactions since the oldest one in progress, of which each is asked for; about 1 us each."""
HASHED_BYTES_MAX = 128 << 20
"""Size of a table of which all rows are hashed; of a larger one, `SAMPLES` ranges of pages (1 s), at least one of each
partition."""
COUNTED_BYTES_MAX = 512 << 20
"""Size of a table of which all rows are counted."""
SAMPLES, SAMPLE_PAGES = 100, 16

_CLUSTER = "SELECT system_identifier::text, (SELECT timeline_id FROM pg_control_checkpoint()) FROM pg_control_system()"
_SNAPSHOT = (
    "WITH now AS MATERIALIZED (SELECT pg_current_snapshot() AS s), bounds AS (SELECT s, "
    "pg_snapshot_xmin(s)::text::bigint AS low, pg_snapshot_xmax(s)::text::bigint AS high FROM now) "
    "SELECT low, high, ARRAY(SELECT x FROM (SELECT pg_snapshot_xip(s)::text::bigint AS x UNION "
    "SELECT x FROM generate_series(low, high - 1) x WHERE high - low <= %s AND "
    "pg_xact_status(x::text::xid8) = 'in progress') open ORDER BY x) FROM bounds"
)
_NOW = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
_XID = f"({_NOW} - (({_NOW} - xmin::text::bigint) & 4294967295))::text::xid8"
"""The transaction that wrote a row, with all of its bits."""
_RELATIONS = (
    "SELECT n.nspname, c.relname, pg_relation_size(c.oid), "
    "pg_relation_size(c.oid) / current_setting('block_size')::int, pg_relation_filenode(c.oid)::bigint, "
    "pg_stat_get_tuples_inserted(c.oid), pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid) "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s AND relkind = 'r' "
    "OR c.oid IN (SELECT relid FROM pg_partition_tree(%(oid)s::oid) WHERE isleaf) ORDER BY c.oid"
)


class Relation(NamedTuple):
    """A table, or a partition that holds rows.

    Attributes:
        name: quoted for SQL.
        inserted, changed: rows so far, by the server's statistics.
    """

    name: str
    bytes: int
    pages: int
    filenode: int
    inserted: int
    changed: int


def relations(connection: psycopg.Connection[Any], oid: int) -> list[Relation]:
    """Raises psycopg.Error."""
    rows = connection.execute(_RELATIONS, {"oid": oid}).fetchall()
    return [Relation(f"{quoted(schema)}.{quoted(name)}", *facts) for schema, name, *facts in rows]


def take(connection: psycopg.Connection[Any], options: PostgresOptions) -> Offsets | None:
    """The position now. None: there is no table, or transaction numbers do not show it.

    Raises psycopg.Error.
    """
    found = target.find(connection, options)
    if found is None:
        return None
    low, high, in_progress = _one(connection, _SNAPSHOT, [OPEN_MAX])
    if high >= NUMBERS or high - low > OPEN_MAX:
        return None
    cluster, _ = _one(connection, _CLUSTER)
    snapshot = f"{low}:{high}:{','.join(map(str, in_progress))}"
    return {"snapshot": snapshot, "table": found[0], "cluster": cluster}


def broken(connection: psycopg.Connection[Any], position: Offsets) -> str:
    """Why a position no longer divides the rows of its table; empty: it does. Raises psycopg.Error."""
    cluster, _ = _one(connection, _CLUSTER)
    if cluster != position["cluster"]:
        return "the table is at another server now: it was restored from a dump, or upgraded"
    (now,) = _one(connection, f"SELECT {_NOW}")
    if now >= NUMBERS:
        return "the server has used all numbers of transactions once, and rows that it froze long ago look new"
    if now - lowest(position) > APART_MAX:
        return f"{now - lowest(position):,} transactions lie between, and they are compared within {APART_MAX:,}"
    return ""


def findings(connection: psycopg.Connection[Any], options: PostgresOptions, oid: int) -> Iterator[Finding]:
    """What audits of a table cost, for the plan. Raises psycopg.Error."""
    if not options.write.only_adds or options.batch_column is not None:
        return
    (now,) = _one(connection, f"SELECT {_NOW}")
    size = sum(r.bytes for r in relations(connection, oid))
    if now >= NUMBERS:
        yield Finding.build("AUDIT_READS_ALL.POSTGRES", refuses=False, table=options.table_text, transactions=now)
    elif size > COUNTED_BYTES_MAX:
        yield Finding.build("AUDIT_SCANS", refuses=False, table=options.table_text, mib=size >> 20)


def lowest(position: Offsets) -> int:
    return int(position["snapshot"].partition(":")[0])


def behind(position: Offsets) -> str:
    """SQL for rows that lie at or behind a position. The comparison of ages is cheap, and skips most others."""
    low = lowest(position) % NUMBERS
    return f"age(xmin) <= age('{low}'::xid) AND NOT {before(position)}"


def before(position: Offsets) -> str:
    """SQL for rows that lie before a position."""
    return f"pg_visible_in_snapshot({_XID}, '{position['snapshot']}'::pg_snapshot)"


def kept(
    connection: psycopg.Connection[Any],
    options: PostgresOptions,
    columns: Sequence[str],
    position: Offsets,
    known: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Facts about the rows before a position. Raises psycopg.Error. Args: known: compute these facts again."""
    found = target.find(connection, options)
    there = [] if found is None else relations(connection, found[0])
    size, pages = sum(r.bytes for r in there), sum(r.pages for r in there)
    _, timeline = _one(connection, _CLUSTER)
    facts: dict[str, Any] = {"columns": list(columns), "timeline": timeline, "relations": {}}
    for relation in there:
        one = None if known is None else known["relations"].get(relation.name)
        if one is not None:
            counted, ranges = one["rows"] is not None, one["ranges"]
        elif known is not None:  # attached or created since
            counted, ranges = relation.bytes <= COUNTED_BYTES_MAX, []
        else:
            counted, ranges = size <= COUNTED_BYTES_MAX, None
            if size > HASHED_BYTES_MAX:
                ranges = spread(0, relation.pages, max(1, SAMPLES * relation.pages // pages), SAMPLE_PAGES)
        hashed = columns if ranges is None else None
        facts["relations"][relation.name] = {
            "filenode": relation.filenode,
            "inserted": relation.inserted,
            "changed": relation.changed,
            "rows": _sum(connection, relation.name, hashed, position) if counted else None,
            "ranges": None
            if ranges is None
            else [[*r[:2], *_sum(connection, relation.name, columns, position, r)] for r in ranges],
        }
    return facts


def _sum(
    connection: psycopg.Connection[Any],
    relation: str,
    columns: Sequence[str] | None,
    position: Offsets,
    pages: Sequence[Any] | None = None,
) -> list[Any]:
    """The number of rows and the sum of their hashes; without columns, the number alone."""
    hashes = "''" if columns is None else target.row_hashes(columns)
    where = f"NOT ({behind(position)})"
    if pages is not None:
        where += f" AND ctid >= '({pages[0]},0)'::tid AND ctid < '({pages[1]},0)'::tid"
    count, total = _one(connection, f"SELECT count(*), {hashes} FROM {relation} WHERE {where}")  # noqa: S608
    return [count, total or ""]


def compared(before_: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """What happened between two calls of `kept`."""
    altered, unknown, continues = [], [], True
    for relation, then in before_["relations"].items():
        found = now["relations"].get(relation)
        if found is None:
            altered.append(f"{relation} was dropped or detached, with {_rows(then)}")
            continue
        change = difference(RowSum(*(then["rows"] or ())), RowSum(*(found["rows"] or ())))
        same_pages = then["filenode"] == found["filenode"]
        if change is None and then["ranges"] is not None:
            if not same_pages:
                unknown.append(f"{relation} was rewritten (VACUUM FULL, CLUSTER): only the number of rows is compared")
            else:
                change = next(
                    (c for a, b in zip(then["ranges"], found["ranges"], strict=True) if (c := _change(a, b))), None
                )
            if change is None and then["rows"] is None:
                unknown += _counted(relation, then, found, before_["timeline"] == now["timeline"] and same_pages)
        if change is not None:
            rewritten = "" if same_pages else " or rewritten, with new transactions"
            altered.append(f"{relation}: {change}{rewritten}")
            continues &= "added" not in change and same_pages
    for relation, found in now["relations"].items():
        if relation in before_["relations"]:
            continue
        if found["rows"] is None:
            unknown.append(f"{relation} was attached since, and is too large to be counted")
        elif found["rows"][0]:
            altered.append(f"{relation} was attached since, with {found['rows'][0]} rows from before")
            continues = False
    return Changes(altered=tuple(altered), unknown=tuple(unknown), continues=continues)


def _change(then: Sequence[Any], found: Sequence[Any]) -> str | None:
    return difference(RowSum(*then[2:]), RowSum(*found[2:]))


def _rows(facts: Mapping[str, Any]) -> str:
    return "its rows" if facts["rows"] is None else f"{facts['rows'][0]} rows"


def _counted(relation: str, then: Mapping[str, Any], found: Mapping[str, Any], same: bool) -> list[str]:
    """By the server's statistics, which a crash resets."""
    if not same or found["inserted"] < then["inserted"] or found["changed"] < then["changed"]:
        return [f"{relation} is too large to be counted, and the server's statistics of its changes were reset"]
    if changed := found["changed"] - then["changed"]:
        return [f"{changed:,} rows of {relation} were updated or deleted, perhaps before the position"]
    return []


def _one(connection: psycopg.Connection[Any], statement: str, values: Sequence[Any] | None = None) -> tuple[Any, ...]:
    return tuple(connection.execute(statement, values).fetchone() or ())

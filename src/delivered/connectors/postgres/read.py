"""What is read of server and table: checks before a start, a scan of all rows, and positions in the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from delivered.connectors.postgres import PostgresOptions, target
from delivered.connectors.postgres.client import PostgresDatabase
from delivered.connectors.postgres.store import slots
from delivered.connectors.postgres.target import migrate, version_of
from delivered.contract.sink import Changes
from delivered.contract.source import Address, Finding, Offsets, Slice
from delivered.kits.sql.batches import NumberedTable, has_batches
from delivered.kits.sql.database import quoted, read_csv
from delivered.kits.sql.merge import findings, no_unique_index
from delivered.kits.sql.sink import check_deletions, check_rules
from delivered.kits.sql.table import (
    Mechanism,
    RowSum,
    TableScan,
    check_column,
    difference,
    missing_at_server,
    never_written,
    permission,
    spread,
    steps,
)
from delivered.model.capability import Guarantee
from delivered.model.errors import Refused, UsageError
from delivered.model.limits import OPEN_TRANSACTION_OLD_S

if TYPE_CHECKING:
    import psycopg

# Whether server, table and user support the guarantee. Changes only the ledger's own tables.

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
    yield from audit_findings(connection, options, relation)
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


# A scan of all rows of the table, in ranges of pages.

SLICE_PAGES = 8_192
"""Minimum number of 8 KiB pages per slice."""


@dataclass(frozen=True)
class PostgresScan(TableScan):
    """See `delivered.kits.sql.table.TableScan`. Rows must not be changed, deleted or moved (VACUUM FULL) meanwhile.

    Without the rows of tables that inherit from it: no batch is written there.
    """

    options: PostgresOptions

    @property
    def database(self) -> PostgresDatabase:
        return PostgresDatabase(self.options)

    def address(self) -> Address:
        options = self.options
        table = options.table_text.removeprefix("public.")
        return Address("postgres", frozenset([options.place]), frozenset([table]))

    def _stored_schema(self) -> pa.Schema | None:
        def question(connection: psycopg.Connection[Any]) -> pa.Schema | None:
            found = target.find(connection, self.options)
            if found is None or version_of(connection, self.options.ledger_schema) == 0:
                return None
            return target.stored_schema(connection, self.options, found[0])

        return self.database.ask(question)

    def _never_written(self) -> UsageError:
        return never_written(self.options.table_text, self.options.where, "url, dbtable and ledgerSchema")

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"<partition>": n}: the first page.

        Raises:
            Refused: what was added since cannot be distinguished from earlier rows.
        """
        first = {} if since is None or "snapshot" in since or has_batches(since) else since
        return self.database.ask(lambda connection: self._slices(connection, first, since, until))

    def _slices(
        self, connection: psycopg.Connection[Any], first: Offsets, since: Offsets | None, until: Offsets | None
    ) -> Sequence[Slice]:
        ends = [] if until is None else [self._before(connection, until)]
        found = target.find(connection, self.options)
        if found is None or None in ends:
            return []
        if has_batches(since) and (table := self._numbered(connection, since)) is not None and table.is_of(since):
            ranges = table.ranges(connection, since, until if has_batches(until) else None)
            return [Slice({"relation": table.table, "where": [table.within(r), *ends]}) for r in ranges]
        if since is not None and self._valid(connection, since):
            ends.append(rows_behind(since))
        pages = {r.name: r.pages for r in relations(connection, found[0])}
        total = sum(pages.values())
        return [
            Slice({"relation": f"ONLY {relation}", "where": [*_pages(at, stop), *ends]}, partition=relation)
            for relation, pages_ in pages.items()
            for at, stop in steps(int(first.get(relation, 0)), pages_, SLICE_PAGES, total)
        ]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """COPY as CSV, parsed by Arrow without loss."""
        schema, data = self.schema(), piece.data
        columns = ", ".join(_selected(f) for f in schema)
        statement = (
            f"COPY (SELECT {columns} FROM {data['relation']} WHERE {' AND '.join(data['where'])}) "  # noqa: S608
            "TO STDOUT (FORMAT csv)"
        )
        connection = self.database.connect("read", writes=False)
        try:
            with self.database.explaining(), connection.cursor().copy(statement) as copy:
                yield from read_csv(copy.read, schema, "t", "f")
        finally:
            connection.close()

    def position(self) -> Offsets | None:
        """None: there is no table, batches change rows, or the server has used all transaction numbers once."""
        if not self.options.write.only_adds:
            return None

        def ask(connection: psycopg.Connection[Any]) -> Offsets | None:
            table = self._numbered(connection)
            if table is not None and table.column in target.table_columns(connection, int(table.target)):
                return table.position(connection)
            return take_position(connection, self.options)

        return self.database.ask(ask)

    def kept(self, position: Offsets) -> Mapping[str, Any] | None:
        schema = self._stored_schema()
        if schema is None:
            return None

        def ask(connection: psycopg.Connection[Any]) -> Mapping[str, Any]:
            table = self._numbered(connection, position) if has_batches(position) else None
            if table is not None:
                return table.kept(connection, position, schema.names)
            return collect_facts(connection, self.options, schema.names, position, None)

        return self.database.ask(ask)

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        def ask(connection: psycopg.Connection[Any]) -> Changes:
            name, found = self.options.table_text, target.find(connection, self.options)
            numbered = has_batches(position)
            if not numbered and (why := find_break(connection, position)):
                return Changes(unknown=(why,), continues=False)
            if found is None or str(found[0]) != str(position["table"]):
                return Changes.deleted(f"table {name}", recreated=found is not None)
            if before is None:
                return Changes(unknown=(f"nothing is known of what table {name} held before",))
            there = [*target.table_columns(connection, found[0])]
            if numbered and (table := self._numbered(connection, position)) is not None:
                return table.changes(connection, position, before, there)
            if missing := [column for column in before["columns"] if column not in there]:
                return Changes(altered=(f"table {name}: columns were removed: {', '.join(missing)}",))
            now = collect_facts(connection, self.options, before["columns"], position, before)
            return compare_facts(before, now)

        return self.database.ask(ask)

    def _numbered(
        self, connection: psycopg.Connection[Any], position: Offsets | None = None
    ) -> NumberedTable[psycopg.Connection[Any]] | None:
        """The table in the order of its batches, as the options, or a position, name their column."""
        column = None if position is None else position["column"]
        return target.numbered_table(connection, self.database, self.options, column)

    def _before(self, connection: psycopg.Connection[Any], position: Offsets) -> str | None:
        """SQL for rows that lie before a position; None: it is none of this table."""
        if not has_batches(position):
            return rows_before(position) if self._valid(connection, position) else None
        table = self._numbered(connection, position)
        return table.before(position) if table is not None and table.is_of(position) else None

    def _valid(self, connection: psycopg.Connection[Any], position: Offsets) -> bool:
        """Whether it is a snapshot's, and of this table. Raises Refused: it no longer divides its rows."""
        if "snapshot" not in position:
            return False
        found = target.find(connection, self.options)
        if why := find_break(connection, position):
            raise Refused("POSITION_LOST", where=self.options.where, position=position, reason=why)
        return found is not None and bool(found[0] == position["table"])


def _pages(start: int, stop: int) -> tuple[str, str]:
    return f"ctid >= '({start},0)'::tid", f"ctid < '({stop},0)'::tid"


def _micros(name: str, zoned: bool) -> str:
    """Microseconds since 1970, independent of time zones and formats; as text where Arrow has no such time, infinity
    or after 294247, so that parsing says so. The server's own number of seconds is inexact after the year 292000."""
    at = f"({name} AT TIME ZONE 'UTC')" if zoned else name
    zone = "+00" if zoned else ""
    day, clock = f"({at}::date - DATE '1970-01-01')::numeric", f"extract(epoch FROM {at}::time)"
    return (
        f"CASE WHEN NOT isfinite({name}) OR {name} > '294247-01-10 04:00:54.775807{zone}' THEN {name}::text "
        f"WHEN {name} < '290000-01-01{zone}' THEN (extract(epoch FROM {name}) * 1000000)::bigint::text "
        f"ELSE ({day} * 86400000000 + {clock} * 1000000)::bigint::text END"
    )


def _selected(f: pa.Field) -> str:
    name = quoted(f.name)
    if pa.types.is_timestamp(f.type):
        return _micros(name, f.type.tz is not None)
    if pa.types.is_time(f.type):
        return f"(extract(epoch FROM {name}) * 1000000)::bigint"
    if pa.types.is_date32(f.type):
        return f"CASE WHEN isfinite({name}) THEN ({name} - DATE '1970-01-01')::text ELSE {name}::text END"
    if pa.types.is_binary(f.type):
        return f"encode({name}, 'hex')"
    return f"{name}::text" if pa.types.is_string(f.type) else name


# Positions in a table by the transactions that wrote its rows: no column is needed, and VACUUM keeps them.
#
# A position is a snapshot, as `pg_current_snapshot` gives it: transactions that it shows lie before it, others behind.
# Each row has the number of its transaction in `xmin`, which freezing keeps; 32 of its 64 bits. So positions are given
# until the server has used 2^32 numbers, and hold for 2^31 further ones.
#
# The server's snapshot lacks subtransactions (savepoints, exception blocks), whose numbers rows have too: `_SNAPSHOT`
# adds those in progress.

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


def take_position(connection: psycopg.Connection[Any], options: PostgresOptions) -> Offsets | None:
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


def find_break(connection: psycopg.Connection[Any], position: Offsets) -> str:
    """Why a position no longer divides the rows of its table; empty: it does. Raises psycopg.Error."""
    cluster, _ = _one(connection, _CLUSTER)
    if cluster != position["cluster"]:
        return "the table is at another server now: it was restored from a dump, or upgraded"
    (now,) = _one(connection, f"SELECT {_NOW}")
    if now >= NUMBERS:
        return "the server has used all numbers of transactions once, and rows that it froze long ago look new"
    if now - _lowest(position) > APART_MAX:
        return f"{now - _lowest(position):,} transactions lie between, and they are compared within {APART_MAX:,}"
    return ""


def audit_findings(connection: psycopg.Connection[Any], options: PostgresOptions, oid: int) -> Iterator[Finding]:
    """What audits of a table cost, for the plan. Raises psycopg.Error."""
    if not options.write.only_adds or options.batch_column is not None:
        return
    (now,) = _one(connection, f"SELECT {_NOW}")
    size = sum(r.bytes for r in relations(connection, oid))
    if now >= NUMBERS:
        yield Finding.build("AUDIT_READS_ALL.POSTGRES", refuses=False, table=options.table_text, transactions=now)
    elif size > COUNTED_BYTES_MAX:
        yield Finding.build("AUDIT_SCANS", refuses=False, table=options.table_text, mib=size >> 20)


def _lowest(position: Offsets) -> int:
    return int(position["snapshot"].partition(":")[0])


def rows_behind(position: Offsets) -> str:
    """SQL for rows that lie at or behind a position. The comparison of ages is cheap, and skips most others."""
    low = _lowest(position) % NUMBERS
    return f"age(xmin) <= age('{low}'::xid) AND NOT {rows_before(position)}"


def rows_before(position: Offsets) -> str:
    """SQL for rows that lie before a position."""
    return f"pg_visible_in_snapshot({_XID}, '{position['snapshot']}'::pg_snapshot)"


def collect_facts(
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
    where = f"NOT ({rows_behind(position)})"
    if pages is not None:
        where += f" AND ctid >= '({pages[0]},0)'::tid AND ctid < '({pages[1]},0)'::tid"
    count, total = _one(connection, f"SELECT count(*), {hashes} FROM ONLY {relation} WHERE {where}")  # noqa: S608
    return [count, total or ""]


def compare_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """What happened between two calls of `collect_facts`."""
    altered, unknown, continues = [], [], True
    for relation, then in before["relations"].items():
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
                unknown += _counted(relation, then, found, before["timeline"] == now["timeline"] and same_pages)
        if change is not None:
            rewritten = "" if same_pages else " or rewritten, with new transactions"
            altered.append(f"{relation}: {change}{rewritten}")
            continues &= "added" not in change and same_pages
    for relation, found in now["relations"].items():
        if relation in before["relations"]:
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

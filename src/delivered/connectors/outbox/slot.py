"""A logical replication slot, its publication, table and server, by SQL: checks, creation, reads, and its one move.

A peek consumes nothing: it decodes from the slot's confirmed position on. A transaction belongs to the range in which
its commit record begins, so a range gives the same rows whenever it is read, until the slot has been advanced past it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivered.connectors.outbox import OWNER, OutboxOptions
from delivered.connectors.outbox.client import connect, explaining, replication, sqlstate
from delivered.connectors.outbox.pgoutput import Begin, Change, Decoder, Op, Relation, Row
from delivered.connectors.outbox.positions import Positions
from delivered.contract.source import Offsets
from delivered.model import patience
from delivered.model.errors import DeliveredError, InvariantBroken, Refused, UsageError
from delivered.model.limits import OUTAGE_PATIENCE_S, SOURCE_PATIENCE_S
from delivered.patterns.caller import Caller, quoted

if TYPE_CHECKING:
    import psycopg


# State of the server, a slot, its publication and its table, as PostgreSQL reports it.

NUMBER = "{} - '0/0'::pg_lsn"

_STATE = f"""
SELECT (SELECT system_identifier::text FROM pg_control_system()),
  CASE WHEN NOT pg_is_in_recovery()
    THEN ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int END,
  CASE WHEN NOT pg_is_in_recovery() THEN ({NUMBER.format("pg_current_wal_flush_lsn()")})::bigint END,
  current_setting('wal_level'), current_setting('max_slot_wal_keep_size'),
  s.slot_type, s.plugin, s.database = current_database(), s.wal_status, s.active_pid,
  ({NUMBER.format("s.restart_lsn")})::bigint, ({NUMBER.format("s.confirmed_flush_lsn")})::bigint,
  to_regclass(%(table)s)::oid::bigint,
  (SELECT concat_ws(',', CASE WHEN pubinsert THEN 'insert' END, CASE WHEN pubupdate THEN 'update' END,
     CASE WHEN pubdelete THEN 'delete' END, CASE WHEN pubtruncate THEN 'truncate' END)
   FROM pg_publication WHERE pubname = %(publication)s),
  (SELECT to_jsonb(t)::text FROM pg_publication_tables t JOIN pg_namespace n ON n.nspname = t.schemaname
     JOIN pg_class c ON c.relname = t.tablename AND c.relnamespace = n.oid
   WHERE t.pubname = %(publication)s AND c.oid = to_regclass(%(table)s)),
  (SELECT pubviaroot FROM pg_publication WHERE pubname = %(publication)s),
  EXISTS (SELECT FROM pg_partition_tree(to_regclass(%(table)s)) p JOIN pg_class c ON c.oid = p.relid
    JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_publication_tables t
    ON t.schemaname = n.nspname AND t.tablename = c.relname AND t.pubname = %(publication)s WHERE p.level > 0)
    OR EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication u ON u.oid = r.prpubid JOIN pg_class c
    ON c.oid = r.prrelid WHERE r.prrelid = to_regclass(%(table)s) AND c.relkind = 'p' AND u.pubname = %(publication)s),
  ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%(table)s) AND attnum > 0
    AND NOT attisdropped ORDER BY attnum),
  ARRAY(SELECT attnum::int FROM pg_attribute WHERE attrelid = to_regclass(%(table)s) AND attnum > 0
    AND NOT attisdropped ORDER BY attnum),
  ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%(table)s) AND attgenerated <> ''),
  ARRAY(SELECT a.attname::text FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid
    AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
    WHERE i.indrelid = to_regclass(%(table)s) AND i.indisprimary)
FROM (SELECT 1) AS one LEFT JOIN pg_replication_slots s ON s.slot_name = %(slot)s
"""


@dataclass(frozen=True)
class State:
    """State of the server, the slot, the publication and the table. Positions are bytes of WAL.

    Attributes:
        timeline, flushed: None: the server is a standby.
        kind: logical or physical; None: there is no slot.
        wal_status: lost: the server removed WAL that the slot needs.
        restart: from here on the slot holds back WAL; confirmed: a peek begins here.
        table: oid; None: there is none.
        publishes: operations, comma-separated; None: there is no publication.
        published: how the publication has the table, as JSON; None: it has not.
        via_root: changes of partitions are published as the table's.
        parts_published: the table is partitioned, and the publication has it, or partitions of it.
        columns, generated, key: of the table: all, the generated ones, those of the primary key.
        numbers: of `columns`: a column that was dropped and added again has another number.
    """

    system: str
    timeline: int | None
    flushed: int | None
    wal_level: str
    keep_size: str
    kind: str | None
    plugin: str | None
    own_database: bool | None
    wal_status: str | None
    active_pid: int | None
    restart: int | None
    confirmed: int | None
    table: int | None
    publishes: str | None
    published: str | None
    via_root: bool | None
    parts_published: bool
    columns: list[str]
    numbers: list[int]
    generated: list[str]
    key: list[str]

    @property
    def carried(self) -> list[str]:
        """Columns that the log has, or will have."""
        listed = json.loads(self.published or "{}").get("attnames")
        return list(listed) if listed is not None else [c for c in self.columns if c not in self.generated]

    @property
    def held_back(self) -> int | None:
        """Bytes of WAL that the slot keeps the server from removing."""
        if self.flushed is None or self.restart is None:
            return None
        return max(0, self.flushed - self.restart)


def lsn_text(position: int) -> str:
    """As PostgreSQL writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def state(connection: psycopg.Connection[Any], options: OutboxOptions) -> State:
    parameters = {"slot": options.slot, "publication": options.publication, "table": quoted("postgres", options.table)}
    row = connection.execute(_STATE, parameters).fetchone()
    if row is None:
        raise InvariantBroken("OUTBOX_ERROR.NO_ROW")
    return State(*row)


# Whether a publication has everything that is read: the table as one, its operations, its rows, its columns.


def check_publication(now: State, options: OutboxOptions) -> None:
    """Raises Refused: it lacks something; or the one that would be made does."""
    name, table = options.publication, options.table
    if now.publishes is not None:
        wanted = "insert" if options.changes is None else "insert,update,delete,truncate"
        lacking = [kind for kind in wanted.split(",") if kind not in now.publishes.split(",")]
        if now.parts_published and not now.via_root:
            raise Refused("OUTBOX_PUBLICATION.PARTITIONS", name=name, table=table)
        if lacking or now.published is None:
            why = f"does not have the table {table}" if now.published is None else f"publishes no {lacking[0]}"
            raise Refused(
                "OUTBOX_PUBLICATION.OPERATIONS",
                name=name,
                reason=why,
                change=f"ADD TABLE {table}" if now.published is None else f"SET (publish = '{wanted}')",
            )
        if '"rowfilter": "' in now.published:
            raise Refused("OUTBOX_PUBLICATION.FILTER", name=name, table=table, filter=now.published)
    needed = now.key if options.changes is not None else options.columns
    lost = next((column for column in needed if column in now.columns and column not in now.carried), None)
    if lost is not None:
        why = "is generated, and PostgreSQL's log has no generated columns" if lost in now.generated else (
            f"is not in the column list of the publication {name}"
        )  # fmt: skip
        raise Refused(
            "OUTBOX_PUBLICATION.COLUMN_LIST" if lost not in now.generated else "OUTBOX_PUBLICATION.COLUMN_GENERATED",
            lost=lost,
            table=table,
            reason=why,
            name=name,
        )


def missing_columns(now: State) -> list[str]:
    """Columns of the table that its changes come without."""
    return [column for column in now.columns if column not in now.carried]


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
                statement=lacks[1].replace("{}", name),
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
    if not key_usable:
        return (
            "has a deferrable primary key: within a transaction two rows may have one key, and a delete of one of them "
            "would delete the other at a sink",
            f"ALTER TABLE {{}} DROP CONSTRAINT its primary key, ADD PRIMARY KEY ({', '.join(key)})",
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


# A logical replication slot and its publication, by SQL: checks, creation.

log = logging.getLogger("delivered.patterns.outbox")

PLUGIN = "pgoutput"
_AGAIN = (
    "find rows that were not delivered (with keep=false the outbox still has them), then start a new checkpoint, "
    "which makes a new slot and begins with the rows of the outbox"
)
_RUNNING = """
SELECT 'prepared ' || quote_literal(gid) || ' since ' || prepared::timestamptz(0) FROM pg_prepared_xacts
UNION ALL
SELECT 'pid ' || pid || coalesce(' (' || nullif(application_name, '') || ')', '') || ', ' || state || ', since '
  || xact_start::timestamptz(0) FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
"""
_NAMED_MAX = 5
SLOT_WAIT_S = OUTAGE_PATIENCE_S
"""For one transaction that runs when a slot is made."""


def check_server(now: State, options: OutboxOptions) -> None:
    """What must hold before a slot can be read or made. Raises UsageError: with the value and the next step."""
    where = options.system
    if now.flushed is None:
        raise Refused("OUTBOX_STANDBY", where=where)
    if now.wal_level != "logical":
        raise Refused("OUTBOX_WAL_LEVEL", where=where, wal_level=now.wal_level)
    if now.table is None:
        raise UsageError("OUTBOX_TABLE.LOG", where=where, table=options.table)
    check_publication(now, options)


def check_cluster(now: State, options: OutboxOptions, start: Offsets) -> None:
    """Whether `start` was read from this cluster, on this timeline or one that the user accepts.

    Raises:
        InvariantBroken: it was not.
    """
    at, where = int(start["lsn"]), options.system
    if (known := start.get("#system")) not in (None, now.system):
        raise InvariantBroken("OUTBOX_OTHER_DATABASE", known=known, where=where, current=now.system)
    if (line := start.get("#timeline")) not in (None, now.timeline) and options.timeline != now.timeline:
        raise InvariantBroken("OUTBOX_TIMELINE", where=where, timeline=now.timeline, position=lsn_text(at), line=line)


def check_slot(now: State, options: OutboxOptions, start: Offsets) -> None:
    """Whether the slot still has everything after `start`, on the server that `start` was read from.

    Raises:
        InvariantBroken: changes may have been skipped, or may be read twice.
        Refused: the slot is not one of pgoutput's.
    """
    at, slot, where, again = int(start["lsn"]), options.slot, options.system, _AGAIN
    if now.flushed is None:
        check_server(now, options)
    check_cluster(now, options, start)
    if now.kind is None:
        raise InvariantBroken("OUTBOX_SLOT_MISSING", where=where, slot=slot, position=lsn_text(at), action=again)
    if now.kind != "logical" or now.plugin != PLUGIN or not now.own_database:
        is_ = f"{now.kind}, of {now.plugin or 'no plugin'}" + ("" if now.own_database else ", of another database")
        raise Refused("OUTBOX_SLOT_PLUGIN", slot=slot, where=where, state=is_)
    if now.wal_status == "lost" or now.confirmed is None:
        raise InvariantBroken(
            "OUTBOX_WAL_REMOVED.START",
            where=where,
            slot=slot,
            position=lsn_text(at),
            keep_size=now.keep_size,
            again=again,
        )
    if now.flushed is not None and now.flushed < at:
        raise InvariantBroken(
            "OUTBOX_DATABASE_BEHIND.WAL", where=where, end=lsn_text(now.flushed), position=lsn_text(at), action=again
        )
    if now.confirmed > at > 0:
        raise moved(now.confirmed, options, at)
    if now.publishes is None:
        raise InvariantBroken(
            "OUTBOX_PUBLICATION.DROPPED",
            where=where,
            publication=options.publication,
            slot=slot,
            position=lsn_text(at),
            again=again,
        )


def moved(confirmed: int, options: OutboxOptions, start: int) -> InvariantBroken:
    return InvariantBroken(
        "OUTBOX_SLOT_MOVED",
        slot=options.slot,
        system=options.system,
        confirmed=lsn_text(confirmed),
        start=lsn_text(start),
    )


def check_table(connection: psycopg.Connection[Any], now: State, options: OutboxOptions, start: Offsets) -> None:
    """Whether the name still means the table that `start` was read from.

    Raises:
        InvariantBroken: it was renamed, or dropped and recreated.
    """
    known = start.get("#table")
    if known in (None, now.table):
        return
    row = connection.execute("SELECT oid::regclass::text FROM pg_class WHERE oid = %s", [known]).fetchone()
    became = f"was renamed to {row[0]}" if row is not None else "was dropped"
    raise InvariantBroken(
        "OUTBOX_TABLE_RENAMED",
        table=options.table,
        became=became,
        successor="no table has its name now." if now.table is None else "another one has its name now.",
        action=f"write {row[0]} in the options, or rename it back" if row is not None else "restore the table",
    )


def create(connection: psycopg.Connection[Any], options: OutboxOptions, rows: Positions | None) -> None:
    """Create publication and slot, and number the rows in the outbox at that time.

    The slot appears under its name last, so that a crash leaves nothing that looks complete.

    Args:
        connection: in autocommit.
        rows: numbers the rows that were committed before the slot begins; None: only later ones are read.

    Raises:
        Refused: a transaction that was running, or is prepared, did not end in time.
    """
    if options.changes is not None:
        check_identity(connection, options)
    publication, temporary = quoted("postgres", options.publication), f"{options.slot[:59]}_new"
    kinds = "insert" if options.changes is None else "insert, update, delete, truncate"
    if connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [options.publication]).fetchone() is None:
        connection.execute(
            f"CREATE PUBLICATION {publication} FOR TABLE ONLY {quoted('postgres', options.table)} "
            f"WITH (publish = '{kinds}', publish_via_partition_root = true)"
        )
    _drop(connection, temporary)
    with contextlib.closing(replication(options)) as other, explaining(options):
        other.execute(f"SET lock_timeout = '{SLOT_WAIT_S:.0f}s'")
        with _waiting(connection, options):
            row = other.execute(f"CREATE_REPLICATION_SLOT {temporary} LOGICAL {PLUGIN} EXPORT_SNAPSHOT").fetchone()
        if rows is not None and row is not None:
            with contextlib.closing(connect(options)) as filling:
                rows.prepare(Caller(filling, what=OWNER))
                filling.commit()
                filling.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                filling.execute(f"SET TRANSACTION SNAPSHOT '{row[2]}'")
                rows.restart(Caller(filling, what=OWNER))
                filling.commit()
    connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [temporary, options.slot])
    _drop(connection, temporary)


@contextlib.contextmanager
def _waiting(connection: psycopg.Connection[Any], options: OutboxOptions) -> Iterator[None]:
    """Name what a new slot waits for: every transaction with writes that runs or is prepared anywhere in the server."""
    rows = connection.execute(_RUNNING).fetchall()
    running = "; ".join(str(text) for (text,) in rows[:_NAMED_MAX]) or "of another user"
    if len(rows) > _NAMED_MAX:
        running += f"; and {len(rows) - _NAMED_MAX} more"
    said = f"{OWNER}: the slot {options.slot} at {options.system} waits for transactions to end: {running}"
    timer = threading.Timer(patience.TELL_AFTER_S, log.warning, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if sqlstate(error) != "55P03":
            raise
        raise Refused("OUTBOX_SLOT_WAITS", waiting=said, slot_wait_s=SLOT_WAIT_S) from error
    finally:
        timer.cancel()


def _drop(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s AND NOT active",
        [name],
    )


_ROWS_FETCHED = 2_000
_IN_USE, _NOT_READY, _UNDEFINED, _REMOVED = "55006", "55000", "42704", "58P01"

_PEEK = (
    "pg_logical_slot_peek_binary_changes(%(slot)s, ('0/0'::pg_lsn + %(end)s), %(count)s, 'proto_version', '1', "
    "'publication_names', %(publication)s)"
)
_END = f"""
WITH m AS MATERIALIZED (SELECT ({NUMBER.format("lsn")})::bigint AS at, get_byte(data, 0) AS kind, n
    FROM {_PEEK} WITH ORDINALITY AS p(lsn, xid, data, n)),
  c AS (SELECT at, kind, count(*) FILTER (WHERE kind IN (68, 73, 84, 85)) OVER (ORDER BY n) AS total FROM m)
SELECT coalesce(max(total), 0), max(at) FILTER (WHERE kind = 67 AND total <= %(rows)s AND total > 0),
  min(at) FILTER (WHERE kind = 67 AND total > 0) FROM c
"""  # 67: commit; 68, 73, 84, 85: delete, insert, truncate, update

_RELATIONS = f"""
WITH m AS MATERIALIZED (SELECT ({NUMBER.format("lsn")})::bigint AS at, get_byte(data, 0) AS kind, n,
    CASE WHEN get_byte(data, 0) IN (82, 84, 89) THEN data END AS data
    FROM {_PEEK} WITH ORDINALITY AS p(lsn, xid, data, n)),
  c AS (SELECT at, n, data, max(at) FILTER (WHERE kind = 67) OVER (ORDER BY n) AS before FROM m)
SELECT before, at, data FROM c WHERE data IS NOT NULL ORDER BY n
"""  # 82: relation, 84: truncate, 89: type


def peek_end(
    connection: psycopg.Connection[Any], options: OutboxOptions, until: int, rows_max: int | None
) -> int | None:
    """Where a batch from the slot's position on may end; None: nothing happened until `until`.

    Args:
        connection: in autocommit.
        rows_max: a batch ends at the end of a transaction, the first of which may have more rows.
    """
    # A transaction of one row has three to four messages. Without a limit, one change is enough to know.
    count = 1 if rows_max is None else 4 * rows_max + 4
    parameters = {"rows": rows_max or 0, "end": until, "count": count, **_names(options)}
    with _reading(options):
        row = connection.execute(_END, parameters).fetchone()
    if row is None or not row[0]:
        return None
    return until if rows_max is None else min(until, int(row[1] or row[2]))


@dataclass(frozen=True)
class Seen:
    """A table's shape before its next rows, or its truncation.

    Attributes:
        before: end of the last transaction before it; None: it is in the first one.
        at: position of its own record.
    """

    before: int | None
    at: int
    relation: Relation
    truncates: bool


def relations(
    connection: psycopg.Connection[Any], options: OutboxOptions, table: int | None, end: int, count: int | None
) -> list[Seen]:
    """In order, from the slot's position on; repeated whenever PostgreSQL repeats it.

    Args:
        connection: in autocommit.
        table: oid.
        count: ends after the transaction with this many changes; None: at `end`.
    """
    with _reading(options):
        rows = connection.execute(_RELATIONS, {"end": end, "count": count, **_names(options)}).fetchall()
    decoder, relations_ = Decoder(), list[Seen]()
    for before, at, data in rows:
        changes = decoder.decode(data)
        if data[:1] == b"R":
            relations_.append(Seen(before, at, decoder.relations[int.from_bytes(data[1:5], "big")], False))
        relations_ += [Seen(before, at, c.relation, True) for c in changes if isinstance(c, Change)]
    return [one for one in relations_ if one.relation.oid == table]


def peek(options: OutboxOptions, start: Offsets, end: int) -> Iterator[tuple[Begin, int, Change]]:
    """Changes of the transactions whose commit record begins in [start, end), in order of commits, each with the
    position of its own record; bounded memory.

    Raises:
        InvariantBroken: the slot did not have all of them.
    """
    at, begin, decoder = int(start["lsn"]), None, Decoder()
    connection = connect(options)
    try:
        with explaining(options), _reading(options):
            check_slot(state(connection, options), options, start)
            for position, data in _messages(connection, options, end):
                for message in decoder.decode(data):
                    if isinstance(message, Begin):
                        begin = message
                    elif begin is not None and at <= begin.lsn < end:
                        yield begin, position, message
            # The slot only moves forward: if it has not passed the start now, it had not during this read.
            check_slot(state(connection, options), options, start)
    finally:
        connection.close()


def _messages(connection: psycopg.Connection[Any], options: OutboxOptions, end: int) -> Iterator[tuple[int, bytes]]:
    """Position and data of each until `end`, some at a time."""
    statement = f"SELECT ({NUMBER.format('lsn')})::bigint, data FROM {_PEEK}"

    def begin() -> tuple[Any, list[Any]]:
        connection.rollback()
        cursor = connection.cursor(name="wal", binary=True)
        try:
            with _reading(options):
                cursor.execute(statement, {"end": end, "count": None, **_names(options)})
                return cursor, cursor.fetchmany(_ROWS_FETCHED)
        except BaseException:
            cursor.close()
            raise

    # Planning reads the slot, too, for the columns of the next rows.
    cursor, rows = waiting(options, begin)
    with cursor:
        while rows:
            yield from rows
            rows = cursor.fetchmany(_ROWS_FETCHED)


def inserts(options: OutboxOptions, start: Offsets, end: int) -> Iterator[tuple[Begin, Relation, Row]]:
    """As `peek`, of the rows inserted into the table."""
    oids = tables(start)
    for begin, _, change in peek(options, start, end):
        if change.op is Op.INSERT and change.new is not None and change.relation.oid in oids:
            yield begin, change.relation, change.new


def tables(start: Offsets) -> frozenset[int]:
    """Oids under which the table's changes are in the log."""
    return frozenset([start["#table"], *start.get("leaves", ())])


def advance(connection: psycopg.Connection[Any], options: OutboxOptions, position: int) -> None:
    """Move the slot on, so that the server may remove WAL. Idempotent. Args: connection: in autocommit."""
    with _reading(options):
        connection.execute(
            "SELECT pg_replication_slot_advance(slot_name, '0/0'::pg_lsn + %s) FROM pg_replication_slots "
            "WHERE slot_name = %s AND confirmed_flush_lsn < '0/0'::pg_lsn + %s",
            [position, options.slot, position],
        )


def _names(options: OutboxOptions) -> dict[str, str]:
    return {"slot": options.slot, "publication": quoted("postgres", options.publication)}


@contextlib.contextmanager
def _reading(options: OutboxOptions) -> Iterator[None]:
    """Translate errors that occur only while decoding."""
    try:
        yield
    except DeliveredError:
        raise
    except Exception as error:
        code = sqlstate(error)
        text = " ".join(str(error).split())
        if code == _IN_USE:
            raise SlotInUse("OUTBOX_SLOT_IN_USE", slot=options.slot, system=options.system, text=text) from error
        if code == _UNDEFINED and "publication" in text:
            raise InvariantBroken(
                "OUTBOX_PUBLICATION.TOO_NEW", system=options.system, slot=options.slot, text=text
            ) from error
        if code in (_NOT_READY, _REMOVED):
            raise InvariantBroken(
                "OUTBOX_WAL_REMOVED.READ", system=options.system, slot=options.slot, text=text
            ) from error
        raise


class SlotInUse(DeliveredError):
    """Another session decodes from the slot at this moment."""


def waiting(options: OutboxOptions, ask: Any) -> Any:
    """Ask again while another session uses the slot: a task that was killed may still be decoding."""
    return patience.wait_out(
        f"the slot {options.slot}", ask, lambda error: isinstance(error, SlotInUse), SOURCE_PATIENCE_S / 4
    )

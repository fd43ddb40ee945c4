"""What PostgreSQL says of itself, and of a slot, its publication and its table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivered.connectors.outbox.options import OutboxOptions
from delivered.model.errors import InvariantBroken
from delivered.patterns.caller import quoted

if TYPE_CHECKING:
    import psycopg

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
    """What the server says of itself, the slot, the publication and the table. Positions are bytes of WAL.

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
    given = {
        "slot": options.slot,
        "publication": options.publication,
        "table": quoted("postgres", options.table),
    }
    found = connection.execute(_STATE, given).fetchone()
    if found is None:
        raise InvariantBroken("OUTBOX_ERROR", "PostgreSQL answered without a row.")
    return State(*found)

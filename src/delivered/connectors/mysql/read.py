"""What is read of server and table: checks before a start, and a scan of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.connectors.mysql import MysqlOptions, client, store, target
from delivered.connectors.mysql.client import Session, ledger_version, migrate, read_only
from delivered.connectors.mysql.store import MysqlDatabase
from delivered.contract.sink import Changes
from delivered.contract.source import Finding, Offsets, Slice
from delivered.kits.mysql import DENIED
from delivered.kits.sql.database import quoted, read_csv
from delivered.kits.sql.merge import findings, no_unique_index
from delivered.kits.sql.sink import age_of, check_deletions
from delivered.kits.sql.table import (
    Mechanism,
    TableScan,
    check_column,
    missing_at_server,
    never_written,
    permission,
    steps,
    text_of,
)
from delivered.model.capability import Guarantee
from delivered.model.errors import InvariantBroken, UsageError
from delivered.model.limits import OPEN_TRANSACTION_OLD_S

if TYPE_CHECKING:
    from delivered.kits.sql.batches import NumberedTable


# Whether server, table and user support the guarantee. Changes only the ledger's own tables.


def look(session: Session, options: MysqlOptions, guarantee: Guarantee) -> Iterator[Finding]:
    settings = _settings(session)
    if settings.get("super_read_only") == "ON" or settings.get("tx_read_only") == "ON":
        raise read_only(options)
    yield from _durable(settings, options, guarantee)
    if guarantee is not Guarantee.AT_MOST_ONCE:
        yield from _replicas(session, options)
    if settings.get("log_bin") == "ON" and settings.get("binlog_format") == "STATEMENT":
        yield Finding.build("BINLOG_STATEMENT.START", refuses=True, place=options.place)
    if guarantee is Guarantee.EXACTLY_ONCE and options.mechanism is Mechanism.TWO_PHASE:
        store.check_allowed(session, options)
        yield from _prepared(session, options)
        yield from check_deletions(options)
    migrate(session, options.ledger_schema)
    yield from _table(session, options)


def _settings(session: Session) -> dict[str, str]:
    names = (
        *("binlog_format", "innodb_flush_log_at_trx_commit", "log_bin", "super_read_only"),
        *("sync_binlog", "transaction_read_only", "tx_read_only"),
    )
    wanted = ", ".join(f"'{n}'" for n in names)
    settings = dict(session.execute(f"SHOW VARIABLES WHERE Variable_name IN ({wanted})").fetchall())
    if "transaction_read_only" in settings:  # its new name
        settings["tx_read_only"] = settings["transaction_read_only"]
    return {str(k): str(v) for k, v in settings.items()}


def _durable(settings: dict[str, str], options: MysqlOptions, guarantee: Guarantee) -> Iterator[Finding]:
    """Whether committed transactions survive a crash of the server's machine."""
    if guarantee is Guarantee.AT_MOST_ONCE:
        return
    weak = [
        f"{name} = {settings[name]}"
        for name, needed in (("innodb_flush_log_at_trx_commit", True), ("sync_binlog", settings.get("log_bin") == "ON"))
        if needed and settings.get(name, "1") != "1"
    ]
    if weak:
        yield Finding.build(
            "COMMIT_NOT_FLUSHED",
            refuses=False,
            place=options.place,
            weak=" and ".join(weak),
            action="; ".join(f"SET GLOBAL {w.partition(' ')[0]} = 1" for w in weak),
        )


def _replicas(session: Session, options: MysqlOptions) -> Iterator[Finding]:
    """Whether a fail-over can lose a decision. Replicas are shown only to users with the privilege PROCESS."""
    row = session.execute("SELECT count(*) FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'")
    replicas = int(row.fetchone()[0])
    names = (f"'Rpl_semi_sync_{role}_{what}'" for role in ("master", "source") for what in ("status", "clients"))
    rows = session.execute(f"SHOW STATUS WHERE Variable_name IN ({', '.join(names)})").fetchall()
    said = {str(name).rpartition("_")[2]: str(value) for name, value in rows}
    # It is on until the first commit that waits in vain, also if none of the replicas takes part.
    waits = said.get("status") == "ON" and said.get("clients") != "0"
    if replicas and not waits:
        yield Finding.build("STANDBY_ASYNCHRONOUS.MYSQL", refuses=False, place=options.place, replicas=replicas)


def _prepared(session: Session, options: MysqlOptions) -> Iterator[Finding]:
    """Transactions of any pipeline with its ledger on this server: foreign ids do not contain a start time."""
    oldest_s = max((age_of(ms) for ms in store.all_started_ms(session)), default=0.0)
    if oldest_s > OPEN_TRANSACTION_OLD_S:
        yield Finding.build("PREPARED_TRANSACTION_OLD.MYSQL", refuses=False, place=options.place, hours=oldest_s / 3600)


def _table(session: Session, options: MysqlOptions) -> Iterator[Finding]:
    table = target.find(session, options)
    if table is None:
        target.check_hidden(session, options)
        if not options.create:
            tables = session.execute(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = coalesce(%s, database()) "
                "LIMIT 10000",
                [options.schema],
            )
            raise missing_at_server(options, [str(name) for (name,) in tables.fetchall()])
        base = options.schema or options.database
        there = "SELECT 1 FROM information_schema.schemata WHERE schema_name = %s"
        if session.execute(there, [base]).fetchone() is None:
            yield Finding.build(
                "SCHEMA_MISSING.DATABASE", refuses=True, base=base, table=options.table_text, place=options.place
            )
        return
    target.check_engine(options, table)
    write = options.write
    denied = _denied(session, options, table)
    if denied:
        user = session.execute("SELECT current_user()").fetchone()[0]
        yield permission(options, user, denied, f"{table.base}.{table.name}")
    elif write.upserts and target.unique_index(session, table, write.keys) is None:
        raise no_unique_index(write, options.table_text, options.where)
    else:
        indexed = partial(target.starts_index, session, table)
        yield from check_column(options, target.table_columns(session, table), indexed)
        yield from findings(options, target.read_definition(session, options))


def _denied(session: Session, options: MysqlOptions, table: target.ServerTable) -> list[str]:
    """Privileges on the table that this user lacks: the server checks them on EXPLAIN, too."""
    columns = target.table_columns(session, table)  # empty if the user has no privilege on the table
    name, write = table.full, options.write
    one = quoted(next((n for n, c in columns.items() if not c.computed), "x"))
    asked = {"INSERT": f"EXPLAIN INSERT INTO {name} ({one}) VALUES (NULL)"}
    if write.upserts or options.batch_column is not None:
        asked["SELECT"] = f"EXPLAIN SELECT {one} FROM {name} WHERE FALSE"
    if write.upserts and not write.insert:
        asked["UPDATE"] = f"EXPLAIN UPDATE {name} SET {one} = NULL WHERE FALSE"
    if write.delete is not None:
        asked["DELETE"] = f"EXPLAIN DELETE FROM {name} WHERE FALSE"
    denied = []
    for right, statement in asked.items():
        try:
            session.execute(statement)
        except Exception as error:
            if client.is_lost(error):
                raise
            if client.error_number(error) in DENIED:
                denied.append(right)
    return denied


# A scan of all rows of the table: the server writes each one as a line of CSV.

SLICE_KEYS = 250_000
"""Minimum range of primary keys per slice."""
ROWS_AT_ONCE = 1_000


@dataclass(frozen=True)
class MysqlScan(TableScan):
    """See `delivered.kits.sql.table.TableScan`. Rows must not be changed, added or deleted meanwhile."""

    options: MysqlOptions

    @property
    def database(self) -> MysqlDatabase:
        return MysqlDatabase(self.options)

    def _stored_schema(self) -> pa.Schema | None:
        def question(session: Session) -> pa.Schema | None:
            table = target.find(session, self.options)
            if table is None or ledger_version(session, self.options.ledger_schema) == 0:
                return None
            return target.stored_schema(session, self.options, table)

        return self.database.ask(question)

    def _never_written(self) -> UsageError:
        return never_written(self.options.table_text, self.options.where, "url, dbtable and ledgerSchema")

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"at": n}: the first value of the primary key. A table without such a key is one slice."""
        return self.database.ask(lambda session: self._slices(session, since, until))

    def _slices(self, session: Session, since: Offsets | None, until: Offsets | None) -> Sequence[Slice]:
        ends: list[str] = []
        if until is not None:
            table = target.numbered_table(session, self.database, self.options, until["column"])
            if table is None or not table.is_of(until):
                return []
            ends.append(table.before(until))
        if since is not None and "batches" in since:
            table = target.numbered_table(session, self.database, self.options, since["column"])
            if table is not None and table.is_of(since):
                return [Slice({"where": [table.within(r), *ends]}) for r in table.ranges(session, since, until)]
        range_ = self._range(session)
        if range_ is None:
            return [Slice({"where": ends})]
        key, first, stop = range_
        pieces = steps(int((since or {}).get("at", first)), stop, SLICE_KEYS)
        return [Slice({"where": [f"{key} >= {at} AND {key} < {end}", *ends]}) for at, end in pieces]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        columns = ", ',', ".join(f"coalesce({_selected(f)}, '')" for f in schema)
        statement = rf"SELECT CONVERT(concat({columns}, '\n') USING binary) FROM {text_of(self.options)}"
        if conditions := piece.data["where"]:
            statement += f" WHERE {' AND '.join(conditions)}"
        session = self.database.connect("read", writes=False)
        try:
            with self.database.explaining():
                rows = session.stream(statement)
                yield from read_csv(lambda: _joined(rows.fetchmany(ROWS_AT_ONCE)), schema, "1", "0")
        finally:
            self.database.discard(session)

    def position(self) -> Offsets | None:
        """None: there is no table, batches change rows, or no column has their number."""
        if not self.options.write.only_adds or self.options.batch_column is None:
            return None

        def ask(session: Session) -> Offsets | None:
            table, there = self._numbered(session)
            return table.position(session) if table is not None and table.column in there else None

        return self.database.ask(ask)

    def kept(self, position: Offsets) -> Mapping[str, Any] | None:
        schema = self._stored_schema()

        def ask(session: Session) -> Mapping[str, Any] | None:
            table, _ = self._numbered(session, position)
            return None if table is None or schema is None else table.kept(session, position, schema.names)

        return self.database.ask(ask)

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        def ask(session: Session) -> Changes:
            table, there = self._numbered(session, position)
            if table is None or not table.is_of(position):
                return Changes.deleted(f"table {self.options.table_text}", recreated=table is not None)
            if before is None:
                return Changes(unknown=(f"nothing is known of what table {table.name} held before",))
            return table.changes(session, position, before, there)

        return self.database.ask(ask)

    def _numbered(
        self, session: Session, position: Offsets | None = None
    ) -> tuple[NumberedTable[Session] | None, Sequence[str]]:
        """The table in the order of its batches, as the options, or a position, name their column; its columns."""
        column = None if position is None else position["column"]
        table = target.numbered_table(session, self.database, self.options, column)
        found = target.find(session, self.options)
        return table, [] if found is None else [*target.table_columns(session, found)]

    def _range(self, session: Session) -> tuple[str, int, int] | None:
        """The primary key, quoted, if it is a single integer column, with its minimum, and its maximum plus one."""
        table = target.find(session, self.options)
        if table is None:
            return None
        columns = target.table_columns(session, table)
        rows = session.execute(
            "SELECT column_name FROM information_schema.statistics "
            "WHERE table_schema = %s AND table_name = %s AND index_name = 'PRIMARY'",
            [table.base, table.name],
        ).fetchall()
        if len(rows) != 1 or "int" not in columns[rows[0][0]].kind:
            return None
        key = quoted(rows[0][0])
        low, high = session.execute(f"SELECT min({key}), max({key}) FROM {table.full}").fetchone()
        return None if low is None else (key, int(low), int(high) + 1)


def _joined(rows: Sequence[tuple[bytes | None]]) -> bytes:
    try:
        return b"".join(row[0] for row in rows)  # type: ignore[misc]
    except TypeError:
        raise InvariantBroken("ROW_TOO_LONG") from None


def _as_text(name: str) -> str:
    """Where the server has no number for a date, as for 0000-00-00: parsing it says so, while null would hide it."""
    return f"CAST({name} AS CHAR)"


def _selected(f: pa.Field) -> str:
    name, t = quoted(f.name), pa.types
    if t.is_timestamp(f.type):
        # Microseconds as an integer: exact, and independent of time zones and formats.
        return f"coalesce(timestampdiff(MICROSECOND, '1970-01-01 00:00:00', {name}), {_as_text(name)})"
    if t.is_time(f.type):
        return f"((hour({name}) * 60 + minute({name})) * 60 + second({name})) * 1000000 + microsecond({name})"
    if t.is_date32(f.type):
        return f"coalesce(to_days({name}) - 719528, {_as_text(name)})"
    if t.is_binary(f.type):
        return f"concat('\"', lower(hex({name})), '\"')"
    if t.is_float32(f.type):
        # A bare float is printed with six digits; a double exactly, but in MySQL a product of one with fifteen.
        return f"{name} * 1e0"
    if t.is_string(f.type):
        return f"concat('\"', replace(CONVERT({name} USING utf8mb4), '\"', '\"\"'), '\"')"
    return name

"""What is read of the database: checks before a start, a scan of all rows, and facts about those before a position."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.sqlite import SqliteOptions, target
from delivered.connectors.sqlite.client import (
    WAL_RACE_FIXED,
    SqliteDatabase,
    begin,
    connect,
    explained,
    migrate,
    rollback,
)
from delivered.contract.sink import Changes
from delivered.contract.source import Finding, Offsets, Slice
from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import findings, no_unique_index
from delivered.kits.sql.table import RowSum, TableScan, difference, never_written, spread, steps
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S


def look(options: SqliteOptions, guarantee: Guarantee) -> Sequence[Finding]:
    """See `delivered.contract.sink.Sink.preflight`. Opens the database for writing, as a batch would."""
    del guarantee
    found: list[Finding] = []
    try:
        connection = connect(options.path)
        try:
            migrate(connection, options.path)
            begin(connection, CONNECT_TIMEOUT_S)
            # BEGIN IMMEDIATE alone succeeds on a read-only file. This writes, and is rolled back.
            connection.execute("UPDATE _delivered_migration SET applied_at_ms = applied_at_ms")
            found.extend(_check_table(connection, options))
            journal = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
            if journal == "wal" and sqlite3.sqlite_version_info < WAL_RACE_FIXED:
                found.append(_wal_race(options.path))
        except sqlite3.Error as error:
            raise explained(error, options.path) from error
        finally:
            rollback(connection)
            connection.close()
        options.staging.mkdir(exist_ok=True)
    except DeliveredError as error:
        return [Finding.refusal(error)]
    except OSError as error:
        staging = options.staging
        return [
            Finding.build(
                "STAGING_FAILED.START", refuses=True, path=str(staging), error=error.strerror, folder=staging.parent
            )
        ]
    return found


def _check_table(connection: sqlite3.Connection, options: SqliteOptions) -> Iterator[Finding]:
    write = options.write
    target.check_kind(connection, options)
    if not target.table_columns(connection, options.table):
        if not options.create:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            raise target.missing_table(options, [str(name) for (name,) in tables])
    elif write.upserts and not target.has_unique_index(connection, options.table, write.keys):
        raise no_unique_index(write, options.table, options.where)
    else:
        if write.only_adds and (why := unordered(connection, options.table)):
            yield Finding.build("AUDIT_READS_ALL.SQLITE", refuses=False, table=options.table, reason=why)
        yield from findings(options, target.read_definition(connection, options))


def _wal_race(path: str) -> Finding:
    version = ".".join(map(str, sqlite3.sqlite_version_info))
    return Finding.build("WAL_RACE", refuses=False, path=path, version=version)


# A scan of all rows in ranges of rowid, and facts about the rows before one.

SLICE_ROWS = 250_000
"""Minimum range of rowids per slice."""
COUNTED_MAX = 2_000_000
"""Rowids over which all rows are counted; of a longer range, the sampled ones are (0.4 s)."""
HASHED_MAX = 100_000
"""Rowids over which all rows are hashed (0.4 s); of a longer range, `SAMPLES` ranges of the same total length."""
SAMPLES = 100
ROWID_MAX = 2**63 - 1
"""Behind it, SQLite numbers new rows at random."""


@dataclass(frozen=True)
class SqliteScan(TableScan):
    """See `delivered.kits.sql.table.TableScan`. Meanwhile, rows may only be added."""

    options: SqliteOptions

    @property
    def database(self) -> SqliteDatabase:
        return SqliteDatabase(self.options.path)

    def _stored_schema(self) -> pa.Schema | None:
        return self.database.ask(lambda connection: target.stored_schema(connection, self.options.table))

    def _never_written(self) -> UsageError:
        return never_written(self.options.table, self.options.where, "path and table")

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"rowid": n}: the first one."""
        first, stop, table = self.database.ask(self._content)
        if until is not None:
            stop = int(until["rowid"]) if _same(table, until) else first
        if since is not None and _same(table, since):
            first = int(since.get("rowid", first))
        return [Slice({"start": at, "end": until_}) for at, until_ in steps(first, stop, SLICE_ROWS)]

    def position(self) -> Offsets | None:
        """None: the table's rows are not numbered in the order in which they are added."""

        def ask(connection: sqlite3.Connection) -> Offsets | None:
            _, stop, table = self._content(connection)
            return {"rowid": stop, "table": table} if self._counts_up(connection) and stop <= ROWID_MAX else None

        return self.database.ask(ask) if self.options.write.only_adds else None

    def kept(self, position: Offsets) -> Mapping[str, Any]:
        """The number of rows, and hashes of some: all of a small table. VACUUM may renumber rows."""
        return self.database.ask(lambda connection: _facts(connection, self.options.table, position, None))

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        def ask(connection: sqlite3.Connection) -> Changes:
            table = self.options.table
            there = target.table_columns(connection, table)
            if not there or not _same(target.identity(connection, table), position):
                return Changes.deleted(f"table {table}", recreated=bool(there))
            if before is None:
                return Changes(unknown=(f"nothing is known of what table {table} held before",))
            if missing := set(before["columns"]) - set(there):
                return Changes(altered=(f"table {table}: columns were removed: {', '.join(sorted(missing))}",))
            return _compared(table, before, _facts(connection, table, position, before))

        return self.database.ask(ask)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        columns = ", ".join(quoted(name) for name in schema.names)
        connection = self.database.connect("read", writes=False)
        try:
            rowid = rowid_name(connection, self.options.table)
            where = f" WHERE {rowid} BETWEEN ? AND ? ORDER BY {rowid}" if rowid else ""
            statement = f"SELECT {columns} FROM {quoted(self.options.table)}{where}"  # noqa: S608 - identifiers quoted
            cursor = connection.execute(statement, (piece.data["start"], piece.data["end"] - 1) if rowid else ())
            while rows := cursor.fetchmany(target.CHUNK_ROWS):
                values = zip(*rows, strict=True)
                arrays = [_array(list(v), f) for v, f in zip(values, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except sqlite3.Error as error:
            raise explained(error, self.options.path) from error
        finally:
            connection.close()

    def _content(self, connection: sqlite3.Connection) -> tuple[int, int, str | None]:
        """First rowid, the one after the last, and the table's identity."""
        table = self.options.table
        rowid, identity = rowid_name(connection, table), target.identity(connection, table)
        if rowid is None:
            return 0, 1, identity
        row = connection.execute(f"SELECT min({rowid}), max({rowid}) FROM {quoted(table)}").fetchone()  # noqa: S608
        # In Python: SQLite would make a float of 2^63.
        return (0, 0, identity) if row[0] is None else (row[0], row[1] + 1, identity)

    def _counts_up(self, connection: sqlite3.Connection) -> bool:
        """Whether SQLite numbers new rows, and in the order in which they are added."""
        table = self.options.table
        return target.stored_schema(connection, table) is not None and not unordered(connection, table)


def unordered(connection: sqlite3.Connection, table: str) -> str:
    """Why SQLite does not number new rows of a table in the order in which they are added; empty: it does."""
    if rowid_name(connection, table) is None:
        return "it is WITHOUT ROWID"
    schema = target.stored_schema(connection, table)
    names = target.filled(connection, table, schema.names) if schema is not None else ()
    return f"the rows bring their numbers, in the column {names[0]!r} (INTEGER PRIMARY KEY)" if names else ""


def _same(identity: str | None, position: Offsets) -> bool:
    """Whether a table is the one that the position is of; True where a user wrote it."""
    return bool(position.get("table", identity) == identity)


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    """Raises BadRecord: another client stored a value that is not one of the column's type."""
    try:
        return target.from_sql(values, field.type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise BadRecord("VALUE_UNREADABLE.SQLITE", column=field.name, type=field.type, error=str(error)[:300]) from None


def rowid_name(connection: sqlite3.Connection, table: str) -> str | None:
    """A name of the rowid that no column shadows; None: the table is WITHOUT ROWID."""
    declared: Any = target.table_columns(connection, table)
    for name in ("_rowid_", "rowid", "oid"):
        if name not in declared:
            try:
                connection.execute(f"SELECT {name} FROM {quoted(table)} LIMIT 0")  # noqa: S608 - identifiers quoted
            except sqlite3.OperationalError:
                return None
            return name
    return None


def _facts(
    connection: sqlite3.Connection, table: str, position: Offsets, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Args: before: compute the same facts again, of rows that have the same numbers."""
    connection.execute("BEGIN")
    stop, rowid = int(position["rowid"]), rowid_name(connection, table)
    source = f"FROM {quoted(table)} WHERE {rowid}"
    columns = list(target.table_columns(connection, table)) if before is None else before["columns"]

    def row_sum(start: int, end: int) -> list[Any]:
        statement = f"SELECT {', '.join(map(quoted, columns))} {source} BETWEEN ? AND ?"
        found = RowSum.of(repr(row).encode() for row in connection.execute(statement, (start, end - 1)))
        return [start, end, found.count, found.sum]

    if before is None:
        first, last = connection.execute(f"SELECT min({rowid}), max({rowid}) {source} < ?", (stop,)).fetchone()
        first, last = (stop, stop - 1) if first is None else (first, last)
        ranges = spread(first, stop, SAMPLES, HASHED_MAX // SAMPLES)
    else:
        first, last = before["first"], before["last"][0]
        ranges = [(start, end) for start, end, *_ in before["ranges"]]
    count = None
    if stop - first <= COUNTED_MAX:
        (count,) = connection.execute(f"SELECT count(*) {source} < ?", (stop,)).fetchone()
    return {
        "columns": columns,
        "first": first,
        "last": row_sum(last, last + 1),
        "rows": count,
        "ranges": [row_sum(start, end) for start, end in ranges],
    }


def _compared(table: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    pairs = [
        (RowSum(*then[2:]), RowSum(*found[2:])) for then, found in zip(before["ranges"], now["ranges"], strict=True)
    ]
    then, found = sum((p[0] for p in pairs), RowSum()), sum((p[1] for p in pairs), RowSum())
    if before["rows"] is not None and before["rows"] != now["rows"]:
        then, found = RowSum(before["rows"]), RowSum(now["rows"])
    if then == found and before["last"] == now["last"]:
        return Changes()
    what = difference(then, found) or "its newest row is another one"
    # A number is used again once the newest row is deleted: then new rows may lie before the position.
    continues = before["last"] == now["last"] and found.count <= then.count
    return Changes(altered=(f"table {table}: {what}",), continues=continues)

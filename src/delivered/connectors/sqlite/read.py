"""A scan of all rows of the table, in ranges of rowid."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.sqlite import SqliteOptions, target
from delivered.connectors.sqlite.client import SqliteDatabase, explained
from delivered.contract.source import Offsets, Slice
from delivered.kits.sql.database import quoted
from delivered.kits.sql.table import TableScan, never_written, steps
from delivered.model.errors import BadRecord, UsageError

SLICE_ROWS = 250_000
"""Minimum range of rowids per slice."""


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

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"rowid": n}: the first one."""
        first, stop = self._range()
        first = int((since or {}).get("rowid", first))
        return [Slice({"start": at, "end": until}) for at, until in steps(first, stop, SLICE_ROWS)]

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

    def _range(self) -> tuple[int, int]:
        """First rowid and the one after the last."""

        def ask(connection: sqlite3.Connection) -> tuple[int, int]:
            rowid = rowid_name(connection, self.options.table)
            if rowid is None:
                return 0, 1
            row = connection.execute(
                f"SELECT min({rowid}), max({rowid}) FROM {quoted(self.options.table)}"  # noqa: S608
            ).fetchone()
            return (0, 0) if row[0] is None else (row[0], row[1] + 1)  # in Python: SQLite would make a float of 2^63

        return self.database.ask(ask)


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

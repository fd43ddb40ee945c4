"""The table as a source of all its rows, in ranges of rowid, for the audit."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.sqlite import target, types
from delivered.connectors.sqlite.database import SqliteDatabase, explained
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.contract.source import Offsets, Slice
from delivered.kits.sql.database import quoted
from delivered.kits.sql.table import TableSource, steps
from delivered.kits.sql.target import never_written
from delivered.model.capability import SourceCapability
from delivered.model.errors import UsageError

SLICE_ROWS = 250_000
"""Range of rowids in one slice, at least."""


@dataclass(frozen=True)
class SqliteTable(TableSource):
    """The rows of one table, with the Arrow types that they were written with."""

    options: SqliteOptions

    def capability(self) -> SourceCapability:
        return SourceCapability(
            "sqlite", replayable=True, local=True, assumes=("rows of the table are only ever added while it is read",)
        )

    @property
    def database(self) -> SqliteDatabase:
        return SqliteDatabase(self.options.path)

    def _stored_schema(self) -> pa.Schema | None:
        return self.database.ask(lambda connection: target.stored_schema(connection, self.options.table))

    def _never_written(self) -> UsageError:
        return never_written(self.options.table, self.options.where, "path and table")

    def driver(self) -> SqliteTableDriver:
        return SqliteTableDriver(self)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        columns = ", ".join(quoted(name) for name in schema.names)
        connection = self.database.connect("read", writes=False)
        try:
            rowid = rowid_name(connection, self.options.table)
            where = f" WHERE {rowid} >= ? AND {rowid} < ? ORDER BY {rowid}" if rowid else ""
            statement = f"SELECT {columns} FROM {quoted(self.options.table)}{where}"  # noqa: S608 - identifiers quoted
            cursor = connection.execute(statement, (piece.data["start"], piece.data["end"]) if rowid else ())
            while rows := cursor.fetchmany(target.CHUNK_ROWS):
                values = zip(*rows, strict=True)
                arrays = [types.from_sql(list(v), f.type) for v, f in zip(values, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except sqlite3.Error as error:
            raise explained(error, self.options.path) from error
        finally:
            connection.close()

    def range(self) -> tuple[int, int]:
        """First rowid and the one after the last."""

        def ask(connection: sqlite3.Connection) -> tuple[int, int]:
            rowid = rowid_name(connection, self.options.table)
            if rowid is None:
                return 0, 1
            row = connection.execute(
                f"SELECT min({rowid}), max({rowid}) + 1 FROM {quoted(self.options.table)}"  # noqa: S608
            ).fetchone()
            return (0, 0) if row[0] is None else (row[0], row[1])

        return self.database.ask(ask)


class SqliteTableDriver:
    """Offsets are `{"rowid": n}`, the next rowid to read."""

    def __init__(self, table: SqliteTable) -> None:
        self._table = table
        self._frozen: Offsets | None = None

    def initial(self) -> Offsets:
        return {"rowid": self._table.range()[0]}

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        end = (self._frozen or self._end())["rowid"]
        return {"rowid": end if rows_max is None else min(end, start["rowid"] + rows_max)}

    def newest(self) -> Offsets | None:
        return self._end()

    def freeze(self) -> None:
        self._frozen = self._end()

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        first, stop = int(start["rowid"]), int(end["rowid"])
        return [Slice({"start": at, "end": until}) for at, until in steps(first, stop, SLICE_ROWS)]

    def batch(self) -> tuple[Offsets, Offsets]:
        first, stop = self._table.range()
        return {"rowid": first}, {"rowid": stop}

    def acknowledge(self, end: Offsets) -> None:
        """A table needs no telling."""

    def close(self) -> None:
        """Nothing is held."""

    def _end(self) -> Offsets:
        return {"rowid": self._table.range()[1]}


def rowid_name(connection: sqlite3.Connection, table: str) -> str | None:
    """A name of the rowid that no column of the user's hides; None for a table WITHOUT ROWID."""
    taken: Any = target.table_columns(connection, table)
    for name in ("_rowid_", "rowid", "oid"):
        if name not in taken:
            try:
                connection.execute(f"SELECT {name} FROM {quoted(table)} LIMIT 0")  # noqa: S608 - identifiers quoted
            except sqlite3.OperationalError:
                return None
            return name
    return None

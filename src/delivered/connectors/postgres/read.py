"""A scan of all rows of the table, in ranges of pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.connectors.postgres import position as positions
from delivered.connectors.postgres import target
from delivered.connectors.postgres.client import PostgresDatabase
from delivered.connectors.postgres.sink import PostgresOptions
from delivered.connectors.postgres.target import version_of
from delivered.contract.sink import Changes
from delivered.contract.source import Address, Offsets, Slice
from delivered.kits.sql.batches import NumberedTable, has_batches
from delivered.kits.sql.database import quoted, read_csv
from delivered.kits.sql.table import TableScan, never_written, steps
from delivered.model.errors import Refused, UsageError

if TYPE_CHECKING:
    import psycopg

SLICE_PAGES = 8_192
"""Minimum number of 8 KiB pages per slice."""


@dataclass(frozen=True)
class PostgresScan(TableScan):
    """See `delivered.kits.sql.table.TableScan`. Rows must not be changed, deleted or moved (VACUUM FULL) meanwhile."""

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
            ends.append(positions.behind(since))
        pages = {r.name: r.pages for r in positions.relations(connection, found[0])}
        total = sum(pages.values())
        return [
            Slice({"relation": relation, "where": [*_pages(at, stop), *ends]}, partition=relation)
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
            return positions.take(connection, self.options)

        return self.database.ask(ask)

    def kept(self, position: Offsets) -> Mapping[str, Any] | None:
        schema = self._stored_schema()
        if schema is None:
            return None

        def ask(connection: psycopg.Connection[Any]) -> Mapping[str, Any]:
            table = self._numbered(connection, position) if has_batches(position) else None
            if table is not None:
                return table.kept(connection, position, schema.names)
            return positions.kept(connection, self.options, schema.names, position, None)

        return self.database.ask(ask)

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        def ask(connection: psycopg.Connection[Any]) -> Changes:
            name, found = self.options.table_text, target.find(connection, self.options)
            numbered = has_batches(position)
            if not numbered and (why := positions.broken(connection, position)):
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
            now = positions.kept(connection, self.options, before["columns"], position, before)
            return positions.compared(before, now)

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
            return positions.before(position) if self._valid(connection, position) else None
        table = self._numbered(connection, position)
        return table.before(position) if table is not None and table.is_of(position) else None

    def _valid(self, connection: psycopg.Connection[Any], position: Offsets) -> bool:
        """Whether it is a snapshot's, and of this table. Raises Refused: it no longer divides its rows."""
        if "snapshot" not in position:
            return False
        found = target.find(connection, self.options)
        if why := positions.broken(connection, position):
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

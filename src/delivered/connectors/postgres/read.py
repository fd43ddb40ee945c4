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
from delivered.kits.sql.database import quoted
from delivered.kits.sql.table import TableScan, never_written, steps
from delivered.kits.sql.text import read_csv
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
        first = {} if since is None or "snapshot" in since else since
        since = self._valid(since)
        if until is not None and self._valid(until) is None:
            return []
        where = {"since": since, "until": until}
        pages = self._pages()
        total = sum(pages.values())
        return [
            Slice({"relation": relation, "start": at, "end": stop, **where}, partition=relation)
            for relation, pages_ in pages.items()
            for at, stop in steps(int(first.get(relation, 0)), pages_, SLICE_PAGES, total)
        ]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """COPY as CSV, parsed by Arrow without loss."""
        schema, data = self.schema(), piece.data
        columns = ", ".join(_selected(f) for f in schema)
        conditions = [f"ctid >= '({data['start']},0)'::tid", f"ctid < '({data['end']},0)'::tid"]
        conditions += [positions.behind(data["since"])] if data.get("since") else []
        conditions += [positions.before(data["until"])] if data.get("until") else []
        statement = (
            f"COPY (SELECT {columns} FROM {data['relation']} WHERE {' AND '.join(conditions)}) "  # noqa: S608
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
        return self.database.ask(lambda connection: positions.take(connection, self.options))

    def kept(self, position: Offsets) -> Mapping[str, Any] | None:
        schema = self._stored_schema()
        if schema is None:
            return None
        return self.database.ask(lambda c: positions.kept(c, self.options, schema.names, position, None))

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        def ask(connection: psycopg.Connection[Any]) -> Changes:
            table, found = self.options.table_text, target.find(connection, self.options)
            if why := positions.broken(connection, position):
                return Changes(unknown=(why,), continues=False)
            if found is None or found[0] != position["table"]:
                return Changes.deleted(f"table {table}", recreated=found is not None)
            if before is None:
                return Changes(unknown=(f"nothing is known of what table {table} held before",))
            there = target.table_columns(connection, found[0])
            if missing := [name for name in before["columns"] if name not in there]:
                return Changes(altered=(f"table {table}: columns were removed: {', '.join(missing)}",))
            now = positions.kept(connection, self.options, before["columns"], position, before)
            return positions.compared(before, now)

        return self.database.ask(ask)

    def _valid(self, position: Offsets | None) -> Offsets | None:
        """None: it is none of this table. Raises Refused: it no longer divides its rows."""
        if position is None or "snapshot" not in position:
            return None

        def ask(connection: psycopg.Connection[Any]) -> Offsets | None:
            found = target.find(connection, self.options)
            if why := positions.broken(connection, position):
                raise Refused("POSITION_LOST", where=self.options.where, position=position, reason=why)
            return position if found is not None and found[0] == position["table"] else None

        return self.database.ask(ask)

    def _pages(self) -> dict[str, int]:
        """The table, or its partitions, quoted for SQL, with their number of pages."""

        def question(connection: psycopg.Connection[Any]) -> dict[str, int]:
            found = target.find(connection, self.options)
            return {} if found is None else {r.name: r.pages for r in positions.relations(connection, found[0])}

        return self.database.ask(question)


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

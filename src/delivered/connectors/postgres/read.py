"""A scan of all rows of the table, in ranges of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.connectors.postgres import target
from delivered.connectors.postgres.client import PostgresDatabase
from delivered.connectors.postgres.sink import PostgresOptions
from delivered.connectors.postgres.target import version_of
from delivered.contract.source import Address, Offsets, Slice
from delivered.kits.sql.database import quoted
from delivered.kits.sql.table import TableScan, never_written, steps
from delivered.kits.sql.text import read_csv
from delivered.model.errors import UsageError

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

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"<partition>": n}: the first page."""
        pages, first = self._pages(), since or {}
        total = sum(pages.values())
        return [
            Slice({"relation": relation, "start": at, "end": until}, partition=relation)
            for relation, stop in pages.items()
            for at, until in steps(int(first.get(relation, 0)), stop, SLICE_PAGES, total)
        ]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """COPY as CSV, parsed by Arrow without loss."""
        schema = self.schema()
        columns = ", ".join(_selected(f) for f in schema)
        statement = (
            f"COPY (SELECT {columns} FROM {piece.data['relation']} WHERE ctid >= '({piece.data['start']},0)'::tid "  # noqa: S608
            f"AND ctid < '({piece.data['end']},0)'::tid) TO STDOUT (FORMAT csv)"
        )
        connection = self.database.connect("read", writes=False)
        try:
            with self.database.explaining(), connection.cursor().copy(statement) as copy:
                yield from read_csv(copy.read, schema, "t", "f")
        finally:
            connection.close()

    def _pages(self) -> dict[str, int]:
        """The table, or its partitions, quoted for SQL, with their number of pages."""

        def question(connection: psycopg.Connection[Any]) -> dict[str, int]:
            found = target.find(connection, self.options)
            if found is None:
                return {}
            rows = connection.execute(
                "SELECT n.nspname, c.relname, pg_relation_size(c.oid) / current_setting('block_size')::int "
                "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s AND relkind = 'r' "
                "OR c.oid IN (SELECT relid FROM pg_partition_tree(%(oid)s::oid) WHERE isleaf) ORDER BY c.oid",
                {"oid": found[0]},
            ).fetchall()
            return {f"{quoted(schema)}.{quoted(name)}": int(count) for schema, name, count in rows}

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

"""Rows that PostgreSQL itself refuses: its parsers of JSON, enums, domains, and its indexes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.postgres import target, writer
from delivered.connectors.postgres.client import about_a_row
from delivered.connectors.postgres.sink import TYPES, PostgresOptions
from delivered.connectors.postgres.target import migrate
from delivered.kits.sql.database import quoted
from delivered.kits.sql.sink import new_nonce
from delivered.kits.sql.table import LONG_BYTES, bytes_of, find_refused, find_too_long, stored_columns
from delivered.model.ranges import first_of, fitted

if TYPE_CHECKING:
    import psycopg

_WIDE = 400
"""Columns of which a row may exceed a page of 8,160 bytes, even if each is stored elsewhere."""


def refused_rows(
    connection: psycopg.Connection[Any], options: PostgresOptions, batch: pa.RecordBatch
) -> pa.Array | None:
    """See `delivered.contract.sink.Sink.refused_rows`. Outside a transaction.

    Creates the table first if the options request it. Loads suspicious rows into an empty table like the target, with
    its indexes but without its constraints, in a transaction that is rolled back: no row of the target is locked, and
    rows of other shards do not conflict.

    Raises:
        UsageError, psycopg.Error: the table cannot take rows of this schema at all.
    """
    schema = TYPES.plain_schema(batch.schema)
    batch, found = fitted(batch, schema), target.find(connection, options)
    if found is None and not options.create:
        return None
    migrate(connection, options.ledger_schema)
    ready = target.ready(connection, options, schema)
    found = found or target.find(connection, options)
    if found is None:
        return None
    relation = found[0]
    reasons = find_too_long(batch, ready.widths, "characters")
    names = stored_columns(options.write, schema).names
    indexes = _indexes(connection, relation)
    suspects = _suspects(batch, names, indexes, _parses(connection, relation, names))
    if reasons is not None:
        suspects = pc.and_(suspects, pc.is_null(reasons))
    if not pc.any(suspects).as_py():
        return reasons
    kinds = [kind for name, kind in zip(batch.schema.names, ready.kinds, strict=False) if name in names]
    connection.execute("BEGIN")
    try:
        copy = _Copy(connection, options, relation, ready.name, tuple(names), tuple(kinds), indexes)
        return first_of(reasons, find_refused(batch.select(names), suspects, copy.load))
    finally:
        connection.execute("ROLLBACK")


@dataclass(frozen=True)
class _Index:
    """
    Attributes:
        body: its definition, from USING on.
        columns: those that it holds; None: expressions or a condition may use any.
    """

    name: str
    body: str
    columns: frozenset[str] | None


class _Copy:
    """An empty table like the target, inside the open transaction."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        options: PostgresOptions,
        relation: int,
        like: str,
        names: Sequence[str],
        kinds: Sequence[str],
        indexes: Sequence[_Index],
    ) -> None:
        self._connection, self._kinds, own = connection, kinds, f"try_{new_nonce()}"
        schema = quoted(options.ledger_schema)
        self._shown = {own: options.table_text}
        table = f"{schema}.{quoted(own)}"
        connection.execute(f"CREATE TABLE {table} (LIKE {like} INCLUDING GENERATED) WITH (autovacuum_enabled = false)")
        bound = connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND attnotnull AND NOT attisdropped",
            [relation],
        ).fetchall()
        if bound:  # constraints are not tried: another option is about them
            free = ", ".join(f"ALTER COLUMN {quoted(name)} DROP NOT NULL" for (name,) in bound)
            connection.execute(f"ALTER TABLE {table} {free}")
        for i, index in enumerate(indexes):
            name = f"{own}_i{i}"
            self._shown = {name: index.name, **self._shown}
            connection.execute(f"CREATE INDEX {quoted(name)} ON {table} {index.body}")
        self._statement = f"COPY {table} ({', '.join(map(quoted, names))}) FROM STDIN (FORMAT binary)"

    def load(self, rows: pa.RecordBatch) -> str | None:
        """Why a row was refused. Raises psycopg.Error if it was not about a row."""
        import psycopg

        why = None
        self._connection.execute("SAVEPOINT row")
        try:
            with self._connection.cursor().copy(self._statement) as copy:
                copy.write(writer.HEADER)
                for block in writer.blocks(rows, self._kinds):
                    copy.write(block)
                copy.write(writer.TRAILER)
        except psycopg.Error as error:
            why = about_a_row(error)
            if why is None:
                raise
        self._connection.execute("ROLLBACK TO SAVEPOINT row")
        for own, shown in self._shown.items():
            why = why and why.replace(own, shown)
        return why


def _indexes(connection: psycopg.Connection[Any], relation: int) -> list[_Index]:
    """Those of the table and its partitions, each definition once."""
    rows = connection.execute(
        """SELECT c.relname, m.amname, pg_get_indexdef(c.oid), i.indexprs IS NULL AND i.indpred IS NULL,
                  (SELECT array_agg(a.attname::text) FROM pg_attribute a
                   WHERE a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey::int2[]))
           FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
           WHERE i.indislive AND (i.indrelid = %s OR i.indrelid IN (SELECT relid FROM pg_partition_tree(%s::oid)))
           ORDER BY i.indrelid <> %s, c.relname""",
        [relation, relation, relation],
    ).fetchall()
    found: dict[str, _Index] = {}
    for name, method, definition, plain, columns in rows:
        body = definition[definition.index(f" USING {method} (") + 1 :]
        found.setdefault(body, _Index(name, body, frozenset(columns or ()) if plain else None))
    return list(found.values())


def _parses(connection: psycopg.Connection[Any], relation: int, names: Sequence[str]) -> bool:
    """Whether the server parses a column of the rows, or computes one from them."""
    row = connection.execute(
        """SELECT 1 FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
           WHERE a.attrelid = %s AND NOT a.attisdropped AND a.attnum > 0 AND (a.attgenerated <> '' OR
             a.attname = ANY(%s) AND (t.typtype IN ('d', 'e') OR t.typname IN ('json', 'jsonb'))) LIMIT 1""",
        [relation, list(names)],
    ).fetchone()
    return row is not None


def _suspects(batch: pa.RecordBatch, names: Sequence[str], indexes: Sequence[_Index], parses: bool) -> pa.Array:
    if parses or len(names) > _WIDE or any(i.columns is None for i in indexes):
        return pa.repeat(True, batch.num_rows)
    suspects = pa.repeat(False, batch.num_rows)
    for index in indexes:
        held = [n for n in names if index.columns is not None and n in index.columns]
        suspects = pc.or_(suspects, pc.greater(bytes_of(batch, held), LONG_BYTES))
    return suspects

"""The user's table: create it, check it, add rows to it; and what we know of its Arrow schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import pyarrow as pa

from delivered.connectors.sqlite import types
from delivered.connectors.sqlite.database import quoted
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.model.errors import UsageError

CHUNK_ROWS = 8_192
"""Rows that exist as Python objects at one time."""


def ready(connection: sqlite3.Connection, options: SqliteOptions, schema: pa.Schema) -> None:
    """Make sure that rows of `schema` fit the table; create it if allowed. Runs inside a transaction that writes.

    The schema is kept beside the ledger: SQLite's own types cannot tell a timestamp from a text.

    Raises:
        UsageError: the table is missing, a column is missing, of another type, or the rows changed their schema.
    """
    schema = types.plain_schema(schema)
    columns = table_columns(connection, options.table)
    if not columns:
        if not options.create:
            raise missing_table(options)
        body = ", ".join(f"{quoted(f.name)} {types.declared(f.type)}" for f in schema)
        connection.execute(f"CREATE TABLE {quoted(options.table)} ({body})")
    else:
        compare(options, schema, columns)
    known = stored_schema(connection, options.table)
    canonical = types.canonical_schema(schema)
    if known is None:
        connection.execute(
            "INSERT INTO _delivered_table (name, arrow_schema) VALUES (?, ?)",
            (options.table, canonical.serialize().to_pybytes()),
        )
    elif not known.equals(canonical):
        raise UsageError(
            "SCHEMA_CHANGED",
            f"Table {options.table!r} in {options.path!r} was written with the columns {_text(known)}, the rows now "
            f"have {_text(canonical)}. Fingerprints of the two could not be added up.",
            next_step="write to another table, or give the rows their former columns and types",
        )


def compare(options: SqliteOptions, schema: pa.Schema, columns: dict[str, str]) -> None:
    """Check rows of `schema` against a table's columns: name in lower case -> declared type.

    Raises:
        UsageError: a column is missing or of another type.
    """
    for field in schema:
        sql_type = columns.get(field.name.lower())
        wanted = types.declared(field.type)
        if sql_type is None:
            raise UsageError(
                "COLUMN_MISSING",
                f"Table {options.table!r} in {options.path!r} has no column {field.name!r}; it has "
                f"{', '.join(sorted(columns))}.",
                next_step=f"ALTER TABLE {quoted(options.table)} ADD COLUMN {quoted(field.name)} {wanted}; or drop "
                "the column from the rows",
            )
        if not types.fits(field.type, sql_type):
            raise UsageError(
                "COLUMN_TYPE",
                f"Column {field.name!r} of table {options.table!r} is declared {sql_type!r}, which would change values "
                f"of {field.type}; they need {wanted}.",
                next_step=f"cast the column of the rows, or make the table's column {wanted}",
            )


def table_columns(connection: sqlite3.Connection, table: str) -> dict[str, str]:
    """Name in lower case -> declared type; empty if there is no such table."""
    rows = connection.execute("SELECT name, type FROM pragma_table_info(?)", (table,)).fetchall()
    return {name.lower(): sql_type for name, sql_type in rows}


def stored_schema(connection: sqlite3.Connection, table: str) -> pa.Schema | None:
    """The Arrow schema, canonical, that the table was written with; None if it never was."""
    there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = '_delivered_table'").fetchone()
    if there is None:
        return None
    row = connection.execute("SELECT arrow_schema FROM _delivered_table WHERE name = ?", (table,)).fetchone()
    return None if row is None else pa.ipc.read_schema(pa.py_buffer(row[0]))


def missing_table(options: SqliteOptions) -> UsageError:
    return UsageError(
        "TABLE_MISSING",
        f"There is no table {options.table!r} in {options.path!r}, and ifNotExists is false.",
        next_step='create the table, or take .option("ifNotExists", "false") out',
    )


def insert(connection: sqlite3.Connection, table: str, batches: Iterable[pa.RecordBatch]) -> int:
    """Add rows inside the open transaction, a bounded chunk of Python objects at a time. Returns how many."""
    statement, rows = "", 0
    for batch in batches:
        if not statement:
            names = batch.schema.names
            statement = (
                f"INSERT INTO {quoted(table)} ({', '.join(map(quoted, names))}) "  # noqa: S608 - identifiers quoted
                f"VALUES ({', '.join('?' * len(names))})"
            )
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            chunk = batch.slice(start, CHUNK_ROWS)
            connection.executemany(statement, zip(*map(types.to_sql, chunk.columns), strict=True))
            rows += chunk.num_rows
    return rows


def _text(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)

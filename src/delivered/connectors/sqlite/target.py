"""The user's table: values of its columns, its creation and checks, inserts, and what its definition does to rows."""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.sqlite import TYPES, SqliteOptions
from delivered.connectors.sqlite.client import connect, migrate, refuses_a_row, row_refused, writing
from delivered.kits.sql.database import Definition, find_events, quoted
from delivered.kits.sql.merge import Merge
from delivered.kits.sql.table import (
    check_known,
    column_computed,
    column_missing,
    extend,
    find_absent,
    id_in_comment,
    missing_error,
    new_comment,
    stored_columns,
    untyped,
)
from delivered.model.errors import UsageError, did_you_mean
from delivered.model.limits import CONNECT_TIMEOUT_S

_AFFINITIES = {
    "INTEGER": ("INTEGER", "NUMERIC", "BLOB"),
    "REAL": ("REAL", "BLOB"),
    "TEXT": ("TEXT", "BLOB"),
    "BLOB": ("BLOB",),
}
"""Declared type -> affinities of a user's column that store its values without loss."""


def affinity(sql_type: str) -> str:
    """SQLite's affinity rules, in their order."""
    upper = sql_type.upper()
    if "INT" in upper:
        return "INTEGER"
    if any(word in upper for word in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if "BLOB" in upper or not upper or upper == "ANY":
        return "BLOB"
    return "REAL" if any(word in upper for word in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def fits(kind: pa.DataType, sql_type: str) -> bool:
    """Whether a column declared as `sql_type` stores values of `kind` without loss."""
    return affinity(sql_type) in _AFFINITIES[TYPES.declared(kind) or "BLOB"]


def to_sql(column: pa.Array) -> list[Any]:
    """Values of a plain type for sqlite3."""
    kind, t = column.type, pa.types
    if t.is_timestamp(kind) or t.is_date32(kind) or t.is_decimal128(kind):
        column = column.cast(pa.string())
    elif t.is_time32(kind):
        column = column.cast(pa.int32())
    elif t.is_time64(kind) or t.is_duration(kind):
        column = column.cast(pa.int64())
    values: list[Any] = column.to_pylist()
    if t.is_floating(kind) and pc.any(pc.is_nan(column)).as_py():
        return ["NaN" if value is not None and math.isnan(value) else value for value in values]
    return values


def from_sql(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Inverse of `to_sql`."""
    t = pa.types
    if t.is_timestamp(kind) or t.is_date32(kind) or t.is_decimal128(kind):
        return pa.array(values, pa.string()).cast(kind)
    if t.is_boolean(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if t.is_time32(kind):
        return pa.array(values, pa.int32()).cast(kind)
    if t.is_time64(kind) or t.is_duration(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if t.is_floating(kind):
        return pa.array([None if v is None else float(v) for v in values], pa.float64()).cast(kind)
    return pa.array(values, kind)


_GAP = r"(?:\s|--[^\n]*\n|/\*.*?\*/)+"
_CLAUSE = re.compile(rf"\bON{_GAP}CONFLICT\b", re.IGNORECASE | re.DOTALL)
_EVENT = re.compile(r"\b(INSERT|UPDATE|DELETE)\b.*?\bON\b", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class SqliteMerge(Merge):
    """
    Attributes:
        aborts: override the conflict clauses of the table, which skip or replace rows without an error.
    """

    aborts: bool = False

    @property
    def insert_into(self) -> str:
        return f"INSERT {'OR ABORT ' * self.aborts}INTO {self.target}"

    @property
    def update_of(self) -> str:
        return f"UPDATE {'OR ABORT ' * self.aborts}{self.target}"

    def exact(self, key: str) -> str:
        return f"CAST({key} AS BLOB)"


def check_kind(connection: sqlite3.Connection, options: SqliteOptions) -> None:
    """Raises UsageError: a view or virtual table: SQLite does not count what its triggers or its module store."""
    row = connection.execute(
        "SELECT type, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name = ? COLLATE NOCASE",
        (options.table,),
    ).fetchone()
    if row is None:
        return
    virtual = re.match(rf"\s*CREATE{_GAP}VIRTUAL\b", row[1] or "", re.IGNORECASE) is not None
    if row[0] == "view" or virtual:
        raise UsageError(
            "NOT_A_TABLE.SQLITE",
            table=options.table,
            where=options.where,
            kind="virtual table" if virtual else "view",
            storage="module stores" if virtual else "triggers store",
        )


def read_definition(connection: sqlite3.Connection, options: SqliteOptions) -> Definition:
    """Raises sqlite3.Error."""
    write, table = options.write, options.table
    runs = find_events(write)
    triggers = []
    rows = connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE tbl_name = ? COLLATE NOCASE AND sql IS NOT NULL", (table,)
    ).fetchall()
    for kind, name, text in rows:
        if kind == "trigger":
            event = _EVENT.search(text.partition(name)[2])
            if event is None or event[1].upper() in runs:
                triggers.append(f"{name} ({'trigger' if event is None else event[1].upper()})")
    keys = {k.lower(): k for k in write.keys}
    loose = {
        keys[column.lower()]: f"collation {collation}"
        for column, collation in connection.execute(
            "SELECT i.name, i.coll FROM pragma_index_list(?) AS l JOIN pragma_index_xinfo(l.name) AS i "
            "WHERE l.\"unique\" AND i.key AND i.cid >= 0 AND i.coll <> 'BINARY' COLLATE NOCASE",
            (table,),
        )
        if column.lower() in keys
    }
    clauses = any(kind == "table" and _CLAUSE.search(text) for kind, _, text in rows)
    columns = connection.execute("SELECT name, hidden FROM pragma_table_xinfo(?)", (table,)).fetchall()
    numbered = numbered_column(connection, table)
    return Definition(
        tuple(triggers),
        loose=loose,
        exists=any(kind == "table" for kind, _, _ in rows),
        clauses=clauses,
        filled=(
            *(f"{name} (generated)" for name, hidden in columns if hidden in (2, 3)),
            *((f"{numbered} (from null)",) if numbered is not None else ()),
        ),
    )


def numbered_column(connection: sqlite3.Connection, table: str) -> str | None:
    """The column that is the row's number, in which SQLite replaces null: an INTEGER PRIMARY KEY."""
    rows = connection.execute("SELECT name, type FROM pragma_table_info(?) WHERE pk > 0", (table,)).fetchall()
    indexed = connection.execute("SELECT 1 FROM pragma_index_list(?) WHERE origin = 'pk'", (table,)).fetchone()
    alone = len(rows) == 1 and rows[0][1].upper() == "INTEGER" and indexed is None
    return str(rows[0][0]) if alone else None


def filled(connection: sqlite3.Connection, table: str, names: Sequence[str]) -> tuple[str, ...]:
    """The rows' columns in which SQLite replaces null."""
    numbered = numbered_column(connection, table)
    return tuple(n for n in names if numbered is not None and n.lower() == numbered.lower())


CHUNK_ROWS = 8_192
"""Maximum number of rows as Python objects at a time."""


def ready(connection: sqlite3.Connection, options: SqliteOptions, schema: pa.Schema) -> None:
    """Check the table against `schema`; create it if allowed. Runs inside a read-write transaction.

    The schema is stored next to the ledger: SQLite's types do not distinguish a timestamp from a text.

    Raises:
        UsageError: the table is missing, a column is missing or of another type, or the rows' schema has changed.
    """
    schema = stored_columns(options.write, TYPES.plain_schema(schema))
    check_kind(connection, options)
    columns = table_columns(connection, options.table)
    if not columns:
        if not options.create:
            raise missing_table(options)
        body = ", ".join(f"{quoted(f.name)} {TYPES.declared(f.type)}" for f in schema)
        if options.write.upserts:
            body += f", PRIMARY KEY ({', '.join(map(quoted, options.write.keys))})"
        connection.execute(f"CREATE TABLE {quoted(options.table)} /* {new_comment()} */ ({body})")
    else:
        compare(options, schema, columns)
        _check_required(options, required_columns(connection, options.table), schema)
    known = stored_schema(connection, options.table)
    canonical = TYPES.canonical_schema(schema)
    if known is None:
        connection.execute(
            "INSERT INTO _delivered_table (name, arrow_schema) VALUES (?, ?)",
            (options.table, canonical.serialize().to_pybytes()),
        )
    else:
        check_known(options, known, canonical, _RECOVERY_ACTION)


_RECOVERY_ACTION = "write to another table, or restore the rows' columns and types"


def add_columns(connection: sqlite3.Connection, options: SqliteOptions, schema: pa.Schema) -> None:
    """Add the columns that the table lacks, and remember them. Runs inside a read-write transaction.

    Raises:
        UsageError: rows of this schema cannot be written to the table.
    """
    schema = stored_columns(options.write, TYPES.plain_schema(schema))
    columns = table_columns(connection, options.table)
    missing = find_absent(options, pa.schema([f for f in schema if f.name.lower() not in columns]), columns)
    compare(options, pa.schema([f for f in schema if f not in missing]), columns)
    _check_required(options, required_columns(connection, options.table), schema)
    known = stored_schema(connection, options.table)
    now = None if known is None else extend(options, known, TYPES.canonical_schema(schema), _RECOVERY_ACTION)
    for field in missing:
        kind = TYPES.declared(field.type)
        connection.execute(f"ALTER TABLE {quoted(options.table)} ADD COLUMN {quoted(field.name)} {kind}")
    if now is not None:
        values = (now.serialize().to_pybytes(), options.table)
        connection.execute("UPDATE _delivered_table SET arrow_schema = ? WHERE name = ?", values)


@contextlib.contextmanager
def altering(options: SqliteOptions) -> Iterator[sqlite3.Connection]:
    """A connection in a transaction that may change tables."""
    with contextlib.closing(connect(options.path)) as connection:
        migrate(connection, options.path)
        with writing(connection, options.path, CONNECT_TIMEOUT_S):
            yield connection


def ready_target(options: SqliteOptions, schema: pa.Schema) -> None:
    """See `delivered.contract.sink.Sink`."""
    with altering(options) as connection:
        if options.merge_schema and (check := table_check(connection, options)) is not None:
            check(schema)
        else:
            ready(connection, options, schema)


def extend_target(options: SqliteOptions, schema: pa.Schema) -> None:
    """See `delivered.contract.sink.Sink.add_columns`."""
    with altering(options) as connection:
        add_columns(connection, options, schema)


def table_check(connection: sqlite3.Connection, options: SqliteOptions) -> Callable[[pa.Schema], None] | None:
    """See `delivered.contract.sink.Sink.target_check`. Raises sqlite3.Error."""
    columns = table_columns(connection, options.table)
    if not columns:
        return None
    required, known = required_columns(connection, options.table), stored_schema(connection, options.table)
    return partial(_check_table, options, columns, required, known)


def _check_table(
    options: SqliteOptions,
    columns: dict[str, str | None],
    required: Sequence[str],
    known: pa.Schema | None,
    schema: pa.Schema,
) -> None:
    schema = stored_columns(options.write, TYPES.plain_schema(schema))
    skipped = [f for f in schema if untyped(f) and columns.get(f.name.lower()) is not None]
    if options.merge_schema:
        skipped += find_absent(options, pa.schema([f for f in schema if f.name.lower() not in columns]), columns)
    compare(options, pa.schema([f for f in schema if f not in skipped]), columns)
    _check_required(options, required, schema)
    if known is not None and not any(map(untyped, schema)):
        check = extend if options.merge_schema else check_known
        check(options, known, TYPES.canonical_schema(schema), _RECOVERY_ACTION)


def compare(options: SqliteOptions, schema: pa.Schema, columns: dict[str, str | None]) -> None:
    """Check a schema against a table's columns: name in lower case -> declared type; None: a generated column.

    Raises:
        UsageError: a column is missing or of another type.
    """
    for field in schema:
        wanted = TYPES.declared(field.type)
        if field.name.lower() not in columns:
            action = f"ALTER TABLE {quoted(options.table)} ADD COLUMN {quoted(field.name)} {wanted}"
            raise column_missing(options, field.name, sorted(columns), action)
        sql_type = columns[field.name.lower()]
        if sql_type is None:
            raise column_computed(options.table, field.name)
        if not fits(field.type, sql_type):
            raise UsageError(
                "COLUMN_TYPE.SQLITE",
                column=field.name,
                table=options.table,
                sql_type=sql_type,
                type=field.type,
                wanted=wanted,
            )


def _check_required(options: SqliteOptions, required: Sequence[str], schema: pa.Schema) -> None:
    """Raises UsageError: rows of this schema lack a column that the table requires."""
    names = {f.name.lower() for f in schema}
    absent = [name for name in required if name.lower() not in names]
    if absent:
        raise UsageError("COLUMN_REQUIRED.SQLITE", missing=", ".join(map(repr, absent)), table=options.table)


def required_columns(connection: sqlite3.Connection, table: str) -> tuple[str, ...]:
    """NOT NULL columns that SQLite does not fill if an INSERT leaves them out."""
    rows = connection.execute(
        'SELECT name FROM pragma_table_xinfo(?) WHERE "notnull" AND hidden = 0 '
        "AND coalesce(upper(dflt_value), 'NULL') = 'NULL'",
        (table,),
    ).fetchall()
    numbered = numbered_column(connection, table)
    return tuple(name for (name,) in rows if name != numbered)


def table_columns(connection: sqlite3.Connection, table: str) -> dict[str, str | None]:
    """Name in lower case -> declared type, None for a generated column; empty if the table does not exist."""
    rows = connection.execute("SELECT name, type, hidden FROM pragma_table_xinfo(?)", (table,)).fetchall()
    return {name.lower(): None if hidden in (2, 3) else sql_type for name, sql_type, hidden in rows}


def identity(connection: sqlite3.Connection, table: str) -> str | None:
    """The id that the table was created with, from the stored CREATE TABLE text; None: another client created it."""
    statement = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE"
    row = connection.execute(statement, (table,)).fetchone()
    return None if row is None else id_in_comment(row[0])


def stored_schema(connection: sqlite3.Connection, table: str) -> pa.Schema | None:
    """The canonical Arrow schema that the table was written with; None: never written."""
    there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = '_delivered_table'").fetchone()
    if there is None:
        return None
    row = connection.execute("SELECT arrow_schema FROM _delivered_table WHERE name = ?", (table,)).fetchone()
    return None if row is None else pa.ipc.read_schema(pa.py_buffer(row[0]))


def missing_table(options: SqliteOptions, known: Iterable[str] = ()) -> UsageError:
    """Args: known: tables that there are."""
    action = 'create the table, or remove .option("ifNotExists", "false")'
    return missing_error(options.table, options.where, did_you_mean(options.table, known) + action)


def has_unique_index(connection: sqlite3.Connection, table: str, keys: Sequence[str]) -> bool:
    """Whether there is a unique index or primary key on exactly these columns, usable for upserts."""
    rows = connection.execute(
        "SELECT 'the primary key', name FROM pragma_table_info(:table) WHERE pk > 0 UNION ALL "
        "SELECT 'index ' || l.name, i.name FROM pragma_index_list(:table) AS l JOIN pragma_index_info(l.name) AS i "
        'WHERE l."unique" AND NOT l.partial',
        {"table": table},
    ).fetchall()
    indexes: dict[str, set[str | None]] = {}
    for index, column in rows:
        indexes.setdefault(index, set()).add(None if column is None else column.lower())
    return {k.lower() for k in keys} in indexes.values()


def insert_rows(
    connection: sqlite3.Connection, options: SqliteOptions, definition: Definition, batches: Iterable[pa.RecordBatch]
) -> tuple[int, int]:
    """As `insert`, into the user's table."""
    into = SqliteMerge(options.write, quoted(options.table), (), definition.clauses).insert_into
    return insert(connection, into, batches, path=options.path)


def insert(
    connection: sqlite3.Connection,
    into: str,
    batches: Iterable[pa.RecordBatch],
    also: Mapping[str, int] | None = None,
    *,
    path: str,
) -> tuple[int, int]:
    """Insert rows inside the open transaction, in bounded chunks of Python objects.

    Returns the numbers of rows sent and stored.

    Args:
        into: "INSERT INTO" and the table, quoted for SQL.
        also: columns with a constant value.
        path: of the database, for errors.

    Raises:
        BadRecord: SQLite refused a row.
    """
    statement, sent, kept = "", 0, 0
    more = also or {}
    for batch in batches:
        if not statement:
            names = [*batch.schema.names, *more]
            values = [*("?" * batch.num_columns), *(str(int(v)) for v in more.values())]
            statement = f"{into} ({', '.join(map(quoted, names))}) VALUES ({', '.join(values)})"
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            chunk = batch.slice(start, CHUNK_ROWS)
            columns = [iter(to_sql(column)) for column in chunk.columns]
            try:
                kept += connection.executemany(statement, zip(*columns, strict=True)).rowcount
            except sqlite3.Error as error:
                if not refuses_a_row(error):
                    raise
                at = chunk.num_rows - length_hint(columns[-1]) - 1  # the last one that was read
                raise row_refused(path, f"the row {_shown(chunk.slice(at, 1))}", error) from error
            sent += chunk.num_rows
    return sent, kept


def _shown(row: pa.RecordBatch) -> str:
    """Columns and values of a row, each shortened, for an error."""
    values = (f"{name} = {to_sql(column)[0]!r:.60}" for name, column in zip(row.schema.names, row.columns, strict=True))
    return f"({', '.join(values):.600})"

"""Rows that SQLite itself refuses: longer than its limit, or with a value that the table cannot compute with."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.sqlite import types
from delivered.connectors.sqlite.database import SqliteDatabase
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.types import TYPES
from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import stored
from delivered.kits.sql.trial import bytes_of, long_values
from delivered.model.columns import fitted
from delivered.model.ranges import because, first_of

_CHECK = re.compile(r"\bCHECK\b", re.IGNORECASE)
_STRICT = re.compile(r"\bSTRICT\b[^)]*$", re.IGNORECASE)
"""Such a table does not take NaN, which is stored as a text."""
_FIXED_BYTES = 9
"""Of a value and its type, at most, where it is no text."""


def refused_rows(options: SqliteOptions, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.contract.trial.TriesRows`.

    Inserts rows into an empty copy of the table in memory, if the table computes anything of them. The copy has the
    table's indexes, but no triggers; a row that breaks a constraint is skipped. Only reads the database.

    Raises:
        DeliveredError: the database cannot be read.
    """
    batch = fitted(batch, TYPES.plain_schema(batch.schema))
    names = stored(options.write, batch.schema).names
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
        reasons = _too_long(batch, names, copy.getlimit(sqlite3.SQLITE_LIMIT_LENGTH))
        if not Path(options.path).exists():
            return reasons
        database, floats = SqliteDatabase(options.path), any(map(pa.types.is_floating, batch.schema.types))
        statements = database.ask(lambda connection: _definition(connection, options.table, floats))
        if not statements or not _copied(copy, statements):
            return reasons
        return first_of(reasons, _tried(copy, options.table, batch.select(names), reasons))


def _too_long(batch: pa.RecordBatch, names: Sequence[str], limit: int) -> pa.Array | None:
    """A value has such a limit, and so has a row."""
    total = pc.add(bytes_of(batch, names), _FIXED_BYTES * len(names))
    beyond = pc.greater(total, limit)
    if not pc.any(beyond).as_py():
        return None
    rows = pc.indices_nonzero(beyond).to_pylist()
    shown = {at: long_values(batch.slice(at, 1)) for at in rows}
    why = f"SQLite stores at most {limit} bytes of a row (SQLITE_MAX_LENGTH)"
    text = pa.array([shown[at] + why if at in shown else None for at in range(batch.num_rows)], pa.string())
    return because(None, beyond, text)


def _definition(connection: sqlite3.Connection, table: str, floats: bool) -> list[str]:
    """Statements that make the table and its indexes; empty if nothing is computed of a row.

    Args:
        floats: whether rows have any.
    """
    found = connection.execute(
        "SELECT type, sql FROM sqlite_master WHERE type IN ('table', 'index') AND tbl_name = ? COLLATE NOCASE "
        "AND sql IS NOT NULL ORDER BY type DESC",
        (table,),
    ).fetchall()
    computes = connection.execute(
        "SELECT 1 FROM pragma_table_xinfo(:table) WHERE hidden IN (2, 3) UNION ALL "
        "SELECT 1 FROM pragma_index_list(:table) AS l LEFT JOIN pragma_index_xinfo(l.name) AS i "
        "WHERE l.partial OR i.cid = -2",
        {"table": table},
    ).fetchone()
    checks = any(kind == "table" and (_CHECK.search(sql) or (floats and _STRICT.search(sql))) for kind, sql in found)
    return [sql for _, sql in found] if computes or checks else []


def _copied(copy: sqlite3.Connection, statements: Sequence[str]) -> bool:
    """Whether the table could be created: another client may have defined a function or a collation for it."""
    try:
        for statement in statements:
            copy.execute(statement)
    except sqlite3.Error:
        return False
    return True


def _tried(copy: sqlite3.Connection, table: str, batch: pa.RecordBatch, reasons: pa.Array | None) -> pa.Array | None:
    into, found = quoted(table), dict[int, str]()
    values = ", ".join("?" * batch.num_columns)
    # Constraints are not tried: another option is about them.
    insert = f"INSERT OR IGNORE INTO {into} ({', '.join(map(quoted, batch.schema.names))}) VALUES ({values})"  # noqa: S608
    for at, row in enumerate(zip(*map(types.to_sql, batch.columns), strict=True)):
        if reasons is not None and reasons[at].is_valid:
            continue
        try:
            copy.execute(insert, row)
        except sqlite3.Error as error:
            if str(error).startswith("no such "):  # about the statement: the other client's function
                return None
            found[at] = f"{long_values(batch.slice(at, 1))}{error}"
        copy.execute(f"DELETE FROM {into}")  # noqa: S608 - so that no row meets another
    return pa.array([found.get(i) for i in range(batch.num_rows)], pa.string()) if found else None

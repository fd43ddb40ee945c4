"""What a table's definition does to the rows that the sink writes: triggers, conflict clauses, loose keys."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from delivered.connectors.sqlite.options import SqliteOptions
from delivered.kits.sql.definition import Definition, events
from delivered.kits.sql.merge import Merge
from delivered.model.errors import UsageError

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
    """
    Raises:
        UsageError: a view or virtual table: SQLite does not count what its triggers or its module store.
    """
    row = connection.execute(
        "SELECT type, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name = ? COLLATE NOCASE",
        (options.table,),
    ).fetchone()
    if row is None:
        return
    virtual = re.match(rf"\s*CREATE{_GAP}VIRTUAL\b", row[1] or "", re.IGNORECASE) is not None
    if row[0] == "view" or virtual:
        raise UsageError(
            "NOT_A_TABLE",
            f"{options.table!r} {options.where} is a {'virtual table' if virtual else 'view'}: what its "
            f"{'module stores' if virtual else 'triggers store'} cannot be counted.",
            next_step="write to a table",
        )


def read(connection: sqlite3.Connection, options: SqliteOptions) -> Definition:
    """Raises sqlite3.Error."""
    write, table = options.write, options.table
    runs = events(write)
    triggers = []
    found = connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE tbl_name = ? COLLATE NOCASE AND sql IS NOT NULL", (table,)
    ).fetchall()
    for kind, name, text in found:
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
    clauses = any(kind == "table" and _CLAUSE.search(text) for kind, _, text in found)
    columns = connection.execute("SELECT name, hidden FROM pragma_table_xinfo(?)", (table,)).fetchall()
    numbered = numbered_column(connection, table)
    return Definition(
        tuple(triggers),
        loose=loose,
        exists=any(kind == "table" for kind, _, _ in found),
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

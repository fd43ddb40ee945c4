"""A table of keys in the target database, for dedup. Statements stand in `delivered.kits.sql.keys`."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from delivered.connectors.sqlite.database import SqliteDatabase, writing
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.store import DIALECT
from delivered.kits.sql.keys import KeyTable
from delivered.model.identity import Scope


def key_table(options: SqliteOptions, scope: Scope) -> KeyTable[sqlite3.Connection]:
    database = SqliteDatabase(options.path)

    @contextlib.contextmanager
    def reading() -> Iterator[sqlite3.Connection]:
        with contextlib.closing(database.connect("keys", writes=False)) as connection, database.explaining():
            yield connection

    @contextlib.contextmanager
    def alone() -> Iterator[sqlite3.Connection]:
        with contextlib.closing(database.connect("keys")) as connection, writing(connection, options.path):
            yield connection

    return KeyTable(DIALECT, scope, reading, alone)

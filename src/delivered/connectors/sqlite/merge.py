"""Upserts: rows of a batch come together in a temporary table, then get into the user's by a few statements.

A temporary table is this connection's alone, lies in a file of its own, and goes with the transaction that made it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import pyarrow as pa

from delivered.connectors.sqlite import target
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.types import TYPES
from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import ORDER, SHARD, Merge, key_in_two_shards, stored

STAGED = 'temp."_delivered_staged"'


class Merging:
    """One batch, or one shard of a weaker guarantee. Used by one thread."""

    def __init__(self, connection: sqlite3.Connection, options: SqliteOptions, schema: pa.Schema) -> None:
        """Args: schema: plain types."""
        self._connection = connection
        self._mode = options.write
        self._table = options.table
        columns = tuple(stored(options.write, schema).names)
        self._merge = Merge(options.write, quoted(options.table), columns)
        self._shards: set[int] = set()
        body = "".join(f"{quoted(f.name)} {TYPES.declared(f.type)}, " for f in schema)
        connection.execute(f"DROP TABLE IF EXISTS {STAGED}")
        connection.execute(
            f"CREATE TABLE {STAGED} ({body}{quoted(SHARD)} INTEGER, {quoted(ORDER)} INTEGER PRIMARY KEY)"
        )

    def add(self, shard: int, batches: Iterable[pa.RecordBatch]) -> int:
        """Returns how many rows came."""
        self._shards.add(shard)
        return target.insert(self._connection, STAGED, batches, {SHARD: shard})

    def finish(self) -> None:
        """Inside a transaction that writes.

        Raises:
            UsageError: a key lies in two shards, and nothing tells which of its rows is the last.
        """
        if self._mode.version is None and len(self._shards) > 1:
            keys = ", ".join(map(quoted, self._mode.keys))
            found = self._connection.execute(
                f"SELECT {keys} FROM {STAGED} GROUP BY {keys} "  # noqa: S608
                f"HAVING min({quoted(SHARD)}) <> max({quoted(SHARD)}) LIMIT 1"
            ).fetchone()
            if found is not None:
                raise key_in_two_shards(self._mode, found, self._table)
        self._connection.execute(self._merge.reduce(STAGED))
        self._connection.execute(self._merge.upsert(STAGED))
        if self._mode.delete is not None:
            self._connection.execute(self._merge.delete(STAGED))
        self._connection.execute(f"DROP TABLE {STAGED}")

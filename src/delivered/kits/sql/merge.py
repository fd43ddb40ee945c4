"""Upserts: which of several rows of a key wins, and the SQL that merges staged rows into the table.

Rows are staged in a table of ours, with `ORDER`, their order of arrival. Of the rows of one key

    with a version    the greatest version wins; of equal versions the first one, as if it had been written before: the
                      batch boundaries of a stream make no difference
    without           the last one wins. Shards of a batch have no order among each other, so a key in two of them is
                      refused

A delete competes like any other row. If it wins, it removes the stored row without a trace: a row of a later batch with
a lower version is inserted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.kits.sql.database import quoted
from delivered.kits.sql.types import Types, because
from delivered.model.capability import WriteMode
from delivered.model.errors import BadRecord, UsageError

ORDER = "__delivered_order"
SHARD = "__delivered_shard"


def stored(mode: WriteMode, schema: pa.Schema) -> pa.Schema:
    """The columns that are stored in the table."""
    return pa.schema([f for f in schema if f.name != mode.delete])


def check_columns(mode: WriteMode, schema: pa.Schema, types: Types) -> None:
    """
    Raises:
        UsageError: the rows lack a column of the mode, or its type does not suit its role.
    """
    named = [*mode.keys, *(n for n in (mode.version, mode.delete) if n is not None)]
    absent = [n for n in named if n not in schema.names]
    if absent:
        raise UsageError(
            "COLUMN_MISSING",
            f"mode upsert uses the columns {', '.join(map(repr, absent))}, but the rows have "
            f"{', '.join(schema.names)}.",
            next_step="correct keyColumns, versionColumn or deleteColumn; names are case-sensitive",
        )
    taken = [n for n in (ORDER, SHARD) if n in schema.names]
    if taken:
        raise UsageError("COLUMN_NAME", f"The column name {taken[0]!r} is reserved.", next_step="rename the column")
    if mode.delete is not None and not pa.types.is_boolean(schema.field(mode.delete).type):
        raise UsageError(
            "COLUMN_TYPE",
            f"deleteColumn {mode.delete!r} is {schema.field(mode.delete).type}; it must be boolean.",
            next_step=f'df.withColumn("{mode.delete}", col("value").isNull()), or what marks a delete in your rows',
        )
    if mode.version is not None and not types.orders(types.plain(schema.field(mode.version).type)):
        raise UsageError(
            "COLUMN_TYPE",
            f"versionColumn {mode.version!r} is {schema.field(mode.version).type}; for {types.system} it must be an "
            f"integer, date{', decimal' if types.orders(pa.decimal128(1)) else ''} or timestamp.",
            next_step=f'df.withColumn("{mode.version}", col("{mode.version}").cast("bigint"))',
        )
    floats = [k for k in mode.keys if pa.types.is_floating(schema.field(k).type)]
    if floats:
        raise UsageError(
            "COLUMN_TYPE",
            f"keyColumns has {floats[0]!r}, a floating-point column: NaN and -0 cannot be keys.",
            next_step=f'cast it: col("{floats[0]}").cast("string")',
        )


def check_rows(mode: WriteMode, batch: pa.RecordBatch) -> None:
    """
    Raises:
        BadRecord: a key or a version is null.
    """
    for role, names in (("key", mode.keys), ("version", (mode.version,) if mode.version else ())):
        for name in names:
            if batch.column(batch.schema.get_field_index(name)).null_count:
                raise BadRecord(
                    f"{role.upper()}_NULL",
                    f"A row has null in {name!r}, a {role} column of the upsert.",
                    next_step=f'df.filter(col("{name}").isNotNull())',
                )


def without_key(mode: WriteMode, batch: pa.RecordBatch, reasons: pa.Array | None) -> pa.Array | None:
    """Add the rows that `check_rows` rejects to the reasons of invalid rows."""
    for name in (*mode.keys, *((mode.version,) if mode.version else ())):
        column = batch.column(batch.schema.get_field_index(name))
        if column.null_count:
            reasons = because(reasons, column.is_null(), f"column {name!r}: null in a key or version")
    return reasons


@dataclass(frozen=True)
class Merge:
    """Statements for one target.

    Attributes:
        target: the table, quoted for SQL.
        columns: those written to it, as the rows name them.
    """

    mode: WriteMode
    target: str
    columns: tuple[str, ...]

    def reduce(self, staged: str) -> str:
        """Keep the winning row of each key. All rows of a shard, or, with a version, of a batch, are staged."""
        by = f"{quoted(ORDER)} DESC"
        if self.mode.version is not None:
            by = f"{quoted(self.mode.version)} DESC, {quoted(ORDER)}"
        ranked = (
            f"SELECT {quoted(ORDER)}, row_number() OVER (PARTITION BY {self._keys()} ORDER BY {by}) AS n FROM {staged}"
        )
        losers = f"SELECT {quoted(ORDER)} FROM ({ranked}) AS ranked WHERE n > 1"
        return f"DELETE FROM {staged} WHERE {quoted(ORDER)} IN ({losers})"

    def before_upsert(self, staged: str) -> str | None:
        """Statement to run before `upsert`, if that cannot skip outdated rows itself."""
        del staged
        return None

    def upsert(self, staged: str) -> str:
        """Write the staged rows that are not deletes; one row per key is staged."""
        columns = ", ".join(map(quoted, self.columns))
        rows = "TRUE" if self.mode.delete is None else f"{quoted(self.mode.delete)} IS NOT TRUE"
        others = [quoted(c) for c in self.columns if c not in self.mode.keys]
        action = "NOTHING"
        if others:
            action = (
                "UPDATE SET " + ", ".join(f"{c} = excluded.{c}" for c in others) + self._if_newer("WHERE", "excluded")
            )
        return (
            f"INSERT INTO {self.target} AS t ({columns}) SELECT {columns} FROM {staged} WHERE {rows} "
            f"ON CONFLICT ({self._keys()}) DO {action}"
        )

    def delete(self, staged: str) -> str:
        """Apply the staged deletes. After `upsert`, so that earlier rows of other shards are found."""
        found = f"SELECT {self._keys('s.')} FROM {staged} AS s WHERE s.{quoted(str(self.mode.delete))} IS TRUE"
        if self.mode.version is not None:
            same = " AND ".join(f"t.{quoted(k)} = s.{quoted(k)}" for k in self.mode.keys)
            found = (
                f"SELECT {self._keys('t.')} FROM {staged} AS s JOIN {self.target} AS t ON {same} "
                f"WHERE s.{quoted(str(self.mode.delete))} IS TRUE{self._if_newer('AND', 's')}"
            )
        return f"DELETE FROM {self.target} WHERE ({self._keys()}) IN ({found})"

    def key_in_two(self, staged: Sequence[str]) -> str:
        """A key that is in more than one of these tables; each table holds a key at most once."""
        rows = " UNION ALL ".join(f"SELECT {self._keys()} FROM {name}" for name in staged)
        return f"SELECT {self._keys()} FROM ({rows}) AS u GROUP BY {self._keys()} HAVING count(*) > 1 LIMIT 1"

    def _keys(self, prefix: str = "") -> str:
        return ", ".join(prefix + quoted(k) for k in self.mode.keys)

    def _if_newer(self, word: str, rows: str) -> str:
        if self.mode.version is None:
            return ""
        version = quoted(self.mode.version)
        return f" {word} (t.{version} IS NULL OR {rows}.{version} > t.{version})"


def key_in_two_shards(mode: WriteMode, key: Sequence[object], table: str) -> UsageError:
    shown = ", ".join(f"{k} = {str(v)[:60]!r}" for k, v in zip(mode.keys, key, strict=True))
    columns = ", ".join(f'"{k}"' for k in mode.keys)
    return UsageError(
        "KEY_IN_TWO_SHARDS",
        f"Two shards of one batch have rows for {table!r} with the key {shown}. Shards have no order among each other, "
        "so the last row is undefined. Nothing of the batch is visible.",
        next_step=f'add .option("versionColumn", ...), or keep each key in one shard: df.repartition({columns})',
    )


def no_unique_index(mode: WriteMode, table: str, where: str) -> UsageError:
    columns = ", ".join(map(quoted, mode.keys))
    return UsageError(
        "KEY_NOT_UNIQUE",
        f"Table {table!r} {where} has no unique index on exactly the key columns ({mode.keys_text}). An upsert needs "
        "one, neither partial nor deferrable.",
        next_step=f"CREATE UNIQUE INDEX ON {table} ({columns}), or correct keyColumns",
    )

"""Upserts: which row of a key wins, and the SQL that merges staged rows into the table.

Rows are staged in a staging table, with `ORDER`, their order of arrival. Of the rows of one key

    with a version    the greatest version wins; of equal versions the first one: batch boundaries make no
                      difference
    without           the last one wins. The shards of a batch are unordered, so a key in two of them is
                      refused

Mode insert and expected versions are conditional writes: see `delivered.kits.sql.conditional`.

A delete competes like any other row. If it wins, it leaves no tombstone: a later batch can insert a row with a lower
version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.kits.sql.database import quoted
from delivered.kits.sql.types import Types
from delivered.model.capability import WriteMode
from delivered.model.errors import BadRecord, UsageError
from delivered.model.ranges import because

ORDER = "__delivered_order"
SHARD = "__delivered_shard"
ROUND = "__delivered_round"
"""The row's ordinal within its key and shard; the rows of a key are applied in this order."""


def stored(mode: WriteMode, schema: pa.Schema) -> pa.Schema:
    """The columns that are stored in the table."""
    return pa.schema([f for f in schema if f.name not in (mode.delete, mode.expected)])


def check_columns(mode: WriteMode, schema: pa.Schema, types: Types) -> None:
    """
    Raises:
        UsageError: the rows lack a column of the mode, or its type does not suit its role.
    """
    columns = [*mode.keys, *(n for n in (mode.version, mode.delete, mode.expected) if n is not None)]
    absent = [n for n in columns if n not in schema.names]
    if absent:
        raise UsageError(
            "COLUMN_MISSING",
            f"The sink's mode uses the columns {', '.join(map(repr, absent))}, but the rows have "
            f"{', '.join(schema.names)}.",
            next_step="correct keyColumns, versionColumn, deleteColumn or expectedVersion; names are case-sensitive",
        )
    reserved = [n for n in (ORDER, SHARD, ROUND) if n in schema.names]
    if reserved:
        raise UsageError("COLUMN_NAME", f"The column name {reserved[0]!r} is reserved.", next_step="rename the column")
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
    if mode.expected is not None:
        kinds = [types.plain(schema.field(n).type) for n in (str(mode.version), mode.expected)]
        if kinds[0] != kinds[1]:
            raise UsageError(
                "COLUMN_TYPE",
                f"expectedVersion {mode.expected!r} is {kinds[1]}, but the version it is compared with, "
                f"{mode.version!r}, is {kinds[0]}.",
                next_step=f'df.withColumn("{mode.expected}", col("{mode.expected}").cast(df.schema["{mode.version}"]'
                ".dataType))",
            )
    floats = [k for k in mode.keys if pa.types.is_floating(schema.field(k).type)]
    if floats:
        raise UsageError(
            "COLUMN_TYPE",
            f"keyColumns has {floats[0]!r}, a floating-point column: NaN and -0 cannot be keys.",
            next_step=f'cast it: col("{floats[0]}").cast("string")',
        )
    nested = [k for k in mode.keys if pa.types.is_nested(schema.field(k).type)]
    if nested:
        raise UsageError(
            "COLUMN_TYPE",
            f"keyColumns has {nested[0]!r}, which is {schema.field(nested[0]).type}: arrays, structs and maps "
            "cannot be keys.",
            next_step=f'use fields of it, or to_json(col("{nested[0]}"))',
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
                    f"A row has null in {name!r}, a {role} column of the sink's mode.",
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

    @property
    def insert_into(self) -> str:
        """Start of an INSERT into the target."""
        return f"INSERT INTO {self.target}"

    @property
    def update_of(self) -> str:
        """Start of an UPDATE of the target."""
        return f"UPDATE {self.target}"

    def reduce(self, staged: str) -> str:
        """Keep the winning row of each key. The table holds all rows of a shard, or, with a version, of a batch."""
        by = f"{quoted(ORDER)} DESC"
        if self.mode.version is not None:
            by = f"{quoted(self.mode.version)} DESC, {quoted(ORDER)}"
        ranked = (
            f"SELECT {quoted(ORDER)}, row_number() OVER (PARTITION BY {self._keys()} ORDER BY {by}) AS n FROM {staged}"
        )
        losers = f"SELECT {quoted(ORDER)} FROM ({ranked}) AS ranked WHERE n > 1"
        return f"DELETE FROM {staged} WHERE {quoted(ORDER)} IN ({losers})"

    def number(self, staged: str) -> str:
        """Number the rows of each key in a shard in order of arrival: `ROUND`, 1 by default."""
        return (
            f"UPDATE {staged} SET {quoted(ROUND)} = r.n FROM ({self._later(staged)}) AS r WHERE r.o = {quoted(ORDER)}"
        )

    def conflicts(self, staged: str) -> str:
        """FROM and WHERE: staged rows `s`, one per key, that conflict with the table's rows `t`."""
        if self.mode.insert:
            return self.found(staged)
        expected, version = f"s.{quoted(str(self.mode.expected))}", f"t.{quoted(str(self.mode.version))}"
        return (
            f"FROM {staged} AS s LEFT JOIN {self._target} ON {self._same} WHERE "
            f"(CASE WHEN {expected} IS NULL THEN t.{quoted(self.mode.keys[0])} IS NOT NULL "
            f"ELSE {version} IS NULL OR {version} <> {expected} END)"
        )

    def found(self, staged: str) -> str:
        """FROM and WHERE: the table's rows `t` of the staged keys."""
        return f"FROM {self._found(staged)} WHERE TRUE"

    def write(self, staged: str, only: str) -> Sequence[str]:
        """Write staged rows without conflicts, at most one per key.

        Args:
            only: condition of a staged row.
        """
        mode = self.mode
        if mode.upserts and not mode.insert and mode.expected is None:
            first = self.before_upsert(staged, only)
            return [*([first] if first is not None else []), self.upsert(staged, only)]
        columns = ", ".join(map(quoted, self.columns))
        insert = f"{self.insert_into} ({columns}) SELECT {columns} FROM {staged} AS s WHERE {only}"
        if mode.expected is None:
            return [insert]
        known = f"{quoted(mode.expected)} IS NOT NULL"
        return [self.update(staged, f"{only} AND s.{known}"), f"{insert} AND NOT s.{known}"]

    def update(self, staged: str, only: str) -> str:
        """Replace the table's rows of the staged keys."""
        changes = ", ".join(f"{quoted(c)} = s.{quoted(c)}" for c in self.columns if c not in self.mode.keys)
        return f"{self.update_of} AS t SET {changes} FROM {staged} AS s WHERE {self._same} AND {only}"

    def before_upsert(self, staged: str, only: str = "TRUE") -> str | None:
        """Statement to run before `upsert`, if that cannot skip outdated rows itself."""
        del staged, only
        return None

    def upsert(self, staged: str, only: str = "TRUE") -> str:
        """Write the staged rows that are not deletes; one row per key is staged."""
        columns = ", ".join(map(quoted, self.columns))
        rows = only if self.mode.delete is None else f"{quoted(self.mode.delete)} IS NOT TRUE"
        others = [quoted(c) for c in self.columns if c not in self.mode.keys]
        action = "NOTHING"
        if others:
            action = (
                "UPDATE SET " + ", ".join(f"{c} = excluded.{c}" for c in others) + self._if_newer("WHERE", "excluded")
            )
        return (
            f"{self.insert_into} AS t ({columns}) SELECT {columns} FROM {staged} AS s WHERE {rows} "
            f"ON CONFLICT ({self._keys()}) DO {action}"
        )

    def delete(self, staged: str) -> str:
        """Apply the staged deletes. After `upsert`, so that earlier rows of other shards are found."""
        found = f"SELECT {self._keys('s.')} FROM {staged} AS s WHERE s.{quoted(str(self.mode.delete))} IS TRUE"
        if self.mode.version is not None:
            found = (
                f"SELECT {self._keys('t.')} FROM {self._found(staged)} "
                f"WHERE s.{quoted(str(self.mode.delete))} IS TRUE{self._if_newer('AND', 's')}"
            )
        return f"DELETE FROM {self.target} WHERE ({self._keys()}) IN ({found})"

    def rows(self, staged: str) -> str:
        """The number of staged rows that are not deletes."""
        return f"SELECT count(*) FROM {staged} AS s WHERE {self._no_delete}"

    def current(self, staged: str) -> str:
        """After `upsert`: the number of staged rows, except deletes, that the table has, or has a newer one of."""
        version = quoted(self.mode.version) if self.mode.version is not None else None
        newer = f" AND t.{version} >= s.{version}" if version is not None else ""
        return f"SELECT count(*) FROM {self._found(staged)} WHERE {self._no_delete}{newer}"

    def merged_key(self, staged: str, loose: Sequence[str]) -> str:
        """A key that staged rows have in several spellings."""
        several = " OR ".join(f"min({self.exact(quoted(k))}) <> max({self.exact(quoted(k))})" for k in loose)
        return f"SELECT {self._keys()} FROM {staged} GROUP BY {self._keys()} HAVING {several} LIMIT 1"

    def missing_key(self, staged: str, loose: Sequence[str]) -> str:
        """After a write: a key of staged rows, except deletes, that the table does not hold in this spelling."""
        same = " AND ".join([self._same, *map(self._spelt_alike, loose)])
        return (
            f"SELECT {self._keys('s.')} FROM {staged} AS s LEFT JOIN {self._target} ON {same} "
            f"WHERE t.{quoted(self.mode.keys[0])} IS NULL AND {self._no_delete} LIMIT 1"
        )

    def other_key(self, staged: str, loose: Sequence[str], deletes: bool = False) -> str:
        """A key of staged rows that the table holds in another spelling."""
        alike = " AND ".join(map(self._spelt_alike, loose))
        only = f"s.{quoted(str(self.mode.delete))} IS TRUE" if deletes else self._no_delete
        return f"SELECT {self._keys('s.')} FROM {self._found(staged)} WHERE {only} AND NOT ({alike}) LIMIT 1"

    def undeleted_key(self, staged: str) -> str:
        """After `delete`: a key that it should have deleted."""
        deleted = f"s.{quoted(str(self.mode.delete))} IS TRUE{self._if_newer('AND', 's')}"
        return f"SELECT {self._keys('s.')} FROM {self._found(staged)} WHERE {deleted} LIMIT 1"

    def exact(self, key: str) -> str:
        """SQL of a key's spelling: equal only if the keys are identical."""
        return f'({key})::text COLLATE "C"'

    def _spelt_alike(self, key: str) -> str:
        return f"{self.exact(f't.{quoted(key)}')} = {self.exact(f's.{quoted(key)}')}"

    @property
    def _no_delete(self) -> str:
        return "TRUE" if self.mode.delete is None else f"s.{quoted(self.mode.delete)} IS NOT TRUE"

    def key_in_two(self, staged: Sequence[str]) -> str:
        """A key that is in more than one of these tables."""
        once = "DISTINCT " if self.mode.conditional else ""  # otherwise reduced already
        rows = " UNION ALL ".join(f"SELECT {once}{self._keys()} FROM {name}" for name in staged)
        return f"SELECT {self._keys()} FROM ({rows}) AS u GROUP BY {self._keys()} HAVING count(*) > 1 LIMIT 1"

    def _found(self, staged: str) -> str:
        return f"{staged} AS s JOIN {self._target} ON {self._same}"

    @property
    def _target(self) -> str:
        return f"{self.target} AS t"

    @property
    def _same(self) -> str:
        return " AND ".join(f"t.{quoted(k)} = s.{quoted(k)}" for k in self.mode.keys)

    def _later(self, staged: str) -> str:
        """A shard's rows after the first of their key: order `o`, number `n`."""
        order = quoted(ORDER)
        counted = f"row_number() OVER (PARTITION BY {self._keys()} ORDER BY {order}) AS n"
        return f"SELECT o, n FROM (SELECT {order} AS o, {counted} FROM {staged}) AS ranked WHERE n > 1"

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
        f"so which row is the {'first' if mode.insert else 'last'} is undefined. Nothing of the batch is visible.",
        next_step=f"keep each key in one shard: df.repartition({columns})"
        + ("" if mode.conditional else ', or add .option("versionColumn", ...)'),
    )


def no_unique_index(mode: WriteMode, table: str, where: str) -> UsageError:
    columns = ", ".join(map(quoted, mode.keys))
    return UsageError(
        "KEY_NOT_UNIQUE",
        f"Table {table!r} {where} has no unique index on exactly the key columns ({mode.keys_text}). An upsert needs "
        "one, neither partial nor deferrable.",
        next_step=f"CREATE UNIQUE INDEX ON {table} ({columns}), or correct keyColumns",
    )

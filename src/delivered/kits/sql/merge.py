"""How staged rows change the table: upserts, conditional writes, and whether the database stored them all.

Upserts: which row of a key wins, and the SQL that merges staged rows into the table.

Rows are staged in a staging table, with `ORDER`, their order of arrival. Of the rows of one key

    with a version    the greatest version wins; of equal versions the first one: batch boundaries make no
                      difference
    without           the last one wins. The shards of a batch are unordered, so a key in two of them is
                      refused

A delete competes like any other row. If it wins, it leaves no tombstone: a later batch can insert a row with a lower
version.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

import pyarrow as pa

from delivered.contract.sink import SkippedRow
from delivered.contract.source import Finding
from delivered.kits.sql.database import C, Connection, Database, Definition, Dialect, list_keys, quoted, scope_values
from delivered.kits.sql.table import (
    Column,
    ServerOptions,
    ServerTypes,
    TableOptions,
    Types,
    check_known,
    compare,
    extend,
    find_absent,
    numbered_schema,
    stored_columns,
    untyped,
)
from delivered.model.capability import OnConflict, WriteMode
from delivered.model.errors import BadRecord, UsageError
from delivered.model.identity import Scope, Work
from delivered.model.rows import as_json_text, because

if TYPE_CHECKING:
    from delivered.kits.sql.database import Connection

ORDER = "__delivered_order"
SHARD = "__delivered_shard"
ROUND = "__delivered_round"
"""The row's ordinal within its key and shard; the rows of a key are applied in this order."""


def check_fits(
    options: ServerOptions,
    types: ServerTypes,
    columns: Mapping[str, Column],
    change: str,
    known: tuple[pa.Schema, str] | None,
    schema: pa.Schema,
) -> None:
    """Check rows against the table that is there, as a start does. See `delivered.contract.sink.Sink.target_check`.

    Args:
        change: see `compare`.
        known: what was written before, and the next step if the rows differ from it; None: nothing was.
    """
    kept = stored_columns(options.write, types.plain_schema(schema))
    written = numbered_schema(options, kept)
    fresh = find_absent(options, written, columns) if options.merge_schema else []
    compare(options, types, pa.schema([f for f in written if f not in fresh]), columns, change)
    if known is not None and not any(map(untyped, kept)):
        check = extend if options.merge_schema else check_known
        check(options, known[0], types.canonical_schema(kept), known[1])


def check_columns(mode: WriteMode, schema: pa.Schema, types: Types) -> None:
    """Raises UsageError: the rows lack a column of the mode, or its type does not suit its role."""
    columns = [*mode.keys, *(n for n in (mode.version, mode.delete, mode.expected) if n is not None)]
    absent = [n for n in columns if n not in schema.names]
    if absent:
        raise UsageError("COLUMN_MISSING.MODE", missing=", ".join(map(repr, absent)), columns=", ".join(schema.names))
    reserved = [n for n in (ORDER, SHARD, ROUND) if n in schema.names]
    if reserved:
        raise UsageError("COLUMN_NAME.RESERVED", name=reserved[0])
    if mode.delete is not None and not pa.types.is_boolean(schema.field(mode.delete).type):
        raise UsageError("COLUMN_TYPE.DELETE", delete=mode.delete, type=schema.field(mode.delete).type)
    if mode.version is not None and not types.orders(types.plain(schema.field(mode.version).type)):
        raise UsageError(
            "COLUMN_TYPE.VERSION",
            version=mode.version,
            type=schema.field(mode.version).type,
            system=types.system,
            decimal=", decimal" if types.orders(pa.decimal128(1)) else "",
        )
    if mode.expected is not None:
        kinds = [types.plain(schema.field(n).type) for n in (str(mode.version), mode.expected)]
        if kinds[0] != kinds[1]:
            raise UsageError(
                "COLUMN_TYPE.EXPECTED_VERSION",
                expected=mode.expected,
                type=kinds[1],
                version=mode.version,
                version_type=kinds[0],
            )
    floats = [k for k in mode.keys if pa.types.is_floating(schema.field(k).type)]
    if floats:
        raise UsageError("COLUMN_TYPE.KEY_FLOAT", column=floats[0])
    nested = [k for k in mode.keys if pa.types.is_nested(schema.field(k).type)]
    if nested:
        raise UsageError("COLUMN_TYPE.KEY_NESTED", column=nested[0], type=schema.field(nested[0]).type)


def check_rows(mode: WriteMode, batch: pa.RecordBatch) -> None:
    """Raises BadRecord: a key or a version is null."""
    for role, names in (("key", mode.keys), ("version", (mode.version,) if mode.version else ())):
        for name in names:
            if batch.column(batch.schema.get_field_index(name)).null_count:
                raise BadRecord("KEY_NULL" if role == "key" else "VERSION_NULL", name=name)


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
        """Write staged rows without conflicts, at most one per key. Args: only: condition of a staged row."""
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
        table=table,
        key=shown,
        which="first" if mode.insert else "last",
        columns=columns,
        alternative="" if mode.conditional else ', or add .option("versionColumn", ...)',
    )


def no_unique_index(mode: WriteMode, table: str, where: str) -> UsageError:
    columns = ", ".join(map(quoted, mode.keys))
    return UsageError("KEY_NOT_UNIQUE.TABLE", table=table, where=where, keys_text=mode.keys_text, columns=columns)


CONFLICT, CONSTRAINT = "conflict", "constraint"


def upsert(connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition) -> None:
    """Write the staged rows that are not deletes. Raises UsageError: the database did not store what it was given."""
    (sent,) = connection.execute(merge.rows(staged)).fetchone()
    first = merge.before_upsert(staged)
    rows = 0 if first is None else connection.execute(first).rowcount
    rows += connection.execute(merge.upsert(staged)).rowcount
    mode = merge.mode
    if rows < sent and (mode.version is not None or set(merge.columns) <= set(mode.keys)):
        (rows,) = connection.execute(merge.current(staged)).fetchone()  # rows that the table has already
    check_count(options, sent, rows, found)
    check_keys_stored(connection, options, merge, staged, found)


def delete(connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition) -> None:
    """Apply the staged deletes.

    Raises:
        UsageError: the database did not delete, or would delete the row of another key.
    """
    check_before_delete(connection, options, merge, staged, found)
    connection.execute(merge.delete(staged))
    check_deleted(connection, options, merge, staged, found)


# Conditional writes: insert if absent, expected version, constraints.
#
# They run in the transaction that writes the rows: the decision's (one_transaction), or the task's (two_phase). Staged
# rows are applied in rounds, one row per key at a time, in order of arrival, so that each row sees the effect of the
# previous one.
#
#     conflict     mode insert: the key exists. expectedVersion: the stored version is not the expected one
#     constraint   a unique, check, foreign key or not-null constraint of the table rejects the row, or a trigger
#                  drops it
#
# Skipped rows are counted in the same transaction, and optionally kept as dead letters. Existing rows are locked before
# they are compared, so that no other writer can change them until the batch is visible. If another writer inserts a key
# in the meantime, the insert violates the key, and the row is retried.

SKIPPED_VERSION = 4
"""Version of the ledger's tables that introduced the counts."""
_CHUNK_ROWS = 1_000
"""Maximum number of dead letters as Python objects at a time."""
_INSERT_ROWS = 100
_FOLDED = -1
"""Batch number under which the counts of earlier batches are summed up."""
_FOLD_ROWS = 64
_SCOPE = "pipeline = :pipeline AND sink = :sink AND incarnation = :incarnation"

log = logging.getLogger(__name__)


@dataclass
class Conditional(Generic[C]):
    """Writes one staging table. Used once, inside an open transaction; raises the client's errors.

    Attributes:
        staged: the table's qualified name; it has the columns `ORDER` and `ROUND`.
        shard: SQL expression for a staged row's shard.
        options: of the target; found: its definition.
    """

    connection: C
    database: Database[C]
    merge: Merge
    staged: str
    work: Work
    shard: str
    options: TableOptions
    found: Definition
    skipped: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Raises UsageError: a conflict, and `on_conflict` is FAIL; or the database dropped a row without an error."""
        mode = self.merge.mode
        self.database.at_once(self.connection)
        number = 0
        while (bounds := self._round_after(number)) is not None:
            number, low, high = bounds
            if mode.insert or mode.expected is not None:
                # Under insert, later rows of the key conflict too: the stored row stays.
                self._resolve(f"s.{quoted(ROUND)} {'>=' if mode.insert else '='} {number}")
            self._write(f"s.{quoted(ROUND)} = {number}", low, high)
        if mode.upserts:
            check_keys_stored(self.connection, self.options, self.merge, self.staged, self.found)
        record_skipped(self.connection, self.database.dialect, self.work, self.skipped)

    def _round_after(self, number: int) -> tuple[int, int, int] | None:
        """The next round with rows, and the bounds of their `ORDER`."""
        this, order = quoted(ROUND), quoted(ORDER)
        row = self.connection.execute(
            f"SELECT {this}, min({order}), max({order}) FROM {self.staged} WHERE {this} > {number} "
            f"GROUP BY {this} ORDER BY {this} LIMIT 1"
        ).fetchone()
        return None if row is None else (int(row[0]), int(row[1]), int(row[2]))

    def _resolve(self, only: str) -> int:
        """Remove conflicts from the staging table; return their number."""
        mode = self.merge.mode
        if mode.expected is not None and self.database.dialect.hold:
            rows = f"SELECT 1 {self.merge.found(self.staged)} AND {only}{self.database.dialect.hold}"
            self.connection.execute(f"SELECT count(*) FROM ({rows}) AS locked").fetchone()
        conflicts = f"{self.merge.conflicts(self.staged)} AND {only}"
        if mode.on_conflict is OnConflict.SKIP:
            removed = self._delete(f"SELECT s.{quoted(ORDER)} AS o {conflicts}")
        else:
            version = f"t.{quoted(mode.version)}" if mode.version is not None else "NULL"
            present = f"t.{quoted(mode.keys[0])} IS NOT NULL"
            removed = self._keep(conflicts, (present, version), self._conflict)
        self.skipped[CONFLICT] += removed
        return removed

    def _write(self, only: str, low: int, high: int) -> None:
        """Write a range of staged rows; bisect it to find each row that the table rejects or drops."""
        order = f"s.{quoted(ORDER)}"
        own = f"{only} AND {order} BETWEEN {low} AND {high}"
        (sent,) = self.connection.execute(f"SELECT count(*) FROM {self.staged} AS s WHERE {own}").fetchone()
        if not sent:
            return
        try:
            with self._savepoint():
                written = (self.connection.execute(s).rowcount for s in self.merge.write(self.staged, own))
                stored = sum(max(n, 0) for n in written)
                if self.merge.mode.on_constraint is not OnConflict.DEAD_LETTER:
                    check_count(self.options, sent, stored, self.found)
                elif stored != sent:
                    raise _Dropped(f"the table dropped the row without an error ({self.found.suspects})")
        except (self.database.errors(), _Dropped) as error:
            if not isinstance(error, _Dropped) and not self.database.is_constraint(error):
                raise
            if low == high:
                self._refuse(own, error)
                return
            middle = (low + high) // 2
            self._write(only, low, middle)
            self._write(only, middle + 1, high)

    def _refuse(self, own: str, error: Exception) -> None:
        """Reject one row that violates a constraint."""
        mode = self.merge.mode
        if (mode.insert or mode.expected is not None) and self._resolve(own):
            return  # another writer inserted its key meanwhile
        if mode.on_constraint is not OnConflict.DEAD_LETTER:
            raise error
        reason = " ".join(str(error.args[-1] if error.args else error).split())
        row = f"FROM {self.staged} AS s WHERE {own}"
        self.skipped[CONSTRAINT] += self._keep(row, ("NULL", "NULL"), lambda *_: reason)

    def _conflict(self, record: Mapping[str, Any], exists: Any, version: Any) -> str:
        """Raises UsageError: the query must stop."""
        mode = self.merge.mode
        reason = "a row of this key is in the table"
        if mode.expected is not None:
            expected = record[mode.expected]
            expects = "no row" if expected is None else f"{mode.version} = {expected}"
            actual = f"{mode.version} = {'null' if version is None else version}" if exists else "no row"
            reason = f"expected {expects}, found {actual}"
        if mode.on_conflict is not OnConflict.FAIL:
            return reason
        key = ", ".join(f"{k} = {str(record[k])[:60]!r}" for k in mode.keys)
        raise UsageError(
            "KEY_EXISTS" if mode.insert else "VERSION_CONFLICT",
            table=self.options.table_text,
            key=key,
            reason=reason,
            batch=self.work.batch,
        )

    def _keep(self, origin: str, more: Sequence[str], reason: Callable[..., str]) -> int:
        """Move staged rows to the dead letters; return their number.

        Args:
            origin: FROM and WHERE of the rows `s`.
            more: SQL of further arguments of `reason`, after the row.
        """
        mode, order = self.merge.mode, f"s.{quoted(ORDER)}"
        own = (n for n in self.merge.columns if n != self.options.batch_column)
        names = [*own, *([mode.expected] if mode.expected is not None else [])]
        columns = ", ".join([order, self.shard, *more, *(f"s.{quoted(n)}" for n in names)])
        moved = 0
        while rows := self.connection.execute(
            f"SELECT {columns} {origin} ORDER BY {order} LIMIT {_CHUNK_ROWS}"
        ).fetchall():
            letters = []
            for _, shard, *values in rows:
                record = dict(zip(names, values[len(more) :], strict=True))
                letters.append((shard, reason(record, *values[: len(more)]), as_json_text(record)))
            self._send(letters)
            positions = ", ".join(str(int(row[0])) for row in rows)
            self.connection.execute(f"DELETE FROM {self.staged} WHERE {quoted(ORDER)} IN ({positions})")
            moved += len(rows)
        return moved

    def _send(self, letters: Sequence[tuple[int, str, str]]) -> None:
        own = {**scope_values(self.work.scope), "batch": self.work.batch}
        for start in range(0, len(letters), _INSERT_ROWS):
            rows, values = [], dict[str, Any](own)
            for i, letter in enumerate(letters[start : start + _INSERT_ROWS]):
                names = [f"{name}{i}" for name in ("shard", "reason", "record")]
                values.update(zip(names, letter, strict=True))
                rows.append(f"(:pipeline, :sink, :incarnation, :batch, {', '.join(f':{n}' for n in names)})")
            self.connection.execute(
                self.database.dialect(
                    "INSERT INTO {dead_letter} (pipeline, sink, incarnation, batch, shard, reason, record) VALUES "
                    + ", ".join(rows)
                ),
                values,
            )

    def _delete(self, orders: str) -> int:
        """Remove rows from the staging table. MySQL accepts the table only in a nested query."""
        order = quoted(ORDER)
        statement = f"DELETE FROM {self.staged} WHERE {order} IN (SELECT o FROM ({orders}) AS found)"
        return int(self.connection.execute(statement).rowcount)

    @contextlib.contextmanager
    def _savepoint(self) -> Iterator[None]:
        self.connection.execute("SAVEPOINT delivered")
        try:
            yield
        except (self.database.errors(), _Dropped) as error:
            if isinstance(error, _Dropped) or self.database.is_constraint(error):
                self.connection.execute("ROLLBACK TO SAVEPOINT delivered")
            raise
        self.connection.execute("RELEASE SAVEPOINT delivered")


class _Dropped(Exception):
    """A statement stored fewer rows than it was given."""


def record_skipped(connection: Connection, dialect: Dialect, work: Work, skipped: Mapping[str, int]) -> None:
    """Record a batch's skipped rows, in the transaction of its rows."""
    for kind, rows in skipped.items():
        if rows:
            log.info("batch %d: %d rows were not written to sink %s: %s", work.batch, rows, work.scope.sink, kind)
            _insert(connection, dialect, work.scope, work.batch, kind, rows)


def fold_skipped(connection: Connection, dialect: Dialect, scope: Scope, batch: int) -> None:
    """Sum up the counts of earlier batches, all of which are visible. Inside an open transaction."""
    values = {**scope_values(scope), "batch": batch}
    where = f"{_SCOPE} AND batch < :batch"
    rows = connection.execute(dialect(f"SELECT kind, total FROM {{skipped}} WHERE {where}"), values).fetchall()
    if len(rows) < _FOLD_ROWS:
        return
    dialect.delete(connection, "skipped", where, values)
    for kind, total in _sum_by_kind(rows).items():
        _insert(connection, dialect, scope, _FOLDED, kind, total)


def count_skipped(connection: Connection, dialect: Dialect, scope: Scope) -> dict[str, int]:
    """Skipped rows of this incarnation, by kind."""
    rows = connection.execute(dialect(f"SELECT kind, total FROM {{skipped}} WHERE {_SCOPE}"), scope_values(scope))
    return dict(_sum_by_kind(rows.fetchall()))


def read_dead_letters(connection: Connection, dialect: Dialect, scope: Scope) -> list[SkippedRow]:
    """Dead letters of this incarnation."""
    columns = "SELECT batch, shard, reason, record FROM {dead_letter} WHERE "
    rows = connection.execute(dialect(f"{columns}{_SCOPE} ORDER BY batch, shard"), scope_values(scope)).fetchall()
    return [SkippedRow(int(batch), int(shard), reason, record) for batch, shard, reason, record in rows]


def _sum_by_kind(rows: Sequence[tuple[str, int]]) -> Counter[str]:
    counts = Counter[str]()
    for kind, total in rows:
        counts[kind] += int(total)
    return counts


def _insert(connection: Connection, dialect: Dialect, scope: Scope, batch: int, kind: str, total: int) -> None:
    connection.execute(
        dialect(
            "INSERT INTO {skipped} (pipeline, sink, incarnation, batch, kind, total) "
            "VALUES (:pipeline, :sink, :incarnation, :batch, :kind, :total)"
        ),
        {**scope_values(scope), "batch": batch, "kind": kind, "total": total},
    )


# What a database stored of the rows that were sent (P32).
#
# A trigger, a rule, a policy, a conflict clause or the collation of a key can drop, divert or merge rows without an
# error. So the counts that the database reports are compared with the rows sent, before the batch can be decided: by a
# task before it prepares, or in the decision's transaction. Where the table's definition can make the count deceive,
# the keys are looked up, too. A changed value cannot be counted: triggers are a finding before the start, and an audit
# compares values.


def check_count(options: TableOptions, sent: int, stored: int, definition: Definition, shard: str = "") -> None:
    """
    Args:
        shard: for the message: "shard 3 of batch 7".

    Raises:
        UsageError: the database stored another number of rows than were sent.
    """
    if stored != sent:
        raise not_stored_error(
            options, f"{sent} rows{f' of {shard}' * bool(shard)} were sent, but it stored {stored}", definition
        )


def not_stored_error(options: TableOptions, what: str, definition: Definition) -> UsageError:
    return UsageError(
        "ROWS_NOT_STORED", table=options.table_text, where=options.where, what=what, suspects=definition.suspects
    )


def check_merged(connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition) -> None:
    """Check the staged rows of a shard, before only the winning row of each key is kept.

    Raises:
        UsageError: different keys are equal by the table's collation.
    """
    if found.loose and not merge.mode.insert:
        row = connection.execute(merge.merged_key(staged, found.loose_keys)).fetchone()
        if row is not None:
            raise _equal_keys(options, merge.mode, row, found)


def check_keys_stored(
    connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition
) -> None:
    """Look up the keys that were written. In the same transaction, after the write.

    Raises:
        UsageError: the table does not hold one, or holds it in another spelling.
    """
    if not found.deceives:
        return
    row = connection.execute(merge.missing_key(staged, found.loose_keys)).fetchone()
    if row is None:
        return
    if found.loose and connection.execute(merge.other_key(staged, found.loose_keys)).fetchone() is not None:
        raise _equal_keys(options, merge.mode, row, found)
    raise not_stored_error(
        options, f"it has no row of the key {_format_key(merge.mode, row)} after it was written", found
    )


def check_before_delete(
    connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition
) -> None:
    """Raises UsageError: a staged delete would delete the row of another key."""
    if found.loose:
        row = connection.execute(merge.other_key(staged, found.loose_keys, deletes=True)).fetchone()
        if row is not None:
            raise _equal_keys(options, merge.mode, row, found)


def check_deleted(connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition) -> None:
    """Raises UsageError: a staged delete had no effect."""
    if found.deceives:
        row = connection.execute(merge.undeleted_key(staged)).fetchone()
        if row is not None:
            raise not_stored_error(
                options, f"it still has the row of the key {_format_key(merge.mode, row)} after a delete", found
            )


def check_emptied(connection: Connection, options: TableOptions, table: str, found: Definition) -> None:
    """
    Args:
        table: quoted for SQL.

    Raises:
        UsageError: rows of the table were not deleted.
    """
    if found.deceives and connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None:
        raise not_stored_error(options, "it still has rows after a delete of all", found)


_NO_COPY = " COPY, which loads the rows here, does not support it."


def findings(options: TableOptions, found: Definition, *, loads: bool = False) -> Iterator[Finding]:
    """What the table's definition says before the start.

    Args:
        loads: rows are loaded by a command that does not support row-level security.
    """
    table = options.table_text
    if found.triggers:
        yield Finding.build("TRIGGERS", refuses=False, table=table, triggers=", ".join(found.triggers))
    if found.loose:
        first = next(iter(found.loose))
        yield Finding.build(
            "KEY_COLLATION.START", refuses=False, table=table, columns=list_keys(found.loose), column=first
        )
    if found.row_security:
        yield Finding.build(
            "ROW_SECURITY",
            refuses=loads,
            table=table,
            no_copy=_NO_COPY * loads,
            mechanism=', or .option("mechanism", "one_transaction") under exactly_once' * loads,
            policy=", or a policy under which the user sees every row it writes" * (not loads),
        )
    if found.clauses:
        yield Finding.build("CONFLICT_CLAUSE", refuses=False, table=table)


def describe_checks(options: TableOptions, found: Definition) -> Sequence[str]:
    """See `delivered.contract.sink.Sink.checked_target`."""
    if not found.exists:
        return ()
    parts = (
        f"triggers {', '.join(found.triggers)}" if found.triggers else "no triggers",
        f"rules {', '.join(found.rules)}" if found.rules else "no rules",
        f"row security {'applies' if found.row_security else 'does not apply'}",
        f"keys {list_keys(found.loose)}" if found.loose else "keys equal only if identical",
        f"widths {', '.join(found.widths)}" if found.widths else "no widths",
        f"filled by the server {', '.join(found.filled)}" if found.filled else "no generated or identity columns",
    )
    return (f"table {options.table_text}: {'; '.join(parts)}",)


def _equal_keys(options: TableOptions, mode: WriteMode, key: Sequence[Any], found: Definition) -> UsageError:
    return UsageError(
        "KEY_COLLATION.ROW",
        key=_format_key(mode, key),
        table=options.table_text,
        where=options.where,
        columns=list_keys(found.loose or {}),
    )


def _format_key(mode: WriteMode, key: Sequence[Any]) -> str:
    return ", ".join(f"{k} = {str(v)[:60]!r}" for k, v in zip(mode.keys, key, strict=True))

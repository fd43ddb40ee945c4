"""Conditional writes: insert if absent, expected version, constraints.

Runs in the transaction that writes the rows: the decision's (one_transaction), or the task's (two_phase). Staged rows
are applied in rounds, one row per key at a time, in order of arrival, so that each row sees the effect of the previous
one.

    conflict     mode insert: the key exists. expectedVersion: the stored version is not the expected one
    constraint   a unique, check, foreign key or not-null constraint of the table rejects the row, or a trigger drops it

Skipped rows are counted in the same transaction, and optionally kept as dead letters. Existing rows are locked before
they are compared, so that no other writer can change them until the batch is visible. If another writer inserts a key
in the meantime, the insert violates the key, and the row is retried.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from delivered.contract.sink import LeftOutRow
from delivered.kits.sql.database import C, Connection, Database, Dialect, quoted, scope_values
from delivered.kits.sql.definition import Definition
from delivered.kits.sql.merge import ORDER, ROUND, Merge
from delivered.kits.sql.options import TableOptions
from delivered.kits.sql.stored import check_count, check_keys_stored
from delivered.model.bad_row import as_json_text
from delivered.model.capability import OnConflict
from delivered.model.errors import UsageError
from delivered.model.identity import Scope, Work

CONFLICT, CONSTRAINT = "conflict", "constraint"
LEFT_OUT_VERSION = 4
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
    left_out: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """
        Raises:
            UsageError: a conflict, and `on_conflict` is FAIL; or the database dropped a row without an error.
        """
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
        record_skipped(self.connection, self.database.dialect, self.work, self.left_out)

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
        self.left_out[CONFLICT] += removed
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
        self.left_out[CONSTRAINT] += self._keep(row, ("NULL", "NULL"), lambda *_: reason)

    def _conflict(self, record: Mapping[str, Any], exists: Any, version: Any) -> str:
        """
        Raises:
            UsageError: the query must stop.
        """
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
            f"Table {self.options.table_text!r}, key {key}: {reason}. Nothing of batch {self.work.batch} is visible.",
            next_step='correct the row at the source, or keep such rows: .option("onConflict", "dead_letter")',
        )

    def _keep(self, origin: str, more: Sequence[str], reason: Callable[..., str]) -> int:
        """Move staged rows to the dead letters; return their number.

        Args:
            origin: FROM and WHERE of the rows `s`.
            more: SQL of further arguments of `reason`, after the row.
        """
        mode, order = self.merge.mode, f"s.{quoted(ORDER)}"
        names = [*self.merge.columns, *([mode.expected] if mode.expected is not None else [])]
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


def record_skipped(connection: Connection, dialect: Dialect, work: Work, left_out: Mapping[str, int]) -> None:
    """Record a batch's skipped rows, in the transaction of its rows."""
    for kind, rows in left_out.items():
        if rows:
            log.info("batch %d: %d rows were not written to sink %s: %s", work.batch, rows, work.scope.sink, kind)
            _insert(connection, dialect, work.scope, work.batch, kind, rows)


def fold(connection: Connection, dialect: Dialect, scope: Scope, batch: int) -> None:
    """Sum up the counts of earlier batches, all of which are visible. Inside an open transaction."""
    values = {**scope_values(scope), "batch": batch}
    where = f"{_SCOPE} AND batch < :batch"
    rows = connection.execute(dialect(f"SELECT kind, total FROM {{left_out}} WHERE {where}"), values).fetchall()
    if len(rows) < _FOLD_ROWS:
        return
    dialect.delete(connection, "left_out", where, values)
    for kind, total in _summed(rows).items():
        _insert(connection, dialect, scope, _FOLDED, kind, total)


def counted(connection: Connection, dialect: Dialect, scope: Scope) -> dict[str, int]:
    """Skipped rows of this incarnation, by kind."""
    rows = connection.execute(dialect(f"SELECT kind, total FROM {{left_out}} WHERE {_SCOPE}"), scope_values(scope))
    return dict(_summed(rows.fetchall()))


def kept(connection: Connection, dialect: Dialect, scope: Scope) -> list[LeftOutRow]:
    """Dead letters of this incarnation."""
    columns = "SELECT batch, shard, reason, record FROM {dead_letter} WHERE "
    rows = connection.execute(dialect(f"{columns}{_SCOPE} ORDER BY batch, shard"), scope_values(scope)).fetchall()
    return [LeftOutRow(int(batch), int(shard), reason, record) for batch, shard, reason, record in rows]


def _summed(rows: Sequence[tuple[str, int]]) -> Counter[str]:
    counts = Counter[str]()
    for kind, total in rows:
        counts[kind] += int(total)
    return counts


def _insert(connection: Connection, dialect: Dialect, scope: Scope, batch: int, kind: str, total: int) -> None:
    connection.execute(
        dialect(
            "INSERT INTO {left_out} (pipeline, sink, incarnation, batch, kind, total) "
            "VALUES (:pipeline, :sink, :incarnation, :batch, :kind, :total)"
        ),
        {**scope_values(scope), "batch": batch, "kind": kind, "total": total},
    )

"""Mechanism one_transaction: the driver moves rows from the tasks' staging tables to the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from delivered.kits.sql.database import Connection, Definition, Server, quoted
from delivered.kits.sql.merge import (
    Conditional,
    Merge,
    check_before_delete,
    check_count,
    check_deleted,
    check_emptied,
    check_keys_stored,
    check_merged,
    check_rules,
    key_in_two_shards,
)
from delivered.kits.sql.options import ServerOptions, TableOptions
from delivered.kits.sql.transactions import PreparedRows
from delivered.ledger.store import Swap
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope, Work
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Prepared


@dataclass(frozen=True)
class Staging:
    """Staging tables in the ledger's schema. Calls run inside an open transaction and raise the client's errors."""

    options: ServerOptions
    server: Server[Any]
    drops: ClassVar[bool] = False
    """The decision's transaction can drop staging tables."""

    @property
    def conditional(self) -> bool:
        """See `delivered.kits.sql.ledger.DecidedTable`."""
        return self.options.write.conditional

    def full(self, table: str) -> str:
        """The qualified name, quoted for SQL."""
        return f"{quoted(self.options.ledger_schema)}.{quoted(table)}"

    def drop(self, connection: Connection, table: str) -> None:
        connection.execute(f"DROP TABLE IF EXISTS {self.full(table)}")

    def reduce(self, connection: Connection, table: str, merge: Merge, rows: int, found: Definition) -> int:
        """Keep the winning staged row of each key; return their number. If every row counts, number them instead.

        Args:
            rows: number of staged rows.

        Raises:
            UsageError: different keys are equal by the table's collation.
        """
        if not self.options.write.upserts:
            return rows
        check_merged(connection, self.options, merge, self.full(table), found)
        if self.options.write.keeps_all:
            connection.execute(merge.number(self.full(table)))
            return rows
        return rows - int(connection.execute(merge.reduce(self.full(table))).rowcount)

    def add(self, connection: Connection, table: str, merge: Merge, work: Work, found: Definition) -> None:
        """Merge reduced rows into the target, except deletes (see `_delete`).

        Raises:
            UsageError: the database did not store what it was given.
        """
        check_rules(self.options, found)
        name = self.full(table)
        if self.options.write.conditional:
            judge = Conditional(connection, self.server, merge, name, work, str(int(work.shard)), self.options, found)
            judge.run()
            return
        upsert(connection, self.options, merge, name, found)

    def move(self, connection: Any, scope: Scope, decision: Decision, staged: Sequence[Prepared]) -> None:
        """See `delivered.kits.sql.ledger.DecidedTable`."""
        if not staged and not self.options.write.complete:
            return
        self._check_keys(connection, staged)
        found = self.server.definition(connection)
        if self.options.write.complete and not decision.revision:
            table = self.server.table(connection)
            if table is not None:
                check_rules(self.options, found)
                connection.execute(f"DELETE FROM {table}")
                check_emptied(connection, self.options, table, found)
        for prepared in staged:
            work = Work(scope, decision.batch, prepared.shard, prepared.attempt)
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, batch=work.batch, shard=work.shard)
            self._move_shard(connection, prepared, work, found)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, batch=work.batch, shard=work.shard)
        self._delete(connection, staged, found)
        if self.drops:
            for prepared in staged:
                self.drop(connection, PreparedRows.of(prepared).staged)

    def _move_shard(self, connection: Connection, prepared: Prepared, work: Work, found: Definition) -> None:
        """Move a shard's rows into the target.

        Raises:
            InvariantBroken: the staged rows differ from those prepared.
            UsageError: the database did not store what it was given.
            The client's error: the server rejected it, for instance because the staged rows are missing.
        """
        handle = PreparedRows.of(prepared)
        table, columns = handle.staged, handle.columns
        staged = self.full(table)
        if self.options.write.merges:
            row = connection.execute(f"SELECT count(*) FROM {staged}").fetchone()
            self._check_staged(prepared, row[0] if row else 0, handle.kept)
            self.add(connection, table, self._merge(prepared), work, found)
            return
        check_rules(self.options, found)
        rows = connection.execute(f"INSERT INTO {handle.target} ({columns}) SELECT {columns} FROM {staged}").rowcount
        sent = prepared.fingerprint.count
        if rows != sent:
            there = connection.execute(f"SELECT count(*) FROM {staged}").fetchone()
            self._check_staged(prepared, there[0] if there else 0, sent)
            check_count(self.options, sent, rows, found, f"shard {prepared.shard} of batch {work.batch}")

    def _check_staged(self, prepared: Prepared, rows: int, expected: int) -> None:
        if rows != expected:
            raise InvariantBroken(
                "STAGED_ROWS_DIFFER",
                f"Shard {prepared.shard}: {rows} rows are staged for {self.options.table_text!r}, but {expected} were "
                "prepared.",
                next_step="start the pipeline again, which repeats the batch",
            )

    def _check_keys(self, connection: Connection, staged: Sequence[Prepared]) -> None:
        """Check the shards of a batch, before the first one is moved.

        Raises:
            UsageError: a key is in two shards, so their order is undefined.
        """
        write = self.options.write
        if len(staged) > 1 and write.upserts and (write.version is None or write.keeps_all):
            tables = [self.full(PreparedRows.of(p).staged) for p in staged]
            duplicate_key = connection.execute(self._merge(staged[0]).key_in_two(tables)).fetchone()
            if duplicate_key is not None:
                raise key_in_two_shards(write, duplicate_key, self.options.table_text)

    def _delete(self, connection: Connection, staged: Sequence[Prepared], found: Definition) -> None:
        """Apply the deletes of all shards, after the last one is moved: with a version, a delete must find older rows
        of any shard."""
        if self.options.write.delete is not None:
            for prepared in staged:
                table = self.full(PreparedRows.of(prepared).staged)
                delete(connection, self.options, self._merge(prepared), table, found)

    def _merge(self, prepared: Prepared) -> Merge:
        handle = PreparedRows.of(prepared)
        return Merge(self.options.write, handle.target, handle.stored)

    def swap(self, connection: Any, swap: Swap) -> None:
        raise NotImplementedError  # the server commits each DDL statement by itself

    def has_swapped(self, swap: Swap) -> bool:
        raise NotImplementedError

    def cannot_swap(self) -> str | None:
        raise NotImplementedError


def upsert(connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition) -> None:
    """Write the staged rows that are not deletes.

    Raises:
        UsageError: the database did not store what it was given.
    """
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

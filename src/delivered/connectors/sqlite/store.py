"""The ledger in a database file: next to the sink's table, whose rows its decisions make visible, or by itself.

Staged files are deleted after the decision.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from delivered.connectors.sqlite import SqliteOptions, target, writer
from delivered.connectors.sqlite.client import DIALECT, SqliteDatabase, ledger_version
from delivered.connectors.sqlite.writer import Merging, StagedRows, read_staged, staged_schema
from delivered.contract.sink import SkippedRow
from delivered.kits.sql.database import Definition, quoted
from delivered.kits.sql.ledger import SqlLedger, SwappingLedger
from delivered.kits.sql.merge import SKIPPED_VERSION, check_count, check_emptied, count_skipped, read_dead_letters
from delivered.kits.sql.sink import find_decided
from delivered.kits.table.shard import StagedFilesCommitter, unlink_others
from delivered.ledger import Store, Swap
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope, Target, Work
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Outcome, Prepared

T = TypeVar("T")


@dataclass(frozen=True)
class SqliteLedgers:
    """See `delivered.ledger.Ledgers`: a file of ledgers for sinks that cannot hold one."""

    path: str

    def store(self, scope: Scope) -> Store:
        return SqlLedger(SqliteDatabase(self.path), scope)


def build_store(options: SqliteOptions, scope: Scope) -> SwappingLedger[sqlite3.Connection]:
    return SwappingLedger(build_database(options), scope, SqliteTable(options))


def build_database(options: SqliteOptions) -> SqliteDatabase:
    return SqliteDatabase(options.path, foreign_keys=options.write.conditional)


@dataclass(frozen=True)
class SqliteTable:
    """See `delivered.kits.sql.ledger.DecidedTable`."""

    options: SqliteOptions

    @property
    def conditional(self) -> bool:
        return self.options.write.conditional

    def move(
        self, connection: sqlite3.Connection, scope: Scope, decision: Decision, staged: Sequence[Prepared]
    ) -> None:
        merging, definition = None, target.read_definition(connection, self.options)
        if staged:
            schema = staged_schema(self.options, scope, StagedRows.of(staged[0]))
            target.ready(connection, self.options, schema)
            if self.options.write.merges:
                merging = Merging(connection, self.options, schema)
        if (
            self.options.write.complete
            and not decision.revision
            and target.table_columns(connection, self.options.table)
        ):
            table = quoted(self.options.table)
            connection.execute(f"DELETE FROM {table}")  # noqa: S608
            check_emptied(connection, self.options, table, definition)
        for prepared in staged:
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, batch=decision.batch, shard=prepared.shard)
            self._add_shard(connection, scope, prepared, merging, definition)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, batch=decision.batch, shard=prepared.shard)
        if merging is not None:
            merging.finish(Work(scope, decision.batch, 0, 0))

    def swap(self, connection: sqlite3.Connection, swap: Swap) -> None:
        """Views, triggers and foreign keys that name the table refer to the new one."""
        connection.execute("PRAGMA legacy_alter_table=ON")
        for old, new in ((self.options.table, swap.kept), (swap.new, self.options.table)):
            connection.execute(f"ALTER TABLE {quoted(old)} RENAME TO {quoted(new)}")
            connection.execute("UPDATE _delivered_table SET name = ? WHERE name = ?", (new, old))

    def has_swapped(self, swap: Swap) -> bool:
        """They change places in one transaction."""
        database = SqliteDatabase(self.options.path)
        return bool(database.ask(lambda connection: target.table_columns(connection, swap.kept)))

    def cannot_swap(self) -> str | None:
        return None

    def _add_shard(
        self,
        connection: sqlite3.Connection,
        scope: Scope,
        prepared: Prepared,
        merging: Merging | None,
        definition: Definition,
    ) -> None:
        staged = StagedRows.of(prepared)
        batches = read_staged(self.options, scope, staged)
        if merging is not None:
            rows = kept = merging.add(prepared.shard, batches)
        else:
            rows, kept = target.insert_rows(connection, self.options, definition, batches)
        if rows != staged.rows or rows != prepared.fingerprint.count:
            raise InvariantBroken(
                "STAGED_ROWS_DIFFER.SQLITE",
                shard=prepared.shard,
                rows=rows,
                prepared=staged.rows,
                count=prepared.fingerprint.count,
            )
        check_count(self.options, rows, kept, definition, f"shard {prepared.shard}")


class SqliteCommitter(StagedFilesCommitter):
    def __init__(self, options: SqliteOptions, scope: Scope) -> None:
        super().__init__(scope)
        self._options = options

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Only deletes the staged copy: the decision has already made the rows visible."""
        del work
        return self.abort(prepared)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - with the decision
        return self._ask(1, lambda c: any(p.shard == work.shard for p in find_decided(c, DIALECT, work)), default=False)

    def _remove(self, prepared: Prepared) -> None:
        writer.remove(self._options, self._scope, StagedRows.of(prepared))

    def _remove_orphans(self, keep: Sequence[Prepared]) -> int:
        return unlink_others(writer.staged_files(self._options, self._scope), {StagedRows.of(p).path for p in keep})

    def _target(self) -> Target | None:
        """Only of tables that this package created."""
        known = self._ask(0, lambda c: target.identity(c, self._options.table), default=None)
        return None if known is None else Target(f"table {self._options.table}", known)

    def skipped(self) -> dict[str, int]:
        """See `delivered.contract.sink.Committer`."""
        return self._ask(SKIPPED_VERSION, lambda c: count_skipped(c, DIALECT, self._scope), default={})

    def dead_letters(self) -> list[SkippedRow]:
        """See `delivered.contract.sink.Committer`."""
        return self._ask(SKIPPED_VERSION, lambda c: read_dead_letters(c, DIALECT, self._scope), default=[])

    def _ask(self, version: int, question: Callable[[sqlite3.Connection], T], *, default: T) -> T:
        """Ask the database; `default`: it does not exist, or its ledger's tables are older than this version."""
        database = SqliteDatabase(self._options.path)
        if not database.exists():
            return default
        return database.ask(
            lambda connection: question(connection) if ledger_version(connection) >= version else default
        )

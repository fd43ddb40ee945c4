"""The ledger in a database file: next to the sink's table, whose rows its decisions make visible, or by itself."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from delivered.connectors.sqlite import definition, target
from delivered.connectors.sqlite.database import DIALECT, SqliteDatabase, writing
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.stage import Merging, StagedRows, read_staged, staged_schema
from delivered.kits.sql.database import quoted
from delivered.kits.sql.definition import Definition
from delivered.kits.sql.keys import KeyTable
from delivered.kits.sql.ledger import SqlLedger, SwappingLedger
from delivered.kits.sql.stored import check_count, check_emptied
from delivered.ledger.store import Store, Swap
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope, Work
from delivered.model.prepared import Prepared
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision


@dataclass(frozen=True)
class SqliteLedgers:
    """See `delivered.ledger.store.Ledgers`: a file of ledgers for sinks that cannot hold one."""

    path: str

    def store(self, scope: Scope) -> Store:
        return SqlLedger(SqliteDatabase(self.path), scope)


def build_store(options: SqliteOptions, scope: Scope) -> SwappingLedger[sqlite3.Connection]:
    database = SqliteDatabase(options.path, options.write.conditional)
    return SwappingLedger(database, scope, SqliteTable(options))


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
        merging, found = None, definition.read(connection, self.options)
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
            check_emptied(connection, self.options, table, found)
        for prepared in staged:
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, batch=decision.batch, shard=prepared.shard)
            self._add_shard(connection, scope, prepared, merging, found)
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
        found: Definition,
    ) -> None:
        staged = StagedRows.of(prepared)
        batches = read_staged(self.options, scope, staged)
        if merging is not None:
            rows = kept = merging.add(prepared.shard, batches)
        else:
            rows, kept = target.insert_rows(connection, self.options, found, batches)
        if rows != staged.rows or rows != prepared.fingerprint.count:
            raise InvariantBroken(
                "STAGED_ROWS_DIFFER",
                f"Shard {prepared.shard}: {rows} rows were staged, but {staged.rows} were prepared, and the "
                f"fingerprint counts {prepared.fingerprint.count}.",
                next_step="start the pipeline again; the batch runs again",
            )
        check_count(self.options, rows, kept, found, f"shard {prepared.shard}")


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

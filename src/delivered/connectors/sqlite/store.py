"""The ledger in the target database: one transaction writes a batch's rows and its decision."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from delivered.connectors.sqlite import definition, target
from delivered.connectors.sqlite.database import DIALECT, SqliteDatabase, begin, migrate, rollback, version_of, writing
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.stage import Merging, StagedRows, read_staged, staged_schema
from delivered.kits.sql.database import quoted
from delivered.kits.sql.definition import Definition
from delivered.kits.sql.keys import KeyTable
from delivered.kits.sql.store import SqlStore
from delivered.kits.sql.stored import check_count, check_emptied
from delivered.ledger.store import Head, Swap
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.identity import Scope, Work
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.prepared import Prepared
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Owner

T = TypeVar("T")


class SqliteStore(SqlStore[sqlite3.Connection]):
    def __init__(self, options: SqliteOptions, scope: Scope) -> None:
        super().__init__(SqliteDatabase(options.path), DIALECT, scope)
        self._options = options

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        connection = self._open()
        migrate(connection, self._options.path)
        with writing(connection, self._options.path, CONNECT_TIMEOUT_S):
            return Ok(self._take(connection, successor))

    def close(self) -> None:
        if self._connection is not None:
            rollback(self._connection)
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._database.connect("ledger")
            if self._conditional:
                self._connection.execute("PRAGMA foreign_keys=ON")  # off by default
        return self._connection

    @property
    def _conditional(self) -> bool:
        return self._options.write.conditional

    def _version(self, connection: sqlite3.Connection) -> int:
        return version_of(connection)

    def _begin(self, connection: sqlite3.Connection) -> None:
        begin(connection)

    def _view(self, question: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        del nothing
        connection = self._open()
        migrate(connection, self._options.path)
        return self._ask(connection, question)

    def _peek(self, question: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        if not Path(self._options.path).exists():
            return nothing
        connection = self._database.connect("ledger", writes=False)
        try:
            return self._ask(connection, lambda c: question(c) if version_of(c) else nothing)
        finally:
            connection.close()

    def _ask(self, connection: sqlite3.Connection, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with self._database.explaining():
                connection.execute("BEGIN")
                return question(connection)
        finally:
            rollback(connection)

    def _after_failed_commit(self, error: Exception, there: Callable[[sqlite3.Connection], bool]) -> Outcome[None]:
        """Closing the connection ended its transaction, so the file shows the final outcome."""
        reason = self._database.explained(error)
        try:
            found = self._ask(self._open(), there)
        except DeliveredError as second:
            return Unknown(f"{reason}; then {second}")
        return Ok(None) if found else Failed(str(reason))

    def _move(self, connection: sqlite3.Connection, decision: Decision, move: Sequence[Prepared]) -> None:
        merging, found = None, definition.read(connection, self._options)
        if move:
            schema = staged_schema(self._options, self._scope, StagedRows.of(move[0]))
            target.ready(connection, self._options, schema)
            if self._options.write.merges:
                merging = Merging(connection, self._options, schema)
        if (
            self._options.write.complete
            and not decision.revision
            and target.table_columns(connection, self._options.table)
        ):
            table = quoted(self._options.table)
            connection.execute(f"DELETE FROM {table}")  # noqa: S608
            check_emptied(connection, self._options, table, found)
        for prepared in move:
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, batch=decision.batch, shard=prepared.shard)
            self._add_shard(connection, prepared, merging, found)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, batch=decision.batch, shard=prepared.shard)
        if merging is not None:
            merging.finish(Work(self._scope, decision.batch, 0, 0))

    def has_swapped(self, swap: Swap) -> bool:
        """See `delivered.ledger.store.SwapsTables`: they change places in one transaction."""
        return bool(self._database.ask(lambda connection: target.table_columns(connection, swap.kept)))

    def cannot_swap(self) -> str | None:
        """See `delivered.ledger.store.SwapsTables`."""
        return None

    def _swap(self, connection: sqlite3.Connection, swap: Swap) -> None:
        """Views, triggers and foreign keys that name the table refer to the new one."""
        connection.execute("PRAGMA legacy_alter_table=ON")
        for old, new in ((self._options.table, swap.kept), (swap.new, self._options.table)):
            connection.execute(f"ALTER TABLE {quoted(old)} RENAME TO {quoted(new)}")
            connection.execute("UPDATE _delivered_table SET name = ? WHERE name = ?", (new, old))

    def _add_shard(
        self, connection: sqlite3.Connection, prepared: Prepared, merging: Merging | None, found: Definition
    ) -> None:
        staged = StagedRows.of(prepared)
        batches = read_staged(self._options, self._scope, staged)
        if merging is not None:
            rows = kept = merging.add(prepared.shard, batches)
        else:
            rows, kept = target.insert_rows(connection, self._options, found, batches)
        if rows != staged.rows or rows != prepared.fingerprint.count:
            raise InvariantBroken(
                "STAGED_ROWS_DIFFER",
                f"Shard {prepared.shard}: {rows} rows were staged, but {staged.rows} were prepared, and the "
                f"fingerprint counts {prepared.fingerprint.count}.",
                next_step="start the pipeline again; the batch runs again",
            )
        check_count(self._options, rows, kept, found, f"shard {prepared.shard}")


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

"""The sink `delivered_sqlite`, and its checks before a start."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from delivered.connectors.sqlite import SqliteOptions, target
from delivered.connectors.sqlite.client import (
    WAL_RACE_FIXED,
    SqliteDatabase,
    begin,
    connect,
    explained,
    migrate,
    rollback,
    writing,
)
from delivered.connectors.sqlite.target import TYPES
from delivered.contract.sink import Parts
from delivered.contract.source import Finding
from delivered.kits.sql.merge import describe_checks, no_unique_index
from delivered.kits.sql.merge import findings as table_findings
from delivered.kits.sql.sink import HISTORY, DatabaseSink
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import DeliveredError
from delivered.model.limits import CONNECT_TIMEOUT_S


@dataclass(frozen=True)
class SqliteSink(DatabaseSink):
    options: SqliteOptions

    types = TYPES
    parts = Parts(
        __package__,
        writer="writer:writer",
        scan="read:SqliteScan",
        store="store:build_store",
        committer="store:SqliteCommitter",
        database="store:build_database",
        refused_rows="writer:refused_rows",
    )

    def capability(self) -> SinkCapability:
        table = self._into
        return SinkCapability(
            system="sqlite",
            commit=Commit.ONE_TRANSACTION,
            mechanism="ledger row in the sink's transaction",
            stage="one Arrow file per shard, next to the database",
            prepare="file and folder fsynced, with a checksum",
            decide=f"one transaction: rows of all shards into {table}, and the ledger row",
            apply="delete the staged files; the decision made the rows visible",
            send=f"short transactions into {table}, visible at once",
            batch_atomic=True,
            remembers=True,
            validates=True,
            local=True,
            write=self.options.write,
            adds_columns=self.options.merge_schema,
            no_position=self.options.write.no_position,
            assumes=("the database file is backed up and restored with its ledger tables", *self._assumed),
            limits=(
                "one machine: driver and tasks open the same file",
                "one writer at a time: shards of a batch are written in sequence",
                HISTORY,
                *self._bounds,
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        """Opens the database for writing, as a batch would, without changing rows."""
        del guarantee
        findings: list[Finding] = []
        try:
            connection = connect(self.options.path)
            try:
                migrate(connection, self.options.path)
                begin(connection, CONNECT_TIMEOUT_S)
                # BEGIN IMMEDIATE alone succeeds on a read-only file. This writes, and is rolled back.
                connection.execute("UPDATE _delivered_migration SET applied_at_ms = applied_at_ms")
                findings.extend(self._check_table(connection))
                journal = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
                if journal == "wal" and sqlite3.sqlite_version_info < WAL_RACE_FIXED:
                    findings.append(_wal_race(self.options.path))
            except sqlite3.Error as error:
                raise explained(error, self.options.path) from error
            finally:
                rollback(connection)
                connection.close()
            self.options.staging.mkdir(exist_ok=True)
        except DeliveredError as error:
            return [Finding.refusal(error)]
        except OSError as error:
            staging = self.options.staging
            return [
                Finding.build(
                    "STAGING_FAILED.START", refuses=True, path=str(staging), error=error.strerror, folder=staging.parent
                )
            ]
        return findings

    def _check_table(self, connection: sqlite3.Connection) -> Iterator[Finding]:
        from delivered.connectors.sqlite import read

        write = self.options.write
        target.check_kind(connection, self.options)
        if not target.table_columns(connection, self.options.table):
            if not self.options.create:
                tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
                raise target.missing_table(self.options, [str(name) for (name,) in tables])
        elif write.upserts and not target.has_unique_index(connection, self.options.table, write.keys):
            raise no_unique_index(write, self.options.table, self.options.where)
        else:
            if write.only_adds and (why := read.unordered(connection, self.options.table)):
                yield Finding.build("AUDIT_READS_ALL.SQLITE", refuses=False, table=self.options.table, reason=why)
            yield from table_findings(self.options, target.read_definition(connection, self.options))

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        reasons: pa.Array | None = self.parts["refused_rows"](self.options, batch)
        return reasons

    def checked_target(self) -> Sequence[str]:
        if not Path(self.options.path).exists():
            return ()
        problems = SqliteDatabase(self.options.path).ask(
            lambda connection: target.read_definition(connection, self.options)
        )
        return describe_checks(self.options, problems)

    def target_check(self) -> Callable[[pa.Schema], None] | None:
        if not Path(self.options.path).exists():
            return None
        return SqliteDatabase(self.options.path).ask(lambda connection: target.table_check(connection, self.options))

    def ready_target(self, schema: pa.Schema) -> None:
        with self._altering() as connection:
            if self.options.merge_schema and (check := target.table_check(connection, self.options)) is not None:
                check(schema)
            else:
                target.ready(connection, self.options, schema)

    def add_columns(self, schema: pa.Schema) -> None:
        if self.options.merge_schema:
            with self._altering() as connection:
                target.add_columns(connection, self.options, schema)

    @contextlib.contextmanager
    def _altering(self) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction that may change tables."""
        with contextlib.closing(connect(self.options.path)) as connection:
            migrate(connection, self.options.path)
            with writing(connection, self.options.path, CONNECT_TIMEOUT_S):
                yield connection


def _wal_race(path: str) -> Finding:
    version = ".".join(map(str, sqlite3.sqlite_version_info))
    return Finding.build("WAL_RACE", refuses=False, path=path, version=version)

"""The sink `delivered_sqlite`."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.sqlite import target, types
from delivered.connectors.sqlite.database import WAL_RACE_FIXED, begin, connect, explained, rollback
from delivered.connectors.sqlite.ledger import SqliteLedger
from delivered.connectors.sqlite.migrate import migrate
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.read import SqliteTable
from delivered.connectors.sqlite.resource import SqliteResource
from delivered.connectors.sqlite.writer import DirectWriter, StagingWriter
from delivered.contract import Finding
from delivered.model.capability import Commit, SinkCapability
from delivered.model.errors import DeliveredError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_HISTORY_BATCHES


@dataclass(frozen=True)
class SqliteSink:
    """Holds options, no connection."""

    options: SqliteOptions

    @property
    def name(self) -> str:
        return self.options.sink_name

    def capability(self) -> SinkCapability:
        table = f"table {self.options.table}"
        return SinkCapability(
            system="sqlite",
            commit=Commit.ONE_TRANSACTION,
            mechanism="ledger row in the sink's transaction",
            stage="an Arrow file for each shard, beside the database",
            prepare="file and folder fsynced, with a checksum",
            decide=f"one transaction: rows of all shards into {table}, and the ledger row",
            apply="staged files deleted; the rows are visible since the decision",
            send=f"short transactions into {table}, visible at once",
            batch_atomic=True,
            local=True,
            assumes=("the database file and its ledger tables are backed up and restored as one",),
            limits=(
                "one machine: driver and tasks open the same file",
                "one writer at a time: shards of a batch get in one after the other",
                f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept",
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        """Opens the database for writing as a batch would, and changes none of its rows."""
        del guarantee
        findings = []
        try:
            connection = connect(self.options.path)
            try:
                migrate(connection, self.options.path)
                begin(connection, CONNECT_TIMEOUT_S)
                # BEGIN IMMEDIATE alone succeeds on a read-only file. This writes, and is rolled back.
                connection.execute("UPDATE _delivered_migration SET applied_at_ms = applied_at_ms")
                if not target.table_columns(connection, self.options.table) and not self.options.create:
                    raise target.missing_table(self.options)
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
            return [Finding(error.code.removeprefix("DELIVERED_"), error.message, True, error.next_step)]
        except OSError as error:
            message = f"Shards cannot be staged in {str(self.options.staging)!r}: {error.strerror}."
            return [Finding("STAGING_FAILED", message, True, f"chmod u+w {self.options.staging.parent}")]
        return findings

    def check_schema(self, schema: pa.Schema) -> None:
        types.check(schema)

    def refused(self, batch: pa.RecordBatch) -> pa.Array | None:
        return types.refused(types.with_schema(batch, types.plain_schema(batch.schema)))

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return types.with_schema(batch, types.canonical_schema(batch.schema))

    def shard_writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> StagingWriter | DirectWriter:
        if guarantee is Guarantee.EXACTLY_ONCE:
            return StagingWriter(self.options, work, schema)
        return DirectWriter(self.options, schema)

    def read_back(self) -> SqliteTable:
        return SqliteTable(self.options)

    def ledger(self, scope: Scope) -> SqliteLedger:
        return SqliteLedger(self.options, scope)

    def resource(self, scope: Scope) -> SqliteResource:
        return SqliteResource(self.options, scope)


def _wal_race(path: str) -> Finding:
    version = ".".join(map(str, sqlite3.sqlite_version_info))
    return Finding(
        "WAL_RACE",
        f"The database {path!r} is in WAL mode, and this SQLite {version} has a rare race there that can corrupt the "
        "file when several processes write; it is gone in 3.51.3.",
        False,
        f"sqlite3 {path} 'PRAGMA journal_mode=DELETE', or run with SQLite 3.51.3 or newer",
    )

"""The sink `delivered_sqlite`, its checks before a start, and a scan of all rows in ranges of rowid."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from delivered.contract.source import Finding, Offsets, Slice
from delivered.kits.sink import Parts
from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import checked, no_unique_index
from delivered.kits.sql.merge import findings as table_findings
from delivered.kits.sql.sink import HISTORY, DatabaseSink
from delivered.kits.sql.table import TableScan, never_written, steps
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import BadRecord, DeliveredError, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S


@dataclass(frozen=True)
class SqliteSink(DatabaseSink):
    options: SqliteOptions

    types = TYPES
    parts = Parts(
        __package__,
        writer="writer:writer",
        scan="sink:SqliteScan",
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
        write = self.options.write
        target.check_kind(connection, self.options)
        if not target.table_columns(connection, self.options.table):
            if not self.options.create:
                raise target.missing_table(self.options)
        elif write.upserts and not target.has_unique_index(connection, self.options.table, write.keys):
            raise no_unique_index(write, self.options.table, self.options.where)
        else:
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
        return checked(self.options, problems)

    def ready_target(self, schema: pa.Schema) -> None:
        with self._altering() as connection:
            if self.options.merge_schema and target.table_columns(connection, self.options.table):
                target.add_columns(connection, self.options, schema, alter=False)
            else:
                target.ready(connection, self.options, schema)

    def add_columns(self, schema: pa.Schema) -> None:
        if self.options.merge_schema:
            with self._altering() as connection:
                target.add_columns(connection, self.options, schema, alter=True)

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


SLICE_ROWS = 250_000
"""Minimum range of rowids per slice."""


@dataclass(frozen=True)
class SqliteScan(TableScan):
    """See `delivered.kits.sql.table.TableScan`. Meanwhile, rows may only be added."""

    options: SqliteOptions

    @property
    def database(self) -> SqliteDatabase:
        return SqliteDatabase(self.options.path)

    def _stored_schema(self) -> pa.Schema | None:
        return self.database.ask(lambda connection: target.stored_schema(connection, self.options.table))

    def _never_written(self) -> UsageError:
        return never_written(self.options.table, self.options.where, "path and table")

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"rowid": n}: the first one."""
        first, stop = self._range()
        first = int((since or {}).get("rowid", first))
        return [Slice({"start": at, "end": until}) for at, until in steps(first, stop, SLICE_ROWS)]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        columns = ", ".join(quoted(name) for name in schema.names)
        connection = self.database.connect("read", writes=False)
        try:
            rowid = rowid_name(connection, self.options.table)
            where = f" WHERE {rowid} BETWEEN ? AND ? ORDER BY {rowid}" if rowid else ""
            statement = f"SELECT {columns} FROM {quoted(self.options.table)}{where}"  # noqa: S608 - identifiers quoted
            cursor = connection.execute(statement, (piece.data["start"], piece.data["end"] - 1) if rowid else ())
            while rows := cursor.fetchmany(target.CHUNK_ROWS):
                values = zip(*rows, strict=True)
                arrays = [_array(list(v), f) for v, f in zip(values, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except sqlite3.Error as error:
            raise explained(error, self.options.path) from error
        finally:
            connection.close()

    def _range(self) -> tuple[int, int]:
        """First rowid and the one after the last."""

        def ask(connection: sqlite3.Connection) -> tuple[int, int]:
            rowid = rowid_name(connection, self.options.table)
            if rowid is None:
                return 0, 1
            row = connection.execute(
                f"SELECT min({rowid}), max({rowid}) FROM {quoted(self.options.table)}"  # noqa: S608
            ).fetchone()
            return (0, 0) if row[0] is None else (row[0], row[1] + 1)  # in Python: SQLite would make a float of 2^63

        return self.database.ask(ask)


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    """Raises BadRecord: another client stored a value that is not one of the column's type."""
    try:
        return target.from_sql(values, field.type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise BadRecord("VALUE_UNREADABLE.SQLITE", column=field.name, type=field.type, error=str(error)[:300]) from None


def rowid_name(connection: sqlite3.Connection, table: str) -> str | None:
    """A name of the rowid that no column shadows; None: the table is WITHOUT ROWID."""
    declared: Any = target.table_columns(connection, table)
    for name in ("_rowid_", "rowid", "oid"):
        if name not in declared:
            try:
                connection.execute(f"SELECT {name} FROM {quoted(table)} LIMIT 0")  # noqa: S608 - identifiers quoted
            except sqlite3.OperationalError:
                return None
            return name
    return None

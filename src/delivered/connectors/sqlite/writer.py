"""Executor side of the sink."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pyarrow as pa

from delivered.connectors.sqlite import target
from delivered.connectors.sqlite.database import SqliteDatabase, connect, explained, migrate, rollback, writing
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.stage import Merging, StagedFile
from delivered.connectors.sqlite.types import TYPES
from delivered.kits.sql.database import Definition
from delivered.kits.sql.merge import check_count, check_rows, stored
from delivered.kits.sql.table import check_nulls
from delivered.model.columns import fitted
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.prepared import Promise


def writer(options: SqliteOptions, work: Work, guarantee: Guarantee, schema: pa.Schema) -> StagingWriter | DirectWriter:
    if guarantee is Guarantee.EXACTLY_ONCE:
        return StagingWriter(options, work, schema)
    return DirectWriter(options, work, schema)


class StagingWriter:
    """exactly_once: stages rows in a file for the driver's transaction."""

    def __init__(self, options: SqliteOptions, work: Work, schema: pa.Schema) -> None:
        self._options = options
        self._work = work
        self._schema = TYPES.plain_schema(schema)
        self._file: StagedFile | None = None
        self._filled: tuple[str, ...] = ()

    def stage(self, batch: pa.RecordBatch) -> None:
        batch = fitted(batch, self._schema)
        check(self._options, batch)
        if self._file is None:
            self._filled = self._compare()
            self._file = StagedFile(self._options, self._work, self._schema)
        check_nulls(batch, self._filled)
        self._file.write(batch)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        del fingerprint  # the file has its own checksum
        return Promise(None if self._file is None else self._file.finish())

    def abort(self) -> None:
        if self._file is not None:
            self._file.discard()

    def _compare(self) -> tuple[str, ...]:
        """Fail before staging rows if the decision is certain to fail.

        Returns the columns in which SQLite replaces null.
        """
        if not Path(self._options.path).exists():
            return ()
        connection = connect(self._options.path, mode="ro")
        try:
            columns = target.table_columns(connection, self._options.table)
            filled = target.filled(connection, self._options.table, self._schema.names)
        except sqlite3.Error as error:
            raise explained(error, self._options.path) from error
        finally:
            connection.close()
        if columns:
            target.compare(self._options, stored(self._options.write, self._schema), columns)
        elif not self._options.create:
            raise target.missing_table(self._options)
        return filled


class DirectWriter:
    """at_least_once, at_most_once: short transactions, each visible at once; never resends rows.

    mode upsert: one transaction per shard, at its end.
    """

    def __init__(self, options: SqliteOptions, work: Work, schema: pa.Schema) -> None:
        self._options = options
        self._work = work
        self._schema = TYPES.plain_schema(schema)
        self._connection: sqlite3.Connection | None = None
        self._merging: Merging | None = None
        self._found = Definition()
        self._filled: tuple[str, ...] = ()

    def stage(self, batch: pa.RecordBatch) -> None:
        batch = fitted(batch, self._schema)
        check(self._options, batch)
        connection = self._ready()
        check_nulls(batch, self._filled)
        if self._merging is not None:
            with self._explaining():
                connection.execute("BEGIN")  # locks only the temporary table
                self._merging.add(0, [batch])
                connection.execute("COMMIT")
            return
        for start in range(0, batch.num_rows, target.CHUNK_ROWS):
            chunk = batch.slice(start, target.CHUNK_ROWS)
            with writing(connection, self._options.path):
                check_count(
                    self._options, *target.insert_rows(connection, self._options, self._found, [chunk]), self._found
                )

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        del fingerprint
        if self._connection is not None and self._merging is not None:
            with writing(self._connection, self._options.path):
                self._merging.finish(self._work)
        self.abort()
        return Promise()

    def abort(self) -> None:
        if self._connection is not None:
            rollback(self._connection)
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _explaining(self) -> contextlib.AbstractContextManager[None]:
        return SqliteDatabase(self._options.path).explaining()

    def _ready(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = connect(self._options.path)
            try:
                migrate(connection, self._options.path)
                with writing(connection, self._options.path):
                    target.ready(connection, self._options, self._schema)
                    self._found = target.read_definition(connection, self._options)
                    self._filled = target.filled(connection, self._options.table, self._schema.names)
                if self._options.write.merges:
                    with self._explaining():
                        self._merging = Merging(connection, self._options, self._schema)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection


def check(options: SqliteOptions, batch: pa.RecordBatch) -> None:
    """
    Raises:
        BadRecord: a row cannot be stored.
    """
    TYPES.check_values(batch)
    if options.write.upserts:
        check_rows(options.write, batch)

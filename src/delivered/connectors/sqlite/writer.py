"""Executor side: shards staged in Arrow files or written at once, upserts, and rows that SQLite itself refuses.

    <database>.delivered/pipeline=<pipeline>/sink=<sink>/<incarnation>.<batch>.<shard>.<attempt>.<random>.arrow

A staged file has a checksum and is durable before the task reports it. The random part distinguishes tasks with the
same numbers: one of them may be a zombie of an earlier run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sqlite3
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.sqlite import TYPES, SqliteOptions, target
from delivered.connectors.sqlite.client import SqliteDatabase, connect, explained, migrate, rollback, writing
from delivered.contract.sink import Writer
from delivered.kits.sql.database import Definition, quoted
from delivered.kits.sql.merge import (
    ORDER,
    ROUND,
    SHARD,
    Conditional,
    check_count,
    check_rows,
    delete,
    key_in_two_shards,
    upsert,
)
from delivered.kits.sql.table import bytes_of, check_nulls, long_values, stored_columns
from delivered.kits.table.store import make_folder, sync
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.rows import because, first_of, fitted
from delivered.model.work import Handle, Promise

_SUFFIX = ".arrow"
_UNFINISHED = ".part"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class StagedRows(Handle):
    """
    Attributes:
        path: the file's name, without its folder.
    """

    path: str
    rows: int
    bytes: int
    crc32: int


def staging_folder(options: SqliteOptions, scope: Scope) -> Path:
    """Folder for all incarnations of one pipeline and sink, and no others."""
    # The prefix keeps a pipeline named ".." inside.
    return options.staging / f"pipeline={scope.pipeline}" / f"sink={scope.sink}"


class StagedFile:
    """One shard being staged. Used by one thread."""

    def __init__(self, options: SqliteOptions, work: Work, schema: pa.Schema) -> None:
        self._folder = staging_folder(options, work.scope)
        name = f"{work.scope.incarnation}.{work.batch}.{work.shard}.{work.attempt}.{uuid.uuid4().hex}{_SUFFIX}"
        self._final = self._folder / name
        self._part = self._folder / (name + _UNFINISHED)
        self.rows = 0
        try:
            make_folder(self._folder)
            self._file = self._part.open("xb")
        except OSError as error:
            raise _failed(self._folder, error) from error
        self._sink = _Summed(self._file)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._sink, mode="w"), schema)

    def write(self, batch: pa.RecordBatch) -> None:
        try:
            self._writer.write_batch(batch)
        except OSError as error:
            raise _failed(self._part, error) from error
        self.rows += batch.num_rows

    def finish(self) -> StagedRows:
        """Make the file durable under its final name; return the handle to find and verify it."""
        try:
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.rename(self._final)
            sync([self._folder])
        except FileNotFoundError:
            raise InvariantBroken("STAGED_FILE_GONE.SQLITE_CLEANED", path=str(self._part)) from None
        except OSError as error:
            raise _failed(self._part, error) from error
        return StagedRows(self._final.name, self.rows, self._sink.size, self._sink.crc)

    def discard(self) -> None:
        """Delete the file under either name. May be called again."""
        with contextlib.suppress(Exception):
            self._file.close()
        for path in (self._part, self._final):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def read_staged(options: SqliteOptions, scope: Scope, staged: StagedRows) -> Iterator[pa.RecordBatch]:
    """The rows of a prepared shard, verified by size and checksum.

    Raises:
        InvariantBroken: the file is missing, or differs from what was prepared.
    """
    path = staging_folder(options, scope) / Path(staged.path).name
    try:
        size, crc = _checksum(path)
    except FileNotFoundError:
        raise InvariantBroken("STAGED_FILE_GONE.SQLITE_MISSING", path=str(path)) from None
    if (size, crc) != (staged.bytes, staged.crc32):
        raise InvariantBroken(
            "STAGED_FILE_DAMAGED",
            path=str(path),
            actual_bytes=size,
            actual_checksum=crc,
            prepared_bytes=staged.bytes,
            prepared_checksum=staged.crc32,
        )
    # Not memory-mapped: a mapped file would count as this process's memory.
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def staged_schema(options: SqliteOptions, scope: Scope, staged: StagedRows) -> pa.Schema:
    """The schema of a prepared shard."""
    try:
        with pa.memory_map(str(staging_folder(options, scope) / Path(staged.path).name)) as source:
            return pa.ipc.open_file(source).schema
    except (OSError, pa.ArrowInvalid) as error:
        raise InvariantBroken("STAGED_FILE_GONE.SQLITE_READ", error=error) from None


def remove(options: SqliteOptions, scope: Scope, staged: StagedRows) -> None:
    """Delete a staged file. May be called again."""
    (staging_folder(options, scope) / Path(staged.path).name).unlink(missing_ok=True)


def staged_files(options: SqliteOptions, scope: Scope) -> list[Path]:
    """All staged files of this sink, finished or not."""
    folder = staging_folder(options, scope)
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.endswith((_SUFFIX, _SUFFIX + _UNFINISHED)))


def _checksum(path: Path) -> tuple[int, int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            size += len(part)
            crc = zlib.crc32(part, crc)
    return size, crc


def _failed(path: Path, error: OSError) -> DeliveredError:
    return DeliveredError("STAGING_FAILED.WRITE", path=str(path), error=error.strerror or error)


class _Summed(io.RawIOBase):
    """A file that counts bytes and computes their checksum."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        self.crc = zlib.crc32(view, self.crc)
        self._file.write(view)
        return view.nbytes

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size


STAGED = 'temp."_delivered_staged"'


class Merging:
    """Upserts a batch, or a shard under a weaker guarantee, through a temporary table. Used by one thread."""

    def __init__(self, connection: sqlite3.Connection, options: SqliteOptions, schema: pa.Schema) -> None:
        """Args: schema: plain types."""
        self._connection = connection
        self._mode = options.write
        self._options = options
        self._found = target.read_definition(connection, options)
        columns = tuple(stored_columns(options.write, schema).names)
        self._merge = target.SqliteMerge(options.write, quoted(options.table), columns, self._found.clauses)
        self._shards: set[int] = set()
        body = "".join(f"{quoted(f.name)} {TYPES.declared(f.type)}, " for f in schema)
        connection.execute(f"DROP TABLE IF EXISTS {STAGED}")
        connection.execute(
            f"CREATE TABLE {STAGED} ({body}{quoted(SHARD)} INTEGER, {quoted(ROUND)} INTEGER DEFAULT 1, "
            f"{quoted(ORDER)} INTEGER PRIMARY KEY)"
        )

    def add(self, shard: int, batches: Iterable[pa.RecordBatch]) -> int:
        """Return the number of rows."""
        self._shards.add(shard)
        return target.insert(
            self._connection, f"INSERT INTO {STAGED}", batches, {SHARD: shard}, path=self._options.path
        )[0]

    def finish(self, work: Work) -> None:
        """Merge the rows into the table, inside a read-write transaction.

        Raises:
            UsageError: a key is in two shards, so their order is undefined; a conflict stops the query; or the table
                dropped a row without an error.
        """
        mode = self._mode
        if mode.upserts and (mode.version is None or mode.expected is not None) and len(self._shards) > 1:
            keys = ", ".join(map(quoted, self._mode.keys))
            duplicate = self._connection.execute(
                f"SELECT {keys} FROM {STAGED} GROUP BY {keys} "  # noqa: S608
                f"HAVING min({quoted(SHARD)}) <> max({quoted(SHARD)}) LIMIT 1"
            ).fetchone()
            if duplicate is not None:
                raise key_in_two_shards(self._mode, duplicate, self._options.table)
        if mode.upserts:
            self._connection.execute((self._merge.number if mode.keeps_all else self._merge.reduce)(STAGED))
        connection, options, merge = self._connection, self._options, self._merge
        if mode.conditional:
            Conditional(
                connection, SqliteDatabase(options.path), merge, STAGED, work, quoted(SHARD), options,
                self._found,
            ).run()  # fmt: skip
        else:
            upsert(connection, options, merge, STAGED, self._found)
        if mode.delete is not None:
            delete(connection, options, merge, STAGED, self._found)
        connection.execute(f"DROP TABLE {STAGED}")


def writer(options: SqliteOptions, work: Work, guarantee: Guarantee, schema: pa.Schema) -> StagingWriter | DirectWriter:
    if guarantee is Guarantee.EXACTLY_ONCE:
        return StagingWriter(options, work, schema)
    return DirectWriter(options, work, schema)


class StagingWriter(Writer):
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
            target.compare(self._options, stored_columns(self._options.write, self._schema), columns)
        elif not self._options.create:
            raise target.missing_table(self._options)
        return filled


class DirectWriter(Writer):
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
    """Raises BadRecord: a row cannot be stored."""
    TYPES.check_values(batch)
    if options.write.upserts:
        check_rows(options.write, batch)


_CHECK = re.compile(r"\bCHECK\b", re.IGNORECASE)
_STRICT = re.compile(r"\bSTRICT\b[^)]*$", re.IGNORECASE)
"""Such a table does not take NaN, which is stored as a text."""
_FIXED_BYTES = 9
"""Of a value and its type, at most, where it is no text."""


def refused_rows(options: SqliteOptions, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.contract.sink.Sink.refused_rows`.

    Inserts rows into an empty copy of the table in memory, if the table computes anything of them. The copy has the
    table's indexes, but no triggers; a row that breaks a constraint is skipped. Only reads the database.

    Raises:
        DeliveredError: the database cannot be read.
    """
    batch = fitted(batch, TYPES.plain_schema(batch.schema))
    names = stored_columns(options.write, batch.schema).names
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
        reasons = _too_long(batch, names, copy.getlimit(sqlite3.SQLITE_LIMIT_LENGTH))
        if not Path(options.path).exists():
            return reasons
        database, floats = SqliteDatabase(options.path), any(map(pa.types.is_floating, batch.schema.types))
        statements = database.ask(lambda connection: _definition(connection, options.table, floats))
        if not statements or not _copied(copy, statements):
            return reasons
        return first_of(reasons, _tried(copy, options.table, batch.select(names), reasons))


def _too_long(batch: pa.RecordBatch, names: Sequence[str], limit: int) -> pa.Array | None:
    """A value has such a limit, and so has a row."""
    total = pc.add(bytes_of(batch, names), _FIXED_BYTES * len(names))
    beyond = pc.greater(total, limit)
    if not pc.any(beyond).as_py():
        return None
    rows = pc.indices_nonzero(beyond).to_pylist()
    shown = {at: long_values(batch.slice(at, 1)) for at in rows}
    why = f"SQLite stores at most {limit} bytes of a row (SQLITE_MAX_LENGTH)"
    text = pa.array([shown[at] + why if at in shown else None for at in range(batch.num_rows)], pa.string())
    return because(None, beyond, text)


def _definition(connection: sqlite3.Connection, table: str, floats: bool) -> list[str]:
    """Statements that make the table and its indexes; empty if nothing is computed of a row.

    Args:
        floats: whether rows have any.
    """
    rows = connection.execute(
        "SELECT type, sql FROM sqlite_master WHERE type IN ('table', 'index') AND tbl_name = ? COLLATE NOCASE "
        "AND sql IS NOT NULL ORDER BY type DESC",
        (table,),
    ).fetchall()
    computes = connection.execute(
        "SELECT 1 FROM pragma_table_xinfo(:table) WHERE hidden IN (2, 3) UNION ALL "
        "SELECT 1 FROM pragma_index_list(:table) AS l LEFT JOIN pragma_index_xinfo(l.name) AS i "
        "WHERE l.partial OR i.cid = -2",
        {"table": table},
    ).fetchone()
    checks = any(kind == "table" and (_CHECK.search(sql) or (floats and _STRICT.search(sql))) for kind, sql in rows)
    return [sql for _, sql in rows] if computes or checks else []


def _copied(copy: sqlite3.Connection, statements: Sequence[str]) -> bool:
    """Whether the table could be created: another client may have defined a function or a collation for it."""
    try:
        for statement in statements:
            copy.execute(statement)
    except sqlite3.Error:
        return False
    return True


def _tried(copy: sqlite3.Connection, table: str, batch: pa.RecordBatch, reasons: pa.Array | None) -> pa.Array | None:
    into, refused = quoted(table), dict[int, str]()
    values = ", ".join("?" * batch.num_columns)
    # Constraints are not tried: another option is about them.
    insert = f"INSERT OR IGNORE INTO {into} ({', '.join(map(quoted, batch.schema.names))}) VALUES ({values})"  # noqa: S608
    for at, row in enumerate(zip(*map(target.to_sql, batch.columns), strict=True)):
        if reasons is not None and reasons[at].is_valid:
            continue
        try:
            copy.execute(insert, row)
        except sqlite3.Error as error:
            if str(error).startswith("no such "):  # about the statement: the other client's function
                return None
            refused[at] = f"{long_values(batch.slice(at, 1))}{error}"
        copy.execute(f"DELETE FROM {into}")  # noqa: S608 - so that no row meets another
    return pa.array([refused.get(i) for i in range(batch.num_rows)], pa.string()) if refused else None

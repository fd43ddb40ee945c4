"""Staged shards: Arrow files with a checksum, durable before the task reports them; and upserts.

    <database>.delivered/pipeline=<pipeline>/sink=<sink>/<incarnation>.<batch>.<shard>.<attempt>.<random>.arrow

The random part distinguishes tasks with the same numbers: one of them may be a zombie of an earlier run.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.connectors.sqlite import target
from delivered.connectors.sqlite.database import SqliteDatabase
from delivered.connectors.sqlite.options import SqliteOptions
from delivered.connectors.sqlite.types import TYPES
from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import ORDER, ROUND, SHARD, Conditional, key_in_two_shards, stored
from delivered.kits.sql.stage import delete, upsert
from delivered.kits.table.durable import make_folder, sync
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.identity import Scope, Work
from delivered.model.prepared import Handle

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


def folder_of(options: SqliteOptions, scope: Scope) -> Path:
    """Folder for all incarnations of one pipeline and sink, and no others."""
    # The prefix keeps a pipeline named ".." inside.
    return options.staging / f"pipeline={scope.pipeline}" / f"sink={scope.sink}"


class StagedFile:
    """One shard being staged. Used by one thread."""

    def __init__(self, options: SqliteOptions, work: Work, schema: pa.Schema) -> None:
        self._folder = folder_of(options, work.scope)
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
            raise InvariantBroken(
                "STAGED_FILE_GONE",
                f"The file {str(self._part)!r} was deleted while the task wrote it: a later start of the pipeline "
                "cleaned up after this one. Nothing of the shard is visible.",
                next_step="nothing, if the later start is running; otherwise start the pipeline again",
            ) from None
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
    path = folder_of(options, scope) / Path(staged.path).name
    try:
        size, crc = _checksum(path)
    except FileNotFoundError:
        raise InvariantBroken(
            "STAGED_FILE_GONE",
            f"The staged rows of a shard, {str(path)!r}, are missing. Nothing of the batch is visible.",
            next_step="start the pipeline again; the batch runs again",
        ) from None
    if (size, crc) != (staged.bytes, staged.crc32):
        raise InvariantBroken(
            "STAGED_FILE_DAMAGED",
            f"The staged rows of a shard, {str(path)!r}, are corrupt: {size} bytes with checksum {crc}, but "
            f"{staged.bytes} with {staged.crc32} were prepared. Nothing of the batch is visible.",
            next_step="check the disk, then start the pipeline again; the batch runs again",
        )
    # Not memory-mapped: a mapped file would count as this process's memory.
    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def staged_schema(options: SqliteOptions, scope: Scope, staged: StagedRows) -> pa.Schema:
    """The schema of a prepared shard."""
    try:
        with pa.memory_map(str(folder_of(options, scope) / Path(staged.path).name)) as source:
            return pa.ipc.open_file(source).schema
    except (OSError, pa.ArrowInvalid) as error:
        raise InvariantBroken(
            "STAGED_FILE_GONE",
            f"The staged rows of a shard cannot be read: {error}. Nothing of the batch is visible.",
            next_step="start the pipeline again; the batch runs again",
        ) from None


def remove(options: SqliteOptions, scope: Scope, staged: StagedRows) -> None:
    """Delete a staged file. May be called again."""
    (folder_of(options, scope) / Path(staged.path).name).unlink(missing_ok=True)


def staged_files(options: SqliteOptions, scope: Scope) -> list[Path]:
    """All staged files of this sink, finished or not."""
    folder = folder_of(options, scope)
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
    return DeliveredError(
        "STAGING_FAILED",
        f"A shard's rows could not be staged at {str(path)!r}: {error.strerror or error}.",
        next_step="free disk space, or grant write permission; then start again: the batch runs again",
    )


class _Summed:
    """A file that counts bytes and computes their checksum."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0
        self.crc = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        self.crc = zlib.crc32(view, self.crc)
        self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

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
        columns = tuple(stored(options.write, schema).names)
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
            found = self._connection.execute(
                f"SELECT {keys} FROM {STAGED} GROUP BY {keys} "  # noqa: S608
                f"HAVING min({quoted(SHARD)}) <> max({quoted(SHARD)}) LIMIT 1"
            ).fetchone()
            if found is not None:
                raise key_in_two_shards(self._mode, found, self._options.table)
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

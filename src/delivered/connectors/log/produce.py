"""Appends records to a log: assigns offsets, commits atomically, and is durable on return."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from delivered.connectors.log import table as layout
from delivered.kits.options import absolute
from delivered.kits.table.durable import sync, sync_checkpoint
from delivered.model.errors import DeliveredError, OutcomeUnknown, UsageError
from delivered.model.fingerprint import record_hashes
from delivered.model.work import LOG_FORMAT, LOG_PROPERTY

PARTITIONS_MAX = 1_000
"""Each partition of an append is an open file."""
ATTEMPTS_MAX = 30
"""Attempts of one append against other producers."""
CHECKPOINT_VERSIONS = 100
_GROUP_ROWS = 65_536
_GROUP_BYTES = 16 << 20
_KEY_SEED = 0x9E3779B9


@dataclass(frozen=True)
class Appended:
    """
    Attributes:
        version: of the table, with these records in it.
        offsets: partition -> (first, last) assigned offset; empty: nothing to append.
        repeated: the application transaction was already committed; nothing was written.
    """

    version: int
    offsets: Mapping[int, tuple[int, int]]
    repeated: bool = False


def append(
    path: str,
    table_or_batches: pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch],
    partition_by: int | None = None,
    idempotence: tuple[str, int] | None = None,
    storage: Mapping[str, str] | None = None,
) -> Appended:
    """Append records to the log at `path`, all or none; create the log if missing.

    On return the records are durable: on a local disk the data files and their folders are fsynced before the commit,
    the commit file and its folder after it. A crash before the return leaves all of the records or none.

    Args:
        table_or_batches: columns `value` (binary or string); optional `key`, `headers` (list of struct key, value),
            `partition` (int), `timestamp`. A stream of batches is not collected.
        partition_by: None: the column `partition`, or partition 0 without one. n: a hash of `key` modulo n.
        idempotence: (application id, version), with a growing version: an append whose version is not above the log's
            for that id is a no-op. Without it, an append retried after a crash may be duplicated.
        storage: options of the object store's client.

    Raises:
        UsageError: bad columns, or too many partitions.
        DeliveredError: ATTEMPTS_MAX conflicts with other producers. Nothing was appended.
        OutcomeUnknown: the storage did not report whether the commit succeeded. With `idempotence`, call again.
    """
    deltalake = layout.delta()
    path = absolute(path)
    options = dict(storage or {})
    if idempotence is not None and idempotence[0] == layout.CONFLICT_ID:
        raise UsageError("APP_ID_RESERVED", conflict_id=layout.CONFLICT_ID)
    table = open_or_create(path, options)
    if (done := _repeated(table, idempotence)) is not None:
        return done
    ends = layout.snapshot(table, path, options).ends()
    files = write_files(path, options, rows_by_partition(table_or_batches, partition_by), ends)
    if not files:
        return Appended(table.version(), {})
    try:
        for attempt in range(ATTEMPTS_MAX):
            sync_data(path, files)
            try:
                commit(table, files, idempotence)
            except deltalake.exceptions.CommitFailedError:
                # Conflict: read again and renumber after the other producer's records. After another error, the commit
                # succeeded if the table has our files, whose names are unique.
                time.sleep(layout.jitter_s(attempt))
                table = layout.open_table(path, options)
                now = layout.snapshot(table, path, options)
                if {f.path for f in files} <= {f.path for f in now.files}:
                    return _finish(path, options, files)
                if (done := _repeated(table, idempotence)) is not None:
                    remove(path, options, files)
                    return done
                files = _shifted(path, options, files, now.ends())
                continue
            return _finish(path, options, files)
    except (deltalake.exceptions.DeltaError, OSError) as error:
        return _look(path, options, files, error)
    remove(path, options, files)
    raise DeliveredError("LOG_CONTENDED", path=path, attempts_max=ATTEMPTS_MAX)


@dataclass
class _File:
    """A data file being written, not yet part of the log."""

    path: str
    partition: int
    first: int
    rows: int = 0
    size: int = 0
    appended_ms: int = 0
    writer: Any = None
    pending: list[pa.RecordBatch] = field(default_factory=list)
    pending_rows: int = 0
    pending_bytes: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.pending.append(batch)
        self.pending_rows += batch.num_rows
        self.pending_bytes += batch.nbytes
        if self.pending_rows >= _GROUP_ROWS or self.pending_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write pending rows as one row group, numbered from the end of the last one."""
        if not self.pending_rows:
            return
        rows = pa.Table.from_batches(self.pending)
        offsets = np.arange(self.first + self.rows, self.first + self.rows + rows.num_rows, dtype=np.int64)
        rows = rows.set_column(layout.STORED.get_field_index("offset"), "offset", pa.array(offsets))
        self.writer.write_table(rows.select(layout.STORED.names), row_group_size=_GROUP_ROWS)
        self.rows += rows.num_rows
        self.pending, self.pending_rows, self.pending_bytes = [], 0, 0


class _Files:
    """The data files of one append, one for each partition."""

    def __init__(self, path: str, options: Mapping[str, str], ends: Mapping[int, int]) -> None:
        self._fs = layout.filesystem(path, options)
        self._ends = ends
        self.files: dict[int, _File] = {}

    def add(self, partition: int, batch: pa.RecordBatch) -> None:
        file = self.files.get(partition)
        if file is None:
            if len(self.files) >= PARTITIONS_MAX:
                raise UsageError("PARTITIONS_TOO_MANY", partitions_max=PARTITIONS_MAX)
            file = _File(f"partition={partition}/{uuid.uuid4().hex}.parquet", partition, self._ends.get(partition, 0))
            self._fs.create_dir(f"partition={partition}", recursive=True)
            file.writer = pq.ParquetWriter(
                file.path, layout.STORED, filesystem=self._fs, compression="zstd", use_dictionary=["key"]
            )
            self.files[partition] = file
        file.add(batch)

    def close(self) -> list[_File]:
        for file in self.files.values():
            file.flush()
            file.writer.close()
            file.size = self._fs.get_file_info(file.path).size
        return [self.files[p] for p in sorted(self.files)]

    def discard(self) -> None:
        for file in self.files.values():
            with contextlib.suppress(Exception):
                file.writer.close()
            with contextlib.suppress(OSError):
                self._fs.delete_file(file.path)


def write_files(
    path: str, options: Mapping[str, str], rows: Iterable[tuple[int, pa.RecordBatch]], ends: Mapping[int, int]
) -> list[_File]:
    files = _Files(path, options, ends)
    try:
        for partition, batch in rows:
            files.add(partition, batch)
        return files.close()
    except BaseException:
        files.discard()
        raise


def rows_by_partition(
    data: pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch], partition_by: int | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The records of `data` in the log's columns, split by partition, in order."""
    if partition_by is not None and not 1 <= partition_by <= PARTITIONS_MAX:
        raise UsageError("PARTITIONS.LOG_COUNT", partition_by=partition_by, partitions_max=PARTITIONS_MAX)
    if isinstance(data, pa.RecordBatch):
        data = [data]
    for batch in data.to_batches(max_chunksize=_GROUP_ROWS) if isinstance(data, pa.Table) else data:
        if not batch.num_rows:
            continue
        stored = _stored(batch)
        if partition_by is not None:
            targets = (record_hashes(stored.select(["key"]), _KEY_SEED) % np.uint64(partition_by)).astype(np.int64)
        elif "partition" in batch.schema.names:
            targets = np.asarray(batch.column("partition").cast(pa.int64()).fill_null(0))
        else:
            yield 0, stored
            continue
        if int(targets.min()) < 0:
            raise UsageError("PARTITIONS.LOG_NEGATIVE", partition=int(targets.min()))
        for target in np.unique(targets):
            yield int(target), stored.take(pa.array(np.flatnonzero(targets == target)))


def _stored(batch: pa.RecordBatch) -> pa.RecordBatch:
    names = batch.schema.names
    unknown = sorted(set(names) - {*layout.STORED.names, "partition"} | ({"offset"} & set(names)))
    if "value" not in names or unknown:
        raise UsageError("LOG_COLUMNS.NAMES", names=names)
    now = pa.scalar(time.time_ns() // 1000, pa.timestamp("us", tz="UTC"))
    columns = []
    for wanted in layout.STORED:
        if wanted.name == "offset":
            columns.append(pa.nulls(batch.num_rows, wanted.type))
        elif wanted.name not in names:
            missing = pa.repeat(now, batch.num_rows) if wanted.name == "timestamp" else None
            columns.append(pa.nulls(batch.num_rows, wanted.type) if missing is None else missing)
        else:
            try:
                columns.append(batch.column(wanted.name).cast(wanted.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise UsageError(
                    "LOG_COLUMNS.TYPE", wanted=wanted.name, type=wanted.type, error=str(error)[:300]
                ) from None
    return pa.RecordBatch.from_arrays(columns, schema=layout.STORED)


def open_or_create(path: str, options: Mapping[str, str]) -> Any:
    deltalake = layout.delta()
    if not deltalake.DeltaTable.is_deltatable(path, dict(options) or None):
        # "ignore": another producer may create the log at the same moment.
        with contextlib.suppress(deltalake.exceptions.CommitFailedError):
            deltalake.DeltaTable.create(
                path, layout.TABLE, mode="ignore", partition_by=[layout.PARTITION_COLUMN],
                storage_options=dict(options) or None, configuration={LOG_PROPERTY: str(LOG_FORMAT)},
                raise_if_key_not_exists=False,
            )  # fmt: skip
        if layout.is_local(path):
            layout.sync_versions(path, 0, 0)
            sync([Path(path), Path(path).parent])
    return layout.open_table(path, options)


def _repeated(table: Any, idempotence: tuple[str, int] | None) -> Appended | None:
    if idempotence is None:
        return None
    known = table.transaction_version(idempotence[0])
    return Appended(table.version(), {}, repeated=True) if known is not None and known >= idempotence[1] else None


def commit(table: Any, files: list[_File], idempotence: tuple[str, int] | None) -> None:
    from deltalake import CommitProperties, PostCommitHookProperties, Transaction
    from deltalake.transaction import AddAction

    now_ms = time.time_ns() // 1_000_000
    for file in files:
        file.appended_ms = now_ms
    adds = [
        AddAction(
            file.path,
            file.size,
            {layout.PARTITION_COLUMN: str(file.partition)},
            now_ms,
            True,
            json.dumps(
                {
                    "numRecords": file.rows,
                    "minValues": {"offset": file.first},
                    "maxValues": {"offset": file.first + file.rows - 1},
                    "nullCount": {"offset": 0},
                }
            ),
        )
        for file in files
    ]
    version = (table.transaction_version(layout.CONFLICT_ID) or 0) + 1
    transactions = [Transaction(layout.CONFLICT_ID, version)]
    if idempotence is not None:
        transactions.append(Transaction(*idempotence))
    table.create_write_transaction(
        adds,
        "append",
        layout.TABLE,
        [layout.PARTITION_COLUMN],
        commit_properties=CommitProperties(app_transactions=transactions),
        # `_finish` writes checkpoints and makes them durable.
        post_commithook_properties=PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False),
    )


def sync_data(path: str, files: list[_File]) -> None:
    if layout.is_local(path):
        root = Path(path)
        sync([*(root / f.path for f in files), *{(root / f.path).parent for f in files}, root])


def _finish(path: str, options: Mapping[str, str], files: list[_File]) -> Appended:
    table = layout.open_table(path, options)
    version = table.version()
    layout.sync_versions(path, version - CHECKPOINT_VERSIONS, version)
    if version and version % CHECKPOINT_VERSIONS == 0:
        checkpoint(table, path)
    return Appended(version, {f.partition: (f.first, f.first + f.rows - 1) for f in files})


def checkpoint(table: Any, path: str) -> None:
    """Write a durable checkpoint of the table at the open version."""
    table.create_checkpoint()
    if layout.is_local(path):
        sync_checkpoint(Path(path), table.version())


def _look(path: str, options: Mapping[str, str], files: list[_File], error: Exception) -> Appended:
    """After a commit of unknown outcome: look for our files, whose names are unique."""
    try:
        there = {f.path for f in layout.snapshot(layout.open_table(path, options), path, options).files}
    except (DeliveredError, OSError) as second:
        raise OutcomeUnknown("APPEND_UNKNOWN", path=path, error=str(error)[:300], second=str(second)[:300]) from error
    if {f.path for f in files} <= there:
        return _finish(path, options, files)
    remove(path, options, files)
    raise DeliveredError("APPEND_FAILED", path=path, error=str(error)[:500]) from error


def _shifted(path: str, options: Mapping[str, str], files: list[_File], ends: Mapping[int, int]) -> list[_File]:
    """Rewrite files whose offsets other producers have used; keep the others."""
    fs = layout.filesystem(path, options)
    kept = [f for f in files if ends.get(f.partition, 0) == f.first]
    stale = [f for f in files if ends.get(f.partition, 0) != f.first]

    def rows() -> Iterator[tuple[int, pa.RecordBatch]]:
        for file in stale:
            with fs.open_input_file(file.path) as source:
                for batch in pq.ParquetFile(source).iter_batches(batch_size=_GROUP_ROWS):
                    yield file.partition, batch.cast(layout.STORED)

    fresh = write_files(path, options, rows(), ends)
    remove(path, options, stale)
    return sorted([*kept, *fresh], key=lambda f: f.partition)


def remove(path: str, options: Mapping[str, str], files: Sequence[_File]) -> None:
    """Best effort: a file in no version is invisible, and vacuum deletes it later."""
    fs = layout.filesystem(path, options)
    for file in files:
        with contextlib.suppress(OSError):
            fs.delete_file(file.path)

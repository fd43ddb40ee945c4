"""Appends records to a log: assigns offsets, commits atomically, and is durable on return. A receiver's journal, too.

The journal skips messages that are already in the log. Deduplication rests on optimistic commits: each is made against
the table version that the window of ids reflects. If another process committed first, the commit fails, the window
reads the new ids, and the remaining messages are tried again. So two processes that append the same message store it
once, even if one was paused in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.connectors.log import table as layout
from delivered.connectors.log.table import RangeReader, read_progress
from delivered.contract.source import Entered, Journal, JournalSize, MessageBatch
from delivered.kits.options import absolute
from delivered.kits.table.store import storage_options, sync, sync_checkpoint
from delivered.model.errors import DeliveredError, OutcomeUnknown, UsageError
from delivered.model.fingerprint import record_hashes
from delivered.model.limits import APPEND_ATTEMPTS_MAX, LOG_FILES_MAX
from delivered.model.options import check_argument, check_storage
from delivered.model.work import LOG_FORMAT, LOG_PROPERTY, Failed, Ok, Outcome, Unknown
from delivered.receiver import Window
from delivered.source import HEADER, HEADERS, id_bytes, id_text

PARTITIONS_MAX = 1_000
"""Each partition of an append is an open file."""
ATTEMPTS_MAX = 30
"""Attempts of one append against other producers."""
CHECKPOINT_VERSIONS = 100
_CALL = "delivered.connectors.log.append"
_DATA_ARGUMENT = (_CALL, "table_or_batches")
_DATA = ("a table, a record batch or record batches of Arrow", 'path, pa.table({"value": ["one", "two"]})')
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
    check_argument(_CALL, "partition_by", partition_by, (int, NoneType), "a number", "..., partition_by=4")
    check_argument(_CALL, "idempotence", idempotence, (tuple, NoneType), "a tuple", '..., idempotence=("import", 7)')
    check_argument(_CALL, "storage", storage, (Mapping, NoneType), "a mapping", '..., storage={"aws_region": "..."}')
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
    check_argument(*_DATA_ARGUMENT, data, (pa.Table, Iterable), *_DATA)
    for batch in data.to_batches(max_chunksize=_GROUP_ROWS) if isinstance(data, pa.Table) else data:
        check_argument(*_DATA_ARGUMENT, batch, pa.RecordBatch, *_DATA)
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
    check_storage("delivered_log", path, options)
    deltalake = layout.delta()
    given = storage_options(path, options)
    if not deltalake.DeltaTable.is_deltatable(path, given):
        # "ignore": another producer may create the log at the same moment.
        with contextlib.suppress(deltalake.exceptions.CommitFailedError):
            deltalake.DeltaTable.create(
                path, layout.TABLE, mode="ignore", partition_by=[layout.PARTITION_COLUMN],
                storage_options=given, configuration={LOG_PROPERTY: str(LOG_FORMAT)},
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


ID_HEADER = "delivered.id"
"""Header with the sender's id of a record; the first of this name counts, and null stands for no id."""
_LOCK = "_receivers.lock"
_LOCK_PATIENCE_S = 5.0
"""A receiver that was stopped while it held the lock holds up the others this long, once."""
_LOCK_POLL_S = 0.002
_CHECKPOINT_VERSIONS = 8
"""An append costs 0.7 ms more per version since the last checkpoint, and a checkpoint 20 ms (deltalake 1.6): with one
every 25, 12, 8, 5 versions, 200 appends of one message took 20.7, 17.2, 16.4, 18.4 ms each."""
_RELOADS_MAX = 5
_VERSIONS_SYNCED_AT_START = 100
_COMPACTED_BYTES = 128 << 20


class LogJournal(Journal):
    """
    Args:
        path: from `absolute`.
        window_size: ids remembered per partition.
        dedup_for_ms: ids younger than this are remembered, too (`Window`).
        partitions: messages are distributed over them by a hash of their key; 1 keeps their order.
        readers: records that all of them have processed are deleted after `keep_s`; empty: none are.
        upkeep: whether `maintain` does anything; one process should.
    """

    def __init__(
        self,
        path: str,
        storage: Mapping[str, str],
        window_size: int,
        partitions: int = 1,
        readers: Sequence[str] = (),
        keep_s: float = 0.0,
        upkeep: bool = True,
        dedup_for_ms: int = 0,
    ) -> None:
        self._path = path
        self._storage = dict(storage)
        self._partitions = partitions
        self._readers = tuple(readers)
        self._keep_s = keep_s
        self._upkeep = upkeep
        self._dedup_for_ms = dedup_for_ms
        self._table = open_or_create(path, self._storage)
        self._folder = layout.log_folder(path)
        self._lock_patience_s = _LOCK_PATIENCE_S
        self._synced = -1
        self.window = Window(window_size, dedup_for_ms)
        self._catch_up()

    def append(self, batch: MessageBatch) -> Outcome[Entered]:
        deltalake = layout.delta()
        files: list[Any] = []
        try:
            with self._lock():
                for attempt in range(APPEND_ATTEMPTS_MAX):
                    self._refresh()
                    fresh = self.window.fresh(batch.ids)
                    if not fresh:
                        return Ok(Entered(0, len(batch), attempt + 1))
                    files, ids = self._write(batch, fresh)
                    sync_data(self._path, files)
                    try:
                        commit(self._table, files, None)
                    except deltalake.exceptions.CommitFailedError:
                        time.sleep(layout.jitter_s(attempt))
                        if not self._is_in(files):
                            remove(self._path, self._storage, files)
                            continue
                    self._committed(files, ids)
                    return Ok(Entered(len(fresh), len(batch) - len(fresh), attempt + 1))
        except (deltalake.exceptions.DeltaError, DeliveredError, OSError) as error:
            return self._look(files, error)
        return Failed(f"{APPEND_ATTEMPTS_MAX} commits of other processes to {self._path!r} were faster")

    def size(self) -> JournalSize:
        self._table.update_incremental()
        sizes = pa.table(self._table.get_add_actions(flatten=True)).column("size_bytes")
        return JournalSize(int(pc.sum(sizes).as_py() or 0), len(sizes))

    def maintain(self, exact: bool = False) -> int:
        if not self._upkeep:
            return 0
        deltalake = layout.delta()
        retired = 0
        with contextlib.suppress(deltalake.exceptions.CommitFailedError), self._lock():  # retried the next time
            self._refresh()
            retired = self._retire(layout.snapshot(self._table, self._path, self._storage), exact)
            now = layout.snapshot(self._table, self._path, self._storage)
            if len(now.files) > LOG_FILES_MAX:
                self._compact(now)
        return retired

    def close(self) -> None:
        """Nothing to close: the client library keeps its own handles."""

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Processes of one machine take turns. Avoids failed commits; guarantees nothing."""
        if not layout.is_local(self._path):
            yield
            return
        with (Path(self._path) / "_delta_log" / _LOCK).open("a") as file:
            deadline = time.monotonic() + self._lock_patience_s
            self._lock_patience_s = 0.0
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._lock_patience_s = _LOCK_PATIENCE_S
                    break
                if time.monotonic() >= deadline:
                    break
                time.sleep(_LOCK_POLL_S)
            yield

    def _refresh(self) -> None:
        """The newest version, durable, and its ids in the window.

        Raises:
            DeliveredError: the window knows ids of messages that are no longer in the log. A new start reads it again.
        """
        if layout.log_folder(self._path) != self._folder:
            raise DeliveredError("LOG_REPLACED.FOLDER", path=self._path)
        self._table.update_incremental()
        if self._table.version() != self._synced:
            self._catch_up()

    def _catch_up(self) -> None:
        """Add missing ids to the window: after a start those of the log's tail, later those that others appended."""
        for _ in range(_RELOADS_MAX):
            now = layout.snapshot(self._table, self._path, self._storage)
            ends = now.ends()
            if any(ends.get(partition, 0) < end for partition, end in self.window.ends.items()):
                raise DeliveredError("LOG_REPLACED.RESTORED", path=self._path, version=now.version)
            # Known messages are acknowledged, so make them durable: their writer may have died before it did.
            first = now.version - _VERSIONS_SYNCED_AT_START if self._synced < 0 else self._synced + 1
            layout.sync_versions(self._path, first, now.version)
            self._synced = now.version
            try:
                earliest = now.earliest()
                for partition, end in ends.items():
                    young = now.first_since(partition, self._dedup_for_ms)
                    start = self.window.start(partition, earliest[partition], end, young)
                    self._update_window(partition, start, end, now)
            except FileNotFoundError:  # rewritten meanwhile into other files
                self._table = layout.open_table(self._path, self._storage)
                continue
            return
        raise DeliveredError("LOG_FILES_VANISH.ONCE", path=self._path)

    def _update_window(self, partition: int, start: int, end: int, now: layout.Snapshot) -> None:
        if start >= end:
            return
        fs = layout.filesystem(self._path, self._storage)
        reader = RangeReader(self._path, partition, start, end, ["headers", "offset"])
        files = now.overlapping(partition, start, end)
        at = start
        for batch in reader.read(fs, files):
            stop = at + batch.num_rows
            appended_ms = max(f.appended_ms for f in files if f.low < stop and f.high >= at)
            self.window.add(partition, at, read_ids(batch.column("headers")), appended_ms)
            at = stop

    def _write(self, batch: MessageBatch, fresh: Sequence[int]) -> tuple[list[Any], dict[int, list[str | None]]]:
        """Data files for these messages, and their ids in order."""
        chosen = batch if len(fresh) == len(batch) else batch.pick(fresh)
        rows = build_rows(chosen)
        parts = list(rows_by_partition(rows, self._partitions if self._partitions > 1 else None))
        ids: dict[int, list[str | None]] = {}
        if len(parts) == 1:
            ids[parts[0][0]] = list(chosen.ids)
        else:
            for partition, rows in parts:
                ids.setdefault(partition, []).extend(read_ids(rows.column("headers")))
        return write_files(self._path, self._storage, parts, self.window.ends), ids

    def _committed(self, files: Sequence[Any], ids: Mapping[int, list[str | None]]) -> None:
        self._table.update_incremental()
        version = self._table.version()
        # Another process's compaction, which conflicts with nothing, may lie between this commit and the last.
        layout.sync_versions(self._path, self._synced + 1, version)
        self._synced = version
        for file in files:
            self.window.add(file.partition, file.first, ids[file.partition], file.appended_ms)
        if version % _CHECKPOINT_VERSIONS == 0:
            checkpoint(self._table, self._path)
            self._table = layout.open_table(self._path, self._storage)

    def _is_in(self, files: Sequence[Any]) -> bool:
        """Whether a commit that reported an error succeeded; leaves the newest version open."""
        self._table = layout.open_table(self._path, self._storage)
        now = layout.snapshot(self._table, self._path, self._storage)
        return {f.path for f in files} <= {f.path for f in now.files}

    def _look(self, files: Sequence[Any], error: Exception) -> Outcome[Entered]:
        try:
            there = bool(files) and self._is_in(files)
        except Exception as second:
            return Unknown(f"{str(error)[:300]}; then {str(second)[:300]}")
        if there:
            return Unknown(str(error)[:300])  # committed, but perhaps not durable: it is redelivered and recognised
        remove(self._path, self._storage, files)
        return Failed(str(error)[:500])

    def _retire(self, now: layout.Snapshot, exact: bool) -> int:
        """Delete records that every reader has processed, but not the window's ids or a partition's end.

        Args:
            exact: to the record, which rewrites a file; else by complete files.
        """
        if not self._readers:
            return 0
        behind = [read_progress(self._path, self._storage, reader) for reader in self._readers]
        if any(b is None for b in behind):
            return 0
        deltalake = layout.delta()
        retired = 0
        for partition in now.ends():
            done = min((b or {}).get(partition, 0) for b in behind)
            horizon = min(done, self.window.first(partition))
            reach = [f for f in now.files if f.partition == partition and (f.low if exact else f.high) < horizon]
            old = [f for f in reach if self._is_old(f)]
            if not old:
                continue
            first, stop = min(f.low for f in old), min(horizon, max(f.high for f in old) + 1)
            self._table.delete(
                f"partition = {partition} AND offset < {stop}",
                post_commithook_properties=deltalake.PostCommitHookProperties(
                    create_checkpoint=False, cleanup_expired_logs=False
                ),
            )
            retired += stop - first
        if retired:
            self._sync_rewritten(now)
            self._table.vacuum(
                retention_hours=int(self._keep_s // 3600), enforce_retention_duration=False, dry_run=False
            )
        return retired

    def _is_old(self, file: layout.LogFile) -> bool:
        if self._keep_s <= 0:
            return True
        fs = layout.filesystem(self._path, self._storage)
        info = fs.get_file_info(file.path)
        return info.mtime_ns is not None and info.mtime_ns / 1e9 < time.time() - self._keep_s

    def _compact(self, now: layout.Snapshot) -> None:
        """Compact small files. The old ones stay on disk for active readers."""
        self._table.optimize.compact(target_size=_COMPACTED_BYTES)
        self._sync_rewritten(now)

    def _sync_rewritten(self, before: layout.Snapshot) -> None:
        """Make durable what the client wrote since a snapshot: files, then the commits that refer to them."""
        known = {f.path for f in before.files}
        if layout.is_local(self._path):
            now = layout.snapshot(self._table, self._path, self._storage)
            fresh = [Path(self._path) / f.path for f in now.files if f.path not in known]
            sync([*fresh, *{p.parent for p in fresh}])
        layout.sync_versions(self._path, before.version + 1, self._table.version())


def build_rows(batch: MessageBatch) -> pa.RecordBatch:
    """Messages as rows of the log; the sender's id becomes the first header."""
    now_us = time.time_ns() // 1000
    plain = not any(batch.headers) and None not in batch.ids
    names, values, ends = _ids_alone(batch.ids) if plain else _entries(batch)
    entries = pa.StructArray.from_arrays([names, values], fields=list(HEADER))
    columns = [
        pa.array(batch.keys, pa.binary()),
        pa.array(batch.values, pa.binary()),
        pa.ListArray.from_arrays(pa.array(ends), entries, type=HEADERS.type),
        pa.array([now_us if t is None else t for t in batch.times_us], pa.timestamp("us", tz="UTC")),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value", "headers", "timestamp"])


def _ids_alone(ids: Sequence[str | None]) -> tuple[pa.Array, pa.Array, Any]:
    """As `_entries`, for the common case: every message has an id and no other headers."""
    names = pa.repeat(pa.scalar(ID_HEADER, pa.string()), len(ids))
    try:
        values = pa.array(ids, pa.string()).cast(pa.binary())
    except UnicodeEncodeError:
        values = pa.array([None if i is None else id_bytes(i) for i in ids], pa.binary())
    return names, values, np.arange(len(ids) + 1, dtype=np.int32)


def _entries(batch: MessageBatch) -> tuple[pa.Array, pa.Array, Any]:
    """Names and values of all headers, and the offsets of each message's headers among them."""
    names: list[str] = []
    values: list[bytes | None] = []
    ends = np.zeros(len(batch) + 1, dtype=np.int32)
    for at, (message_id, headers) in enumerate(zip(batch.ids, batch.headers, strict=True), 1):
        if message_id is not None:
            names.append(ID_HEADER)
            values.append(id_bytes(message_id))
        elif any(name == ID_HEADER for name, _ in headers):  # a sender's own header is no id
            names.append(ID_HEADER)
            values.append(None)
        for name, value in headers:
            names.append(name)
            values.append(value)
        ends[at] = len(names)
    return pa.array(names, pa.string()), pa.array(values, pa.binary()), ends


def read_ids(headers: pa.Array) -> list[str | None]:
    """The ids stored by `build_rows`; None for a record without one."""
    ids: list[str | None] = [None] * len(headers)
    parents = pc.list_parent_indices(headers)
    entries = pc.list_flatten(headers)
    named = pc.equal(entries.field("key"), ID_HEADER)
    rows = parents.filter(named).to_pylist()
    values = entries.field("value").filter(named).to_pylist()
    for row, value in reversed(list(zip(rows, values, strict=True))):
        ids[row] = id_text(value)
    return ids

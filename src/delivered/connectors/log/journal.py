"""The log as a receiver's journal: an open handle, and appends that skip messages that are already in the log.

Deduplication rests on optimistic commits: each is made against the table version that the window of ids reflects. If
another process committed first, the commit fails, the window reads the new ids, and the remaining messages are tried
again. So two processes that append the same message store it once, even if one was paused in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.log import produce
from delivered.connectors.log import table as layout
from delivered.connectors.log.source import RangeReader
from delivered.connectors.log.table import read_progress
from delivered.contract.queue import Entered, Journal, JournalSize, MessageBatch
from delivered.kits.table.durable import sync
from delivered.model.errors import DeliveredError
from delivered.model.limits import APPEND_ATTEMPTS_MAX, LOG_FILES_MAX
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.receiver.window import Window
from delivered.source import HEADER, HEADERS, id_bytes, id_text

ID_HEADER = "delivered.id"
"""Header with the sender's id of a record; the first of this name counts, and null stands for no id."""
_LOCK = "_receivers.lock"
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
        self._table = produce.open_or_create(path, self._storage)
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
                    produce.sync_data(self._path, files)
                    try:
                        produce.commit(self._table, files, None)
                    except deltalake.exceptions.CommitFailedError:
                        time.sleep(layout.jitter_s(attempt))
                        if not self._is_in(files):
                            produce.remove(self._path, self._storage, files)
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
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _refresh(self) -> None:
        """The newest version, durable, and its ids in the window."""
        self._table.update_incremental()
        if self._table.version() != self._synced:
            self._catch_up()

    def _catch_up(self) -> None:
        """Add missing ids to the window: after a start those of the log's tail, later those that others appended."""
        for _ in range(_RELOADS_MAX):
            now = layout.snapshot(self._table, self._path, self._storage)
            # Known messages are acknowledged, so make them durable: their writer may have died before it did.
            first = now.version - _VERSIONS_SYNCED_AT_START if self._synced < 0 else self._synced + 1
            layout.sync_versions(self._path, first, now.version)
            self._synced = now.version
            try:
                earliest = now.earliest()
                for partition, end in now.ends().items():
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
        parts = list(produce.rows_by_partition(rows, self._partitions if self._partitions > 1 else None))
        ids: dict[int, list[str | None]] = {}
        if len(parts) == 1:
            ids[parts[0][0]] = list(chosen.ids)
        else:
            for partition, rows in parts:
                ids.setdefault(partition, []).extend(read_ids(rows.column("headers")))
        return produce.write_files(self._path, self._storage, parts, self.window.ends), ids

    def _committed(self, files: Sequence[Any], ids: Mapping[int, list[str | None]]) -> None:
        self._table.update_incremental()
        version = self._table.version()
        # Another process's compaction, which conflicts with nothing, may lie between this commit and the last.
        layout.sync_versions(self._path, self._synced + 1, version)
        self._synced = version
        for file in files:
            self.window.add(file.partition, file.first, ids[file.partition], file.appended_ms)
        if version % _CHECKPOINT_VERSIONS == 0:
            produce.checkpoint(self._table, self._path)
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
        produce.remove(self._path, self._storage, files)
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
        found = fs.get_file_info(file.path)
        return found.mtime_ns is not None and found.mtime_ns / 1e9 < time.time() - self._keep_s

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
    found: list[str | None] = [None] * len(headers)
    parents = pc.list_parent_indices(headers)
    entries = pc.list_flatten(headers)
    named = pc.equal(entries.field("key"), ID_HEADER)
    rows = parents.filter(named).to_pylist()
    values = entries.field("value").filter(named).to_pylist()
    for row, value in reversed(list(zip(rows, values, strict=True))):
        found[row] = id_text(value)
    return found

"""The log's layout: a Delta table by `partition`, whose file statistics have the offsets; how ranges of it are read.

Delta partitions are never merged, so every file, even a compacted one, belongs to one partition, and its smallest and
largest offset bound the records in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.contract.source import ReceiverReport
from delivered.kits.options import not_a_folder
from delivered.kits.table import store
from delivered.kits.table.store import find_outage, storage_options
from delivered.model.errors import InvariantBroken, Unreachable, UsageError, extra
from delivered.model.work import LOG_PROPERTY, check_format, with_format, without_format
from delivered.source import HEADERS, TIMESTAMP

STORED = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        HEADERS,
        pa.field("offset", pa.int64()),
        pa.field("timestamp", TIMESTAMP),
    ]
)
"""Columns inside a Parquet file; `partition` is in the file's path and the table's log."""

TABLE = pa.schema([*STORED, pa.field("partition", pa.int32())])
PARTITION_COLUMN = "partition"
CONFLICT_ID = "delivered_log"
"""Application transaction id of every append: Delta lets concurrent blind appends succeed, which would assign offsets
twice, but commits with the same id conflict."""

_RATE_APPENDS = 1_000
_RATE_SPAN_MS_MIN = 10_000


@dataclass(frozen=True)
class LogFile:
    """
    Attributes:
        path: relative to the table.
        low, high: smallest and largest offset in it.
        appended_ms: Unix time of its commit; of a compacted file, of the compaction.
    """

    path: str
    partition: int
    low: int
    high: int
    appended_ms: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The log at one version of the table. Files are ordered by partition, then offset."""

    version: int
    files: tuple[LogFile, ...]

    def earliest(self) -> dict[int, int]:
        """Partition -> first existing offset."""
        first: dict[int, int] = {}
        for file in self.files:
            first[file.partition] = min(file.low, first.get(file.partition, file.low))
        return first

    def ends(self) -> dict[int, int]:
        """Partition -> offset of the next record."""
        ends: dict[int, int] = {}
        for file in self.files:
            ends[file.partition] = max(file.high + 1, ends.get(file.partition, 0))
        return ends

    def first_since(self, partition: int, for_ms: int) -> int | None:
        """The first offset that was appended at most `for_ms` before the partition's newest append. None: no record."""
        files = [f for f in self.files if f.partition == partition]
        newest_ms = max((f.appended_ms for f in files), default=0)
        return min((f.low for f in files if f.appended_ms >= newest_ms - for_ms), default=None)

    def rate(self, partition: int) -> float | None:
        """Records per second, over the last appends. None: too few to know."""
        files = [f for f in self.files if f.partition == partition][-_RATE_APPENDS:]
        span_ms = files[-1].appended_ms - files[0].appended_ms if files else 0
        if span_ms < _RATE_SPAN_MS_MIN:
            return None
        return (files[-1].high - files[0].high) * 1000 / span_ms

    def overlapping(self, partition: int, start: int, end: int) -> list[LogFile]:
        """Files that may contain offsets of [start, end)."""
        return [f for f in self.files if f.partition == partition and f.low < end and f.high >= start]


def is_local(path: str) -> bool:
    return "://" not in path


def delta() -> Any:
    """The client library, imported on use. Raises MissingExtra: it is not installed."""
    with extra("log"):
        import deltalake
    return deltalake


def open_table(path: str, storage: Mapping[str, str], version: int | None = None) -> Any:
    """The Delta table at `path`, at its newest version or at `version`.

    Raises:
        UsageError: there is no log at `path`.
        Unreachable: the storage did not answer, or rejected the credentials.
    """
    deltalake = delta()
    try:
        table = deltalake.DeltaTable(path, version=version, storage_options=storage_options(path, storage))
    except deltalake.exceptions.TableNotFoundError:
        raise UsageError("LOG_MISSING", path=path) from None
    except (deltalake.exceptions.DeltaError, OSError) as error:
        outage = None if is_local(path) else find_outage(f"the log {path!r}", error)
        raise (
            not_a_folder(path) or outage or Unreachable("LOG_UNREACHABLE", path=path, error=str(error)[:500])
        ) from None
    written = table.metadata().configuration.get(LOG_PROPERTY, "0")
    check_format(int(written) if written.isdigit() else written, f"a log at {path!r}")
    return table


def rate(path: str, storage: Mapping[str, str]) -> float | None:
    """Records per second of the busiest partition, over its last appends since a compaction. None: too few to know."""
    now = snapshot(open_table(path, storage), path, storage)
    rates = [now.rate(partition) for partition in now.ends()]
    return max((r for r in rates if r is not None), default=None)


def log_folder(path: str) -> tuple[int, int] | None:
    """Identity of the folder with a local table's log: another one was moved or created. None: remote, or missing."""
    try:
        info = (Path(path) / "_delta_log").stat() if is_local(path) else None
    except OSError:
        return None
    return None if info is None else (info.st_dev, info.st_ino)


def snapshot(table: Any, path: str, storage: Mapping[str, str]) -> Snapshot:
    """List the files of an open table with their offsets."""
    actions = pa.table(table.get_add_actions(flatten=True))
    names = set(actions.column_names)
    if f"partition.{PARTITION_COLUMN}" not in names and actions.num_rows:
        raise UsageError("LOG_FOREIGN", path=path, partition_column=PARTITION_COLUMN)
    files = []
    for row in actions.to_pylist():
        low, high = row.get("min.offset"), row.get("max.offset")
        if low is None or high is None:
            low, high = _footer_range(path, storage, row["path"])
        if low is not None and high is not None:
            partition, appended_ms = int(row[f"partition.{PARTITION_COLUMN}"]), row["modification_time"]
            files.append(LogFile(row["path"], partition, low, high, appended_ms))
    files.sort(key=lambda f: (f.partition, f.low, f.high, f.path))
    return Snapshot(table.version(), tuple(files))


def filesystem(path: str, storage: Mapping[str, str]) -> Any:
    """A pyarrow filesystem whose root is the table."""
    from pyarrow import fs

    if is_local(path):
        return fs.SubTreeFileSystem(path, fs.LocalFileSystem(use_mmap=False))
    from deltalake.fs import DeltaStorageHandler

    return fs.PyFileSystem(DeltaStorageHandler(path, dict(storage) or None))


def _footer_range(path: str, storage: Mapping[str, str], file: str) -> tuple[int | None, int | None]:
    """Offsets of a file whose statistics another writer left out of the table's log."""
    import pyarrow.parquet as pq

    with filesystem(path, storage).open_input_file(file) as source:
        offsets = pq.ParquetFile(source).read(columns=["offset"]).column("offset")
    if not len(offsets):
        return None, None
    bounds = pa.compute.min_max(offsets).as_py()
    return bounds["min"], bounds["max"]


def commit_digest(path: str, storage: Mapping[str, str], version: int) -> str | None:
    """A commit's content, hashed: it holds names that no other commit has. None: Delta removed it from its log."""
    try:
        with filesystem(path, storage).open_input_stream(f"_delta_log/{version:020}.json") as file:
            return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    except OSError:
        return None


def record_digest(path: str, storage: Mapping[str, str], files: Sequence[LogFile], offset: int) -> str | None:
    """A record's key, offset and time, hashed: other records under its offset arrived later. None: it is not there.

    Args:
        files: of its partition.
    """
    reader = RangeReader(path, files[0].partition, offset, offset + 1, ["key", "offset", "timestamp"])
    try:
        rows = [row for batch in reader.read(filesystem(path, storage), files) for row in batch.to_pylist()]
    except (FileNotFoundError, InvariantBroken):  # deleted
        return None
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()


def sync_versions(path: str, first: int, last: int) -> None:
    """Make the commits first..last of a local table durable.

    Producers do so before they return; a reader repeats it before it reports offsets, as a commit's producer may have
    died in between.
    """
    if is_local(path):
        # A reader without the permission to sync the folder may still read.
        with contextlib.suppress(PermissionError):
            store.sync_versions(Path(path), first, last)


def jitter_s(attempt: int) -> float:
    """Wait before the retry after a conflict: 5 ms to 0.5 s, growing."""
    return random.uniform(0.005, min(0.5, 0.01 * 2**attempt))  # noqa: S311 - jitter, not a secret


def damaged(path: str, partition: int, expected: int, actual: str) -> InvariantBroken:
    """The error for missing or duplicate offsets."""
    return InvariantBroken("LOG_RECORDS_MISSING", path=path, partition=partition, expected=expected, actual=actual)


PROGRESS = "_progress"
"""Folder next to the table's data; Delta ignores names with an underscore."""


def put(path: str, storage: Mapping[str, str], folder: str, name: str, text: str) -> None:
    """Replace the file `folder`/`name`.json next to the table's data; not synced."""
    fs, target = filesystem(path, storage), f"{folder}/{name}.json"
    local = is_local(path)
    draft = f"{folder}/.{name}.draft" if local else target  # objects appear atomically
    fs.create_dir(folder, recursive=True)
    # Buffered: the object store's handler needs bytes, and pyarrow would pass the argument unchanged.
    with fs.open_output_stream(draft, buffer_size=65_536) as file:
        file.write(text.encode())
    if local:
        fs.move(draft, target)


def write_progress(path: str, storage: Mapping[str, str], reader: str, offsets: Mapping[int, int]) -> None:
    """Store a reader's position next to the log, for deletion behind all readers. It may lag, but is never ahead."""
    record = with_format({"offsets": {str(p): o for p, o in offsets.items()}})
    put(path, storage, PROGRESS, reader, json.dumps(record))


def read_progress(path: str, storage: Mapping[str, str], reader: str) -> dict[int, int] | None:
    """The position stored by `write_progress`; None: unknown."""
    fs = filesystem(path, storage)
    try:
        with fs.open_input_stream(f"{PROGRESS}/{reader}.json") as file:
            document = json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return None
    return {int(p): int(o) for p, o in without_format(document, "a reader's progress")["offsets"].items()}


# Reports of a log's receivers, a file each in a folder next to the table's data.

_FOLDER = "_receivers"
_QUEUE = "_queue", "queue"
"""Folder and name of the file that names the queue."""
_QUEUE_SETTLES_S = 1.0


class Receivers:
    """
    Args:
        path: of the log, absolute, or a URL.

    Attributes:
        local: the reports are on a local disk.
    """

    def __init__(self, path: str, storage: Mapping[str, str]) -> None:
        self._path, self._storage = path, storage
        self.local = is_local(path)

    def read(self) -> list[ReceiverReport]:
        """Oldest first. One that is being replaced or removed may be absent."""
        from pyarrow import fs as arrow_fs

        fs, reports = filesystem(self._path, self._storage), list[ReceiverReport]()
        for info in fs.get_file_info(arrow_fs.FileSelector(_FOLDER, allow_not_found=True)):
            if not info.base_name.endswith(".json"):
                continue
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                reports.append(ReceiverReport.from_json(fs.open_input_stream(info.path).readall()))
        return sorted(reports, key=lambda r: r.at_ms)

    def write(self, report: ReceiverReport) -> None:
        put(self._path, self._storage, _FOLDER, report.name, report.to_json())

    def queue(self, name: str) -> str:
        """The queue that fills the log, by the first receiver that asked; this one, if none has.

        In an object store the last of several that ask at the same moment: each waits for the others before it looks.
        """
        if (known := self._queue()) is not None:
            return known
        (folder, file), text = _QUEUE, json.dumps(with_format({"queue": name}))
        if not self.local:
            put(self._path, self._storage, folder, file, text)
            time.sleep(_QUEUE_SETTLES_S)
            return self._queue() or name
        put(self._path, self._storage, folder, draft := f"{file}-{uuid.uuid4().hex}", text)
        folder_path = Path(self._path) / folder
        target, source = folder_path / f"{file}.json", folder_path / f"{draft}.json"
        try:
            target.hardlink_to(source)  # unlike a rename, replaces none
        except OSError:  # another receiver's; torn by a power failure; or a file system without links
            if self._queue() is None:
                source.replace(target)
        finally:
            source.unlink(missing_ok=True)
        return self._queue() or name

    def _queue(self) -> str | None:
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            text = filesystem(self._path, self._storage).open_input_stream("/".join(_QUEUE) + ".json").readall()
            return str(without_format(json.loads(text), "the queue of a log")["queue"])
        return None

    def remove(self, report: ReceiverReport) -> None:
        with contextlib.suppress(FileNotFoundError):
            filesystem(self._path, self._storage).delete_file(f"{_FOLDER}/{report.name}.json")


# Reads a range of offsets of one partition as record batches.
#
# Files and row groups are chosen by their statistics; every batch is checked for order, gaps and duplicates. Compaction
# may have reordered offsets: then only that part is loaded, bounded by the slice's share of the row groups involved,
# and sorted.

BATCH_ROWS = 16_384
"""Maximum rows per batch."""
BATCH_BYTES = 8 << 20
"""Approximate maximum bytes per batch."""


@dataclass(frozen=True)
class _Group:
    """A row group and the offset range in its footer."""

    file: Any
    index: int
    low: int
    high: int

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Its rows in stored order, a bounded number at a time."""
        metadata = self.file.metadata.row_group(self.index)
        row_bytes = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
        rows = max(64, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
        yield from self.file.iter_batches(rows, row_groups=[self.index], columns=columns)


class RangeReader:
    """Reads [start, end) once. `position` is the next offset, to continue after a file was deleted."""

    def __init__(self, name: str, partition: int, start: int, end: int, columns: Sequence[str]) -> None:
        self._name = name
        self._partition = partition
        self._end = end
        self._columns = list(columns)
        self.position = start

    def read(self, fs: Any, files: Sequence[LogFile]) -> Iterator[pa.RecordBatch]:
        """Records from `position` to the end, from these files of one version of the table.

        Raises:
            FileNotFoundError: a file was deleted; call again with those of a newer version.
            InvariantBroken: an offset is missing or duplicated.
        """
        wanted = sorted((f for f in files if f.low < self._end and f.high >= self.position), key=lambda f: f.low)
        for cluster in _clusters(wanted):
            opened = []
            try:
                groups: list[_Group] = []
                for file in cluster:
                    opened.append(fs.open_input_file(file.path))
                    groups += _groups(pq.ParquetFile(opened[-1], pre_buffer=False), self.position, self._end)
                for together in _clusters(sorted(groups, key=lambda g: g.low)):
                    yield from self._cluster(together)
            finally:
                for source in opened:
                    source.close()
        if self.position < self._end:
            raise damaged(self._name, self._partition, self.position, "the end of the log")

    def _cluster(self, groups: Sequence[_Group]) -> Iterator[pa.RecordBatch]:
        """Row groups with overlapping ranges: stream a single one while it is in order, else load and sort."""
        if len(groups) == 1:
            group = groups[0]
            for raw in group.batches(self._columns):
                batch = self._within(raw)
                if not batch.num_rows:
                    continue
                if not self._follows(batch):
                    break
                yield self._projected(batch)
            else:
                return
        parts = []
        for group in groups:
            for raw in group.batches(self._columns):
                batch = self._within(raw)
                if batch.num_rows:
                    parts.append(batch)
        if not parts:
            return
        rows = pa.Table.from_batches(parts)
        del parts
        rows = rows.take(pc.sort_indices(rows, sort_keys=[("offset", "ascending")]))
        for batch in rows.to_batches(max_chunksize=BATCH_ROWS):
            if not self._follows(batch):
                offsets = np.asarray(batch.column("offset"))
                expected = np.arange(self.position, self.position + len(offsets))
                at = int(np.flatnonzero(offsets != expected)[0])
                raise damaged(self._name, self._partition, int(expected[at]), f"offset {int(offsets[at])} in its place")
            yield self._projected(batch)

    def _within(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        schema = pa.schema([STORED.field(name) for name in self._columns])
        batch = raw.select(self._columns).cast(schema)
        offsets = batch.column("offset")
        bounds = pc.min_max(offsets).as_py()
        if bounds["min"] is not None and bounds["min"] >= self.position and bounds["max"] < self._end:
            return batch
        return batch.filter(pc.and_(pc.greater_equal(offsets, self.position), pc.less(offsets, self._end)))

    def _follows(self, batch: pa.RecordBatch) -> bool:
        offsets = np.asarray(batch.column("offset"))
        return bool((offsets == np.arange(self.position, self.position + len(offsets))).all())

    def _projected(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.position += batch.num_rows
        return batch


def _groups(file: Any, start: int, end: int) -> list[_Group]:
    column = next(i for i in range(file.metadata.num_columns) if file.metadata.schema.column(i).path == "offset")
    groups = []
    for index in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(index).column(column).statistics
        known = statistics is not None and statistics.has_min_max
        low, high = (statistics.min, statistics.max) if known else (start, end - 1)
        if low < end and high >= start:
            groups.append(_Group(file, index, low, high))
    return groups


def _clusters(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Split items sorted by `low` into runs of overlapping ranges."""
    run: list[Any] = []
    high = -1
    for item in items:
        if run and item.low > high:
            yield run
            run = []
        run.append(item)
        high = item.high if len(run) == 1 else max(high, item.high)
    if run:
        yield run


def first_since(fs: Any, path: str, ms: int) -> int | None:
    """Smallest offset in a file whose record has this timestamp, in milliseconds since 1970, or a later one."""
    with fs.open_input_file(path) as source:
        file, first = pq.ParquetFile(source), None
        for batch in file.iter_batches(columns=["offset", "timestamp"]):
            late = pc.greater_equal(batch.column("timestamp"), pa.scalar(ms * 1000, TIMESTAMP))
            low = pc.min(batch.column("offset").filter(late)).as_py()
            first = low if first is None or (low is not None and low < first) else first
    return first

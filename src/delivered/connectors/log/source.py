"""The log as a source: offsets, admission, slices, reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.log import EARLIEST, LATEST, LogOptions, Position
from delivered.connectors.log import table as layout
from delivered.connectors.log.table import RangeReader, Receivers, first_since, write_progress
from delivered.contract.source import (
    Finding,
    Offsets,
    ReceiverReport,
    Retained,
    Slice,
    Source,
    SourceDriver,
    foreign_offsets,
)
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.source import admit, columns

_RELOADS_MAX = 5
_VERSIONS_SYNCED_AT_START = 100
_ID = "#log"
"""Key of the Delta table's id in the offsets: a log that was deleted and recreated has another one."""


@dataclass(frozen=True)
class LogSource(Source):
    """`delivered_log`. Holds options, no connection."""

    options: LogOptions

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    def capability(self) -> SourceCapability:
        local = layout.is_local(self.options.path)
        return SourceCapability(
            system="log",
            replayable=True,
            local=local,
            offset_metadata=frozenset({_ID}),
            lasting_metadata=frozenset({_ID}),
            assumes=(
                f"nothing deletes rows of the Delta table {self.options.name} that a checkpoint still needs; "
                "compaction and vacuum are fine",
            ),
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            self.driver().newest()
        except DeliveredError as error:
            return [Finding.refusal(error)]
        return []

    def rate(self) -> float | None:
        return layout.rate(self.options.path, self.options.storage_resolved())

    def receivers(self) -> Sequence[ReceiverReport]:
        return Receivers(self.options.path, self.options.storage_resolved()).read()

    def schema(self) -> pa.Schema:
        return columns(self.options.headers)

    def driver(self) -> LogDriver:
        return LogDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """The slice's records in offset order, at most 16,384 per batch."""
        options, data = self.options, piece.data
        storage = options.storage_resolved()
        partition, start, end = data["partition"], data["start"], data["end"]
        columns = ["key", "value", "offset", "timestamp", *(["headers"] if options.headers else [])]
        reader = RangeReader(options.path, partition, start, end, columns)
        files = [layout.LogFile(path, partition, low, high) for path, low, high in data["files"]]
        fs = layout.filesystem(options.path, storage)
        schema = self.schema()
        for _ in range(_RELOADS_MAX):
            try:
                for batch in reader.read(fs, files):
                    yield self._columns(batch, partition, schema)
                return
            except FileNotFoundError:
                # Compacted and vacuumed since the slice was planned: the records are in other files now.
                table = layout.open_table(options.path, storage)
                files = layout.snapshot(table, options.path, storage).overlapping(partition, reader.position, end)
        raise InvariantBroken("LOG_FILES_VANISH.AGAIN", path=options.path, reloads_max=_RELOADS_MAX)

    def _columns(self, batch: pa.RecordBatch, partition: int, schema: pa.Schema) -> pa.RecordBatch:
        constant = {
            "topic": pa.scalar(self.options.name, pa.string()),
            "partition": pa.scalar(partition, pa.int32()),
            "timestampType": pa.scalar(0, pa.int32()),
        }
        arrays = [
            pa.repeat(constant[field.name], batch.num_rows) if field.name in constant else batch.column(field.name)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


class LogDriver(SourceDriver):
    """Offsets are `{"version": v, "offsets": {"0": 12}, "#log": id}`: the next offset of each partition, and the table
    version that the batch's end was read from, so that a replay opens the same files directly."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self._storage = options.storage_resolved()
        self._table: Any = None
        self._snapshot: layout.Snapshot | None = None
        self._synced = -1
        self._log: tuple[int, int] | None = None
        self._frozen: layout.Snapshot | None = None

    def initial(self) -> Offsets:
        if self._options.ending is not None:
            raise UsageError("OPTION_CONFLICT.LOG_END")
        now, since = self._refresh(), self._options.since_ms
        positions = self._since(since, now) if since is not None else self._resolve(self._options.starting, now)
        return _offsets(now.version, positions)

    def check_offsets(self, offsets: Offsets) -> None:
        if offsets and not isinstance(offsets.get("offsets"), dict):
            raise foreign_offsets("a log", offsets)

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        now = self._frozen or self._refresh()
        self._check_id(start)
        begin = self._begin(start, now)
        ends = now.ends()
        shares = admit({p: max(ends.get(p, at) - at, 0) for p, at in sorted(begin.items())}, rows_max)
        target = {p: at + shares[p] for p, at in begin.items()}
        # A new version without new records (a compaction) starts no batch.
        return start if target == _read(start) else self._offsets(now, target)

    def newest(self) -> Offsets | None:
        now = self._refresh()
        return self._offsets(now, now.ends())

    def waiting_since(self, start: Offsets, end: Offsets) -> dict[str, int]:
        """When the records were appended."""
        at, begin = self._at(int(end.get("version", -1))), _read(start)
        waiting = {p: at.overlapping(p, begin.get(p, 0), stop) for p, stop in _read(end).items()}
        return {str(p): files[0].appended_ms for p, files in waiting.items() if files}

    def retained(self, at: Offsets) -> Retained:
        """What is missing. Receivers delete behind the log's readers: when is not known here."""
        first = self._refresh().earliest()
        missing = {str(p): first[p] - offset for p, offset in _read(at).items() if first.get(p, offset) > offset}
        return Retained(missing, unknown="receivers delete what all logReaders have read")

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        """The commit with the newest record at the time, and each partition's last record: Delta's RESTORE keeps the
        commits that it undoes."""
        path, storage, version = self._options.path, self._storage, int(at.get("version", -1))
        digest = layout.commit_digest(path, storage, version) if version >= 0 else None
        found, now = {} if digest is None else {"version": digest}, self._refresh()
        for partition, end in _read(at).items():
            files = now.overlapping(partition, end - 1, end)
            if files and (digest := layout.record_digest(path, storage, files, end - 1)) is not None:
                found[str(partition)] = digest
        return found

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        now = self.landmarks(at)
        if any(known.get(name, digest) != digest for name, digest in now.items()):
            self._check_id(at)
            raise InvariantBroken("DATA_LOST.LOG_RESTORED", path=self._options.path, position=_read(at))

    def freeze(self) -> None:
        self._frozen = self._refresh()

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        if self._table is None and _ID in end:
            self._refresh()
            self._check_id(end)
        at = self._at(int(end.get("version", -1)))
        earliest = at.earliest()
        begin, pieces = _read(start), []
        for partition, stop in sorted(_read(end).items()):
            first = begin.get(partition, earliest.get(partition, 0))
            if first >= stop:
                continue
            files = at.overlapping(partition, first, stop)
            if not files or files[0].low > first:
                actual = f"offset {files[0].low}" if files else "no file that holds it"
                raise layout.damaged(self._options.path, partition, first, actual)
            ranges = [(f.path, f.low, f.high) for f in files]
            data = {"partition": partition, "start": first, "end": stop, "files": ranges}
            pieces.append(Slice(data, partition=f"{self._options.name}-{partition}"))
        return pieces

    def batch(self) -> tuple[Offsets, Offsets]:
        now = self._refresh()
        begin = self._resolve(self._options.starting, now)
        end = self._resolve(self._options.ending or LATEST, now)
        for partition, stop in end.items():
            begin.setdefault(partition, now.earliest().get(partition, 0))
            if stop > now.ends().get(partition, 0):
                raise UsageError(
                    "OFFSET_OUT_OF_RANGE.LOG",
                    stop=stop,
                    partition=partition,
                    path=self._options.path,
                    end=now.ends().get(partition, 0),
                )
        return _offsets(now.version, begin), _offsets(now.version, end)

    def acknowledge(self, end: Offsets) -> None:
        """A log needs no acknowledgement; the position is stored for deletion behind all readers."""
        if self._options.reader is not None:
            write_progress(self._options.path, self._storage, self._options.reader, _read(end))

    def close(self) -> None:
        self._table = self._snapshot = None

    def _refresh(self) -> layout.Snapshot:
        """The newest version; on a local disk it is durable before its offsets are reported."""
        path = self._options.path
        log = layout.log_folder(path)
        if self._table is None:
            self._table = layout.open_table(path, self._storage)
        elif log != self._log:  # to an update, a missing folder has no new version
            self._reopen()
        else:
            try:
                self._table.update_incremental()
            except Exception:  # the log was cleaned up, or the table recreated: open it again
                self._reopen()
        self._log = log
        version = self._table.version()
        if self._snapshot is None or self._snapshot.version != version:
            first = self._synced + 1 if self._synced >= 0 else version - _VERSIONS_SYNCED_AT_START
            layout.sync_versions(path, first, version)
            self._synced = version
            self._snapshot = layout.snapshot(self._table, path, self._storage)
        return self._snapshot

    def _reopen(self) -> None:
        before = self._table.metadata().id
        self._table, self._snapshot = layout.open_table(self._options.path, self._storage), None
        self._check_id({_ID: before})

    def _check_id(self, offsets: Offsets) -> None:
        before, now = offsets.get(_ID), str(self._table.metadata().id)
        if before not in (None, now):
            raise InvariantBroken("DATA_LOST.LOG_RECREATED", path=self._options.path, before=before, current=now)

    def _offsets(self, now: layout.Snapshot, offsets: Mapping[int, int]) -> Offsets:
        return {**_offsets(now.version, offsets), _ID: str(self._table.metadata().id)}

    def _at(self, version: int) -> layout.Snapshot:
        """The table at the version of a batch's end; the newest one if that version no longer exists."""
        if self._snapshot is not None and self._snapshot.version == version:
            return self._snapshot
        path = self._options.path
        if version >= 0:
            try:
                return layout.snapshot(layout.open_table(path, self._storage, version), path, self._storage)
            except DeliveredError:
                pass
        return self._refresh()

    def _begin(self, start: Offsets, now: layout.Snapshot) -> dict[int, int]:
        """Position of every partition; one added since the checkpoint starts at its first record."""
        begin, ends = _read(start), now.ends()
        for partition, at in begin.items():
            if at > ends.get(partition, at):
                raise InvariantBroken(
                    "LOG_BEHIND", position=at, partition=partition, path=self._options.path, end=ends[partition]
                )
        return {**now.earliest(), **begin}

    def _since(self, ms: int, now: layout.Snapshot) -> dict[int, int]:
        """First offset of each partition whose record is of then or later; its end if there is none."""
        fs, positions = layout.filesystem(self._options.path, self._storage), now.ends()
        for file in reversed(now.files):
            low = first_since(fs, file.path, ms)
            if low is not None:
                positions[file.partition] = min(low, positions[file.partition])
        return positions

    def _resolve(self, position: Position, now: layout.Snapshot) -> dict[int, int]:
        earliest, ends = now.earliest(), now.ends()
        if isinstance(position, str):
            return {EARLIEST: earliest, LATEST: ends}[position]
        unknown = sorted(set(position) - set(ends))
        if unknown:
            raise UsageError("PARTITION_UNKNOWN.LOG", unknown=unknown, path=self._options.path, known=sorted(ends))
        return {p: earliest[p] if at == -2 else ends[p] if at == -1 else at for p, at in position.items()}


def _offsets(version: int, offsets: Mapping[int, int]) -> Offsets:
    return {"version": version, "offsets": {str(p): offsets[p] for p in sorted(offsets)}}


def _read(offsets: Offsets) -> dict[int, int]:
    return {int(p): int(at) for p, at in offsets.get("offsets", {}).items()}

"""Reads a range of offsets of one partition as record batches.

Files and row groups are chosen by their statistics; every batch is checked for order, gaps and duplicates. Compaction
may have reordered offsets: then only that part is loaded, bounded by the slice's share of the row groups involved, and
sorted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.connectors.log.table import STORED, LogFile, damaged
from delivered.source.columns import TIMESTAMP

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
    found = []
    for index in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(index).column(column).statistics
        known = statistics is not None and statistics.has_min_max
        low, high = (statistics.min, statistics.max) if known else (start, end - 1)
        if low < end and high >= start:
            found.append(_Group(file, index, low, high))
    return found


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
        file, found = pq.ParquetFile(source), None
        for batch in file.iter_batches(columns=["offset", "timestamp"]):
            late = pc.greater_equal(batch.column("timestamp"), pa.scalar(ms * 1000, TIMESTAMP))
            low = pc.min(batch.column("offset").filter(late)).as_py()
            found = low if found is None or (low is not None and low < found) else found
    return found

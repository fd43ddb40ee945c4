"""Rows of a world's inputs, replayable by offset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.memory.options import MemorySourceOptions
from delivered.connectors.memory.world import ROWS, world
from delivered.contract.finding import Finding
from delivered.contract.source import Offsets, Slice, Source, SourceDriver
from delivered.model.capability import SourceCapability
from delivered.model.step import Moment, StepId, reach

_ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class MemorySource(Source):
    options: MemorySourceOptions

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    def capability(self) -> SourceCapability:
        return SourceCapability("memory", replayable=True, local=True)

    def preflight(self) -> Sequence[Finding]:
        world(self.options.world)
        return ()

    def schema(self) -> pa.Schema:
        return ROWS

    def driver(self) -> MemoryDriver:
        return MemoryDriver(self)

    def partitions(self) -> list[list[tuple[bytes | None, bytes | None]]]:
        return world(self.options.world).inputs

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        partition, start, end = piece.data
        rows = self.partitions()[partition][start:end]
        for i in range(0, len(rows), _ROWS_PER_BATCH):
            facts = {"partition": partition, "offset": start + i}
            reach(StepId.SOURCE_READ, Moment.BEFORE, **facts)
            part = rows[i : i + _ROWS_PER_BATCH]
            batch = pa.RecordBatch.from_pylist([{"key": k, "value": v} for k, v in part], schema=ROWS)
            reach(StepId.SOURCE_READ, Moment.AFTER, **facts)
            yield batch


class MemoryDriver(SourceDriver):
    """Offsets: partition, as text -> index of the next row."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self._frozen: Offsets | None = None

    def initial(self) -> Offsets:
        return {str(p): 0 for p in range(len(self._source.partitions()))}

    def newest(self) -> Offsets:
        return {str(p): len(rows) for p, rows in enumerate(self._source.partitions())}

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        end, left = self._frozen or self.newest(), rows_max
        if left is None:
            return end
        reached = {}
        for i, p in enumerate(sorted(end, key=int)):
            # Split the remainder evenly among the remaining partitions, rounded up so that the stream finishes.
            count = min(end[p] - start.get(p, 0), -(-left // (len(end) - i)))
            reached[p] = start.get(p, 0) + count
            left -= count
        return reached

    def freeze(self) -> None:
        self._frozen = self.newest()

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        return [Slice((int(p), start.get(p, 0), end[p])) for p in sorted(end, key=int)]

    def batch(self) -> tuple[Offsets, Offsets]:
        return self.initial(), self.newest()

"""A bounded scan of a sink whose system has a source: from its `startingOffsets` to its `endingOffsets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from delivered.contract.powers import Address, address_of, planned
from delivered.contract.source import Offsets, Slice, Source


@dataclass(frozen=True)
class SourceScan:
    """See `delivered.contract.sink.BoundedScan`."""

    source: Source

    def planned(self) -> SourceScan:
        """See `delivered.contract.powers.Planned`."""
        return SourceScan(planned(self.source))

    def schema(self) -> pa.Schema:
        return self.source.schema()

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        """Partitions that `since` does not name are read from their earliest offsets."""
        with closing(self.source.driver()) as driver:
            start, end = driver.batch()
            return driver.slices(_over(start, since or {}), end)

    def address(self) -> Address | None:
        """See `delivered.contract.powers.HasAddress`."""
        return address_of(self.source)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return self.source.read(piece)


def _over(start: Offsets, since: Offsets) -> Offsets:
    return {
        **start,
        **{
            k: _over(start[k], v) if isinstance(v, dict) and isinstance(start.get(k), dict) else v
            for k, v in since.items()
        },
    }

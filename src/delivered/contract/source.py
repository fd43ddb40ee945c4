"""What a source's connector implements: offsets, slices of a batch, and the read of a slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.model.capability import SourceCapability

Offsets = dict[str, Any]
"""A position in a source, as the JSON in Spark's offset log. The connector chooses the shape."""


@dataclass(frozen=True)
class Slice:
    """The part of a batch that one task reads.

    Attributes:
        data: picklable; the connector chooses the shape.
        partition: name of the source partition, for reports; slices of one partition are ordered.
    """

    data: Any
    partition: str = ""


class SourceDriver(Protocol):
    """Plans the batches of a source. Runs on the driver, in one long-lived process; used by one thread."""

    def initial(self) -> Offsets:
        """Where a new checkpoint starts, by `startingOffsets`. Not called if the checkpoint has offsets.

        `startingOffsets` accepts the result as JSON: the checkpoint sidecar keeps it, so that "latest" stays the same
        when batch 0 is rerun.
        """

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        """Where the next batch may end: at most about `rows_max` records after `start`; None: no limit."""

    def newest(self) -> Offsets | None:
        """The current end of the source, for the lag in progress reports."""

    def freeze(self) -> None:
        """Trigger.AvailableNow: offer no record newer than this call."""

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        """Split a batch. The same start and end give the same slices in the same order, in any process."""

    def batch(self) -> tuple[Offsets, Offsets]:
        """Start and end of a batch read: `startingOffsets` to `endingOffsets`."""

    def acknowledge(self, end: Offsets) -> None:
        """Report progress: the end of a batch that Spark logged. May be called repeatedly for a batch, or never."""

    def close(self) -> None:
        """Release connections. May be called again."""


@runtime_checkable
class Source(Protocol):
    """A source as the user declared it: validated options, no connection. Picklable."""

    @property
    def rows_per_batch_max(self) -> int | None:
        """The user's admission limit (`maxOffsetsPerTrigger`), if any."""

    def capability(self) -> SourceCapability:
        """Static: contacts no server."""

    def preflight(self) -> Sequence[Finding]:
        """Check on the live system that this source can be read. Runs on the driver before the first batch."""

    def schema(self) -> pa.Schema:
        """Columns that `read` returns. Static if possible."""

    def driver(self) -> SourceDriver: ...

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """Runs on an executor. Bounded memory; the same slice gives the same records, in the same order."""


@runtime_checkable
class NamesRows(Source, Protocol):
    """A source of changes, whose updates and deletes are of a row that a key names."""

    def row_key(self) -> tuple[str, ...]:
        """Columns of the key; none: it has none, or no changes. Of a planned source it contacts no server."""


@runtime_checkable
class Rechecks(Protocol):
    """A source whose server may lose later what preflight checked at the start."""

    def recheck(self) -> None:
        """Read-only. Raises DeliveredError: a start would be refused now."""


REJECTED = pa.field(
    "__delivered_rejected",
    pa.struct(
        [
            pa.field("reason", pa.string()),
            pa.field("topic", pa.string()),
            pa.field("partition", pa.int32()),
            pa.field("offset", pa.int64()),
            pa.field("key", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("sink", pa.string()),
            pa.field("more", pa.string()),
        ]
    ),
)
"""Column of records that the source or the transform could not turn into rows: why, where from, and their bytes. Null
for a row. Such records travel with the batch, for its dead letters. `sink`: as in a dead letter; null: SOURCE_LETTERS.
`more`: the record's other columns, as JSON (`model.bad_row.as_json_text`); null: none."""


COORDINATES = ("topic", "partition", "offset")
"""Columns that say where a record is, in sources that have them."""

RAW = pa.field("__delivered_raw", pa.struct([pa.field("key", pa.binary()), pa.field("value", pa.binary())]))
"""Column of a source that decodes its records: their bytes, for dead letters of rows that the transform fails for."""

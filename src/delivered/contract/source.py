"""What a source is: where it stands, how a batch is cut into slices, and how a task reads one.

Docstrings and outcomes as in `contract.sink`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.model.capability import SourceCapability

Offsets = dict[str, Any]
"""Where a source stands, as JSON: what Spark writes into its offset log. A connector chooses the shape."""


@dataclass(frozen=True)
class Slice:
    """The part of a batch that one task reads.

    Attributes:
        data: picklable values only; the connector chooses the shape.
        partition: name of the source partition that it is cut from, for reports; its slices come in its order.
    """

    data: Any
    partition: str = ""


class SourceDriver(Protocol):
    """The driver's hand on a source. Runs on the driver, in one long-lived process; used by one thread."""

    def initial(self) -> Offsets:
        """Where a new checkpoint starts, by `startingOffsets`. Not called when the checkpoint holds offsets.

        `startingOffsets` accepts what this returns, as JSON: a pipeline keeps it beside the checkpoint, so that
        "latest" means the same when batch 0 runs again.
        """

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        """Where the next batch may end: at most about `rows_max` records after `start`; None: no bound."""

    def newest(self) -> Offsets | None:
        """The end of the source now, for lag in progress reports."""

    def freeze(self) -> None:
        """Available-now: from here on nothing beyond what exists at this moment."""

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        """Cut a batch. The same start and end give the same slices in the same order, also in another process."""

    def batch(self) -> tuple[Offsets, Offsets]:
        """Start and end of a read that is not a stream: `startingOffsets` to `endingOffsets`."""

    def acknowledge(self, end: Offsets) -> None:
        """Tell the source how far the pipeline is: at the end of a batch that Spark logged; perhaps again, or never."""

    def close(self) -> None:
        """Give connections back. May be called again."""


@runtime_checkable
class Source(Protocol):
    """A source as the user named it: options, checked, no connection. Picklable."""

    @property
    def rows_per_batch_max(self) -> int | None:
        """The user's admission limit (`maxOffsetsPerTrigger`), if any."""

    def capability(self) -> SourceCapability:
        """Static: asks no server."""

    def preflight(self) -> Sequence[Finding]:
        """Ask the live system whether this source can be read. Runs on the driver before the first batch."""

    def schema(self) -> pa.Schema:
        """Columns of the batches that `read` gives. Static where it can be."""

    def driver(self) -> SourceDriver: ...

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """Runs on an executor. Bounded memory; the same slice gives the same records, in the same order."""

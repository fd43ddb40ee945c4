"""Rows on their way from a source to the sinks, with those that were rejected on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

from delivered.model.bad_row import as_json_text


class Origin(Enum):
    """Where a row was rejected. The value stands for the sink in a stored dead letter; no sink has such a name."""

    SOURCE = "(source)"
    """It is a record that never became a row."""
    TRANSFORM = "(transform)"
    """The transform raised for it."""
    SINK = ""
    """A sink or its server cannot hold it. A dead letter has the sink's name instead."""

    @classmethod
    def parse(cls, sink: str) -> Origin:
        """Of what a stored dead letter has as its sink."""
        return next((o for o in (cls.SOURCE, cls.TRANSFORM) if o.value == sink), cls.SINK)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A record or row that goes no further than to the dead letters.

    Attributes:
        record: its columns; of what the source or the transform rejected, those of the source's record, undecoded.
        topic, partition, offset: where its source has it, if known.
        row: index among the rows that a sink was given with it.
    """

    origin: Origin
    reason: str
    record: Mapping[str, Any]
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    row: int = 0

    @property
    def text(self) -> str:
        """The record as a dead letter has it: JSON."""
        keys = {"key": None, "value": None} if self.origin is Origin.SOURCE else {}
        return as_json_text({**keys, **self.record})


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of rows, or a part of one. Its length counts the rejected ones, too.

    Attributes:
        rejected: in the order in which they were rejected.
        records: for each good row what its dead letter would have of its source's record (key and value before they
            were decoded, topic, partition, offset), as far as `good` does not have it. None: nothing more.
    """

    good: pa.RecordBatch
    rejected: Sequence[Rejection] = ()
    records: pa.RecordBatch | None = None

    def __len__(self) -> int:
        return int(self.good.num_rows) + len(self.rejected)

"""Record batches that are too large to be decompressed, as dead letters of their source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka.record_batch import BatchTooLarge
from delivered.clients.kafka.rows import Partition
from delivered.contract.source import REJECTED
from delivered.source.columns import columns

_RECORDS = pa.field("recordBatch", pa.int64())
"""In a letter: its value is a record batch of so many offsets, not a record's value."""

Read = Callable[[Callable[[BatchTooLarge, int], None]], Iterator[pa.RecordBatch]]
"""Reads a slice; calls its argument for what it leaves out."""


def raw_schema(headers: bool) -> pa.Schema:
    """Columns of records, and of what stands for a record batch."""
    return columns(headers).append(_RECORDS)


@dataclass(frozen=True)
class Rejecting:
    """
    Attributes:
        headers: rows have them.
        kept: rows have the column REJECTED; else what is rejected is left out.
    """

    headers: bool
    kept: bool

    def read(self, read: Read, partition: Partition) -> Iterator[pa.RecordBatch]:
        found: list[dict[str, Any]] = []

        def keep(error: BatchTooLarge, offset: int) -> None:
            topic, number = partition
            found.append(
                {
                    "reason": error.message,
                    "topic": topic,
                    "partition": number,
                    "offset": offset,
                    "value": error.batch,
                    "more": json.dumps({_RECORDS.name: error.next_offset - offset}),
                }
            )

        for batch in read(keep):
            if found:
                yield from self._rejected(found)
                found.clear()
            yield batch.append_column(REJECTED, pa.nulls(batch.num_rows, REJECTED.type)) if self.kept else batch
        if found:
            yield from self._rejected(found)

    def decoded(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `delivered.contract.schemas.RejectsRecords`."""
        batches = raw.column(_RECORDS.name).is_valid()
        rows = raw.select(columns(self.headers).names)
        if not self.kept:
            return rows.filter(pc.invert(batches))
        why = "it is a record batch; raise maxRecordBatchBytes, and replay its offsets"
        reasons = [{"reason": why} if is_batch else None for is_batch in batches.to_pylist()]
        return rows.append_column(REJECTED, pa.array(reasons, REJECTED.type))

    def _rejected(self, found: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
        if self.kept:
            schema = columns(self.headers).append(REJECTED)
            yield pa.RecordBatch.from_pylist([{REJECTED.name: each} for each in found], schema=schema)

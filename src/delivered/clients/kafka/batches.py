"""Rows to record batches: which partition, how many records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka import record_batch
from delivered.clients.kafka.errors import Failures
from delivered.clients.kafka.rows import RECORD_OVERHEAD, Rows
from delivered.clients.kafka.sequences import Batch
from delivered.clients.kafka.transactions import Transaction
from delivered.model.limits import RECORD_BATCH_BYTES_MAX

BATCH_BYTES = 1_000_000
"""Of a record batch before compression."""
_STRIPE_BYTES = 64 << 10
"""Records without a key and a partition: as many as this go to one partition before the next one."""


class Encoder:
    """
    Attributes:
        bytes_max: of a record, and of a batch as sent.
    """

    def __init__(self, config: Mapping[str, str], held: Transaction | None, transactional: bool) -> None:
        self.bytes_max = int(config.get("message.max.bytes", "1048588"))
        self._stripe = int.from_bytes(np.random.bytes(2), "big")
        self._settings: dict[str, Any] = {
            "compression": config.get("compression.type", config.get("compression.codec", "none")),
            "bytes_max": self.bytes_max,
            "producer_id": -1 if held is None else held.producer_id,
            "producer_epoch": -1 if held is None else held.epoch,
            "transactional": transactional,
        }

    def within_limit(self, rows: Rows, failures: Failures) -> Rows:
        """Without records that the client itself rejects."""
        size = pc.fill_null(pc.cast(pc.binary_length(rows.value), pa.int64()), 0)
        if rows.key is not None:
            size = pc.add(size, pc.fill_null(pc.cast(pc.binary_length(rows.key), pa.int64()), 0))
        longest = self.bytes_max - RECORD_OVERHEAD
        if (pc.max(size).as_py() or 0) <= longest:
            return rows
        bad = pc.greater(size, longest)
        for length in size.filter(bad).to_pylist():
            failures.add("MSG_SIZE_TOO_LARGE", length)
        good = pc.invert(bad)
        return Rows(
            rows.topic,
            None if rows.key is None else rows.key.filter(good),
            rows.value.filter(good),
            None if rows.headers is None else rows.headers.filter(good),
            None if rows.partition is None else rows.partition[np.asarray(good)],
        )

    def spread(self, rows: Rows, count: int) -> Iterator[tuple[int, Any]]:
        """Partitions with rows, and which rows."""
        n = len(rows)
        if n == 0:
            return
        partition = rows.partition
        if partition is None or (partition < 0).any():
            by_key = np.full(n, -1, np.int32)
            if rows.key is not None:
                by_key = record_batch.partition_of(rows.key, count)
            partition = by_key if partition is None else np.where(partition < 0, by_key, partition).astype(np.int32)
        free = np.flatnonzero(partition < 0)
        if len(free):
            stripe = max(1, int(_STRIPE_BYTES * n / max(1, bytes_of(rows))))
            partition[free] = (self._stripe + np.arange(len(free)) // stripe) % count
            self._stripe += 1 + len(free) // stripe
        chosen, bounds = record_batch.group(np.ascontiguousarray(partition, np.int32), count)
        for p in np.flatnonzero(np.diff(bounds)).tolist():
            yield p, chosen[bounds[p] : bounds[p + 1]]

    def encode(self, rows: Rows, chosen: Any, sequence: int, deadline: float) -> Iterator[Batch]:
        """Rows of one partition. Raises BadRecord: a record's headers are too large."""
        now = time.time_ns() // 1_000_000
        for one in record_batch.encode(
            *(rows.key, rows.value, rows.headers),
            timestamps=now,
            rows=chosen,
            sequence=sequence,
            target_bytes=BATCH_BYTES,
            **self._settings,
        ):
            largest = _size(rows.key, rows.value, int(chosen[one.first])) if one.count == 1 else 0
            yield Batch(one.data, one.count, largest, deadline, one.sequence)

    def halves(self, batch: Batch, at: tuple[str, int]) -> list[Batch]:
        """The records of a batch that is too large for the topic, in smaller ones."""
        decoded = record_batch.decode(batch.data, at, 0, aborted=None, headers=True, bytes_max=RECORD_BATCH_BYTES_MAX)
        [records] = pa.Table.from_batches(decoded).combine_chunks().to_batches()
        parts, sequence = list[Batch](), batch.sequence
        half = records.num_rows // 2
        for piece in (records.slice(0, half), records.slice(half)):
            key, value = piece.column("key"), piece.column("value")
            for one in record_batch.encode(
                *(key, value, piece.column("headers")),
                timestamps=np.asarray(piece.column("timestamp").cast(pa.timestamp("ms")).cast(pa.int64())),
                sequence=sequence,
                **self._settings,
            ):
                largest = _size(key, value, one.first) if one.count == 1 else 0
                parts.append(Batch(one.data, one.count, largest, batch.deadline, one.sequence))
                sequence = record_batch.next_sequence(sequence, one.count) if sequence >= 0 else -1
        return parts


def _size(key: pa.Array | None, value: pa.Array, row: int) -> int:
    return sum(len(c[row].as_py() or b"") for c in (key, value) if c is not None)


def bytes_of(rows: Rows) -> int:
    return sum(c.nbytes for c in (rows.key, rows.value, rows.headers) if c is not None)


def joined(listed: list[Rows]) -> Iterator[Rows]:
    """Rows of one topic in one piece, if their columns are alike."""
    first = listed[0]
    kinds = {tuple(None if c is None else c.type for c in (r.key, r.value, r.headers)) for r in listed}
    if len(listed) == 1 or len(kinds) > 1 or len({r.partition is None for r in listed}) > 1:
        yield from listed
        return
    yield Rows(
        first.topic,
        None if first.key is None else pa.concat_arrays([r.key for r in listed]),
        pa.concat_arrays([r.value for r in listed]),
        None if first.headers is None else pa.concat_arrays([r.headers for r in listed]),
        None if first.partition is None else np.concatenate([r.partition for r in listed if r.partition is not None]),
    )

"""Kafka's record batches (message format 2) from and to Arrow columns, with no Python object per record.

`record_batch.c` walks the records, through ctypes and without Python's lock; pyarrow's codecs compress.
Without the compiled library `available` returns False, and librdkafka serves every reader and writer.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka import record_batch_native as native
from delivered.clients.kafka.batch_errors import BatchTooLarge as BatchTooLarge
from delivered.clients.kafka.batch_errors import CorruptBatch as CorruptBatch
from delivered.clients.kafka.batch_errors import corrupt, fault, too_large
from delivered.clients.kafka.compression import COMPRESSIONS, Scratch, TooLarge, compressor, scratch
from delivered.clients.kafka.rows import Partition
from delivered.model.errors import BadRecord, DeliveredError
from delivered.model.limits import DECOMPRESSED_BYTES_MAX, RECORD_BATCH_BYTES_MAX
from delivered.source.columns import HEADER, REPRESENTED, TIMESTAMP, columns, header_name

HEADER_BYTES = 61
"""Of a batch, before its records."""

SEQUENCE_MAX = 2**31 - 1
"""The next sequence number is 0."""

CHUNK_BYTES = 1 << 20
"""Decompressed records that `decode` takes into one RecordBatch, if its caller does not say. With more, allocators
return memory between two of them, and the faults of new pages cost more than decoding."""

_PASSES_MAX = 16
"""Over a batch that decompresses to many times the chunk: each pass reads all of it, and returns a part."""

_TRANSACTIONAL = 16
_OFFSET_MAX = 2**31 - 1
"""Of Arrow's binary columns."""


def available() -> bool:
    """Whether the library was built with the package, for this platform. All other functions need it."""
    return native.library() is not None


# -- partitions --------------------------------------------------------------------------------------------------------


def partition_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.int32]:
    """The partition that the Java client chooses for each key (murmur2); -1 for null, whose partition is free.

    Args:
        keys: binary or string, 32- or 64-bit offsets.
    """
    found = np.empty(len(keys), np.int32)
    column, keep = native.column(keys)
    native.functions().rb_partitions(column, len(keys), partitions, found.ctypes.data)
    del keep
    return found


def group(partition: npt.NDArray[np.int32], partitions: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Rows by partition, in their order.

    Args:
        partition: of each row, contiguous.

    Returns:
        rows, and `partitions + 1` bounds: those of partition p are `rows[bounds[p]:bounds[p + 1]]`.

    Raises:
        ValueError: a row's partition does not exist.
    """
    rows, bounds = np.empty(len(partition), np.int32), np.empty(partitions + 1, np.int64)
    bad = native.functions().rb_group(
        partition.ctypes.data, len(partition), partitions, bounds.ctypes.data, rows.ctypes.data
    )
    if bad >= 0:
        raise ValueError(f"row {bad} has partition {partition[bad]}; there are {partitions}")
    return rows, bounds


# -- encode ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A record batch, ready for a Produce request.

    Attributes:
        data: the whole batch; base offset 0, which the broker replaces.
        first: position of its first record among those that `encode` was called for.
        count: records.
        sequence: of its first record; -1: not idempotent.
    """

    data: memoryview
    first: int
    count: int
    sequence: int


def encode(
    key: pa.Array | None,
    value: pa.Array,
    headers: pa.Array | None = None,
    *,
    timestamps: npt.NDArray[np.int64] | int,
    rows: native.Rows | None = None,
    compression: str = "none",
    level: int | None = None,
    bytes_max: int,
    target_bytes: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    sequence: int = -1,
    transactional: bool = False,
) -> Iterator[Encoded]:
    """Records of one partition as record batches, one after another as the caller asks for them.

    Args:
        key, value: binary or string, 32- or 64-bit offsets; key None: all null.
        headers: list of structs of key and value; a null list is an empty one.
        timestamps: milliseconds since 1970, of each row or of all.
        rows: which rows, in this order; None: all.
        level: of the codec; None: Kafka's default.
        bytes_max: limit of a batch as sent (the topic's `max.message.bytes`).
        target_bytes: of a batch before compression, at most; None: bytes_max. A larger record has a batch of its own.
        sequence: of the first record; -1: not idempotent.

    Raises:
        BadRecord: a batch of one record is larger than `bytes_max`, or a header has no key. Batches that were yielded
            before are valid.
    """
    library, n = native.functions(), len(value) if rows is None else len(rows)
    source, keep = native.records(key, value, headers, timestamps, rows)
    compress = compressor(compression, level)
    flags = _TRANSACTIONAL if transactional else 0
    target = min(target_bytes or bytes_max, bytes_max)
    # Compressed batches leave the buffer to the next one.
    reused = None if compress is None else np.empty(target, np.uint8)
    first, room, result = 0, target, native.Encoded()
    while first < n:
        out = np.empty(room, np.uint8) if reused is None or room > len(reused) else reused
        records = out[HEADER_BYTES:]
        library.rb_encode(source, first, n, records.ctypes.data, len(records), result)
        count, size = result.next - first, HEADER_BYTES + result.size
        if count == 0:  # a record that is larger than a batch should be
            room = HEADER_BYTES + result.needed
            if room > (bytes_max if compress is None else RECORD_BATCH_BYTES_MAX):
                raise _too_large(first, rows, room, bytes_max)
            continue
        attributes, room = flags, target
        if compress is not None:
            parts = compress(records[: result.size].data)
            packed = HEADER_BYTES + sum(len(p) for p in parts)
            if packed < size or size > bytes_max:
                attributes |= COMPRESSIONS.index(compression)
                out, size = np.empty(packed, np.uint8), packed
                out.data[HEADER_BYTES:] = b"".join(parts)
            else:
                out = out[:size].copy()
            if size > bytes_max:
                raise _too_large(first, rows, size, bytes_max)
        library.rb_seal(
            *(out.ctypes.data, size, attributes, count, result.base_timestamp, result.max_timestamp),
            *(producer_id, producer_epoch, sequence),
        )
        yield Encoded(out.data[:size], first, count, sequence)
        first = result.next
        if sequence >= 0:
            sequence = next_sequence(sequence, count)
    del keep


def next_sequence(sequence: int, count: int) -> int:
    """The sequence number after `count` records from `sequence` on."""
    return (sequence + count) % (SEQUENCE_MAX + 1)


def _too_large(first: int, rows: native.Rows | None, size: int, bytes_max: int) -> BadRecord:
    return BadRecord(
        "RECORD_TOO_LARGE",
        f"Row {first if rows is None else int(rows[first])} needs a batch of {size} bytes; the limit is {bytes_max} "
        "(max.message.bytes).",
        next_step="raise kafka.message.max.bytes and the topic's max.message.bytes, or filter such records",
    )


# -- decode ------------------------------------------------------------------------------------------------------------


class Decoded:
    """Batches of one partition, decoded as one iterates over it.

    Attributes:
        position: the next offset to fetch. All visible records from `start` to below it are among the batches; at most
            `end`.
        partial: size of a batch of which the buffer has only the beginning; 0: none. If nothing else came, the fetch
            must allow for this many bytes.
    """

    def __init__(
        self,
        buffer: Any,
        partition: Partition,
        start: int,
        end: int,
        aborted: Iterable[tuple[int, int]] | None,
        headers: bool,
        chunk_bytes: int,
        bytes_max: int,
    ) -> None:
        self._buffer = pa.py_buffer(buffer)
        self._partition, self._start, self._end = partition, start, end
        self._headers, self._chunk_bytes = headers, min(chunk_bytes, _OFFSET_MAX // 2)
        self._bytes_max = min(bytes_max, _OFFSET_MAX // 2)
        found, table = native.Scanned(), np.empty(self._buffer.size // HEADER_BYTES + 1, native.BATCH)
        transactions, keep = _aborted(aborted)
        address = self._buffer.address
        arguments = (address, self._buffer.size, start, end, transactions, table.ctypes.data, len(table), found)
        native.functions().rb_scan(*arguments)
        del keep
        if found.fault:
            raise fault(self._partition, found.fault, found.base_offset, found.found, found.wanted)
        self._batches = table[: found.batches]
        self.position: int = found.position
        self.partial: int = found.partial

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """RecordBatches with the columns key, value, offset, timestamp, timestampType[, headers] of a source.

        Raises:
            CorruptBatch, BatchTooLarge: after the RecordBatches before it.
        """
        batches, first, size, room = self._batches, 0, 0, scratch()
        for i, codec in enumerate((batches["attributes"] & 7).tolist()):
            if first < i and size + int(batches["size"][i]) > _OFFSET_MAX:
                yield from self._decode(batches[first:i], size, room)
                first, size, room = i, 0, scratch()
            if codec:
                try:
                    batches["size"][i] = self._decompress(batches[i], COMPRESSIONS[codec], room)
                except DeliveredError:
                    if first < i:
                        yield from self._decode(batches[first:i], size, room)
                    raise
            size += int(batches["size"][i])
            if size >= self._chunk_bytes:
                yield from self._decode(batches[first : i + 1], size, room)
                first, size, room = i + 1, 0, scratch()
        if first < len(batches):
            yield from self._decode(batches[first:], size, room)

    def _decompress(self, batch: Any, name: str, room: Scratch) -> int:
        at = int(batch["records"]) - self._buffer.address
        size = int(batch["size"])
        data = memoryview(self._buffer).cast("B")
        try:
            return room.add(data[at : at + size], name, self._bytes_max)
        except TooLarge:
            packed, offsets = bytes(data[at - HEADER_BYTES : at + size]), (batch["base_offset"], batch["last_offset"])
            raise too_large(self._partition, packed, name, self._bytes_max, *map(int, offsets)) from None
        except (ValueError, OSError, struct.error) as error:
            why = f"its records are not valid {name}: {error}"
            raise corrupt(self._partition, int(batch["base_offset"]), why) from None

    def _decode(self, batches: npt.NDArray[Any], size: int, room: Scratch) -> Iterator[pa.RecordBatch]:
        """Of `batches`, the compressed ones lie in `room`, in their order. A large one is decoded in several passes."""
        compressed = (batches["attributes"] & 7) != 0
        if compressed.any():
            sizes = batches["size"][compressed]
            batches["records"][compressed] = room.address + np.cumsum(sizes) - sizes
        start, last = max(self._start, int(batches["base_offset"][0])), int(batches["last_offset"][-1])
        end = min(self._end, last + 1)
        step = -(-(end - start) // min(_PASSES_MAX, max(1, size // (2 * self._chunk_bytes))))
        for low in range(start, end, step):
            yield self._decode_range(batches, size, low, min(low + step, end))

    def _decode_range(self, batches: npt.NDArray[Any], size: int, start: int, end: int) -> pa.RecordBatch:
        counts = np.minimum(batches["count"], batches["size"] // 7)
        n = int(counts.sum())
        out = native.Columns(room=n)
        parts = [native.BinaryColumn(n, size, out.key), native.BinaryColumn(n, size, out.value)]
        offsets, timestamps, types = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int32)
        out.offsets, out.timestamps, out.types = (a.ctypes.data for a in (offsets, timestamps, types))
        native.functions().rb_decode(batches.ctypes.data, len(batches), start, end, out)
        if out.fault:
            base_offset = int(batches[out.batch]["base_offset"])
            raise fault(self._partition, out.fault, base_offset, out.found, out.wanted)
        rows = out.rows
        arrays = [
            parts[0].array(rows, pa.binary()),
            parts[1].array(rows, pa.binary()),
            pa.array(offsets[:rows]),
            pa.Array.from_buffers(TIMESTAMP, rows, [None, pa.py_buffer(timestamps[:rows])]),
            pa.array(types[:rows]),
        ]
        if self._headers:
            arrays.append(self._headers_of(batches, start, end, out))
        return pa.RecordBatch.from_arrays(arrays, schema=schema(self._headers))

    def _headers_of(self, batches: npt.NDArray[Any], start: int, end: int, out: native.Columns) -> pa.Array:
        n, headers = out.rows, out.headers
        if not headers:
            return pa.nulls(n, pa.list_(HEADER))
        found = native.Headers()
        keys = native.BinaryColumn(headers, out.header_key_size, found.key)
        values = native.BinaryColumn(headers, out.header_value_size, found.value)
        lists, valid = np.zeros(n + 1, np.int32), np.full(n // 8 + 1, 255, np.uint8)
        found.lists, found.valid = lists.ctypes.data, valid.ctypes.data
        native.functions().rb_headers(batches.ctypes.data, len(batches), start, end, found)
        names = keys.array(headers, pa.binary())
        try:
            text = names.cast(pa.string())
        except pa.ArrowInvalid:
            text = None
        if text is None or any(pc.any(pc.starts_with(text, start)).as_py() for start in REPRESENTED):
            text = pa.array([header_name(name) for name in names.to_pylist()], pa.string())
        items = pa.StructArray.from_arrays([text, values.array(headers, pa.binary())], fields=list(HEADER))
        buffers = [pa.py_buffer(valid), pa.py_buffer(lists)]
        return pa.Array.from_buffers(pa.list_(HEADER), n, buffers, children=[items])


def decode(
    buffer: Any,
    partition: Partition,
    start: int,
    end: int = 2**63 - 1,
    *,
    aborted: Iterable[tuple[int, int]] | None,
    headers: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    bytes_max: int = DECOMPRESSED_BYTES_MAX,
) -> Decoded:
    """Decode the records of one partition of a Fetch response: batches, of which the last one may be truncated.

    Checks every batch's header and CRC-32C. Records are decompressed and decoded as one iterates over the result.

    Args:
        buffer: bytes, or anything with the buffer protocol; it must not change before the last RecordBatch was taken.
        partition: topic and number, for errors.
        start, end: records below `start`, or at or above `end`, are left out.
        aborted: producer id and first offset of aborted transactions, from the response: their records are left out
            (read_committed); None: nothing is left out (read_uncommitted).
        headers: whether to return headers.
        chunk_bytes: decompressed bytes after which a RecordBatch ends, with the record batch that reached them.
        bytes_max: of a record batch, decompressed.

    Raises:
        CorruptBatch: a batch is invalid. UsageError: the message format is older than Kafka 0.11.
    """
    return Decoded(buffer, partition, start, end, aborted, headers, chunk_bytes, bytes_max)


@functools.cache
def schema(headers: bool) -> pa.Schema:
    """Columns of a decoded RecordBatch: a source's without topic and partition."""
    return pa.schema([field for field in columns(headers) if field.name not in ("topic", "partition")])


def _aborted(transactions: Iterable[tuple[int, int]] | None) -> tuple[native.Aborted | None, Any]:
    if transactions is None:
        return None, None
    pairs = np.array(sorted(transactions, key=lambda t: t[1]), np.int64).reshape(-1, 2)
    active = np.empty(max(1, len(pairs)), np.int64)
    return native.Aborted(list=pairs.ctypes.data, count=len(pairs), producers=active.ctypes.data), (pairs, active)

"""Record batches of Kafka's format from and to Arrow columns: rows to produce, compression, encoding, decoding.

Encoding and decoding are in C (`record_batch.c`, decision 053), if it was compiled with the package.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.model.errors import BadRecord, DeliveredError, UsageError
from delivered.model.fingerprint import Signatures, load
from delivered.model.limits import DECOMPRESSED_BYTES_MAX, RECORD_BATCH_BYTES_MAX
from delivered.source import HEADER, REPRESENTED, TIMESTAMP, columns, header_name

Partition = tuple[str, int]
"""Topic and number."""

RECORD_OVERHEAD = 128
"""Upper bound of what the client adds to key and value before it checks message.max.bytes, without headers."""

Headers = Sequence[tuple[str, bytes | None]]
"""Of one record."""

T = TypeVar("T")


def by_topic(items: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Items by their topic, as requests list them."""
    found: dict[str, list[T]] = {}
    for topic, item in items:
        found.setdefault(topic, []).append(item)
    return found


@dataclass(frozen=True)
class Rows:
    """Rows for one topic.

    Attributes:
        key, value: binary or large_binary; key None: every key is null.
        headers: list<struct<key: string, value: binary>>, or None.
        partition: int32, -1: by key; or None.
    """

    topic: str
    key: pa.Array | None
    value: pa.Array
    headers: pa.Array | None = None
    partition: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.value)

    def slice(self, start: int, length: int) -> Rows:
        if start == 0 and length >= len(self):
            return self
        return Rows(
            self.topic,
            None if self.key is None else self.key.slice(start, length),
            self.value.slice(start, length),
            None if self.headers is None else self.headers.slice(start, length),
            None if self.partition is None else self.partition[start : start + length],
        )


# record_batch.c through ctypes: its structs and functions.

LIBRARY = Path(__file__).with_name("record_batch.lib")
"""Where hatch_build.py puts it."""

RowNumbers = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_P, _N = ctypes.c_void_p, ctypes.c_int64


class Column(ctypes.Structure):
    _fields_ = (("offsets", _P), ("data", _P), ("valid", _P), ("valid_from", _N), ("wide", _N))


class Records(ctypes.Structure):
    _fields_ = (
        *((name, Column) for name in ("key", "value", "headers", "header_key", "header_value")),
        *(("timestamps", _P), ("timestamp", _N), ("rows", _P), ("rows_wide", _N)),
    )


class EncodeResult(ctypes.Structure):
    _fields_ = tuple((name, _N) for name in ("next", "size", "needed", "base_timestamp", "max_timestamp"))


class Scanned(ctypes.Structure):
    _fields_ = tuple(
        (name, _N) for name in ("batches", "position", "partial", "fault", "base_offset", "found", "wanted")
    )


class Aborted(ctypes.Structure):
    _fields_ = (("list", _P), ("count", _N), ("next", _N), ("producers", _P), ("active", _N))


class Binary(ctypes.Structure):
    _fields_ = (("offsets", _P), ("data", _P), ("valid", _P), ("nulls", _N), ("size", _N), ("room", _N))


class Columns(ctypes.Structure):
    _fields_ = (
        *(("key", Binary), ("value", Binary), ("offsets", _P), ("timestamps", _P), ("types", _P)),
        *((name, _N) for name in ("rows", "room", "headers", "header_key_size", "header_value_size")),
        *((name, _N) for name in ("fault", "batch", "found", "wanted")),
    )


class HeaderColumns(ctypes.Structure):
    _fields_ = (("lists", _P), ("valid", _P), ("key", Binary), ("value", Binary), ("rows", _N), ("headers", _N))


BATCH = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("base_offset", "last_offset", "base_timestamp", "max_timestamp"),
            *("records", "size", "count", "attributes"),
        )
    ]
)

_SIGNATURES: Signatures = {
    "rb_crc32c": (ctypes.c_uint32, _P, _N, ctypes.c_int),
    "rb_encode": (None, ctypes.POINTER(Records), _N, _N, _P, _N, ctypes.POINTER(EncodeResult)),
    "rb_seal": (None, _P, _N, ctypes.c_int16, ctypes.c_int32, _N, _N, _N, ctypes.c_int16, ctypes.c_int32),
    "rb_partitions": (None, ctypes.POINTER(Column), _N, ctypes.c_int32, _P),
    "rb_group": (_N, _P, _N, ctypes.c_int32, _P, _P),
    "rb_scan": (None, _P, _N, _N, _N, ctypes.POINTER(Aborted), _P, _N, ctypes.POINTER(Scanned)),
    "rb_decode": (None, _P, _N, _N, _N, ctypes.POINTER(Columns)),
    "rb_headers": (None, _P, _N, _N, _N, ctypes.POINTER(HeaderColumns)),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    return load(LIBRARY, _SIGNATURES)


def functions() -> ctypes.CDLL:
    if (loaded := library()) is None:
        raise DeliveredError("KAFKA_CODEC", library=LIBRARY.name)
    return loaded


def column(array: pa.Array | None) -> tuple[Column, Any]:
    """A binary or list column for C, and what must stay alive while it is used."""
    if array is None or pa.types.is_null(array.type):
        return Column(), None
    valid, offsets, *data = array.buffers()[:3]
    if offsets is None or not offsets.size:  # an empty array need not have any
        return Column(), None
    kind = array.type
    wide = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind) or pa.types.is_large_list(kind)
    found = Column(
        offsets=offsets.address + array.offset * (8 if wide else 4),
        data=data[0].address if data and data[0] is not None else None,
        valid=valid.address if valid is not None and array.null_count else None,
        valid_from=array.offset,
        wide=wide,
    )
    return found, array


def records(
    key: pa.Array | None,
    value: pa.Array,
    headers: pa.Array | None,
    timestamps: npt.NDArray[np.int64] | int,
    rows: RowNumbers | None,
) -> tuple[Records, Any]:
    found, keep = Records(), []
    parts = {"key": key, "value": value}
    if headers is not None and not pa.types.is_null(headers.type):
        items = headers.values
        parts |= {"headers": headers, "header_key": items.field(0), "header_value": items.field(1)}
        if items.null_count or items.field(0).null_count:
            raise BadRecord("HEADER_KEY_MISSING")
    for name, array in parts.items():
        of_array, kept = column(array)
        setattr(found, name, of_array)
        keep.append(kept)
    if isinstance(timestamps, np.ndarray):
        keep.append(np.ascontiguousarray(timestamps, np.int64))
        found.timestamps = keep[-1].ctypes.data
    else:
        found.timestamp = timestamps
    if rows is not None:
        keep.append(np.ascontiguousarray(rows))
        found.rows, found.rows_wide = keep[-1].ctypes.data, rows.dtype == np.int64
    return found, keep


class BinaryColumn:
    """Buffers of a binary column that C fills."""

    def __init__(self, n: int, room: int, out: Binary) -> None:
        self._out, self._offsets = out, np.zeros(n + 1, np.int32)
        self._data, self._valid = np.empty(room, np.uint8), np.full(n // 8 + 1, 255, np.uint8)
        out.offsets, out.data, out.valid = (a.ctypes.data for a in (self._offsets, self._data, self._valid))
        out.room = room

    def array(self, n: int, kind: pa.DataType) -> pa.Array:
        out = self._out
        valid = pa.py_buffer(self._valid) if out.nulls else None
        buffers = [valid, pa.py_buffer(self._offsets[: n + 1]), pa.py_buffer(self._data[: out.size])]
        return pa.Array.from_buffers(kind, n, buffers, null_count=out.nulls)


# What is wrong with a record batch from a broker, in words.

FAULTS = (
    "",
    "its length is {found} bytes, and the least is {wanted}",
    "its magic byte is {found}; only 0 to 2 are known",
    "",
    "its CRC-32C is {found:#x}, and its header says {wanted:#x}",
    "its offsets are impossible: the last one is {found} after the first",
    "it follows offset {found}",
    "it has {found} records, of at most {wanted}",
    "its compression is {found}, of at most {wanted}",
    "it is a control batch without a control record",
    "a record has {found} bytes, with {wanted} left",
    "record {found} is truncated",
    "a record has offset delta {found}, which is not ascending, or beyond the last one, {wanted}",
    "a key has {found} bytes, with {wanted} left",
    "a value has {found} bytes, with {wanted} left",
    "a record has {found} headers, with room for {wanted}",
    "a header's key or value has {found} bytes, with {wanted} left",
    "{found} bytes follow the last field",
    "more bytes than were counted ({found})",
)
"""By the fault's number in record_batch.c."""
_OLD_MAGIC = 3


class CorruptBatch(DeliveredError):
    """Bytes from a broker that are no valid record batch."""


class BatchTooLarge(BadRecord):
    """A record batch whose records are too many bytes, decompressed.

    Attributes:
        offset: of its first record.
        next_offset: after its last one.
        batch: its bytes, compressed, with the header.
    """

    offset: int
    next_offset: int
    batch: bytes


def fault(partition: Partition, number: int, base_offset: int, found: int, wanted: int) -> DeliveredError:
    """Args: number: the fault's in record_batch.c."""
    if number == _OLD_MAGIC:
        topic, at = partition
        return UsageError("KAFKA_OLD_FORMAT", topic=topic, position=at, actual=found, base_offset=base_offset)
    return corrupt(partition, base_offset, FAULTS[number].format(found=found, wanted=wanted))


def corrupt(partition: Partition, base_offset: int, what: str) -> CorruptBatch:
    topic, number = partition
    return CorruptBatch("KAFKA_CORRUPT_BATCH", topic=topic, number=number, base_offset=base_offset, what=what)


def too_large(partition: Partition, batch: bytes, codec: str, limit: int, first: int, last: int) -> BatchTooLarge:
    topic, number = partition
    found = BatchTooLarge(
        "KAFKA_BATCH_TOO_LARGE", topic=topic, number=number, offset=first, bytes=len(batch), codec=codec, limit=limit
    )
    found.offset, found.next_offset, found.batch = first, last + 1, batch
    return found


# Compression of record batches by pyarrow's codecs, in the framings of Kafka's clients.
#
# Kafka's Java reader of LZ4 frames, which the broker uses too, accepts neither blocks that depend on each other, as
# pyarrow writes them above 64 KiB, nor several frames: blocks are compressed one by one, and make up one frame.

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
"""By their number in a batch's attributes."""

_SCRATCH_BYTES, _SCRATCH_BYTES_KEPT = 2 << 20, 16 << 20
_LEVELS = {"gzip": 6, "zstd": 3}
"""Kafka's defaults where pyarrow's differ."""

_LZ4_FRAME = bytes.fromhex("04224d18 60 40 82")
"""Magic, version 1 with independent blocks and no checksums, blocks of 64 KiB, checksum of the two."""
_LZ4_BLOCK = 64 << 10
_LZ4_END = bytes(4)


Compress = Callable[[memoryview], Sequence[Any]]
"""Records to the parts (with the buffer protocol) of the compressed records."""


def compressor(name: str, level: int | None) -> Compress | None:
    """None: without compression. Raises UsageError: unknown name."""
    if name not in COMPRESSIONS:
        raise UsageError("COMPRESSION_UNKNOWN", name=name, known=", ".join(COMPRESSIONS))
    if name == "none":
        return None
    codec = pa.Codec(name, compression_level=_LEVELS.get(name) if level is None else level)
    if name != "lz4":
        return lambda records: [codec.compress(records, asbytes=True)]

    def blocks(records: memoryview) -> list[Any]:
        parts: list[Any] = [_LZ4_FRAME]
        for at in range(0, len(records), _LZ4_BLOCK):
            # A frame of one block, which is independent. (A memoryview of it would be longer than the buffer.)
            frame = codec.compress(records[at : at + _LZ4_BLOCK])
            parts.append(frame.slice(len(_LZ4_FRAME), frame.size - len(_LZ4_FRAME) - len(_LZ4_END)))
        return [*parts, _LZ4_END]

    return blocks


_XERIAL = b"\x82SNAPPY\x00"
_SNAPPY_RATIO_MAX = 64


def _snappy_size(block: memoryview) -> int:
    """Decompressed size, from the varint at the start."""
    size = 0
    for i, byte in enumerate(block[:5]):
        size |= (byte & 127) << 7 * i
        if byte < 128:
            return size
    raise ValueError("no size")


class TooLarge(Exception):
    """More bytes, decompressed, than are allowed."""


def _snappy(data: memoryview, limit: int) -> Iterator[pa.Buffer]:
    """One snappy block; or, framed as by xerial's library for Java, many, each after its size (four bytes)."""
    blocks = [data]
    if data[:8] == _XERIAL:
        blocks, at = [], 16
        while at < len(data):
            (size,) = struct.unpack_from(">i", data, at)
            at += 4
            if not 0 < size <= len(data) - at:
                raise ValueError(f"a block of {size} bytes")
            blocks.append(data[at : at + size])
            at += size
    codec, total = pa.Codec("snappy"), 0
    for block in blocks:
        size = _snappy_size(block)
        total += size
        if size > _SNAPPY_RATIO_MAX * len(block):
            raise ValueError(f"a block that claims {size} bytes")
        if total > limit:
            raise TooLarge
        yield codec.decompress(block, size)


class Scratch:
    """Memory for decompressed records, used again and again: fresh pages cost as much as decompressing into them.

    Attributes:
        filled: bytes in use. Whoever has read them sets it to 0.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(_SCRATCH_BYTES, np.uint8)
        self.filled = 0

    @property
    def address(self) -> int:
        """Until more is added."""
        return int(self._bytes.ctypes.data)

    def add(self, data: memoryview, name: str, limit: int) -> int:
        """Decompress `data`; return how many bytes that are.

        Raises:
            TooLarge: more than `limit`. No more memory than for these was allocated.
            ValueError, OSError (pyarrow's), struct.error: not compressed by this codec.
        """
        before = self.filled
        most = before + limit + 1  # the one byte more shows that there is more
        if name == "snappy":
            for part in _snappy(data, limit):
                self._grow(part.size, most)
                self._bytes.data[self.filled : self.filled + part.size] = memoryview(part).cast("B")
                self.filled += part.size
            return self.filled - before
        with pa.CompressedInputStream(pa.BufferReader(data), name) as stream:
            while count := stream.readinto(self._bytes[self.filled : most].data):
                self.filled += count
                if self.filled == most:
                    raise TooLarge
                self._grow(1, most)
        return self.filled - before

    def _grow(self, more: int, most: int) -> None:
        """Make room for `more` bytes, and for no more than `most` in all."""
        if self.filled + more > len(self._bytes):
            larger = np.empty(max(min(2 * len(self._bytes), most), self.filled + more), np.uint8)
            larger[: self.filled] = self._bytes[: self.filled]
            self._bytes = larger

    def clear(self) -> None:
        self.filled = 0
        if len(self._bytes) > _SCRATCH_BYTES_KEPT:
            self._bytes = np.empty(_SCRATCH_BYTES, np.uint8)


class _Scratches(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


_scratches = _Scratches()


def scratch() -> Scratch:
    """This thread's, empty."""
    _scratches.scratch.clear()
    return _scratches.scratch


HEADER_BYTES = 61
"""Of a batch, before its records."""

SEQUENCES = 1 << 31
"""Sequences wrap around to 0."""

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
    return library() is not None


# -- partitions --------------------------------------------------------------------------------------------------------


def partition_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.int32]:
    """The partition that the Java client chooses for each key (murmur2); -1 for null, whose partition is free.

    Args:
        keys: binary or string, 32- or 64-bit offsets.
    """
    found = np.empty(len(keys), np.int32)
    source, keep = column(keys)
    functions().rb_partitions(source, len(keys), partitions, found.ctypes.data)
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
    bad = functions().rb_group(partition.ctypes.data, len(partition), partitions, bounds.ctypes.data, rows.ctypes.data)
    if bad >= 0:
        raise ValueError(f"row {bad} has partition {partition[bad]}; there are {partitions}")
    return rows, bounds


# -- encode ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A record batch, ready for a Produce request.

    Attributes:
        data: the complete batch; base offset 0, which the broker replaces.
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
    rows: RowNumbers | None = None,
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
    native, n = functions(), len(value) if rows is None else len(rows)
    source, keep = records(key, value, headers, timestamps, rows)
    compress = compressor(compression, level)
    flags = _TRANSACTIONAL if transactional else 0
    target = min(target_bytes or bytes_max, bytes_max)
    # Compressed batches leave the buffer to the next one.
    reused = None if compress is None else np.empty(target, np.uint8)
    first, room, result = 0, target, EncodeResult()
    while first < n:
        out = np.empty(room, np.uint8) if reused is None or room > len(reused) else reused
        body = out[HEADER_BYTES:]
        native.rb_encode(source, first, n, body.ctypes.data, len(body), result)
        count, size = result.next - first, HEADER_BYTES + result.size
        if count == 0:  # a record that is larger than a batch should be
            room = HEADER_BYTES + result.needed
            if room > (bytes_max if compress is None else RECORD_BATCH_BYTES_MAX):
                raise _too_large(first, rows, room, bytes_max)
            continue
        attributes, room = flags, target
        if compress is not None:
            parts = compress(body[: result.size].data)
            packed = HEADER_BYTES + sum(len(p) for p in parts)
            if packed < size or size > bytes_max:
                attributes |= COMPRESSIONS.index(compression)
                out, size = np.empty(packed, np.uint8), packed
                out.data[HEADER_BYTES:] = b"".join(parts)
            else:
                out = out[:size].copy()
            if size > bytes_max:
                raise _too_large(first, rows, size, bytes_max)
        native.rb_seal(
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
    return (sequence + count) % SEQUENCES


def _too_large(first: int, rows: RowNumbers | None, size: int, bytes_max: int) -> BadRecord:
    return BadRecord(
        "RECORD_TOO_LARGE.KAFKA_BATCH", row=first if rows is None else int(rows[first]), size=size, bytes_max=bytes_max
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
        found, table = Scanned(), np.empty(self._buffer.size // HEADER_BYTES + 1, BATCH)
        transactions, keep = _aborted(aborted)
        address = self._buffer.address
        arguments = (address, self._buffer.size, start, end, transactions, table.ctypes.data, len(table), found)
        functions().rb_scan(*arguments)
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
        out = Columns(room=n)
        parts = [BinaryColumn(n, size, out.key), BinaryColumn(n, size, out.value)]
        offsets, timestamps, types = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int32)
        out.offsets, out.timestamps, out.types = (a.ctypes.data for a in (offsets, timestamps, types))
        functions().rb_decode(batches.ctypes.data, len(batches), start, end, out)
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

    def _headers_of(self, batches: npt.NDArray[Any], start: int, end: int, out: Columns) -> pa.Array:
        n, headers = out.rows, out.headers
        if not headers:
            return pa.nulls(n, pa.list_(HEADER))
        found = HeaderColumns()
        keys = BinaryColumn(headers, out.header_key_size, found.key)
        values = BinaryColumn(headers, out.header_value_size, found.value)
        lists, valid = np.zeros(n + 1, np.int32), np.full(n // 8 + 1, 255, np.uint8)
        found.lists, found.valid = lists.ctypes.data, valid.ctypes.data
        functions().rb_headers(batches.ctypes.data, len(batches), start, end, found)
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
        buffer: bytes, or anything with the buffer protocol; it must not change before the last RecordBatch was yielded.
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


def _aborted(transactions: Iterable[tuple[int, int]] | None) -> tuple[Aborted | None, Any]:
    if transactions is None:
        return None, None
    pairs = np.array(sorted(transactions, key=lambda t: t[1]), np.int64).reshape(-1, 2)
    active = np.empty(max(1, len(pairs)), np.int64)
    return Aborted(list=pairs.ctypes.data, count=len(pairs), producers=active.ctypes.data), (pairs, active)

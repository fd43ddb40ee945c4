"""Compression of record batches by pyarrow's codecs, in the framings of Kafka's clients.

Kafka's Java reader of LZ4 frames, which the broker uses too, accepts neither blocks that depend on each other, as
pyarrow writes them above 64 KiB, nor several frames: blocks are compressed one by one, and make up one frame.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from delivered.model.errors import UsageError

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
        raise UsageError(
            "COMPRESSION_UNKNOWN",
            f"Compression {name!r} is not one of {', '.join(COMPRESSIONS)}.",
            next_step="use one of these",
        )
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
            TooLarge: more than `limit`. No more memory than for these was taken.
            ValueError, OSError (pyarrow's), struct.error: not compressed by this codec.
        """
        before = self.filled
        most = before + limit + 1  # the one byte more tells that there is more
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

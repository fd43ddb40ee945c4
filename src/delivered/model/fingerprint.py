"""A count and an additive keyed hash of records: equal multisets of records give equal fingerprints.

Hashes are added, not XORed: under XOR a duplicate cancels out, and three copies look like one. The hash of a record is
64 bits, computed column by column over Arrow buffers with no Python object per record; the sum is kept modulo 2**128
in two independent 64-bit lanes. The mixers are the finaliser of MurmurHash3 and multiplication by odd constants.
The key makes fingerprints of two pipelines incomparable, on purpose.

This numpy code defines the hash, and computes it where there is no library of `mix.c`: no compiler, or built on another
platform.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_MASK = (1 << 64) - 1
_WORD = np.uint64(0x9E3779B97F4A7C15)
_LENGTH = np.uint64(0xC2B2AE3D27D4EB4F)
_COLUMN = np.uint64(0xD6E8FEB86659FD93)
_LANE = np.uint64(0xA0761D6478BD642F)
_NULL = np.uint64(0x5851F42D4C957F2D)
_S32, _S33 = np.uint64(32), np.uint64(33)
_LONG_VALUE_BYTES = 4096
"""Longer values are hashed one by one with BLAKE2b: one vector step per word would cost more."""

_KEEP = np.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=np.uint64)
"""n -> mask of the first n bytes of a little-endian word."""


@dataclass(frozen=True)
class Fingerprint:
    """
    Attributes:
        count: records.
        low, high: sums of the records' hashes modulo 2**64.
    """

    count: int = 0
    low: int = 0
    high: int = 0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.count + other.count, (self.low + other.low) & _MASK, (self.high + other.high) & _MASK)

    def __sub__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.count - other.count, (self.low - other.low) & _MASK, (self.high - other.high) & _MASK)

    def __str__(self) -> str:
        return f"{self.count}:{self.high:016x}{self.low:016x}"

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Read what `str` wrote."""
        count, _, digits = text.partition(":")
        return cls(int(count), int(digits[16:], 16), int(digits[:16], 16))


def seed_of(*names: str) -> int:
    """The key of a pipeline's fingerprints: 64 bits of BLAKE2b over its names."""
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest(), "little")


def fingerprint(batch: pa.RecordBatch, seed: int, columns: Sequence[str] | None = None) -> Fingerprint:
    """Fingerprint of the rows of `batch`.

    Args:
        seed: from `seed_of`.
        columns: only these, in this order; default: all, in the batch's order. Names do not matter, order does.

    Raises:
        TypeError: a column's type has no canonical bytes here.
        KeyError: there is no column of that name.
    """
    if batch.num_rows == 0:
        return Fingerprint()
    hashes = record_hashes(batch, seed, columns)
    if (both := sums(hashes)) is not None:
        return Fingerprint(batch.num_rows, *both)
    with np.errstate(over="ignore"):
        low, high = (int(np.sum(lane, dtype=np.uint64)) for lane in lanes(hashes))
    return Fingerprint(batch.num_rows, low, high)


def lanes(hashes: U64) -> tuple[U64, U64]:
    """Each record's contribution to `low` and `high` of a fingerprint; the audit sums them elsewhere."""
    with np.errstate(over="ignore"):
        return hashes, _finish(hashes ^ _LANE)


def record_hashes(batch: pa.RecordBatch, seed: int, columns: Sequence[str] | None = None) -> U64:
    """One 64-bit hash per row. Arguments as for `fingerprint`."""
    # By position: a schema may have duplicate names.
    chosen = batch.columns if columns is None else [batch.column(name) for name in columns]
    key = np.uint64(seed & _MASK)
    with np.errstate(over="ignore"):
        total = np.full(batch.num_rows, key, dtype=np.uint64)
        for array in chosen:
            hashes = _hash_array(array, key)
            if fold(total, hashes):
                continue
            total *= _COLUMN
            total ^= hashes
            total ^= total >> _S32
        return total if finish(total) else _finish(total)


def _finish(h: U64) -> U64:
    h = h ^ (h >> _S33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> _S33
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> _S33
    return h


def _hash_array(array: pa.Array, key: np.uint64) -> U64:
    """Hash of each value of an Arrow array, nulls included."""
    array = _plain(array)
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL, dtype=np.uint64)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        hashes = _hash_bytes(array, np.dtype(np.int32), key)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        hashes = _hash_bytes(array, np.dtype(np.int64), key)
    elif pa.types.is_map(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        hashes = _hash_list(array, key)
    elif pa.types.is_struct(kind):
        hashes = np.full(len(array), key, dtype=np.uint64)
        for i in range(kind.num_fields):
            hashes *= _COLUMN
            hashes ^= _hash_array(array.field(i), key)
        hashes = _finish(hashes)
    else:
        hashes = _hash_fixed(array, key)
    if array.null_count:
        hashes = np.where(np.asarray(array.is_null()), _NULL, hashes)
    return hashes


def _plain(array: pa.Array) -> pa.Array:
    """The values, decoded: equal values must hash equally in any encoding."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(array.storage)
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(array))
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return array.cast(pa.binary())
    if pa.types.is_fixed_size_list(kind):
        return array.cast(pa.large_list(kind.value_type))
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        # No cast: pyarrow's gives wrong offsets where a list view has nulls.
        lengths = np.asarray(pc.list_value_length(array).fill_null(0)).astype(np.int64)
        offsets = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        return pa.LargeListArray.from_arrays(offsets, array.flatten(), mask=array.is_null())
    return array


def _hash_fixed(array: pa.Array, key: np.uint64) -> U64:
    kind = array.type
    n = len(array)
    if (hashes := hash_fixed(array, int(key))) is not None:
        return hashes
    if pa.types.is_boolean(kind):
        words = np.asarray(array.cast(pa.uint8()).fill_null(0)).astype(np.uint64)
    elif pa.types.is_floating(kind):
        wide = np.asarray(array.cast(pa.float64()).fill_null(0.0)) + 0.0  # -0.0 becomes 0.0
        wide[np.isnan(wide)] = np.nan  # canonical NaN
        words = wide.view(np.uint64)
    elif pa.types.is_integer(kind):
        words = np.asarray(array.fill_null(0)).astype(np.int64).view(np.uint64)
    elif n == 0:
        return np.zeros(0, dtype=np.uint64)
    elif pa.types.is_decimal128(kind):
        pairs = np.frombuffer(array.buffers()[1], dtype=np.uint64)
        pairs = pairs[2 * array.offset : 2 * (array.offset + n)].reshape(n, 2)
        words = _finish((pairs[:, 0] ^ key) * _WORD) ^ pairs[:, 1]
    elif pa.types.is_temporal(kind) and kind.bit_width in (32, 64):
        raw = array.view(pa.int32() if kind.bit_width == 32 else pa.int64())
        words = np.asarray(raw.fill_null(0)).astype(np.int64).view(np.uint64)
    else:
        raise TypeError(f"no fingerprint for Arrow type {kind}; cast the column to string or binary")
    return _finish((words ^ key) * _WORD)


def _hash_list(array: pa.Array, key: np.uint64) -> U64:
    """A list's hash depends on its values and their order."""
    offsets = np.asarray(array.offsets).astype(np.int64)
    child: pa.Array
    if pa.types.is_map(array.type):
        child = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    else:
        child = array.values
    hashes = _hash_array(child, key)
    lengths = np.diff(offsets)
    positions = np.arange(len(hashes), dtype=np.int64)
    owner_start = np.repeat(offsets[:-1], lengths)
    inside = slice(int(offsets[0]), int(offsets[-1]))
    ranked = (positions[inside] - owner_start).astype(np.uint64) + np.uint64(1)
    mixed = _finish(hashes[inside] * _COLUMN ^ ranked * _WORD)
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    begin = offsets - offsets[0]
    return _finish((sums[begin[1:]] - sums[begin[:-1]]) ^ (lengths.astype(np.uint64) * _LENGTH) ^ key)


def _hash_bytes(array: pa.Array, offset_type: np.dtype[np.signedinteger], key: np.uint64) -> U64:
    """Hash of variable-length values: eight bytes per step, all rows in parallel."""
    n = len(array)
    if (found := hash_bytes(array, offset_type.itemsize, _LONG_VALUE_BYTES, int(key))) is not None:
        return found
    _, offset_buffer, data_buffer = array.buffers()
    if n == 0 or offset_buffer is None:
        return np.full(n, key, dtype=np.uint64)
    offsets = np.frombuffer(offset_buffer, dtype=offset_type)[array.offset : array.offset + n + 1]
    offsets = offsets.astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    hashes = (lengths.astype(np.uint64) * _LENGTH) ^ key
    if data_buffer is None or offsets[-1] == offsets[0]:
        return _finish(hashes)
    data = np.frombuffer(data_buffer, dtype=np.uint8)
    width = int(lengths[0])
    longest = int(lengths.max())
    if width <= _LONG_VALUE_BYTES and int(lengths.min()) == longest:
        return _hash_equal_widths(data[int(offsets[0]) : int(offsets[-1])].reshape(n, width), hashes)
    return _hash_mixed_widths(data[int(offsets[0]) : int(offsets[-1])], starts - offsets[0], lengths, hashes, key)


def _step(hashes: U64, words: U64) -> U64:
    hashes ^= words
    hashes *= _WORD
    hashes ^= hashes >> _S32
    return hashes


def _hash_equal_widths(rows: npt.NDArray[np.uint8], hashes: U64) -> U64:
    n, width = rows.shape
    padded_width = -(-width // 8) * 8
    if padded_width == width:
        padded = np.ascontiguousarray(rows)
    else:
        padded = np.zeros((n, padded_width), dtype=np.uint8)
        padded[:, :width] = rows
    words = padded.view(np.uint64)
    for i in range(words.shape[1]):
        hashes = _step(hashes, words[:, i])
    return _finish(hashes)


def _hash_mixed_widths(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    hashes: U64,
    key: np.uint64,
) -> U64:
    """Same hash as `_hash_equal_widths` for equal values: one step per word of a row, the last one masked.

    Rows are sorted by number of words, longest first, so that rows with words left come first.
    """
    words = (lengths + 7) >> 3
    long_rows = np.flatnonzero(lengths > _LONG_VALUE_BYTES)
    words[long_rows] = 0
    order = np.argsort(words.astype(np.uint16), kind="stable")[::-1]  # numpy sorts 16 bits by radix
    having = len(order) - np.cumsum(np.bincount(words))  # rows with more words than the index
    # An unaligned word spans two aligned ones. One word of padding guarantees the second.
    aligned = np.zeros((len(data) >> 3) + 2, dtype=np.uint64)
    aligned.view(np.uint8)[: len(data)] = data
    begin = starts[order]
    at = begin >> 3
    right = ((begin & 7) << 3).astype(np.uint64)
    left = np.uint64(64) - right  # numpy: a shift by 64 gives 0
    keep = _KEEP[((lengths[order] - 1) & 7) + 1]
    sorted_hashes = hashes[order]
    now = int(having[0])
    low = aligned.take(at[:now])
    for following in having[1:].tolist():
        at[:now] += 1
        high = aligned.take(at[:now])
        low >>= right[:now]
        low |= high << left[:now]
        low[following:] &= keep[following:now]
        _step(sorted_hashes[:now], low)
        low, now = high[:following], following
    hashes[order] = sorted_hashes
    for row in long_rows:
        value = data[starts[row] : starts[row] + lengths[row]].tobytes()
        digest = hashlib.blake2b(value, digest_size=8, key=int(key).to_bytes(8, "little")).digest()
        hashes[row] ^= np.uint64(int.from_bytes(digest, "little"))
    return _finish(hashes)


# `mix.c` through ctypes, if it was built with the package: hashes of Arrow arrays.

LIBRARY = Path(__file__).with_name("mix.lib")
"""Where hatch_build.py puts it."""

U64 = npt.NDArray[np.uint64]

_P, _N, _KEY = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
_FIXED = (None, _P, _N, _KEY, _P)
_BYTES = (ctypes.c_int, _P, _P, _N, _N, _KEY, _P)
Signatures = Mapping[str, tuple[Any, ...]]
"""Function -> return type, then argument types."""

_SIGNATURES: Signatures = {
    **{f"hash_{kind}": _FIXED for kind in ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "f32", "f64", "i128")},
    "hash_bytes32": _BYTES,
    "hash_bytes64": _BYTES,
    "fold": (None, _P, _P, _N),
    "finish_all": (None, _P, _N),
    "sums": (None, _P, _N, _P),
}


def load(path: Path, signatures: Signatures) -> ctypes.CDLL | None:
    """A library with these functions. None: not built, or built for another platform."""
    if sys.byteorder != "little" or not path.exists():
        return None
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (gives, *takes) in signatures.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = gives, takes
    except (OSError, AttributeError):
        return None
    return loaded


@functools.cache
def library() -> ctypes.CDLL | None:
    """`mix.c`, loaded once."""
    return load(LIBRARY, _SIGNATURES)


def hash_fixed(array: pa.Array, key: int) -> U64 | None:
    """Hashes of numbers, booleans, times and decimals; those of nulls are undefined. None: unsupported type."""
    mixers, n = library(), len(array)
    if mixers is None or not n:
        return None
    kind = array.type
    if pa.types.is_boolean(kind):
        array, name, width = array.cast(pa.uint8()), "hash_u8", 1
    elif pa.types.is_decimal128(kind):
        name, width = "hash_i128", 16
    elif pa.types.is_float32(kind) or pa.types.is_float64(kind):
        name, width = f"hash_f{kind.bit_width}", kind.bit_width // 8
    elif pa.types.is_integer(kind) or (pa.types.is_temporal(kind) and kind.bit_width in (32, 64)):
        sign = "u" if pa.types.is_unsigned_integer(kind) and kind.bit_width < 64 else "i"
        name, width = f"hash_{sign}{kind.bit_width}", kind.bit_width // 8
    else:
        return None
    values = array.buffers()[1]
    if values is None:
        return None
    out = np.empty(n, np.uint64)
    getattr(mixers, name)(values.address + array.offset * width, n, key, out.ctypes.data)
    return out


def hash_bytes(array: pa.Array, offset_bytes: int, longest: int, key: int) -> U64 | None:
    """Hashes of texts or bytes. None: one of them has more than `longest` bytes, or there is nothing to hash."""
    mixers, n = library(), len(array)
    _, offsets, data = array.buffers()
    if mixers is None or not n or offsets is None or data is None:
        return None
    hashing = mixers.hash_bytes32 if offset_bytes == 4 else mixers.hash_bytes64
    out = np.empty(n, np.uint64)
    at = offsets.address + array.offset * offset_bytes
    return None if hashing(at, data.address, n, longest, key, out.ctypes.data) else out


def fold(total: U64, hashes: U64) -> bool:
    """Fold a column's hashes into those of the records, in place. False: nothing was done."""
    mixers = library()
    if mixers is None or not (total.flags.c_contiguous and hashes.flags.c_contiguous):
        return False
    mixers.fold(total.ctypes.data, hashes.ctypes.data, len(total))
    return True


def finish(hashes: U64) -> bool:
    """Finalise the hashes in place. False: nothing was done."""
    mixers = library()
    if mixers is None or not hashes.flags.c_contiguous:
        return False
    mixers.finish_all(hashes.ctypes.data, len(hashes))
    return True


def sums(hashes: U64) -> tuple[int, int] | None:
    """Sums of both lanes. None: not computed."""
    mixers = library()
    if mixers is None or not hashes.flags.c_contiguous:
        return None
    found = np.zeros(2, np.uint64)
    mixers.sums(hashes.ctypes.data, len(hashes), found.ctypes.data)
    return int(found[0]), int(found[1])

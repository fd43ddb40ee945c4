"""Libraries in C through ctypes, if they were built with the package; and `mix.c`: hashes of Arrow arrays.

Without `mix.c` (no compiler, or built on another platform), `library` is None and fingerprint.py computes the same
hashes with numpy.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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

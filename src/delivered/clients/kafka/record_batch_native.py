"""`record_batch.c` through ctypes: its structs and functions, if it was compiled with the package."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delivered.model.errors import BadRecord, DeliveredError
from delivered.model.fingerprint import Signatures, load

LIBRARY = Path(__file__).with_name("record_batch.lib")
"""Where hatch_build.py puts it."""

Rows = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_P, _N = ctypes.c_void_p, ctypes.c_int64


class Column(ctypes.Structure):
    _fields_ = (("offsets", _P), ("data", _P), ("valid", _P), ("valid_from", _N), ("wide", _N))


class Records(ctypes.Structure):
    _fields_ = (
        *((name, Column) for name in ("key", "value", "headers", "header_key", "header_value")),
        *(("timestamps", _P), ("timestamp", _N), ("rows", _P), ("rows_wide", _N)),
    )


class Encoded(ctypes.Structure):
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


class Headers(ctypes.Structure):
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
    "rb_encode": (None, ctypes.POINTER(Records), _N, _N, _P, _N, ctypes.POINTER(Encoded)),
    "rb_seal": (None, _P, _N, ctypes.c_int16, ctypes.c_int32, _N, _N, _N, ctypes.c_int16, ctypes.c_int32),
    "rb_partitions": (None, ctypes.POINTER(Column), _N, ctypes.c_int32, _P),
    "rb_group": (_N, _P, _N, ctypes.c_int32, _P, _P),
    "rb_scan": (None, _P, _N, _N, _N, ctypes.POINTER(Aborted), _P, _N, ctypes.POINTER(Scanned)),
    "rb_decode": (None, _P, _N, _N, _N, ctypes.POINTER(Columns)),
    "rb_headers": (None, _P, _N, _N, _N, ctypes.POINTER(Headers)),
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
    rows: Rows | None,
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

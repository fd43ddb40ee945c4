"""Null lists and maps of structs, which pyiceberg's reader (0.12) makes empty ones: an upsert would store them so."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def keep_nulls() -> None:
    """Mend the reader, once in a process. Call it before a scan."""
    from pyiceberg.io.pyarrow import ArrowProjectionVisitor

    reader: Any = ArrowProjectionVisitor
    if getattr(reader, "_keeps_nulls", False):
        return
    for name in ("list", "map"):
        setattr(reader, name, _keeping(getattr(reader, name)))
    reader._keeps_nulls = True


def _keeping(project: Any) -> Any:
    def projected(self: Any, kind: Any, given: Any, *parts: Any) -> Any:
        made = project(self, kind, given, *parts)
        return made if given is None or made is None or made.null_count == given.null_count else _masked(made, given)

    return projected


def _masked(made: pa.Array, given: pa.Array) -> pa.Array:
    # Of a slice, as Arrow reads row groups of more than 131,072 rows: no mask is taken with offsets that are one.
    offsets, mask = pa.array(made.offsets.to_numpy()), given.is_null()
    if isinstance(made, pa.MapArray):
        return pa.MapArray.from_arrays(offsets, made.keys, made.items, made.type, mask=mask)
    return type(made).from_arrays(offsets, made.values, type=made.type, mask=mask)

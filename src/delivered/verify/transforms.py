"""Transforms from Arrow to Arrow for the verifier's workloads, as a user would name them in a pipeline file."""

from __future__ import annotations

import json
import uuid

import pyarrow as pa


def _made(batch: pa.RecordBatch, rows: list[tuple[bytes | None, bytes]]) -> pa.RecordBatch:
    kinds = [batch.schema.field(name).type for name in ("key", "value")]
    columns = [pa.array([r[i] for r in rows], kind) for i, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value"])


def fan_out(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Multiples of three vanish; even numbers come out twice."""
    rows = []
    for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
        n = int(json.loads(value)["n"])
        if n % 3:
            rows += [(key, value + part) for part in ((b"#0", b"#1") if n % 2 == 0 else (b"#0",))]
    return _made(batch, rows)


def other_each_time(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Not deterministic: every run of a batch gives other values."""
    keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
    return _made(batch, [(k, v + b"#" + uuid.uuid4().hex.encode()) for k, v in zip(keys, values, strict=True)])

"""Transforms for the verifier's workloads, as a user would name them in a pipeline file: Arrow to Arrow, and one from
DataFrame to DataFrame."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pyarrow as pa

from delivered_lab.verify.workloads import POISON, WATERMARK_S, WINDOW_S, WINDOWS, in_kept_range, is_poison


def _made(batch: pa.RecordBatch, rows: list[tuple[bytes | None, bytes]]) -> pa.RecordBatch:
    kinds = [batch.schema.field(name).type for name in ("key", "value")]
    columns = [pa.array([r[i] for r in rows], kind) for i, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value"])


def values(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Of messages, for a table."""
    return batch.select(["value"])


def fan_out(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop multiples of three; duplicate even numbers."""
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


def to_topics(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Send every row to the sink's topic of the same number."""
    targets = ["-out".join(name.rsplit("-in", 1)) for name in batch.column("topic").to_pylist()]
    columns = [batch.column("key"), batch.column("value"), pa.array(targets, pa.string())]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value", "topic"])


def sparse(batch: pa.RecordBatch) -> pa.RecordBatch:
    kept = [in_kept_range(str(json.loads(v)["id"])) for v in batch.column("value").to_pylist()]
    return batch.filter(pa.array(kept, pa.bool_()))


def refuses_poison(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A transform that was not written for such a record."""
    for value in batch.column("value").to_pylist():
        if is_poison(value):
            raise ValueError(f"{POISON}: cannot parse {value[:40]!r}")
    return batch


def drops_poison(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The fixed version."""
    kept = [not is_poison(v) for v in batch.column("value").to_pylist()]
    return batch.filter(pa.array(kept, pa.bool_()))


def windowed(frame: Any) -> Any:
    """Count and sum per key and window. In SQL expressions: this module is also loaded without Spark."""
    return (
        frame.selectExpr(
            "CAST(key AS STRING) AS k", "CAST(substr(get_json_object(CAST(value AS STRING), '$.id'), 2) AS INT) AS i"
        )
        .selectExpr("k", "i", "timestamp_seconds(i) AS at")
        .withWatermark("at", f"{WATERMARK_S} seconds")
        .selectExpr("k", "i", f"window(at, '{WINDOW_S} seconds') AS w")
        .groupBy("k", "w")
        .agg({"*": "count", "i": "sum"})
        .selectExpr("k", f"unix_timestamp(w.start) DIV {WINDOW_S} AS n", "`count(1)` AS c", "`sum(i)` AS s")
        .where(f"n < {WINDOWS}")
        .selectExpr(
            "k AS key",
            """concat('{"id": "', k, '@', n, '", "k": "', k, '", "n": ', n, ', "count": ', c, ', "sum": ', s, '}')"""
            " AS value",
        )
    )

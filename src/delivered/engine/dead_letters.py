"""Dead letters: invalid rows, and records that never became rows, with the reason and their source coordinates."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.sink import DEAD_LETTERS, SOURCE_LETTERS, Sink
from delivered.contract.source import REJECTED
from delivered.model.bad_row import as_json_text, plain_rows
from delivered.model.identity import Scope
from delivered.model.ranges import first_reason

log = logging.getLogger(__name__)

_COORDINATES = {"topic": pa.string(), "partition": pa.int32(), "offset": pa.int64()}


def validated(sink: Sink, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array | None]:
    """The valid rows, and each input row's reason for rejection (null: valid); None if all are valid."""
    reasons = rejections(sink, rows)
    return (rows, None) if reasons is None else (rows.filter(pc.is_null(reasons)), reasons)


def rejections(sink: Sink, rows: pa.RecordBatch) -> pa.Array | None:
    """Each row's reason for rejection (null: valid), by the sink, then by its server; None if all are valid."""
    reasons = sink.invalid_rows(rows)
    if reasons is not None and reasons.null_count == len(reasons):
        reasons = None
    valid = rows if reasons is None else rows.filter(pc.is_null(reasons))
    refused = sink.refused_rows(valid) if valid.num_rows else None
    if refused is None or reasons is None:
        return reasons if refused is None else refused
    return pc.replace_with_mask(reasons.cast(pa.string()), pc.is_null(reasons), refused)


def refused_row(sink: Sink, rows: pa.RecordBatch) -> tuple[int, str] | None:
    """The first row that the sink or its server rejects, and why; None: there is none, or it cannot be found now."""
    try:
        return first_reason(rejections(sink, rows))
    except Exception as error:
        log.warning("which row is to blame could not be found: %s", error)
        return None


def dead_letters(
    scope: Scope,
    reasons: pa.Array,
    rows: pa.RecordBatch,
    origin: pa.RecordBatch | None,
    batch: int,
    shard: int,
    first: int,
) -> pa.RecordBatch:
    """One dead letter for each row with a reason.

    Args:
        scope: of the sink that rejected the rows.
        origin: the same rows before the sink's route, for their source coordinates; None: the route dropped rows.
        first: index of the first of `rows` among this sink's rows in this shard.
    """
    picked = pc.indices_nonzero(pc.is_valid(reasons))
    bad = rows.take(picked)
    count = bad.num_rows
    known = dict(zip(origin.schema.names, origin.columns, strict=True)) if origin is not None else {}
    columns = [
        pa.array([scope.sink] * count, pa.string()),
        reasons.take(picked).cast(pa.string()),
        pa.array([batch] * count, pa.int64()),
        pa.array([shard] * count, pa.int32()),
        pc.add(picked.cast(pa.int64()), first),
        *(_coordinate(known.get(n), kind, picked) for n, kind in _COORDINATES.items()),
        pa.array([as_json_text(row) for row in plain_rows(bad)], pa.string()),
        pa.array([scope.pipeline] * count, pa.string()),
        pa.array([scope.incarnation] * count, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEAD_LETTERS)


def split_rejected(batch: pa.RecordBatch) -> tuple[pa.RecordBatch | None, pa.Array | None]:
    """The rows of a batch, and the records that never became rows, as REJECTED holds them; None: there are none."""
    at = batch.schema.get_field_index(REJECTED.name)
    if at < 0:
        return batch, None
    records, names = batch.column(at), [n for n in batch.schema.names if n != REJECTED.name]
    records = records if records.type == REJECTED.type else records.cast(REJECTED.type)
    rejected = records.drop_null()
    rows = batch.select(names) if names else None
    if rows is not None and len(rejected):
        rows = rows.filter(pc.is_null(records))
    return rows, rejected if len(rejected) else None


def of_source(scope: Scope, records: pa.Array, batch: int, shard: int, first: int) -> pa.RecordBatch:
    """One dead letter for each record that never became a row.

    Args:
        first: index of the first one among those of this shard.
    """
    count = len(records)
    told = records.to_pylist()
    columns = [
        pa.array([each["sink"] or SOURCE_LETTERS for each in told], pa.string()),
        records.field(records.type.get_field_index("reason")),
        pa.array([batch] * count, pa.int64()),
        pa.array([shard] * count, pa.int32()),
        pa.array(range(first, first + count), pa.int64()),
        *(records.field(records.type.get_field_index(n)) for n in _COORDINATES),
        pa.array([as_json_text(_record(each)) for each in told], pa.string()),
        pa.array([scope.pipeline] * count, pa.string()),
        pa.array([scope.incarnation] * count, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEAD_LETTERS)


def _record(rejected: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the source that a letter keeps. A source need not have keys and values."""
    parts = {n: rejected[n] for n in ("key", "value") if rejected[n] is not None or not rejected["sink"]}
    return {**parts, **json.loads(rejected["more"] or "{}")}


def _coordinate(column: pa.Array | None, kind: pa.DataType, picked: pa.Array) -> pa.Array:
    if column is None:
        return pa.nulls(len(picked), kind)
    try:
        return column.take(picked).cast(kind)
    except pa.ArrowInvalid:  # a user's column of the same name
        return pa.nulls(len(picked), kind)

"""Rows for which the user's function raises: found by halving their batch, kept with their source record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa

from delivered.contract.sink import TRANSFORM_LETTERS
from delivered.contract.source import RAW, REJECTED
from delivered.model.bad_row import NOT_OF_A_ROW, as_json_text, plain_rows, reason_of

log = logging.getLogger(__name__)


def isolated(
    function: Callable[[pa.RecordBatch], pa.RecordBatch], batch: pa.RecordBatch, made: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """What a row-wise function makes of a batch, in the rows' order; then, in a batch whose only column is REJECTED,
    the rows for which it raised alone.

    Of n rows, at most 2n calls. A function is called again for rows of a batch in which another one fails.

    Args:
        batch: rows of the source; RAW is not passed to the function.
        made: the function's columns. Others are an error of the row too.
    """
    rows, bad = without_raw(batch), dict[int, str]()
    left = [(0, rows.num_rows)]
    while left:
        at, count = left.pop()
        try:
            part = _conformed(function(rows.slice(at, count)), made)
        except NOT_OF_A_ROW:
            raise
        except Exception as error:
            if count == 0:
                raise
            if count == 1:
                bad[at] = reason_of(error)
            else:
                left += [(at + count // 2, count - count // 2), (at, count // 2)]
            continue
        yield part
    if bad:
        log.warning("the transform failed for %d of %d rows: %s", len(bad), rows.num_rows, next(iter(bad.values())))
        yield only_rejected(_records(batch, bad))


def only_rejected(records: pa.Array) -> pa.RecordBatch:
    """A batch without rows, but with records for the dead letters."""
    return pa.RecordBatch.from_arrays([records], schema=pa.schema([REJECTED]))


def with_rejected(batch: pa.RecordBatch, made: pa.Schema) -> pa.RecordBatch:
    """A batch of `isolated` in columns that are always the same: those of `rejecting_schema`."""
    count = batch.num_rows
    if batch.schema.names == [REJECTED.name]:
        columns = [*(pa.nulls(count, kind) for kind in made.types), batch.column(0)]
    else:
        columns = [*batch.columns, pa.nulls(count, REJECTED.type)]
    return pa.RecordBatch.from_arrays(columns, schema=rejecting_schema(made))


def rejecting_schema(made: pa.Schema) -> pa.Schema:
    """The function's columns, which are null for a row that it failed for, and REJECTED."""
    return pa.schema([*(f.with_nullable(True) for f in made), REJECTED])


def without_raw(batch: pa.RecordBatch) -> pa.RecordBatch:
    names = batch.schema.names
    return batch.select([n for n in names if n != RAW.name]) if RAW.name in names else batch


def _conformed(part: pa.RecordBatch, made: pa.Schema) -> pa.RecordBatch:
    """The columns as they were announced: types that a function infers from few rows may differ. From no rows it may
    have inferred none.

    Raises:
        ValueError: other columns, or a value that does not fit its column.
    """
    if part.schema.equals(made):
        return part
    if part.schema.names != made.names:
        raise ValueError(f"the function returned the columns {part.schema.names}, and {made.names} for no rows")
    columns = [
        column if pa.types.is_null(kind) else column.cast(kind)
        for column, kind in zip(part.columns, made.types, strict=True)
    ]
    fields = [f.with_type(column.type) for f, column in zip(made, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _records(batch: pa.RecordBatch, bad: Mapping[int, str]) -> pa.Array:
    """Rows of the source, as REJECTED holds them."""
    order = sorted(bad)
    picked = batch.take(pa.array(order, pa.int64()))
    columns = dict(zip(picked.schema.names, picked.columns, strict=True))
    found: dict[str, pa.Array] = {}
    if raw := columns.pop(RAW.name, None):
        for name in RAW.type.names:
            found[name] = raw.field(name)
            columns.pop(name, None)
    for f in REJECTED.type:
        if f.name in columns and _fits(columns[f.name].type, f.type):
            found[f.name] = columns.pop(f.name).cast(f.type)
    others = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    count = len(order)
    found["reason"] = pa.array([bad[at] for at in order], pa.string())
    found["sink"] = pa.array([TRANSFORM_LETTERS] * count, pa.string())
    if columns:
        found["more"] = pa.array([as_json_text(row) for row in plain_rows(others)], pa.string())
    return pa.StructArray.from_arrays(
        [found.get(f.name, pa.nulls(count, f.type)) for f in REJECTED.type], fields=list(REJECTED.type)
    )


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    return bool(kind == wanted or (pa.types.is_integer(kind) and pa.types.is_integer(wanted)))

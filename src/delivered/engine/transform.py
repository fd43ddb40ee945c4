"""The transform over Arrow batches, which keeps rows for which it raises; and the task that reads the source itself and
transforms its records, so that they never become JVM rows.

Spark still plans, places, retries and logs such a batch. Only one row per slice passes through it.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.contract.source import COORDINATES, Slice, Source
from delivered.model.bad_row import NOT_OF_A_ROW, plain_rows, reason_of
from delivered.model.rows import Origin, Rejection, Rows
from delivered.model.step import Moment, StepId, reach

log = logging.getLogger(__name__)

SLICE_COLUMN = "__delivered_slice"
SLICE_SCHEMA = pa.schema([pa.field(SLICE_COLUMN, pa.binary(), nullable=False)])

ArrowFunction = Callable[[pa.RecordBatch], pa.RecordBatch]
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class ArrowTransform:
    """A transform from Arrow to Arrow, row-wise: rows of one batch depend on no other batch.

    Attributes:
        select: columns to keep, in this order, before `function`; empty: all.
        function: batch -> batch, deterministic; None: the identity.
    """

    select: tuple[str, ...] = ()
    function: ArrowFunction | None = None

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.select:
            batch = batch.select(list(self.select))
        return batch if self.function is None else self.function(batch)


def isolated(function: Callable[[pa.RecordBatch], pa.RecordBatch], rows: Rows, columns: pa.Schema) -> Iterator[Rows]:
    """What a row-wise function makes of the good rows, in their order; with the last, the rows for which it raised
    alone, after those that were rejected before.

    Of n rows, at most 2n calls. A function is called again for rows of a batch in which another one fails.

    Args:
        columns: the function's. Others are an error of the row too.
    """
    bad = dict[int, str]()
    left = [(0, rows.good.num_rows)]
    while left:
        at, count = left.pop()
        try:
            part = _conformed(function(rows.good.slice(at, count)), columns)
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
        yield Rows(part)
    if bad:
        first = next(iter(bad.values()))
        log.warning("the transform failed for %d of %d rows: %s", len(bad), rows.good.num_rows, first)
    if bad or rows.rejected:
        yield Rows(pa.RecordBatch.from_pylist([], schema=columns), [*rows.rejected, *_rejections(rows, bad)])


@dataclass(frozen=True)
class Direct:
    """What a task needs to read the source itself. Picklable; holds no connection.

    Attributes:
        rejects: neither a record that cannot be decoded nor a row for which the transform raises fails the task.
    """

    source: Source
    transform: ArrowTransform
    rejects: bool = False

    def schema(self) -> pa.Schema:
        """Schema of the sink's rows. Runs the transform on an empty batch."""
        return self.transform(pa.RecordBatch.from_pylist([], schema=self.source.schema())).schema

    def rows(self, slices: Iterator[pa.RecordBatch]) -> Iterator[Rows]:
        """Read all `slices`, one after the other."""
        isolates = self.rejects and self.transform.function is not None
        columns = self.schema() if isolates else None
        for batch in slices:
            for packed in batch.column(0).to_pylist():
                reach(StepId.SOURCE_READ, Moment.BEFORE)
                piece = unpack(packed)
                for rows in self.source.read_rows(piece) if self.rejects else map(Rows, self.source.read(piece)):
                    if columns is None:
                        yield Rows(self.transform(rows.good), rows.rejected)
                    else:
                        yield from isolated(self.transform, rows, columns)
                reach(StepId.SOURCE_READ, Moment.AFTER)


def pack(piece: Slice) -> pa.RecordBatch:
    """The one row that passes through Spark for a slice."""
    return pa.record_batch([pa.array([pickle.dumps(piece)], pa.binary())], schema=SLICE_SCHEMA)


def unpack(packed: bytes) -> Slice:
    """The inverse of `pack`. The column never leaves Spark, so it holds only what this package's reader wrote."""
    piece = pickle.loads(packed)  # noqa: S301
    if not isinstance(piece, Slice):
        raise TypeError(f"column {SLICE_COLUMN} holds {type(piece).__name__}; it must hold a Slice")
    return piece


def _conformed(part: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    """The columns as they were announced: types that a function infers from few rows may differ. From no rows it may
    have inferred none.

    Raises:
        ValueError: other columns, or a value that does not fit its column.
    """
    if part.schema.equals(columns):
        return part
    if part.schema.names != columns.names:
        raise ValueError(f"the function returned the columns {part.schema.names}, and {columns.names} for no rows")
    arrays = [
        column if pa.types.is_null(kind) else column.cast(kind)
        for column, kind in zip(part.columns, columns.types, strict=True)
    ]
    fields = [f.with_type(array.type) for f, array in zip(columns, arrays, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _rejections(rows: Rows, bad: Mapping[int, str]) -> Iterator[Rejection]:
    """The rows of the source with these reasons."""
    order = sorted(bad)
    picked = rows.good.take(pa.array(order, pa.int64()))
    raw = rows.records.take(pa.array(order, pa.int64())).to_pylist() if rows.records is not None else [{}] * len(order)
    is_bytes = {f.name for f in (*picked.schema, *(rows.records.schema if rows.records is not None else ()))
                if f.name in ("key", "value") and pa.types.is_binary(f.type)}  # fmt: skip
    for at, row, undecoded in zip(order, plain_rows(picked), raw, strict=True):
        record: dict[str, Any] = {**row, **undecoded}
        position = {n: record.pop(n) for n in COORDINATES if _is_coordinate(n, record.get(n))}
        parts = {n: record.pop(n) for n in ("key", "value") if n in is_bytes}
        yield Rejection(
            Origin.TRANSFORM, bad[at], {**{n: v for n, v in parts.items() if v is not None}, **record}, **position
        )


def _is_coordinate(name: str, value: Any) -> bool:
    """Whether it is one, and not a user's column of the same name."""
    if name == "topic":
        return isinstance(value, str)
    limit = _INT32_MAX if name == "partition" else (1 << 63) - 1
    return isinstance(value, int) and not isinstance(value, bool) and -limit - 1 <= value <= limit

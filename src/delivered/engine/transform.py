"""Rows through a transform.

Over Arrow batches: a row-wise function, which keeps the rows for which it raises; and the task that reads the source
itself and transforms its records, so that they never become JVM rows. Spark still plans, places, retries and logs such
a batch. Only one row per slice passes through it.

In Spark's own transform: rows as columns, on the way through Spark; and a task's message to the driver as a row.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.source import COORDINATES, Slice, Source
from delivered.model.errors import InvariantBroken
from delivered.model.rows import NOT_OF_A_ROW, Origin, Rejection, Rows, as_json_text, plain_rows, reason_of
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import BatchPlan, ShardMessage

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


def run_isolated(
    function: Callable[[pa.RecordBatch], pa.RecordBatch], rows: Rows, columns: pa.Schema
) -> Iterator[Rows]:
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
            part = _conform(function(rows.good.slice(at, count)), columns)
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
        yield Rows(pa.RecordBatch.from_pylist([], schema=columns), [*rows.rejected, *_build_rejections(rows, bad)])


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
                piece = unpack_slice(packed)
                for rows in self.source.read_rows(piece) if self.rejects else map(Rows, self.source.read(piece)):
                    if columns is None:
                        yield Rows(self.transform(rows.good), rows.rejected)
                    else:
                        yield from run_isolated(self.transform, rows, columns)
                reach(StepId.SOURCE_READ, Moment.AFTER)


def pack_slice(piece: Slice) -> pa.RecordBatch:
    """The one row that passes through Spark for a slice."""
    return pa.record_batch([pa.array([pickle.dumps(piece)], pa.binary())], schema=SLICE_SCHEMA)


def unpack_slice(packed: bytes) -> Slice:
    """The inverse of `pack_slice`. The column never leaves Spark, so it holds only what this package's reader wrote."""
    piece = pickle.loads(packed)  # noqa: S301
    if not isinstance(piece, Slice):
        raise TypeError(f"column {SLICE_COLUMN} holds {type(piece).__name__}; it must hold a Slice")
    return piece


MESSAGE = "message"
"""Column of a task's message to the driver."""


def pack_message(message: ShardMessage) -> bytes:
    """A message without its plan, which the driver has: offsets of thousands of partitions are in it."""
    plan = message.plan
    return pickle.dumps((plan.owner, plan.batch, plan.epoch, replace(message, plan=None)))  # type: ignore[arg-type]


def unpack_message(data: bytes, plan: BatchPlan) -> ShardMessage:
    """The message of a task of this plan.

    Raises:
        InvariantBroken: it is of another one.
    """
    *running, message = pickle.loads(data)  # noqa: S301 - Spark carried it from our own task
    if running != (planned := [plan.owner, plan.batch, plan.epoch]):
        raise InvariantBroken("BATCH_DIFFERS.TASK", running=running, planned=planned)
    returned: ShardMessage = message
    return replace(returned, plan=plan)


def _conform(part: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
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


def _build_rejections(rows: Rows, bad: Mapping[int, str]) -> Iterator[Rejection]:
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


# Rows as one record batch, and back: on the way through Spark, and in files, there are only columns.
#
#     task of the source     RAW        -> Spark -> task of the transform
#     task of the transform  REJECTED   -> Spark -> task of the sinks
#
# Nothing else knows these columns. Between a source and its sinks without Spark, there are none.

REJECTED = pa.field(
    "__delivered_rejected",
    pa.struct(
        [
            pa.field("reason", pa.string()),
            pa.field("topic", pa.string()),
            pa.field("partition", pa.int32()),
            pa.field("offset", pa.int64()),
            pa.field("key", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("sink", pa.string()),
            pa.field("more", pa.string()),
        ]
    ),
)
"""A `Rejection`; null for a good row. `sink`: its origin; null: the source. `more`: the record's other columns, as JSON
(`model.rows.as_json_text`); null: none."""

RAW = pa.field("__delivered_raw", pa.struct([pa.field("key", pa.binary()), pa.field("value", pa.binary())]))
"""Of a source that decodes its records: their bytes, for dead letters of rows that the transform fails for."""

_FILE = pa.schema([REJECTED])


def decode(batch: pa.RecordBatch) -> Rows:
    """The rows of a batch in the columns of `encode`, or of any batch of rows."""
    at, raw = (batch.schema.get_field_index(f.name) for f in (REJECTED, RAW))
    if at < 0 and raw < 0:
        return Rows(batch)
    good = batch.drop_columns([f.name for f, i in ((REJECTED, at), (RAW, raw)) if i >= 0])
    records = pa.RecordBatch.from_struct_array(batch.column(raw)) if raw >= 0 else None
    if at < 0 or batch.column(at).null_count == batch.num_rows:
        return Rows(good, (), records)
    rejected = batch.column(at)
    rows = pc.is_null(rejected)
    return Rows(good.filter(rows), _parse(rejected), records.filter(rows) if records is not None else None)


def decoder(schema: pa.Schema) -> Callable[[pa.RecordBatch], Rows]:
    """What `decode` does, for batches that all have this schema. Picklable."""
    return decode if {REJECTED.name, RAW.name} & {*schema.names} else Rows


def encode(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    """As a batch of this schema: rejected rows come last, and are null but for REJECTED, if the schema has it."""
    count = len(rows.rejected) if REJECTED.name in schema.names else 0
    total = rows.good.num_rows + count

    def column(field: pa.Field) -> pa.Array:
        if field.name == REJECTED.name:
            return pa.array([*[None] * rows.good.num_rows, *map(_structure, rows.rejected)], REJECTED.type)
        if field.name == RAW.name:
            parts = [
                rows.records.column(f.name) if rows.records is not None else pa.nulls(total, f.type) for f in RAW.type
            ]
            return pa.StructArray.from_arrays(parts, fields=list(RAW.type))
        good = rows.good.column(field.name)
        return pa.concat_arrays([good, pa.nulls(count, good.type)]) if count else good

    return pa.RecordBatch.from_arrays([column(f) for f in schema], schema=schema)


def source_schema(source: Source, *, raw: bool) -> pa.Schema:
    """Columns of a source's rows. Args: raw: and RAW, if the source decodes keys or values."""
    schema = source.schema()
    if not raw:
        return schema
    undecoded = source.raw_schema()
    both = [f.name for f in RAW.type if f.name in schema.names and f.name in undecoded.names]
    decodes = any(schema.field(n).type != undecoded.field(n).type for n in both)
    return schema.append(RAW) if decodes else schema


def with_rejected(schema: pa.Schema) -> pa.Schema:
    """Columns of rows, which are null for a rejected one, and REJECTED."""
    return pa.schema([*(f.with_nullable(True) for f in schema), REJECTED])


def without_rejected(schema: pa.Schema) -> pa.Schema:
    """Columns of the rows alone."""
    return pa.schema([f for f in schema if f.name != REJECTED.name])


def pack_rejected(rejected: Sequence[Rejection]) -> bytes:
    """For a file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _FILE) as writer:
        column = pa.array([_structure(r) for r in rejected], REJECTED.type)
        writer.write_batch(pa.RecordBatch.from_arrays([column], schema=_FILE))
    return bytes(sink.getvalue())


def join_rejected(files: Sequence[bytes]) -> bytes:
    """Several files as one."""
    return pack_rejected([r for data in files for r in unpack_rejected(data)])


def unpack_rejected(data: bytes) -> list[Rejection]:
    """The inverse of `pack_rejected`."""
    return [r for batch in pa.ipc.open_stream(data) for r in _parse(batch.column(0))]


def _structure(rejected: Rejection) -> dict[str, Any]:
    more = dict(rejected.record)
    source = rejected.origin is Origin.SOURCE
    plain = [n for n in ("key", "value") if isinstance(more.get(n), bytes) or (source and more.get(n) is None)]
    parts = {n: more.pop(n, None) for n in plain}
    return {
        "reason": rejected.reason,
        "topic": rejected.topic,
        "partition": rejected.partition,
        "offset": rejected.offset,
        **parts,
        "sink": None if source else rejected.origin.value,
        "more": as_json_text(more) if more else None,
    }


def _parse(column: pa.Array) -> list[Rejection]:
    return [
        Rejection(
            Origin.parse(each["sink"] or Origin.SOURCE.value),
            each["reason"],
            {n: each[n] for n in ("key", "value") if each[n] is not None} | json.loads(each["more"] or "{}"),
            *(each[n] for n in COORDINATES),
        )
        for each in column.drop_null().to_pylist()
    ]

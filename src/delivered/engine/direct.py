"""Records that never become JVM rows: the task gets slices, reads them itself, and hands the rows to the sink.

Spark still plans, places, retries and logs the batch. Only one row per slice passes through it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from delivered.contract.source import Slice, Source
from delivered.engine.dead_letters import split_rejected
from delivered.engine.isolate import isolated, only_rejected, without_raw
from delivered.model.step import Moment, StepId, reach

SLICE_COLUMN = "__delivered_slice"
SLICE_SCHEMA = pa.schema([pa.field(SLICE_COLUMN, pa.binary(), nullable=False)])

ArrowFunction = Callable[[pa.RecordBatch], pa.RecordBatch]


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


@dataclass(frozen=True)
class Direct:
    """What a task needs to read the source itself. Picklable; holds no connection.

    Attributes:
        kept: a row for which the transform raises does not fail the task: it has the column REJECTED.
    """

    source: Source
    transform: ArrowTransform
    kept: bool = False

    @classmethod
    def rejecting(cls, source: Source, transform: ArrowTransform) -> Direct:
        """Neither records that cannot be decoded nor rows that the transform raises for fail the task."""
        function = transform.function is not None
        return cls(source.rejecting(kept=True, raw=function), transform, function)

    def schema(self) -> pa.Schema:
        """Schema of the sink's rows. Runs the transform on an empty batch."""
        rows, _ = split_rejected(pa.RecordBatch.from_pylist([], schema=self.source.schema()))
        return self.transform(without_raw(rows)).schema

    def rows(self, slices: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read all `slices`, one after the other."""
        made = self.schema() if self.kept else None
        for batch in slices:
            for packed in batch.column(0).to_pylist():
                reach(StepId.SOURCE_READ, Moment.BEFORE)
                for batch in self.source.read(unpack(packed)):
                    rows, records = split_rejected(batch)
                    if records is not None:
                        yield only_rejected(records)
                    if rows is not None and made is not None:
                        yield from isolated(self.transform, rows, made)
                    elif rows is not None:
                        yield self.transform(rows)
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

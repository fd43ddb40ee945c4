"""Any delivered source as a Spark reader, for streams and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from delivered.checkpoint.history import Samples
from delivered.checkpoint.sidecar import (
    Landmarks,
    PlainDriver,
    RemovedParts,
    first_of_stream,
    put_task_file,
    stream_driver,
)
from delivered.contract.source import Slice, Source, SourceDriver
from delivered.engine.transform import encode, pack_rejected, pack_slice, source_schema
from delivered.model.limits import LANDMARK_EVERY_S, LANDMARK_IDLE_EVERY_S
from delivered.model.patience import in_query
from delivered.model.step import Moment, StepId, reach
from delivered.spark.internals import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    asked_without_start,
)
from delivered.spark.writers import arm, running_batch, running_task

if TYPE_CHECKING:
    import pyarrow as pa

    from delivered.pipeline.spec import Reading


T = TypeVar("T")


class SlicePartition(InputPartition):
    """Carries a slice to its task."""

    def __init__(self, piece: Slice) -> None:
        self.piece = piece


def read_slice(
    read: Callable[[Slice], Iterator[T]], partition: InputPartition, pipeline: str | None = None
) -> Iterator[T]:
    """One task's part of a batch."""
    arm(pipeline)
    in_query()
    if not isinstance(partition, SlicePartition):
        return  # PySpark runs one task without a partition for an empty batch read
    reach(StepId.SOURCE_READ, Moment.BEFORE)
    yield from read(partition.piece)
    reach(StepId.SOURCE_READ, Moment.AFTER)


@asked_without_start
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one process per query on the driver; tasks get copies without a connection."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self._source = source
        self._reading = reading
        self._opened: SourceDriver | None = None
        self._logged: dict[str, Any] | None = None
        self._landmarks = Landmarks(reading.checkpoint, reading.source)
        self._removed = RemovedParts(reading.checkpoint, reading.source)
        self._samples = Samples(reading.checkpoint, reading.source)
        self._start: dict[str, Any] | None = None
        self._ends = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_logged": None}

    @property
    def _driver(self) -> SourceDriver:
        arm(self._reading.pipeline)
        if self._opened is None:
            self._opened = stream_driver(self._source, self._reading.checkpoint, name=self._reading.source)
        return self._opened

    @property
    def query_checkpoint(self) -> str | None:
        """None: unknown."""
        return self._reading.checkpoint

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        self._logged = first_of_stream(self._driver, self._reading.checkpoint, self._reading.source)
        return self._logged

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._source.rows_per_batch_max
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        in_query()
        self._start = start
        if self._reading.ends and not self._ends:
            self.prepareForTriggerAvailableNow()
        if self._reading.drain is not None and Path(self._reading.drain.path).exists():
            end = start
        else:
            self._driver.check_offsets(start)
            self._landmarks.check(self._driver, start)  # first: a driver may acknowledge the start again
            end = self._driver.latest(start, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
            self._removed.check(self._driver, start, end)
            idle_s = 0.0 if self._ends else LANDMARK_IDLE_EVERY_S
            self._landmarks.keep(self._driver, start, idle_s if end == start else LANDMARK_EVERY_S)
        if self._reading.until is not None:
            sooner = self._source.earlier(end, self._reading.until)
            if isinstance(self._driver, PlainDriver):
                self._driver.bounded(end, sooner, start)
            return sooner
        # Spark calls `commit` for a batch only after it has planned the next one, which may be never. But it asks for
        # offsets only after it has logged the batch that ended at `start`, also at the end of an available-now run.
        self._acknowledge(start)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        newest = self._driver.newest()
        if newest is not None and self._start is not None:
            self._samples.keep(self._start, newest)
        return newest

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._ends = True
        self._driver.freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        in_query()
        self._driver.check_offsets(end)
        pieces = [SlicePartition(s) for s in self._driver.slices(start, end)]
        self._landmarks.check(self._driver, end)
        return pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if self._reading.direct and isinstance(partition, SlicePartition):
            return iter([pack_slice(partition.piece)])
        if self._reading.rejects and self._source.capability().decodes:
            return self._rejecting(partition)
        return read_slice(self._source.read, partition, self._reading.pipeline)

    def _rejecting(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows; records that never became one are stored for the end of the batch."""
        reading, source = self._reading, self._source
        schema = source_schema(source, raw=reading.raw)
        for number, rows in enumerate(read_slice(source.read_rows, partition, reading.pipeline)):
            if rows.rejected:
                running = int(running_batch(running_task())[1] or 0)
                own = f"{reading.source}-{_digest(partition)}-{number:06}"
                put_task_file(str(reading.checkpoint), running, reading.start or "", own, pack_rejected(rows.rejected))
            yield encode(rows, schema)

    def commit(self, end: dict[str, Any]) -> None:
        if self._reading.until is None:
            self._acknowledge(end)

    def _acknowledge(self, logged: dict[str, Any]) -> None:
        """Acknowledge each position once. No batch ends at the start of the stream."""
        if logged != self._logged:
            self._driver.acknowledge(logged)
            self._logged = logged

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _digest(partition: InputPartition) -> str:
    piece = partition.piece if isinstance(partition, SlicePartition) else None
    return hashlib.blake2b(repr(piece).encode(), digest_size=8).hexdigest()


class BatchReader(DataSourceReader):
    """Reads from `startingOffsets` to `endingOffsets`, once."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def partitions(self) -> Sequence[InputPartition]:
        driver = self._source.driver()
        try:
            start, end = driver.batch()
            return [SlicePartition(s) for s in driver.slices(start, end)]
        finally:
            driver.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self._source.read, partition)

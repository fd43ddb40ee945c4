"""Any source of ours as a Spark reader, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from delivered.contract.powers import HasOffsetMetadata
from delivered.contract.source import Slice, Source, SourceDriver
from delivered.engine.direct import pack
from delivered.model.patience import in_query
from delivered.model.step import Moment, StepId, reach
from delivered.spark import first_offsets
from delivered.spark.crash import arm
from delivered.spark.drain import is_drained
from delivered.spark.handover import SourceFacts, Teller
from delivered.spark.offset_metadata import PlainDriver, stream_driver

if TYPE_CHECKING:
    import pyarrow as pa


class SlicePartition(InputPartition):
    """Carries a slice to its task."""

    def __init__(self, piece: Slice) -> None:
        self.piece = piece


def read_slice(source: Source, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """One task's part of a batch."""
    arm()
    in_query()
    if not isinstance(partition, SlicePartition):
        return  # PySpark makes a task without a partition of ours where a batch read has nothing to read
    reach(StepId.SOURCE_READ, Moment.BEFORE)
    yield from source.read(partition.piece)
    reach(StepId.SOURCE_READ, Moment.AFTER)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives on the driver in one process per query; copies without a connection go to the tasks."""

    def __init__(
        self,
        source: Source,
        direct: bool,
        drain: str | None = None,
        driver_id: str = "",
        checkpoint: str | None = None,
    ) -> None:
        self._source = source
        self._direct = direct
        self._drain = drain
        self._checkpoint = checkpoint
        self._opened: SourceDriver | None = None
        self._initial: dict[str, Any] | None = None
        self._logged: dict[str, Any] | None = None
        self._teller = Teller(driver_id)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_initial": None, "_logged": None}

    @property
    def _driver(self) -> SourceDriver:
        arm()
        if self._opened is None:
            self._opened = stream_driver(self._source, self._checkpoint)
        return self._opened

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        initial, began = self._driver.initial(), None
        if self._checkpoint is not None:
            # Batch 0 runs again: where it begins was settled the first time, whatever "latest" is by now.
            began = first_offsets.kept(self._checkpoint)
        metadata = self._source.offset_metadata if isinstance(self._source, HasOffsetMetadata) else frozenset()
        self._initial = initial if began is None else {k: v for k, v in began.items() if k not in metadata}
        self._logged = self._initial
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._source.rows_per_batch_max
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        in_query()
        if is_drained(self._drain):
            end = start
        else:
            end = self._driver.latest(start, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        # Spark calls `commit` of a batch when it has planned the next one, which may be never. It asks for offsets
        # only after it has logged the batch that ended at `start`; so it does at the end of an available-now run.
        self._acknowledge(start)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._driver.newest()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._driver.freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        in_query()
        slices = self._driver.slices(start, end)
        self._tell_sink(start, end)
        return [SlicePartition(s) for s in slices]

    def _tell_sink(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        begins = start if start == self._initial else None
        if self._checkpoint is None and isinstance(self._driver, PlainDriver):
            self._teller.tell(end, replace(self._driver.facts(end), start=begins))
        elif begins is not None:
            self._teller.tell(end, SourceFacts(begins, self._checkpoint is None))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if self._direct and isinstance(partition, SlicePartition):
            return iter([pack(partition.piece)])
        return read_slice(self._source, partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._acknowledge(end)

    def _acknowledge(self, logged: dict[str, Any]) -> None:
        """Once for each place. Where the stream begins, no batch has ended."""
        if logged != self._logged:
            self._driver.acknowledge(logged)
            self._logged = logged

    def stop(self) -> None:
        self._teller.stop()
        if self._opened is not None:
            self._opened.close()
            self._opened = None


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
        return read_slice(self._source, partition)

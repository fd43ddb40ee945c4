"""A query run again in the batches that it ran in: the same source ranges, through Spark's own state, into files.

Where a batch ended decides what an operator with state gives: when a watermark moved, which record was late, which of
two copies came first. The ledger has each batch's source offsets. A streaming query with a temporary checkpoint reads
exactly these, batch by batch. What it does not repeat: the time of a batch.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyarrow import fs
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from delivered.audit.request import Positions
from delivered.checkpoint import batch_metadata, open_folder
from delivered.checkpoint.sidecar import stream_driver
from delivered.contract.source import Offsets, Slice, Source, SourceDriver
from delivered.model.errors import InvariantBroken
from delivered.spark.internals import (
    ReadAllAvailable,
    ReadLimit,
    Setting,
    SupportsTriggerAvailableNow,
    active,
    asked_without_start,
    from_arrow,
    start_available_now,
)
from delivered.spark.settings import with_setting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH, AT = "__delivered_batch", "__delivered_at"
_NOT_KEPT = (
    Setting.SHUFFLE_PARTITIONS,  # changes no row
    Setting.SOURCES_BY_NAME,  # the script's sources have no names
    Setting.OFFSET_LOG_FORMAT,
)
_PROGRESS_S = 2


@dataclass(frozen=True)
class Script:
    """The batches to run again.

    Attributes:
        sources: by name.
        checkpoint: of the query that ran.
        start: of the first batch.
        ends: offsets of the sources after each batch.
        batches: their numbers in the checkpoint.
        several_watermarks: a single one is the same after a restart.
        rejects: as in the audit's request.
    """

    sources: Mapping[str, Source]
    checkpoint: str
    start: Positions
    ends: Sequence[Positions]
    batches: Sequence[int]
    output_mode: str
    several_watermarks: bool
    rejects: bool


class _Slice(InputPartition):
    def __init__(self, piece: Slice) -> None:
        self.piece = piece


@asked_without_start
class ScriptReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads from `start` to each of `ends`, one per batch. Spark asks once per batch, in one process per query."""

    query_checkpoint = None  # it never restarts

    def __init__(
        self, source: Source, rejects: bool, name: str, checkpoint: str, start: Offsets, ends: Sequence[Offsets]
    ) -> None:
        self._source, self._rejects, self._name, self._checkpoint = source, rejects, name, checkpoint
        self._start, self._ends = start, list(ends)
        self._at = 0
        self._opened: SourceDriver | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_ends": []}

    def initialOffset(self) -> Offsets:  # noqa: N802
        return self._start

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def reportLatestOffset(self) -> Offsets | None:  # noqa: N802
        return None

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802, ARG002
        expected = self._ends[self._at - 1] if self._at else self._start
        if start != expected:
            raise InvariantBroken("REPLAY_OFFSETS", position=self._at, start=start, expected=expected)
        if self._at == len(self._ends):
            return start
        self._at += 1
        return self._ends[self._at - 1]

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        if start == end:
            return []
        if self._opened is None:
            self._opened = stream_driver(self._source, self._checkpoint, writes=False, name=self._name)
        return [_Slice(s) for s in self._opened.slices(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, _Slice):
            yield from (self._source.read_good if self._rejects else self._source.read)(partition.piece)

    def commit(self, end: Offsets) -> None:
        pass

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


class ScriptSource(DataSource):
    """Spark creates it from its class alone, which holds the arguments of its reader."""

    called: ClassVar[str] = ""
    source_schema: ClassVar[StructType]
    arguments: ClassVar[tuple[Source, bool, str, str, Offsets, Sequence[Offsets]]]

    @classmethod
    def name(cls) -> str:
        return cls.called

    def schema(self) -> StructType:
        return self.source_schema

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002
        return ScriptReader(*self.arguments)


def _stream(spark: SparkSession, script: Script, name: str) -> DataFrame:
    fixed = script.sources[name].planned()
    called = f"delivered_replay_{uuid.uuid4().hex}"
    attributes = {
        "called": called,
        "source_schema": from_arrow(fixed.schema()),
        "arguments": (
            fixed,
            script.rejects,
            name,
            script.checkpoint,
            script.start[name],
            [e[name] for e in script.ends],
        ),
    }
    # Not importable by name, so that Spark pickles the class by value.
    spark.dataSource.register(type("Replay", (ScriptSource,), attributes))
    return spark.readStream.format(called).load()


@contextmanager
def replay(
    spark: SparkSession,
    transform: Callable[[Mapping[str, DataFrame]], DataFrame],
    script: Script,
    say: Callable[[str], None],
) -> Iterator[tuple[DataFrame, str]]:
    """The rows that the batches delivered, each with its batch's place in the script, as `BATCH`, and its own among
    those of its task, as `AT`.

    Yields:
        the rows, and why they may not be what the batches delivered; empty: they are. Of output mode complete, the rows
        of the last batch alone.
    """
    count = len(script.ends)
    with ExitStack() as context:
        folder = context.enter_context(_folder(spark, script.checkpoint))
        rows = f"{folder}/rows"
        context.enter_context(active(spark))
        frames = {name: _stream(spark, script, name) for name in script.sources}
        for key, value in _settings(script).items():
            context.enter_context(with_setting(spark, key, value))
        context.enter_context(with_setting(spark, Setting.BATCHES_RETAINED, str(count + 2)))
        frame = transform(frames)

        def keep(df: DataFrame, number: int) -> None:
            if number == count - 1 or (number < count and script.output_mode != "complete"):
                place = {BATCH: F.lit(number), AT: F.monotonically_increasing_id()}
                df.withColumns(place).write.mode("append").parquet(rows)
            else:
                df.write.format("noop").mode("overwrite").save()  # its state is needed

        writer = frame.writeStream.outputMode(script.output_mode).foreachBatch(keep)
        query = start_available_now(writer.option("checkpointLocation", f"{folder}/checkpoint"))
        try:
            while not query.awaitTermination(_PROGRESS_S):
                if (done := query.lastProgress) is not None:
                    say(f"replaying: {min(done.batchId + 1, count):,} of {count:,} batches")
        finally:
            query.stop()
        places = [StructField(BATCH, IntegerType()), StructField(AT, LongType())]
        schema = StructType([*frame.schema.fields, *places])
        differs = _differs(script, f"{folder}/checkpoint")
        yield spark.read.schema(schema).parquet(rows), differs


def _settings(script: Script) -> dict[str, str]:
    """Spark logs with a batch what its state depends on."""
    for batch in script.batches:
        if (logged := batch_metadata(script.checkpoint, batch)) is not None:
            return {k: v for k, v in logged.get("conf", {}).items() if k not in _NOT_KEPT}
    return {}


def _differs(script: Script, again: str) -> str:
    """Why the replay is not what ran, by the watermarks that Spark logged; empty: no difference is known."""
    missing = 0
    for number, batch in enumerate(script.batches):
        ran, now = batch_metadata(script.checkpoint, batch), batch_metadata(again, number)
        if now is None:
            return f"the replay ended before batch {batch}: the query ran batches without input for another reason"
        if ran is not None and ran["batchWatermarkMs"] != now["batchWatermarkMs"]:
            return (
                f"batch {batch} ran with the watermark {ran['batchWatermarkMs']} ms, and its replay with "
                f"{now['batchWatermarkMs']} ms: a restart of the query changes it if there are several"
            )
        missing += ran is None and now["batchWatermarkMs"] > 0
    if missing and script.several_watermarks:
        return (
            f"Spark no longer keeps the watermarks of {missing:,} of {len(script.batches):,} batches: with several, a "
            "restart of the query may have changed them"
        )
    return ""


@contextmanager
def _folder(spark: SparkSession, checkpoint: str) -> Iterator[str]:
    """For state and rows; removed afterwards. On a cluster next to the checkpoint, which every executor reaches."""
    if str(spark.conf.get("spark.master", "")).startswith("local"):
        with tempfile.TemporaryDirectory(prefix="delivered-replay-", ignore_cleanup_errors=True) as folder:
            yield f"file://{folder}"
        return
    location = f"{checkpoint.rstrip('/')}/delivered/replay-{uuid.uuid4().hex}"
    try:
        yield location
    finally:
        filesystem, path = open_folder(location)
        if filesystem.get_file_info(path).type is fs.FileType.Directory:
            filesystem.delete_dir(path)

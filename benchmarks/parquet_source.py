"""Parquet files as a source of the contract, so that a direct stream can be measured with typed columns."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from delivered.contract.source import Offsets, Slice, Source, SourceDriver
from delivered.model.capability import SourceCapability

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery
    from pyspark.sql.types import StructType

FORMAT = "delivered_bench_parquet"


@dataclass(frozen=True)
class ParquetSource(Source):
    """Every file of a folder and of the folders in it, in `shards` slices. Offsets are `{"files": n}`."""

    folder: str
    shards: int

    def capability(self) -> SourceCapability:
        return SourceCapability("parquet", replayable=True, local=True)

    def files(self) -> list[str]:
        return sorted(str(p) for pattern in ("*.parquet", "*/*.parquet") for p in Path(self.folder).glob(pattern))

    def schema(self) -> pa.Schema:
        return pq.read_schema(self.files()[0])

    def driver(self) -> ParquetDriver:
        return ParquetDriver(self)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        for path in piece.data:
            yield from pq.ParquetFile(path).iter_batches(32_768)


class ParquetDriver(SourceDriver):
    def __init__(self, source: ParquetSource) -> None:
        self._source = source

    def initial(self) -> Offsets:
        return {"files": 0}

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:  # noqa: ARG002
        return {"files": len(self._source.files())}

    def newest(self) -> Offsets | None:
        return None

    def freeze(self) -> None:
        """A folder of files is renamed into its place as a whole."""

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        files, shards = self._source.files()[start["files"] : end["files"]], self._source.shards
        return [Slice(files[i::shards]) for i in range(shards) if files[i::shards]]

    def batch(self) -> tuple[Offsets, Offsets]:
        return self.initial(), self.latest(self.initial(), None)


def register(spark: SparkSession) -> None:
    """Make the source known to a session."""
    from delivered.spark.formats import DeliveredDataSource

    class BenchParquet(DeliveredDataSource):
        @classmethod
        def name(cls) -> str:
            return FORMAT

        def _source(self, schema: StructType | None = None) -> Source:  # noqa: ARG002
            options: dict[str, Any] = dict(self.options)
            return ParquetSource(options["path"], int(options["shards"]))

    spark.dataSource.register(BenchParquet)


def direct_stream(
    spark: SparkSession, folder: str, shards: int, guarantee: str, system: str, **options: str
) -> DataStreamWriter:
    """A stream of the files into a sink, as `Pipeline` makes it where no operation of Spark's stands between them."""
    from pyspark.cloudpickle import dumps

    from delivered.engine.transform import ArrowTransform, Direct
    from delivered.model.capability import Guarantee
    from delivered.pipeline.spec import OPTION, Envelope, PipelineSpec, Reading, SinkSpec

    checkpoint = tempfile.mkdtemp(prefix="bench-")
    spec = PipelineSpec(
        pipeline=uuid.uuid4().hex,
        guarantee=Guarantee.parse(guarantee),
        sinks=(SinkSpec(system, options),),
        checkpoint=checkpoint,
        direct=dumps(Direct(ParquetSource(folder, shards), ArrowTransform())),
        start=uuid.uuid4().hex,
    )
    reader = spark.readStream.format(FORMAT).option("path", folder).option("shards", shards)
    writer = (
        reader.option(OPTION, Envelope(Reading(checkpoint, direct=True)).encode())
        .load()
        .writeStream.format(f"delivered_{system}")
    )
    return writer.option(OPTION, spec.to_option()).option("checkpointLocation", checkpoint)


class Running:
    """A query that runs, and is handed folders of files: what is measured is the batch alone.

    Args:
        begin: (folder that the query reads, where it writes to) -> the query, started.
    """

    def __init__(self, begin: Callable[[str, str], StreamingQuery]) -> None:
        self._begin = begin
        self._incoming = Path(tempfile.mkdtemp(prefix="bench-"))
        self._given = 0
        self._query: StreamingQuery | None = None

    def __call__(self, folder: Path, into: str) -> None:
        """Hand over what lies in the folder; return when it is decided and logged."""
        draft = self._incoming / "_draft"
        draft.mkdir()
        for file in folder.glob("*.parquet"):
            (draft / file.name).hardlink_to(file)
        draft.rename(self._incoming / f"{self._given:03d}")
        self._given += 1
        if self._query is None:
            self._query = self._begin(str(self._incoming), into)
        self._query.processAllAvailable()

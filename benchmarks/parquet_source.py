"""Parquet files as a source of the contract, so that a direct stream can be measured with typed columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from delivered.contract import Finding, Offsets, Slice, Source
from delivered.model.capability import SourceCapability

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT = "delivered_bench_parquet"


@dataclass(frozen=True)
class ParquetSource:
    """Every file of a folder, in `shards` slices. Offsets are `{"files": n}`."""

    folder: str
    shards: int

    @property
    def rows_per_batch_max(self) -> int | None:
        return None

    def capability(self) -> SourceCapability:
        return SourceCapability("parquet", replayable=True, local=True)

    def preflight(self) -> Sequence[Finding]:
        return []

    def files(self) -> list[str]:
        return sorted(str(p) for p in Path(self.folder).glob("*.parquet"))

    def schema(self) -> pa.Schema:
        return pq.read_schema(self.files()[0])

    def driver(self) -> ParquetDriver:
        return ParquetDriver(self)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        for path in piece.data:
            yield from pq.ParquetFile(path).iter_batches(32_768)


class ParquetDriver:
    def __init__(self, source: ParquetSource) -> None:
        self._source = source

    def initial(self) -> Offsets:
        return {"files": 0}

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:  # noqa: ARG002
        return {"files": len(self._source.files())}

    def newest(self) -> Offsets | None:
        return None

    def freeze(self) -> None:
        """Nobody adds files."""

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        files, shards = self._source.files()[start["files"] : end["files"]], self._source.shards
        return [Slice(files[i::shards]) for i in range(shards) if files[i::shards]]

    def batch(self) -> tuple[Offsets, Offsets]:
        return self.initial(), self.latest(self.initial(), None)

    def acknowledge(self, end: Offsets) -> None:
        """Files need no telling."""

    def close(self) -> None:
        """Nothing is held."""


def register(spark: SparkSession) -> None:
    """Make the source known to a session."""
    from delivered.spark.formats import DeliveredDataSource

    class BenchParquet(DeliveredDataSource):
        @classmethod
        def name(cls) -> str:
            return FORMAT

        def _source(self) -> Source:
            options: dict[str, Any] = dict(self.options)
            return ParquetSource(options["path"], int(options["shards"]))

    spark.dataSource.register(BenchParquet)

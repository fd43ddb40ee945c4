"""One Spark data source per connector: `delivered_kafka`, `delivered_sqlite`, ..."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import BooleanType, StructField, StructType

from delivered.contract.powers import ChecksGuarantee, planned
from delivered.contract.sink import Sink, SinkGroup
from delivered.contract.source import Source
from delivered.engine.direct import SLICE_SCHEMA
from delivered.model.errors import Refused
from delivered.pipeline.registry import connectors, find_sink, find_source
from delivered.spark import tables
from delivered.spark.batch_writer import BatchWriter
from delivered.spark.direct import is_direct, read_direct, without_direct
from delivered.spark.drain import drain_of, without_drain
from delivered.spark.driver import Driver
from delivered.spark.hooks import install
from delivered.spark.offset_metadata import location_of, without_location
from delivered.spark.readers import BatchReader, StreamReader
from delivered.spark.session import active, make_active
from delivered.spark.settings import PipelineSettings, split_options
from delivered.spark.sinks import FORMAT as SINKS_FORMAT
from delivered.spark.sinks import unpacked
from delivered.spark.start_check import OPTION, check_start
from delivered.spark.stream_writer import StreamWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class DeliveredDataSource(DataSource):
    """Base of all formats. `register` makes one class per connector and session from it."""

    system: ClassVar[str] = ""
    driver: ClassVar[Driver] = Driver("")
    _planned: Source | None = None

    @classmethod
    def name(cls) -> str:
        return f"delivered_{cls.system}"

    def _source(self, schema: StructType | None = None) -> Source:
        options = without_location(without_drain(without_direct(self.options)))
        return find_source(self.system, options if schema is None else tables.for_read(schema, options, self.system))

    def _planned_source(self, schema: StructType | None = None) -> Source:
        """The one that told the schema: Spark hands this object on when it has asked."""
        if self._planned is None:
            self._planned = planned(self._source(schema))
        return self._planned

    def _table(self, options: dict[str, str]) -> StructType:
        """The columns of a table in Spark's catalog: those that its source gives, or its sink takes."""
        if tables.is_sink(options):
            _, of_sink = split_options(options)
            sink = find_sink(self.system, of_sink)
            rows = sink.records(pa.RecordBatch.from_pylist([], schema=sink.scan().schema())).schema
        else:
            rows = planned(find_source(self.system, options)).schema()
        return tables.with_options(from_arrow_schema(rows), options)

    @property
    def _direct(self) -> bool:
        return is_direct(self.options)

    def _opened(self, options: dict[str, str]) -> Sink | SinkGroup:
        return find_sink(self.system, options)

    def _sink(
        self, given: Mapping[str, str], schema: pa.Schema, overwrite: bool
    ) -> tuple[Sink | SinkGroup, dict[str, str], PipelineSettings]:
        settings, options = split_options(given)
        if overwrite:
            raise Refused(
                "OVERWRITE",
                f"{self.name()} appends; it does not replace what the sink holds.",
                next_step='use outputMode("append"), or mode("append") of df.write',
            )
        sink = self._opened(options)
        if isinstance(sink, ChecksGuarantee):
            sink.check_guarantee(settings.guarantee)
        sink.check_schema(schema)
        return sink, options, settings

    def schema(self) -> StructType:
        if OPTION in self.options:
            check_start(self.system, self.options, self._sink)
            return StructType([StructField("checked", BooleanType())])
        table = tables.created(self.options)
        if table is not None:
            return self._table(table)
        found = SLICE_SCHEMA if self._direct else self._planned_source().schema()
        schema: StructType = from_arrow_schema(found)
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._planned_source(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return StreamReader(
            self._source() if self._direct else self._planned_source(schema),
            self._direct,
            drain_of(self.options),
            self.driver.id,
            location_of(self.options),
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        rows = to_arrow_schema(schema, timezone="UTC")
        given = tables.for_write(schema, without_direct(self.options), self.system)
        sink, options, settings = self._sink(given, rows, overwrite)
        if isinstance(sink, SinkGroup):
            raise Refused(
                "BATCH_SEVERAL",
                f"df.write with {self.name()} is not offered: several sinks share the batches of a stream.",
                next_step="use delivered.Pipeline with several sinks",
            )
        return BatchWriter(sink, options, settings, self.driver, rows)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        direct = read_direct(self.options, schema)
        rows = direct.schema() if direct else to_arrow_schema(schema, timezone="UTC")
        sink, options, settings = self._sink(without_direct(self.options), rows, overwrite)
        return StreamWriter(sink, options, settings, self.driver, rows, direct)


_registered: WeakKeyDictionary[SparkSession, Driver] = WeakKeyDictionary()
"""What a session's classes carry."""


def is_registered(spark: SparkSession) -> bool:
    """Whether this session knows the formats: registering again makes Spark warn, once for each."""
    return spark in _registered


class SeveralSinks(DeliveredDataSource):
    """The internal format of a pipeline with several sinks."""

    def _opened(self, options: dict[str, str]) -> Sink | SinkGroup:
        return unpacked(options)


def register(spark: SparkSession) -> None:
    """Make every format of this package known to a session, and the session active in this thread. May be called again.

    Every session that this one makes by `newSession` knows them too, and so does every thread. Errors of these formats
    begin with their code from here on, and a query that cannot be started is refused by `start()` (docs/spark.md).

    Args:
        spark: a classic session or one of Spark Connect.

    The registered classes carry an id of this driver, new for each call: it is how the driver's processes know each
    other as one owner of a ledger, and how a second driver on the same checkpoint is told apart.
    """
    _register(spark, None)
    install(spark, _register)
    make_active(spark)


def _register(spark: SparkSession, parent: SparkSession | None) -> None:
    """
    Args:
        parent: a session of the same driver.
    """
    driver = (_registered.get(parent) if parent is not None else None) or Driver.of(spark)
    with active(spark):  # where Spark looks whether a format is there already
        for name in connectors():
            attributes: dict[str, Any] = {"system": name, "driver": driver}
            # Not importable by name, so that Spark pickles the class by value, id included.
            spark.dataSource.register(type(f"Delivered_{name}", (DeliveredDataSource,), attributes))
        several: dict[str, Any] = {"system": SINKS_FORMAT, "driver": driver}
        spark.dataSource.register(type(f"Delivered_{SINKS_FORMAT}", (SeveralSinks,), several))
    _registered[spark] = driver

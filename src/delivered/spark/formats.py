"""One Spark data source per connector: `delivered_kafka`, `delivered_sqlite`, ..."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
from pyspark.cloudpickle import loads
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import BooleanType, StructField, StructType

from delivered.contract.source import Source
from delivered.engine.in_band import source_schema, without_rejected
from delivered.engine.sinks import Sinks
from delivered.engine.transform import SLICE_COLUMN, SLICE_SCHEMA, Direct
from delivered.model.errors import Refused, UsageError
from delivered.model.work import DriverAddress, Owner
from delivered.pipeline.registry import PREFIX, find_source
from delivered.pipeline.spec import PipelineSpec, Reading, is_start_check
from delivered.spark import tables
from delivered.spark.readers import BatchReader, StreamReader
from delivered.spark.writers import BatchWriter, ForeachWriter, StreamWriter


class DeliveredDataSource(DataSource):
    """Base of all formats. `register` derives one class per connector and session."""

    system: ClassVar[str] = ""
    owner: ClassVar[Owner] = Owner("")
    driver: ClassVar[DriverAddress] = DriverAddress()
    _planned: Source | None = None

    @classmethod
    def name(cls) -> str:
        return f"delivered_{cls.system}"

    def schema(self) -> StructType:
        if is_start_check(self.options):
            self._check_start()
            return StructType([StructField("checked", BooleanType())])
        table = tables.created(self.options)
        if table is not None:
            return self._table(table)
        reading, found = self._reading, SLICE_SCHEMA
        if not reading.direct:
            found = source_schema(self._planned_source(), raw=reading.raw)
        schema: StructType = from_arrow_schema(found)
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._planned_source(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        reading = self._reading
        return StreamReader(self._source() if reading.direct else self._planned_source(schema), reading)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        rows = _rows(schema)
        options = tables.for_write(schema, self.options, self.system)
        spec = PipelineSpec.parse(self.system, options, self.owner, self.driver)
        sinks = self._sinks(spec, rows, overwrite)
        if spec.batch is not None:
            return ForeachWriter(spec, sinks, rows)
        if any(m.sink.capability().write.complete for m in sinks.members):
            raise Refused(
                "MODE_COMPLETE",
                f"df.write with {self.name()} appends or upserts; complete is an output mode of streaming queries.",
                next_step='write delivered.Pipeline(output_mode="complete", ...), or delivered.write_batch',
            )
        return BatchWriter(spec, sinks, rows)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        spec = PipelineSpec.parse(self.system, self.options, self.owner, self.driver)
        direct = _direct(spec, schema)
        rows = direct.schema() if direct else _rows(schema)
        return StreamWriter(spec, self._sinks(spec, rows, overwrite), rows, direct)

    @property
    def _reading(self) -> Reading:
        return Reading.parse(self.options)[0]

    def _source(self, schema: StructType | None = None) -> Source:
        options = Reading.parse(self.options)[1]
        return find_source(self.system, options if schema is None else tables.for_read(schema, options, self.system))

    def _planned_source(self, schema: StructType | None = None) -> Source:
        """The source whose schema Spark was given: it reuses this object afterwards."""
        if self._planned is None:
            self._planned = self._source(schema).planned()
        return self._planned

    def _sinks(self, spec: PipelineSpec, rows: pa.Schema, overwrite: bool) -> Sinks:
        if overwrite and spec.checkpoint is not None:
            raise _appends_only(self.name(), "complete")
        if overwrite:
            raise Refused(
                "OVERWRITE",
                f"{self.name()} does not overwrite; it only appends.",
                next_step='use mode("append") with df.write',
            )
        sinks = spec.open()
        for member in sinks.members:
            member.sink.check_guarantee(spec.guarantee)
        sinks.check_schema(rows)
        return sinks

    def _table(self, options: dict[str, str]) -> StructType:
        """The columns of a table in Spark's catalog: those of its source, or those that its sink accepts."""
        if tables.is_sink(options):
            sink = PipelineSpec.parse(self.system, options).sinks[0].open()
            rows = sink.records(pa.RecordBatch.from_pylist([], schema=sink.scan().schema())).schema
        else:
            rows = find_source(self.system, options).planned().schema()
        return tables.with_options(from_arrow_schema(rows), options)

    def _check_start(self) -> None:
        """Called by hooks.py through `schema`, the only part of a data source that Spark runs eagerly, in classic
        sessions and over Spark Connect."""
        from delivered.pipeline.facts import (
            check_start,
        )  # a third of this module's import; processes of a query skip it

        spec = PipelineSpec.parse(self.system, self.options, self.owner, self.driver)
        if spec.check is None:
            return
        if spec.check.output_mode != "append":
            raise _appends_only(self.name(), spec.check.output_mode)
        rows = to_arrow_schema(StructType.fromJson(dict(spec.check.columns)), timezone="UTC")
        check_start(spec, self._sinks(spec, rows, overwrite=False))


def _appends_only(name: str, mode: str) -> Refused:
    return Refused(
        "OUTPUT_MODE",
        f"The query's output mode is {mode}, but Spark only lets Python sinks, such as {name}, append.",
        next_step=f'write delivered.Pipeline(output_mode="{mode}", ...); or, in the Spark API, keep '
        f'outputMode("{mode}") and write with .foreachBatch(lambda df, batch_id: delivered.write_batch(df, batch_id, '
        f'sink=delivered.endpoint("{name.removeprefix(PREFIX)}", ...), guarantee="exactly_once", pipeline="..."))',
    )


def _rows(schema: StructType) -> pa.Schema:
    """Columns for the sinks, without that of what the transform rejected."""
    return without_rejected(to_arrow_schema(schema, timezone="UTC"))


def _direct(spec: PipelineSpec, schema: StructType) -> Direct | None:
    """What tasks need to read the source themselves, if the stream carries slices.

    Raises:
        UsageError: only one end of the stream is direct.
    """
    if (spec.direct is not None) != (schema.names == [SLICE_COLUMN]):
        raise UsageError(
            "DIRECT_HALF",
            f"The stream's columns are {schema.names}, but the sink is {'' if spec.direct else 'not '}configured to "
            "read slices.",
            next_step="build direct streams with delivered.Pipeline, and do not transform them as a DataFrame",
        )
    direct: Direct | None = loads(spec.direct) if spec.direct is not None else None
    return direct

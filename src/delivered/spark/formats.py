"""One Spark data source per connector, `delivered_kafka`, `delivered_sqlite`, ..., and SQL tables over them, whose
options are in the metadata of their first column (`pipeline/spec.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import BooleanType, StructField, StructType

from delivered.contract.source import Source
from delivered.engine import Sinks
from delivered.engine.transform import SLICE_COLUMN, SLICE_SCHEMA, Direct, decoder, source_schema, without_rejected
from delivered.model.errors import Refused, UsageError
from delivered.model.rows import Rows
from delivered.pipeline.registry import PREFIX, find_source
from delivered.pipeline.spec import (
    Envelope,
    OrderCheck,
    PipelineSpec,
    Reading,
    Sender,
    StartCheck,
    create_table_options,
    is_sink_table,
    read_options,
    table_metadata,
    write_options,
)
from delivered.spark.internals import from_arrow, loads, to_arrow
from delivered.spark.readers import BatchReader, StreamReader
from delivered.spark.writers import BatchWriter, StreamWriter


class DeliveredDataSource(DataSource):
    """Base of all formats. `register` derives one class per connector and session."""

    system: ClassVar[str] = ""
    sender: ClassVar[Sender | None] = None
    _planned: Source | None = None

    @classmethod
    def name(cls) -> str:
        return f"delivered_{cls.system}"

    def schema(self) -> StructType:
        question = Envelope.decode(self.options)
        if isinstance(question, StartCheck | OrderCheck):
            self._check_start(question)
            return StructType([StructField("checked", BooleanType())])
        table = create_table_options(self.options)
        if table is not None:
            return self._table(table)
        reading, columns = self._reading, SLICE_SCHEMA
        if not reading.direct:
            columns = source_schema(self._planned_source(), raw=reading.raw)
        schema: StructType = from_arrow(columns)
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._planned_source(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        reading = self._reading
        return StreamReader(self._source() if reading.direct else self._planned_source(schema), reading)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        rows = without_rejected(to_arrow(schema))
        options = write_options(_metadata(schema), self.options, self.system)
        spec = PipelineSpec.parse(self.system, options, self.sender)
        if overwrite:
            raise Refused("OVERWRITE", name=self.name())
        sinks = spec.checked(rows)
        if any(m.sink.capability().write.complete for m in sinks.members):
            raise Refused("MODE_COMPLETE.BATCH_WRITE", name=self.name())
        return BatchWriter(spec, sinks, rows)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        if overwrite:
            raise _appends_only(self.name(), "complete")
        return StreamWriter(*_stream_write(self.system, tuple(sorted(self.options.items())), self.sender, schema))

    @property
    def _reading(self) -> Reading:
        return Reading.parse(self.options)[0]

    def _source(self, schema: StructType | None = None) -> Source:
        options = Reading.parse(self.options)[1]
        if schema is not None:
            options = read_options(_metadata(schema), options, self.system)
        return find_source(self.system, options)

    def _planned_source(self, schema: StructType | None = None) -> Source:
        """The source whose schema Spark was given: it reuses this object afterwards."""
        if self._planned is None:
            self._planned = self._source(schema).planned()
        return self._planned

    def _table(self, options: dict[str, str]) -> StructType:
        """The columns of a table in Spark's catalog: those of its source, or those that its sink accepts."""
        if is_sink_table(options):
            sink = PipelineSpec.parse(self.system, options).sinks[0].open()
            rows = sink.records(pa.RecordBatch.from_pylist([], schema=sink.scan().schema())).schema
        else:
            rows = find_source(self.system, options).planned().schema()
        first, *rest = from_arrow(rows).fields
        metadata = {**first.metadata, **table_metadata(options)}
        return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *rest])

    def _check_start(self, question: StartCheck | OrderCheck) -> None:
        """Called by hooks.py through `schema`, the only part of a data source that Spark runs eagerly, in classic
        sessions and over Spark Connect."""
        from delivered.pipeline.facts import check_start  # processes of a query do not load it
        from delivered.pipeline.start import record_order

        if isinstance(question, OrderCheck):
            record_order(question.checkpoint, question.sources, complete=False)
            return
        spec = PipelineSpec.parse(self.system, self.options, self.sender)
        if question.output_mode != "append":
            raise _appends_only(self.name(), question.output_mode)
        rows = to_arrow(StructType.fromJson(dict(question.columns)))
        check_start(spec, spec.checked(rows))


def _metadata(schema: StructType) -> dict[str, Any]:
    return schema.fields[0].metadata if schema.fields else {}


def _appends_only(name: str, mode: str) -> Refused:
    return Refused("OUTPUT_MODE.SPARK", mode=mode, name=name, system=name.removeprefix(PREFIX))


@lru_cache(maxsize=8)
def _stream_write(
    system: str, options: tuple[tuple[str, str], ...], sender: Sender | None, schema: StructType
) -> tuple[PipelineSpec, Sinks, pa.Schema, Callable[[Iterator[pa.RecordBatch]], Iterator[Rows]]]:
    """What a `StreamWriter` takes. The same for each batch of a query, for which Spark asks for a writer anew.

    Raises:
        UsageError: only one end of the stream is direct.
    """
    spec = PipelineSpec.parse(system, dict(options), sender)
    if (spec.direct is not None) != (schema.names == [SLICE_COLUMN]):
        raise UsageError("DIRECT_HALF", columns=schema.names, verb="is" if spec.direct else "is not")
    if spec.direct is not None:
        direct: Direct = loads(spec.direct)
        rows = direct.schema()
        return spec, spec.checked(rows), rows, direct.rows
    columns = to_arrow(schema)
    rows = without_rejected(columns)
    return spec, spec.checked(rows), rows, partial(map, decoder(columns))

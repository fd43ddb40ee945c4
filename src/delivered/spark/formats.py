"""One Spark data source per connector, `delivered_kafka`, `delivered_sqlite`, ..., and SQL tables over them.

Spark passes the options of `CREATE TABLE t USING delivered_kafka OPTIONS (...)` to a Python source only once, when it
asks for the columns, and never to later statements on the table (measured with PySpark 4.3). But it keeps the schema.
So the options are stored in the metadata of the first column, which every SELECT, INSERT INTO and readStream.table
gets. Every statement resolves the table again, and reads its current content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import ClassVar

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
from delivered.engine.sinks import Sinks
from delivered.engine.transform import SLICE_COLUMN, SLICE_SCHEMA, Direct, decoder, source_schema, without_rejected
from delivered.model.errors import Refused, UsageError
from delivered.model.rows import Rows
from delivered.model.secrets import redacted
from delivered.pipeline.registry import PREFIX, find_source
from delivered.pipeline.spec import Envelope, PipelineSpec, Reading, Sender, StartCheck
from delivered.spark.internals import from_arrow, loads, to_arrow
from delivered.spark.readers import BatchReader, StreamReader
from delivered.spark.writers import BatchWriter, StreamWriter

_TABLE = "delivered.table"
_CATALOG = "provider"
_PREFIX = "option."
_PER_STATEMENT = frozenset({"runid", "pipeline"})
"""Options that a statement may add: INSERT INTO t WITH ('runId' = '...')."""


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
        if isinstance(question, StartCheck):
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
        options = write_options(schema, self.options, self.system)
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
        return find_source(self.system, options if schema is None else read_options(schema, options, self.system))

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
        return with_table_options(from_arrow(rows), options)

    def _check_start(self, question: StartCheck) -> None:
        """Called by hooks.py through `schema`, the only part of a data source that Spark runs eagerly, in classic
        sessions and over Spark Connect."""
        from delivered.pipeline.facts import (
            check_start,
        )  # a third of this module's import; processes of a query skip it

        spec = PipelineSpec.parse(self.system, self.options, self.sender)
        if question.output_mode != "append":
            raise _appends_only(self.name(), question.output_mode)
        rows = to_arrow(StructType.fromJson(dict(question.columns)))
        check_start(spec, spec.checked(rows))


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


def create_table_options(options: Mapping[str, str]) -> dict[str, str] | None:
    """The options of the calling `CREATE TABLE`; None: another statement calls.

    Raises:
        UsageError: one holds a secret: the schema goes wherever the rows go, even into files of other formats.
    """
    lowered = {k.lower(): v for k, v in options.items()}
    if _CATALOG not in lowered:
        return None
    found = {k.removeprefix(_PREFIX): v for k, v in lowered.items() if k.startswith(_PREFIX)}
    if "path" in lowered:  # Spark removes it from OPTIONS, as the table's location
        found.setdefault("path", re.sub(r"^file:/+", "/", lowered["path"]))  # Hadoop's spelling of a local one
    hidden = redacted(found)
    secret = next((k for k in found if hidden[k] != found[k]), None)
    if secret is not None:
        raise UsageError("TABLE_SECRET", secret=secret)
    return found


def with_table_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """The table's columns, with its options stored for `_table_options`."""
    first, *rest = schema.fields
    metadata = {**first.metadata, _TABLE: json.dumps(dict(options))}
    return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *rest])


def is_sink_table(options: Mapping[str, str]) -> bool:
    """A table with a guarantee is a sink; any other is a source."""
    return "guarantee" in options


def read_options(schema: StructType, options: Mapping[str, str], system: str) -> dict[str, str]:
    """The options of a read: the statement's own override the table's.

    Raises:
        Refused: the table is a sink.
        UsageError: a table whose options Spark did not pass.
    """
    table = _table_options(schema)
    if is_sink_table(table):
        raise Refused("TABLE_WRITE_ONLY")
    if not table and not options:
        raise _not_passed(system, "SELECT ... FROM t WITH (...)")
    return {**table, **options}


def write_options(schema: StructType, options: Mapping[str, str], system: str) -> dict[str, str]:
    """The options of a write: the table's, if the statement writes to a table.

    A frame that was read from a table has that table's options in its schema. They count only for a statement without
    options of its own, such as INSERT INTO.

    Raises:
        UsageError: a table whose options Spark did not pass.
    """
    if any(k.lower() not in _PER_STATEMENT for k in options):
        return dict(options)
    table = _table_options(schema)
    if not is_sink_table(table):  # none, or those of the table that the rows were read from
        raise _not_passed(system, "INSERT INTO t WITH (...)", "with the option guarantee, ")
    return {**table, **options}


def _not_passed(system: str, statement: str, as_sink: str = "") -> UsageError:
    return UsageError(
        "TABLE_OPTIONS", system=system, side="sink" if as_sink else "source", as_sink=as_sink, statement=statement
    )


def _table_options(schema: StructType) -> dict[str, str]:
    kept = schema.fields[0].metadata.get(_TABLE) if schema.fields else None
    stored: dict[str, str] = json.loads(kept) if kept is not None else {}
    return stored

"""One Spark data source per connector: `delivered_kafka`, `delivered_sqlite`, ..."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from delivered.contract import Connector, Sink, Source
from delivered.model.errors import Refused, UsageError
from delivered.spark.batch_writer import BatchWriter
from delivered.spark.direct import is_direct, read_direct, without_direct
from delivered.spark.readers import BatchReader, StreamReader
from delivered.spark.settings import PipelineSettings, split_options
from delivered.spark.stream_writer import StreamWriter
from delivered.write.direct import SLICE_SCHEMA

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

ENTRY_POINTS = "delivered.connectors"


def connectors() -> dict[str, Connector]:
    """Every installed connector by name. Imports no client library."""
    found = {e.name: e.load() for e in entry_points(group=ENTRY_POINTS)}
    return dict(sorted(found.items()))


def connector(name: str) -> Connector:
    """The connector of a system.

    Raises:
        UsageError: there is none of that name.
    """
    found = {e.name: e for e in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise UsageError(
            "FORMAT_UNKNOWN",
            f"There is no connector {name!r}. Installed: {', '.join(sorted(found))}.",
            next_step='write one of these; `pip install "delivered[...]"` adds client libraries, not formats',
        )
    loaded: Connector = found[name].load()
    return loaded


def find_source(system: str, options: Mapping[str, str]) -> Source:
    """A source by the name of its system.

    Raises:
        UsageError: no such connector, not a source, or a bad option.
    """
    found = connector(system)
    if found.source_options is None:
        raise UsageError("NOT_A_SOURCE", f"delivered_{system} cannot be read as a source.")
    return found.source(options)


def find_sink(system: str, options: Mapping[str, str]) -> Sink:
    """A sink by the name of its system. Raises as `find_source`."""
    found = connector(system)
    if found.sink_options is None:
        raise UsageError("NOT_A_SINK", f"delivered_{system} cannot be written to.")
    return found.sink(options)


class DeliveredDataSource(DataSource):
    """Base of all formats. `register` makes one class per connector and session from it."""

    system: ClassVar[str] = ""
    driver_id: ClassVar[str] = ""

    @classmethod
    def name(cls) -> str:
        return f"delivered_{cls.system}"

    def _source(self) -> Source:
        return find_source(self.system, without_direct(self.options))

    @property
    def _direct(self) -> bool:
        return is_direct(self.options)

    def _sink(self, schema: pa.Schema, overwrite: bool) -> tuple[Sink, dict[str, str], PipelineSettings]:
        settings, options = split_options(without_direct(self.options))
        if overwrite:
            raise Refused(
                "OVERWRITE",
                f"{self.name()} appends; it does not replace what the sink holds.",
                next_step='use outputMode("append") or outputMode("update"), or mode("append") of df.write',
            )
        sink = find_sink(self.system, options)
        sink.check_schema(schema)
        return sink, options, settings

    def schema(self) -> StructType:
        found = SLICE_SCHEMA if self._direct else self._source().schema()
        schema: StructType = from_arrow_schema(found)
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return BatchReader(self._source())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        return StreamReader(self._source(), self._direct)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        rows = to_arrow_schema(schema, timezone="UTC")
        sink, options, settings = self._sink(rows, overwrite)
        return BatchWriter(sink, options, settings, self.driver_id, rows)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        direct = read_direct(self.options, schema)
        rows = direct.schema() if direct else to_arrow_schema(schema, timezone="UTC")
        sink, options, settings = self._sink(rows, overwrite)
        return StreamWriter(sink, options, settings, self.driver_id, rows, direct)


def register(spark: SparkSession) -> None:
    """Make every format of this package known to a session. May be called again.

    Args:
        spark: a classic session or one of Spark Connect.

    The registered classes carry an id of this driver, new for each call: it is how the driver's processes know each
    other as one owner of a ledger, and how a second driver on the same checkpoint is told apart.
    """
    driver_id = uuid.uuid4().hex
    for name in connectors():
        attributes: dict[str, Any] = {"system": name, "driver_id": driver_id}
        # Not importable by name, so that Spark pickles the class by value, id included.
        spark.dataSource.register(type(f"Delivered_{name}", (DeliveredDataSource,), attributes))

"""One Spark data source per connector: `delivered_kafka`, `delivered_sqlite`, ..."""

from __future__ import annotations

import uuid
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
from delivered.spark.readers import BatchReader, StreamReader
from delivered.spark.settings import PipelineSettings, split_options
from delivered.spark.stream_writer import StreamWriter

if TYPE_CHECKING:
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


class DeliveredDataSource(DataSource):
    """Base of all formats. `register` makes one class per connector and session from it."""

    system: ClassVar[str] = ""
    driver_id: ClassVar[str] = ""

    @classmethod
    def name(cls) -> str:
        return f"delivered_{cls.system}"

    def _source(self) -> Source:
        found = connector(self.system)
        if found.source_options is None:
            raise UsageError("NOT_A_SOURCE", f"{self.name()} cannot be read as a source.")
        return found.source(dict(self.options))

    def _sink(self, schema: StructType, overwrite: bool) -> tuple[Sink, dict[str, str], PipelineSettings]:
        found = connector(self.system)
        if found.sink_options is None:
            raise UsageError("NOT_A_SINK", f"{self.name()} cannot be written to.")
        settings, options = split_options(dict(self.options))
        if overwrite:
            raise Refused(
                "OVERWRITE",
                f"{self.name()} appends; it does not replace what the sink holds.",
                next_step='use outputMode("append") or outputMode("update"), or mode("append") of df.write',
            )
        sink = found.sink(options)
        sink.check_schema(to_arrow_schema(schema, timezone="UTC"))
        return sink, options, settings

    def schema(self) -> StructType:
        schema: StructType = from_arrow_schema(self._source().schema())
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return BatchReader(self._source())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        return StreamReader(self._source())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        sink, options, settings = self._sink(schema, overwrite)
        return BatchWriter(sink, options, settings, self.driver_id, to_arrow_schema(schema, timezone="UTC"))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        sink, options, settings = self._sink(schema, overwrite)
        return StreamWriter(sink, options, settings, self.driver_id, to_arrow_schema(schema, timezone="UTC"))


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

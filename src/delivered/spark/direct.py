"""How the two ends of a direct stream find each other: an option on the source, an option on the sink.

The source's stream then carries slices instead of records, and the sink's option carries source and transform, so that
a task can read the slices itself. `Pipeline` sets both; nothing else should.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.cloudpickle import dumps, loads
from pyspark.sql.types import StructType

from delivered.engine.direct import SLICE_COLUMN, Direct
from delivered.model.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter

_SOURCE_OPTION = "delivered.direct.slices"
_SINK_OPTION = "delivered.direct.read"


def mark_source(reader: DataStreamReader) -> DataStreamReader:
    """Let a source's stream carry slices."""
    return reader.option(_SOURCE_OPTION, "true")


def mark_sink(writer: DataStreamWriter, direct: Direct) -> DataStreamWriter:
    """Let a sink's tasks read the slices themselves."""
    packed: bytes = dumps(direct)  # type: ignore[no-untyped-call]
    return writer.option(_SINK_OPTION, base64.b64encode(packed).decode())


def is_direct(options: Mapping[str, str]) -> bool:
    return options.get(_SOURCE_OPTION) == "true"


def without_direct(options: Mapping[str, str]) -> dict[str, str]:
    """The options that pipeline and connector know."""
    return {k: v for k, v in options.items() if k.lower() not in (_SOURCE_OPTION, _SINK_OPTION)}


def read_direct(options: Mapping[str, str], schema: StructType) -> Direct | None:
    """What the sink's option carries, if the stream carries slices.

    Raises:
        UsageError: one end of the stream is direct and the other is not.
    """
    packed = options.get(_SINK_OPTION)
    slices = schema.names == [SLICE_COLUMN]
    if (packed is not None) != slices:
        raise UsageError(
            "DIRECT_HALF",
            f"The stream's columns are {schema.names}, and the sink was {'' if packed else 'not '}told to read slices.",
            next_step="build direct streams with delivered.Pipeline, and do not transform them as a DataFrame",
        )
    if packed is None:
        return None
    direct = loads(base64.b64decode(packed))
    if not isinstance(direct, Direct):
        raise UsageError("DIRECT_HALF", f"The sink's direct option holds {type(direct).__name__}, not a direct read.")
    return direct

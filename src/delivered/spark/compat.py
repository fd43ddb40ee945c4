"""What differs between versions of Spark: the only module that imports pyspark and asks which one it is.

| Spark | what it lacks, and what that costs |
|---|---|
| 4.2 | a query with several sources cannot restart in the middle of a batch: no pipeline has several |
| 4.1 | a stream is asked for its end without its start and without a limit: the reader remembers where it is. |
| | Available-now is one batch to the end: a query whose source limits batches runs without it until it has read what |
| | was there at its start. Sources have no names, so a pipeline has one. Progress shows no lag |
| 4.0 | sockets on this machine between JVM and workers are TCP. A DataFrame over a batch source asks for its offsets |
| | at every action |
| 3.5 | data sources in Python: no format of ours can be registered. Everything runs by `foreachBatch` (foreach.py) |
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import pyspark

from delivered.model.errors import InvariantBroken, Refused
from delivered.model.identity import SOURCE
from delivered.spark import parsed

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from delivered.pipeline.definition import Definition

_POLL_S = 0.02

R = TypeVar("R", bound="type[DataSourceStreamReader]")


VERSION = parsed(pyspark.__version__)

PYTHON_SOURCES = VERSION >= (4, 0)
"""Formats can be written in Python."""
CLASSIC_FRAME = "pyspark.sql.classic.dataframe" if VERSION >= (4, 0) else "pyspark.sql.dataframe"
ADMITS = VERSION >= (4, 2)
"""Spark asks a stream with its start and a limit, and runs available-now in several batches."""
LOCAL_SOCKETS = VERSION >= (4, 1)
VALID_TEXT = "make_valid_utf8({})" if VERSION >= (4, 0) else "decode(cast({} as binary), 'UTF-8')"
"""SQL: a string whose bytes may be any, as UTF-8."""
READS_ONCE = VERSION >= (4, 1)
"""A DataFrame over a batch source asks for its offsets at its first action alone."""

if ADMITS:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
else:
    ReadLimit = ReadAllAvailable = SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]

    class ReadMaxRows(NamedTuple):  # type: ignore[no-redef]
        """See `pyspark.sql.streaming.datasource`."""

        max_rows: int


if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter as ArrowWriter
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    from pyspark.sql.datasource import WriterCommitMessage
elif PYTHON_SOURCES:
    from pyspark.sql import datasource
    from pyspark.sql.datasource import DataSourceArrowWriter as ArrowWriter
    from pyspark.sql.datasource import WriterCommitMessage

    # Spark 4.0 passes Arrow to a stream's writer if it is also one for batches.
    StreamArrowWriter = getattr(
        datasource,
        "DataSourceStreamArrowWriter",
        type("StreamArrowWriter", (datasource.DataSourceStreamWriter, ArrowWriter), {}),
    )
else:
    ArrowWriter = StreamArrowWriter = WriterCommitMessage = object

__all__ = [
    "ArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "StreamArrowWriter",
    "SupportsTriggerAvailableNow",
    "WriterCommitMessage",
]


def unfit_version(pipeline: Definition, version: str) -> Refused | None:
    """What this version of Spark lacks for a pipeline."""
    own = next((e for e in pipeline.sources.values() if not e.is_spark_own), None)
    if own is not None and parsed(version) < (4, 0):
        return Refused("SPARK_VERSION.SOURCE", version=version, label=own.label)
    return cannot_restart(pipeline.sources, version)


def cannot_restart(sources: Collection[str], version: str) -> Refused | None:
    """Why this version of Spark has no named sources, or cannot restart a query with them; None: it can.

    Spark 4.2 expects the number of state partitions in the offset log, which its format 2 does not hold: a start whose
    newest batch is not finished ends with "None.get".
    """
    if set(sources) == {SOURCE} or parsed(version) > (4, 2):
        return None
    named = ", ".join(sorted(sources))
    if parsed(version) < (4, 2):
        return Refused("SOURCES_SPARK_VERSION.NAMES", version=version, sources=named)
    return Refused("SOURCES_SPARK_VERSION.RESTART", version=version, sources=named)


class _Remembering:
    """Puts the start into the calls of a Spark that does not pass it.

    Spark asks in one process for each query, which ends with it. After a restart it first asks for the partitions of
    the newest batch that it logged, or of none behind it; a new query begins with its first end. Each end is the start
    of the next batch.
    """

    _known_end: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        at: dict[str, Any] = super().initialOffset()  # type: ignore[misc]
        self._known_end = at
        return at

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._known_end = end
        pieces: Sequence[InputPartition] = super().partitions(start, end)  # type: ignore[misc]
        return pieces

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._known_end is None:
            from delivered.checkpoint.folder import read_logged  # not in a task

            checkpoint = self.query_checkpoint  # type: ignore[attr-defined]
            if checkpoint is not None and read_logged(checkpoint)[1] is not None:
                raise InvariantBroken("START_UNKNOWN", version=pyspark.__version__, checkpoint=checkpoint)
            self._known_end = super().initialOffset()  # type: ignore[misc]
        limit = self.getDefaultReadLimit()  # type: ignore[attr-defined]
        self._known_end = super().latestOffset(self._known_end, limit)  # type: ignore[misc]
        return self._known_end


def asked_without_start(reader: R) -> R:
    """The class of a stream's reader, as this Spark calls it. Its `query_checkpoint` is where the query may restart."""
    if ADMITS:
        return reader
    return cast("R", type(reader.__name__, (_Remembering, reader), {"__module__": reader.__module__}))


def start_available_now(writer: DataStreamWriter, *, ends: bool = True) -> StreamingQuery:
    """Start a query that ends once it has read what was there at its start.

    Args:
        ends: its source offers nothing beyond, in batch after batch, by itself.
    """
    if ADMITS or not ends:
        return writer.trigger(availableNow=True).start()
    query = writer.trigger(processingTime="0 seconds").start()
    stop_when_read(query)
    return query


def stop_when_read(query: StreamingQuery) -> None:
    """End a query, from a thread of its own, once its source offers nothing beyond what it has read."""
    threading.Thread(target=_stop_idle, args=(query,), daemon=True, name="delivered-available-now").start()


def _stop_idle(query: StreamingQuery) -> None:
    """A source that offers nothing beyond its first end has no more batch once a trigger found no data."""
    while query.isActive:
        if query.status["message"] == "Waiting for data to arrive":
            query.stop()
            return
        time.sleep(_POLL_S)

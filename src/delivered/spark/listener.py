"""Listeners of a session's queries: Spark's own figures as metrics, and OpenLineage events."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from delivered.operate.lineage import Lineage
from delivered.operate.metrics import QueryTotals
from delivered.pipeline.definition import Definition
from delivered.spark.internals import to_arrow

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType


class QueryMetrics(QueryTotals, StreamingQueryListener):
    """A collector of prometheus_client, and a listener: `spark.streams.addListener(metrics)`."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        self.started(str(event.id), event.name)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        self.progressed(event.progress)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        self.terminated(str(event.id), event.exception)


class _Listener(StreamingQueryListener):
    """Of a session: the runs that `follow` added, by run id."""

    def __init__(self) -> None:
        self.runs: dict[str, Lineage] = {}
        self._lock = Lock()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        run = self.runs.get(str(event.progress.runId))
        if run is not None:
            run.progressed()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        self.end(str(event.runId), event.exception)

    def end(self, run_id: str, failure: str | None) -> None:
        with self._lock:
            run = self.runs.pop(run_id, None)
        if run is not None:
            run.ended(run.written(), failure)


_listeners: WeakKeyDictionary[SparkSession, _Listener] = WeakKeyDictionary()


def follow(spark: SparkSession, query: StreamingQuery, pipeline: Definition, columns: StructType | None) -> None:
    """Send the events of a query that has just started.

    Args:
        columns: of the sink; None: not known."""
    rows = to_arrow(columns) if columns is not None else None
    run = Lineage(pipeline, str(query.runId), rows)
    run.started()
    if spark not in _listeners:
        _listeners[spark] = _Listener()
        spark.streams.addListener(_listeners[spark])
    _listeners[spark].runs[str(query.runId)] = run
    if not query.isActive:  # it may have ended before the listener knew it
        failure = query.exception()
        _listeners[spark].end(str(query.runId), str(failure) if failure is not None else None)

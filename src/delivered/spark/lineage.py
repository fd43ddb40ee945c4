"""OpenLineage events of running queries: start, progress, end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.listener import StreamingQueryListener

from delivered.checkpoint.history import batches
from delivered.operate.lineage import Lineage
from delivered.pipeline.definition import Definition

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

_RUNNING_EVERY_S = 60.0


@dataclass
class _Run:
    lineage: Lineage
    checkpoint: str
    began_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    told_at: float = field(default_factory=time.monotonic)

    def written(self) -> dict[str, int]:
        """Records by sink since the start, as far as the checkpoint's history goes back."""
        sums: dict[str, int] = {}
        for report in batches(self.checkpoint):
            if report.decided_at_ms >= self.began_ms:
                for sink, records in report.records.items():
                    sums[sink] = sums.get(sink, 0) + records
        return sums


class _Listener(StreamingQueryListener):
    """Of a session: the runs that `follow` added, by run id."""

    def __init__(self) -> None:
        self.runs: dict[str, _Run] = {}
        self._lock = Lock()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        run = self.runs.get(str(event.progress.runId))
        if run is not None and time.monotonic() - run.told_at >= _RUNNING_EVERY_S:
            run.told_at = time.monotonic()
            run.lineage.running(run.written())

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        self.end(str(event.runId), event.exception)

    def end(self, run_id: str, failure: str | None) -> None:
        with self._lock:
            run = self.runs.pop(run_id, None)
        if run is not None:
            run.lineage.ended(run.written(), failure)


_listeners: WeakKeyDictionary[SparkSession, _Listener] = WeakKeyDictionary()


def follow(spark: SparkSession, query: StreamingQuery, pipeline: Definition, columns: StructType | None) -> None:
    """Send the events of a query that has just started.

    Args:
        columns: of the sink; None: not known."""
    rows = to_arrow_schema(columns, timezone="UTC") if columns is not None else None
    run = _Run(Lineage(pipeline, str(query.runId), rows), pipeline.checkpoint)
    run.lineage.started()
    if spark not in _listeners:
        _listeners[spark] = _Listener()
        spark.streams.addListener(_listeners[spark])
    _listeners[spark].runs[str(query.runId)] = run
    if not query.isActive:  # it may have ended before the listener knew it
        failure = query.exception()
        _listeners[spark].end(str(query.runId), str(failure) if failure is not None else None)

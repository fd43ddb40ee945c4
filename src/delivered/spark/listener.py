"""Listeners of a session's queries: Spark's own figures as metrics, and OpenLineage events."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from delivered.checkpoint.history import records_since
from delivered.operate.lineage import Lineage
from delivered.operate.metrics import FAILED, query_families
from delivered.pipeline.definition import Definition
from delivered.spark.internals import to_arrow

if TYPE_CHECKING:
    from prometheus_client import Metric
    from pyspark.sql.streaming.listener import (
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

_REPORTS = 100
"""Batches that may end until Spark reports one: its events arrive later, on a thread of their own."""


class QueryMetrics(StreamingQueryListener):
    """A collector of prometheus_client, and a listener: `spark.streams.addListener(metrics)`.

    Queries are named by `queryName`, else by their id. Spark does not count rows of Python sinks (-1): those of a
    pipeline come from the reports of its batches.

    Args:
        checkpoints: by query name, of the pipelines whose rows are counted.
    """

    def __init__(self, checkpoints: Mapping[str, str]) -> None:
        self._checkpoints = checkpoints
        self._began_ms = time.time_ns() // 1_000_000
        self._lock = Lock()
        self._names: dict[str, str] = {}
        self._last: dict[str, Any] = {}
        self._totals: dict[str, Counter[str]] = defaultdict(Counter)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        with self._lock:
            self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        progress = event.progress
        name = progress.name or str(progress.id)
        written = progress.sink.numOutputRows
        if written < 0:
            written = self._reported(name, progress.batchId)
        with self._lock:
            self._last[name] = progress
            self._totals[name] += Counter(
                batches=1,
                input_rows=progress.numInputRows,
                output_rows=written,
                late_rows=sum(o.numRowsDroppedByWatermark for o in progress.stateOperators),
            )

    def _reported(self, name: str, batch: int) -> int:
        """Rows that a batch wrote to all sinks; 0 if it was decided before, and nothing was written now."""
        if name not in self._checkpoints:
            return 0
        return sum(records_since(self._checkpoints[name], self._began_ms, batch, newest=_REPORTS).values())

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        with self._lock:
            name = self._names.pop(str(event.id), str(event.id))
            if event.exception is not None:
                self._totals[name][FAILED] += 1
            self._last.pop(name, None)

    def describe(self) -> Sequence[Metric]:
        return [*self.collect()]

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            newest, totals = dict(self._last), {n: Counter(c) for n, c in self._totals.items()}
        yield from query_families(totals, newest)


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

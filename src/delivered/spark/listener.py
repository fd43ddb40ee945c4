"""Spark's own figures of the queries of a session, as metrics: rows read, phases of a batch, state."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from delivered.checkpoint.history import batches

if TYPE_CHECKING:
    from prometheus_client import Metric
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

_FAILED = "failed"
_REPORTS = 100
"""Batches that may end until Spark tells of one: its events arrive later, on a thread of their own."""


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
        newest = batches(self._checkpoints[name], _REPORTS)
        now = (r for r in newest if r.batch == batch and r.decided_at_ms >= self._began_ms)
        return sum(sum(r.records.values()) for r in now)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        with self._lock:
            name = self._names.pop(str(event.id), str(event.id))
            if event.exception is not None:
                self._totals[name][_FAILED] += 1
            self._last.pop(name, None)

    def describe(self) -> Sequence[Metric]:
        return [*self.collect()]

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            last, totals = dict(self._last), {n: Counter(c) for n, c in self._totals.items()}
        for key, text in (
            ("batches", "Batches that Spark ran."),
            ("input_rows", "Rows read, by Spark's count."),
            ("output_rows", "Rows written to all sinks."),
            ("late_rows", "Rows dropped as older than the watermark."),
            (_FAILED, "Queries that ended with an error."),
        ):
            counter = CounterMetricFamily(f"delivered_query_{key}", text, labels=("query",))
            for name, counts in totals.items():
                counter.add_metric((name,), counts[key])
            yield counter
        phases = GaugeMetricFamily(
            "delivered_query_phase_seconds", "Of the newest batch, by Spark's phase.", labels=("query", "phase")
        )
        state = GaugeMetricFamily(
            "delivered_query_state_rows", "Rows in the state store.", labels=("query", "operator")
        )
        memory = GaugeMetricFamily(
            "delivered_query_state_bytes", "Memory of the state store.", labels=("query", "operator")
        )
        for name, progress in last.items():
            for phase, ms in progress.durationMs.items():
                phases.add_metric((name, phase), ms / 1000)
            for number, operator in enumerate(progress.stateOperators):
                labels = (name, f"{number} {operator.operatorName}")
                state.add_metric(labels, operator.numRowsTotal)
                memory.add_metric(labels, operator.memoryUsedBytes)
        yield from (phases, state, memory)

"""Metrics of pipelines, from their status at each scrape or export: no driver need run.

In Prometheus' format, and for OpenTelemetry: there every metric is an instrument, `delivered_lag_seconds` is
`delivered.lag_seconds`, with its labels as attributes. Beside them, `messaging.client.sent.messages` counts the records
decided at sinks that are brokers, and `messaging.client.consumed.messages` those that receivers consumed from queues:
the names of OpenTelemetry's conventions for messaging. Counters count within a checkpoint, and start again with a new
one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from delivered.checkpoint.history import records_since
from delivered.model.errors import UsageError, extra
from delivered.model.options import check_http_url
from delivered.model.work import STEPS
from delivered.operate.status import Driver, SealStatus, Status, unanswered
from delivered.pipeline.receive import MESSAGES, is_dead
from delivered.pipeline.registry import connector

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics.export import MetricReader
    from prometheus_client import Metric
    from prometheus_client.registry import Collector

_VERDICTS = ("held", "broken", "unknown")
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SENT, CONSUMED = "messaging.client.sent.messages", "messaging.client.consumed.messages"
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}
_FRESH_S = 1.0
"""The instruments of one collection share one look."""

Attributes = dict[str, str | int]
Point = tuple[float, Attributes]


class StatusCollector:
    """A collector of prometheus_client. Args: look: the status of every pipeline, now."""

    def __init__(self, look: Callable[[], Iterable[Status]]) -> None:
        self._look = look

    def describe(self) -> Sequence[Metric]:
        """Without asking anything: prometheus_client calls it when the collector is registered."""
        return list(_Families().all())

    def collect(self) -> Iterator[Metric]:
        families, started = _Families(), time.monotonic()
        for status in self._look():
            families.add(status)
        families.scrape.add_metric((), time.monotonic() - started)
        return families.all()


class _Families:
    def __init__(self) -> None:
        with extra("metrics"):
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"delivered_{name}", text, labels=("pipeline", *labels))

        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"delivered_{name}", text, labels=("pipeline", *labels))

        self.up = gauge("up", "1: ledger, sinks and sources answered.")
        self.info = gauge("pipeline_info", "Always 1.", "guarantee", "driver")
        self.driver_running = gauge("driver_running", "1: the driver's process lives on this host.")
        self.fenced = gauge("drivers_fenced", "Earlier drivers that the ledger fences, of the last 16.")
        self.records = counter("records", "Records decided.", "sink", "guarantee")
        self.given_up = counter("records_given_up", "Records given up under at_most_once, an upper bound.", "sink")
        self.letters = counter("dead_letters", "Records and rows delivered as dead letters.", "sink")
        self.batches = counter("batches", "Batches decided and visible.")
        self.bytes = counter("written_bytes", "Bytes of rows that batches wrote to all sinks, as in memory.")
        self.rewritten = counter("shards_rewritten", "Shards whose prepared rows had expired, written again.")
        self.seconds = counter("step_seconds", "Time of batches, by step.", "step")
        self.last_seconds = gauge("last_batch_step_seconds", "Time of the newest batch, by step.", "step")
        self.batch = gauge("batch", "Number of the newest decided batch.")
        self.decided = gauge("last_decision_timestamp_seconds", "When the newest batch was decided.")
        self.decided_age = gauge("last_decision_age_seconds", "Time since the newest batch was decided.")
        self.lag = gauge("lag_offsets", "Offsets between newest decision and source's end.", "source", "partition")
        self.lag_seconds = gauge(
            "lag_seconds", "Age of the first waiting record: Kafka, logs, receivers.", "source", "partition"
        )
        self.lag_seconds_min = gauge("lag_seconds_min", "How long offsets have waited at least, whatever the source.")
        self.held_back = gauge(
            "lag_held_back_offsets", "Offsets hidden by open transactions: Kafka. Not in lag_offsets.", "source"
        )
        self.hidden = gauge(
            "sink_hidden_offsets", "Offsets that others' transactions hide from the sink's readers: Kafka.", "sink"
        )
        self.pace_in = gauge("source_offsets_per_second", "Offsets that arrive, over the last minute.")
        self.pace_out = gauge("delivered_offsets_per_second", "Offsets that are delivered, over the last minute.")
        self.new_letters = gauge("dead_letters_new", "Dead letters since an operator listed them.", "sink")
        self.run_ended = gauge(
            "last_run_end_timestamp_seconds", 'When the last run ended, "failed" or "stopped".', "outcome"
        )
        self.open = gauge("open_transactions", "Open transactions at the sinks.", "decided")
        self.open_age = gauge("open_transaction_age_seconds", "Age of the oldest open transaction.", "decided")
        self.open_share = gauge("open_transaction_timeout_ratio", "Largest age, as a share of the time-out.", "decided")
        self.receivers = gauge("receivers", 'Receivers of a queue, by state: "running" or "gone".', "source", "state")
        self.received = counter("receiver_messages", "Messages of a receiver, by kind.", "source", "receiver", "kind")
        self.window = gauge("receiver_window_seconds", "How long a log recognises a message, at its rate.", "source")
        self.redelivery = gauge("receiver_redelivery_seconds", "How late the queue may redeliver a message.", "source")
        self.wal = gauge(
            "outbox_wal_held_back_bytes", "WAL that an outbox slot keeps the server from removing.", "source"
        )
        self.audit = gauge("audit_verdict", "1: the verdict of the last audit.", "sink", "verdict")
        self.audit_at = gauge("audit_timestamp_seconds", "When the last audit ended.", "sink")
        self.audit_damage = gauge("audit_records", "Records of the last audit, by class.", "sink", "class")
        self.sealed_batch = gauge("audit_sealed_batch", "Newest batch that an audit has sealed.", "sink")
        self.seal_verdict = gauge("audit_seal_verdict", "1: the verdict of the last seal.", "sink", "verdict")
        self.seal_age = gauge("audit_seal_age_seconds", "Time since the last seal.", "sink")
        self.seal_every = gauge("audit_every_seconds", "Between two audits, as the pipeline's file says.", "sink")
        self.seal_lag = gauge("audit_lag_seconds", "Time since the last seal; 0: no batch waits to be sealed.", "sink")
        self.unsealed_batches = gauge("audit_unsealed_batches", "Batches decided after the last seal.", "sink")
        self.unsealed = gauge("audit_unsealed_records", "Records decided after the last seal.", "sink")
        self.never_audited = gauge(
            "audit_never_audited_records", "Records sealed without an audit, in this checkpoint.", "sink"
        )
        self.seals_broken = gauge("audit_broken_ranges", "Broken ranges of the last day, and of the last seal.", "sink")
        self.chain_faults = gauge("audit_chain_faults", "Breaks in the chain of the newest seals.", "sink")
        self.expires = gauge(
            "audit_unsealed_expires_seconds", "Time until the source may drop an unsealed record: Kafka.", "sink"
        )
        self.expired = gauge(
            "audit_unsealed_missing_offsets", "Offsets dropped before they were sealed: Kafka, logs.", "sink"
        )
        self.problems = gauge("problems", "Problems that need attention, by code.", "code")
        self.scrape = GaugeMetricFamily("delivered_scrape_seconds", "Time to ask all pipelines.")

    def all(self) -> Iterator[Metric]:
        yield from self.__dict__.values()

    def add(self, now: Status) -> None:
        name = now.pipeline
        self.up.add_metric((name,), 0.0 if unanswered(now) else 1.0)
        self.info.add_metric((name, now.guarantee, now.driver.value), 1.0)
        if now.driver in (Driver.RUNNING, Driver.STOPPED):
            self.driver_running.add_metric((name,), float(now.driver is Driver.RUNNING))
        self.fenced.add_metric((name,), now.drivers_fenced)
        for s in now.sinks:
            if s.records is None:
                continue
            self.records.add_metric((name, s.name, now.guarantee), s.records)
            if now.guarantee == "at_most_once" or s.given_up:
                self.given_up.add_metric((name, s.name), s.given_up)
            if s.dead_letters:
                self.letters.add_metric((name, s.name), s.records)
        self.batches.add_metric((name,), now.totals.batches)
        self.bytes.add_metric((name,), now.totals.bytes)
        self.rewritten.add_metric((name,), now.totals.rewritten)
        for step in STEPS:
            self.seconds.add_metric((name, step), now.totals.seconds.get(step, 0.0))
            if now.last is not None:
                self.last_seconds.add_metric((name, step), now.last.seconds.get(step, 0.0))
        if now.batch is not None and now.decided_at_ms is not None and now.decided_age_s is not None:
            self.batch.add_metric((name,), now.batch)
            self.decided.add_metric((name,), now.decided_at_ms / 1000)
            self.decided_age.add_metric((name,), now.decided_age_s)
            if now.lag_total is not None:
                self.lag_seconds_min.add_metric((name,), now.decided_age_s if now.lag_total else 0.0)
        for source, partitions in now.lag.items():
            for partition, behind in partitions.items():
                self.lag.add_metric((name, source, partition), behind)
        for source, waits in (now.lag_s or {}).items():
            for partition, seconds in waits.items():
                self.lag_seconds.add_metric((name, source, partition), seconds)
        self._add_waiting(name, now)
        self._add_receivers(name, now)
        for decided in (True, False) if now.transactions is not None else ():
            labels, same = (name, str(decided).lower()), [t for t in now.transactions or () if t.decided is decided]
            shares = [(t.age_s or 0.0) / t.timeout_s for t in same if t.timeout_s]
            self.open.add_metric(labels, len(same))
            self.open_age.add_metric(labels, max((t.age_s or 0.0 for t in same), default=0.0))
            self.open_share.add_metric(labels, max(shares, default=0.0))
        for source, held in now.wal_held_back.items():
            self.wal.add_metric((name, source), held)
        for sink, audit in now.audits.items():
            for verdict in _VERDICTS:
                self.audit.add_metric((name, sink, verdict), float(audit["verdict"] == verdict))
            self.audit_at.add_metric((name, sink), audit["at_ms"] / 1000)
            for kind, count in audit["counts"].items():
                self.audit_damage.add_metric((name, sink, kind), count)
        for sink, seals in now.seals.items():
            self._add_seals((name, sink), seals)
        for code in {p.code for p in now.problems}:
            self.problems.add_metric((name, code), sum(p.code == code for p in now.problems))

    def _add_waiting(self, name: str, now: Status) -> None:
        for source, held in now.held_back.items():
            self.held_back.add_metric((name, source), held.total)
        for sink, held in now.hidden.items():
            self.hidden.add_metric((name, sink), held.total if held.by else 0)
        if now.pace is not None:
            self.pace_in.add_metric((name,), now.pace.in_per_s)
            self.pace_out.add_metric((name,), now.pace.out_per_s)
        for sink, new in now.new_dead_letters.items():
            self.new_letters.add_metric((name, sink), new.count)
        if now.runs and (ended := now.runs[-1].ended_ms) is not None:
            self.run_ended.add_metric((name, "failed" if now.runs[-1].has_failed else "stopped"), ended / 1000)

    def _add_seals(self, labels: tuple[str, str], seals: SealStatus) -> None:
        if seals.cadence is not None:
            self.seal_every.add_metric(labels, seals.cadence.every_s)
        if not seals.is_watched:
            return
        if seals.last is not None and seals.age_s is not None:
            self.sealed_batch.add_metric(labels, seals.last.last)
            self.seal_age.add_metric(labels, seals.age_s)
            self.seal_lag.add_metric(labels, seals.age_s if seals.unsealed_batches else 0.0)
            self.never_audited.add_metric(labels, seals.never_audited)
            for verdict in _VERDICTS:
                self.seal_verdict.add_metric((*labels, verdict), float(seals.last.verdict.value == verdict))
        self.unsealed_batches.add_metric(labels, seals.unsealed_batches)
        self.unsealed.add_metric(labels, seals.unsealed_records)
        self.seals_broken.add_metric(labels, len([*seals.recent_broken]))
        self.chain_faults.add_metric(labels, len(seals.sealed.faults))
        if seals.expires is not None:
            self.expires.add_metric(labels, seals.expires[0])
        if seals.retained:
            self.expired.add_metric(labels, seals.missing)

    def _add_receivers(self, name: str, now: Status) -> None:
        for source, reports in now.receivers.items():
            died = sum(map(is_dead, reports))
            self.receivers.add_metric((name, source, "running"), len(reports) - died)
            self.receivers.add_metric((name, source, "gone"), died)
            for r in reports:
                for kind in MESSAGES:
                    receiver = f"{r.owner.host}/{r.owner.process}"
                    self.received.add_metric((name, source, receiver, kind), r.counts.get(kind, 0))
        for source, window in now.windows.items():
            self.window.add_metric((name, source), window.kept_s)
            self.redelivery.add_metric((name, source), window.needed_s)


# Spark's own figures, which only its driver has.

FAILED = "failed"
_OF_QUERIES = {
    "batches": "Batches that Spark ran.",
    "input_rows": "Rows read, by Spark's count.",
    "output_rows": "Rows written to all sinks.",
    "late_rows": "Rows dropped as older than the watermark.",
    FAILED: "Queries that ended with an error.",
}


_REPORTS = 100
"""Batches that may end until Spark reports one: its events arrive later, on a thread of their own."""


class QueryTotals:
    """What the queries of this process have done; a collector of prometheus_client.

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

    def started(self, query: str, name: str | None) -> None:
        with self._lock:
            self._names[query] = name or query

    def progressed(self, progress: Any) -> None:
        """Args: progress: Spark's report of a batch."""
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

    def terminated(self, query: str, failure: str | None) -> None:
        with self._lock:
            name = self._names.pop(query, query)
            if failure is not None:
                self._totals[name][FAILED] += 1
            self._last.pop(name, None)

    def describe(self) -> Sequence[Metric]:
        return [*self.collect()]

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            newest, totals = dict(self._last), {n: Counter(c) for n, c in self._totals.items()}
        yield from _query_families(totals, newest)


def _query_families(totals: Mapping[str, Mapping[str, int]], newest: Mapping[str, Any]) -> Iterator[Metric]:
    """
    Args:
        totals: by query, what `_OF_QUERIES` names.
        newest: by query, Spark's newest report of those that run.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, text: str, label: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"delivered_query_{name}", text, labels=("query", label))

    for key, text in _OF_QUERIES.items():
        counter = CounterMetricFamily(f"delivered_query_{key}", text, labels=("query",))
        for name, counts in totals.items():
            counter.add_metric((name,), counts.get(key, 0))
        yield counter
    phases = gauge("phase_seconds", "Of the newest batch, by Spark's phase.", "phase")
    rows = gauge("state_rows", "Rows in the state store.", "operator")
    memory = gauge("state_bytes", "Memory of the state store.", "operator")
    for name, progress in newest.items():
        for phase, ms in progress.durationMs.items():
            phases.add_metric((name, phase), ms / 1000)
        for number, operator in enumerate(progress.stateOperators):
            labels = (name, f"{number} {operator.operatorName}")
            rows.add_metric(labels, operator.numRowsTotal)
            memory.add_metric(labels, operator.memoryUsedBytes)
    yield from (phases, rows, memory)


def text(statuses: Iterable[Status]) -> str:
    """One scrape."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: statuses))
    return generate_latest(registry).decode()


@contextlib.contextmanager
def serving(
    look: Callable[[], Iterable[Status]], port: int, address: str = "127.0.0.1", more: Sequence[Collector] = ()
) -> Iterator[int]:
    """Serve /metrics on a thread; yields the port. Each scrape asks again.

    Args:
        port: 0: any free one.
        more: other collectors of prometheus_client.

    Raises:
        UsageError: the port is in use.
        MissingExtra: prometheus_client is not installed.
    """
    with extra("metrics"):
        from prometheus_client import CollectorRegistry, start_http_server
    registry = CollectorRegistry()
    for collector in (StatusCollector(look), *more):
        registry.register(collector)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise UsageError("METRICS_PORT", port=port, address=address, error=error) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def readings(statuses: Sequence[Status]) -> dict[str, list[Point]]:
    """Instrument -> values with their attributes."""
    points: dict[str, list[Point]] = {
        _name(f.name): [(s.value, dict(s.labels)) for s in f.samples]
        for f in StatusCollector(lambda: statuses).collect()
    }
    points[SENT] = [
        (s.records, _attributes(now, "send", s.system, s.destination))
        for now in statuses
        for s in now.sinks
        if s.records is not None and connector(s.system).messaging
    ]
    points[CONSUMED] = [
        (sum(r.counts.get("received", 0) for r in reports), _attributes(now, "receive", *now.queues[source]))
        for now in statuses
        for source, reports in now.receivers.items()
        if source in now.queues
    ]
    return points


def otlp_reader(endpoint: str | None, every_s: float) -> MetricReader:
    """Sends to a collector by OTLP over HTTP.

    Args:
        endpoint: its base address; None: of OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.

    Raises:
        UsageError: nothing can listen there. MissingExtra: the extra `otel` is not installed.
    """
    for name, value in {"--otlp": endpoint, _ENDPOINT: None if endpoint else os.environ.get(_ENDPOINT)}.items():
        if value is not None:
            check_http_url(name, value, "--otlp http://localhost:4318")
    with extra("otel"):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    target = f"{endpoint.rstrip('/')}/v1/metrics" if endpoint is not None else None
    return PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=target), export_interval_millis=every_s * 1000)


@contextlib.contextmanager
def exporting(look: Callable[[], Iterable[Status]], to: MetricReader) -> Iterator[None]:
    """Read and export whenever the reader collects, and once more at the end.

    Raises:
        MissingExtra: the extra `otel` is not installed.
    """
    with extra("otel"):
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
    provider = MeterProvider([to], Resource.create({"service.name": "delivered"}))
    meter, latest = provider.get_meter("delivered"), _Latest(look)
    for family in StatusCollector(list).describe():
        counts = family.type == "counter"
        make = meter.create_observable_counter if counts else meter.create_observable_gauge
        unit = _UNITS.get(family.name.rsplit("_", 1)[-1], "")
        make(_name(family.name), [partial(latest.observe, _name(family.name))], unit, family.documentation)
    for name, text in ((SENT, "Records decided at a broker."), (CONSUMED, "Messages that receivers took.")):
        meter.create_observable_counter(name, [partial(latest.observe, name)], "{message}", text)
    try:
        yield
    finally:
        provider.shutdown()


class _Latest:
    def __init__(self, look: Callable[[], Iterable[Status]]) -> None:
        self._look = look
        self._lock = Lock()
        self._at = float("-inf")
        self._points: dict[str, list[Point]] = {}

    def observe(self, name: str, options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        del options
        with self._lock:
            if time.monotonic() - self._at > _FRESH_S:
                self._points = readings(list(self._look()))
                self._at = time.monotonic()
            return [Observation(value, attributes) for value, attributes in self._points[name]]


def _attributes(now: Status, operation: str, system: str, destination: str) -> Attributes:
    return {
        "messaging.operation.name": operation,
        "messaging.system": system,
        "messaging.destination.name": destination,
        "delivered.pipeline": now.pipeline,
    }


def _name(family: str) -> str:
    return family.replace("delivered_", "delivered.", 1)

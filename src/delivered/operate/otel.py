"""The same readings for OpenTelemetry, with the names of its conventions for messaging where these have one.

Every metric of `observe.metrics` is an instrument: `delivered_lag_seconds` is `delivered.lag_seconds`, with its labels
as attributes. Beside them, `messaging.client.sent.messages` counts the records decided at sinks that are brokers, and
`messaging.client.consumed.messages` those that receivers took from queues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from delivered.model.errors import MissingExtra
from delivered.model.options import check_http_url
from delivered.operate.metrics import StatusCollector
from delivered.operate.state import Status
from delivered.pipeline.registry import connector

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics.export import MetricReader

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SENT, CONSUMED = "messaging.client.sent.messages", "messaging.client.consumed.messages"
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}
_FRESH_S = 1.0
"""The instruments of one collection share one look."""

Attributes = dict[str, str | int]
Point = tuple[float, Attributes]


def readings(statuses: Sequence[Status]) -> dict[str, list[Point]]:
    """Instrument -> values with their attributes."""
    found: dict[str, list[Point]] = {
        _name(f.name): [(s.value, dict(s.labels)) for s in f.samples]
        for f in StatusCollector(lambda: statuses).collect()
    }
    found[SENT] = [
        (s.records, _of(now, "send", s.system, s.destination))
        for now in statuses
        for s in now.sinks
        if connector(s.system).messaging
    ]
    found[CONSUMED] = [
        (sum(r.counts.get("received", 0) for r in reports), _of(now, "receive", *now.queues[source]))
        for now in statuses
        for source, reports in now.receivers.items()
        if source in now.queues
    ]
    return found


def reader(endpoint: str | None, every_s: float) -> MetricReader:
    """Sends to a collector by OTLP over HTTP.

    Args:
        endpoint: its base address; None: of OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.

    Raises:
        UsageError: nothing can listen there. MissingExtra: the extra `otel` is not installed.
    """
    for name, value in {"--otlp": endpoint, _ENDPOINT: None if endpoint else os.environ.get(_ENDPOINT)}.items():
        if value is not None:
            check_http_url(name, value, "--otlp http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ImportError:
        raise MissingExtra("otel") from None
    target = f"{endpoint.rstrip('/')}/v1/metrics" if endpoint is not None else None
    return PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=target), export_interval_millis=every_s * 1000)


@contextlib.contextmanager
def exporting(look: Callable[[], Iterable[Status]], to: MetricReader) -> Iterator[None]:
    """Read and export whenever the reader collects, and once more at the end.

    Raises:
        MissingExtra: the extra `otel` is not installed.
    """
    try:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
    except ImportError:
        raise MissingExtra("otel") from None
    provider = MeterProvider([to], Resource.create({"service.name": "delivered"}))
    meter, latest = provider.get_meter("delivered"), _Latest(look)
    for family in StatusCollector(list).describe():
        counts = family.type == "counter"
        make = meter.create_observable_counter if counts else meter.create_observable_gauge
        unit = _UNITS.get(family.name.rsplit("_", 1)[-1], "")
        make(_name(family.name), [partial(latest.of, _name(family.name))], unit, family.documentation)
    for name, text in ((SENT, "Records decided at a broker."), (CONSUMED, "Messages that receivers took.")):
        meter.create_observable_counter(name, [partial(latest.of, name)], "{message}", text)
    try:
        yield
    finally:
        provider.shutdown()


class _Latest:
    def __init__(self, look: Callable[[], Iterable[Status]]) -> None:
        self._look = look
        self._lock = Lock()
        self._at = float("-inf")
        self._found: dict[str, list[Point]] = {}

    def of(self, name: str, options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        del options
        with self._lock:
            if time.monotonic() - self._at > _FRESH_S:
                self._found = readings(list(self._look()))
                self._at = time.monotonic()
            return [Observation(value, attributes) for value, attributes in self._found[name]]


def _of(now: Status, operation: str, system: str, destination: str) -> Attributes:
    return {
        "messaging.operation.name": operation,
        "messaging.system": system,
        "messaging.destination.name": destination,
        "delivered.pipeline": now.pipeline,
    }


def _name(family: str) -> str:
    return family.replace("delivered_", "delivered.", 1)

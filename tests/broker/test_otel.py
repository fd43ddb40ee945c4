"""OpenTelemetry: the readings of metrics as instruments, with the names of its conventions; by OTLP to a collector."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import rotel
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.semconv._incubating.attributes import messaging_attributes as conventions
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from tests.support.decided import checkpoint, decide, pipeline

from delivered.connectors.log.produce import append
from delivered.contract.source import ReceiverReport
from delivered.engine.context import _place
from delivered.model.work import Owner
from delivered.operate.asking import status
from delivered.operate.metrics import CONSUMED, SENT, exporting
from delivered.operate.status import SinkStatus, Status
from delivered_lab.brokers.servers import free_ports


def points(reader: InMemoryMetricReader) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {m.name: [(p.value, dict(p.attributes)) for p in m.data.data_points] for m in metrics}


def test_instruments_have_the_names_of_the_conventions() -> None:
    assert (SENT, CONSUMED) == (
        messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES,
        messaging_metrics.MESSAGING_CLIENT_CONSUMED_MESSAGES,
    )
    now = Status(
        "orders", "exactly_once", "",
        sinks=(SinkStatus("clean", "kafka", 41, 0, destination="clean"), SinkStatus("t", "postgres", 41, 0)),
        receivers={"source": (ReceiverReport(Owner("x", "elsewhere"), int(time.time() * 1000), {"received": 7}),)},
        queues={"source": ("rabbitmq", "calls")},
    )  # fmt: skip
    looks = 0

    def look() -> list[Status]:
        nonlocal looks
        looks += 1
        return [now]

    reader = InMemoryMetricReader()
    with exporting(look, reader):
        found = points(reader)
        assert looks == 1, "the instruments share a look"
    assert found[SENT] == [(41, attributes("send", "kafka", "clean"))]
    assert found[CONSUMED] == [(7, attributes("receive", "rabbitmq", "calls"))]
    assert found["delivered.receivers"] == [
        (1.0, {"pipeline": "orders", "source": "source", "state": "running"}),
        (0.0, {"pipeline": "orders", "source": "source", "state": "gone"}),
    ]


def attributes(operation: str, system: str, destination: str) -> dict[str, Any]:
    return {
        conventions.MESSAGING_OPERATION_NAME: operation,
        conventions.MESSAGING_SYSTEM: system,
        conventions.MESSAGING_DESTINATION_NAME: destination,
        "delivered.pipeline": "orders",
    }


def test_a_collector_receives_them(tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    decide(made, 2, _place(Owner("owner"), psutil.Process()))
    checkpoint(made, 2)
    append(str(tmp_path / "in"), pa.table({"value": [b"b"] * 3}), idempotence=("test", 2))
    assert status(made).lag_total == 2
    file = tmp_path / "orders.yaml"
    file.write_text(
        f"pipeline: orders\nguarantee: exactly_once\ncheckpoint: {tmp_path}/checkpoint\n"
        f"source: {{format: log, path: {tmp_path}/in}}\n"
        f"sinks: [{{format: sqlite, path: {tmp_path}/out.db, table: orders}}]\n"
    )
    port, grpc = free_ports(2)
    collector = [Path(rotel.__file__).with_name("rotel-agent"), "start", "--exporter", "blackhole"]
    listens = ["--otlp-http-endpoint", f"127.0.0.1:{port}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"]
    shows = ["--debug-log", "metrics", "--debug-log-verbosity", "detailed"]
    sends = [sys.executable, "-m", "delivered.cli.main", "metrics", file, "--otlp", f"http://127.0.0.1:{port}"]
    received = tmp_path / "received.log"
    with received.open("wb") as out:
        one = subprocess.Popen([*collector, *listens, *shows], stdout=out, stderr=out)
        other = subprocess.Popen([*sends, "--every", "1"], stderr=subprocess.PIPE, env={**os.environ, "NO_COLOR": "1"})
    try:
        deadline = time.monotonic() + 60
        while "delivered.lag_offsets" not in received.read_text():
            assert other.poll() is None and one.poll() is None, received.read_text()
            assert time.monotonic() < deadline, received.read_text()
            time.sleep(0.1)
        other.send_signal(signal.SIGTERM)
        other.communicate(timeout=60)
        assert other.returncode == 0
    finally:
        for process in (one, other):
            process.kill()
            process.wait()

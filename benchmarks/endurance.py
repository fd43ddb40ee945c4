"""Does a pipeline that runs for hours keep its memory, threads and file descriptors? From outside, with /proc.

Two exactly_once pipelines from one topic of Kafka into one topic each, directly and through Spark's rows, at a steady
rate. At the end, both outputs are counted and audited.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Producer

import delivered
from benchmarks import origin
from benchmarks.__main__ import VALUE_BYTES, count, create_topic, versions
from delivered.spark.session import session
from delivered_lab import brokers

_SAMPLE_S = 10.0
_TICKS_S = 0.1
_KEPT = 60
"""Samples in the report."""
FIGURES = ("jvm_bytes", "python_bytes", "worker_bytes", "processes", "threads", "files")


class Feed:
    """Sends `rate` records a second until stopped."""

    def __init__(self, bootstrap: str, topic: str, rate: int) -> None:
        self.sent = 0
        self._producer = Producer({"bootstrap.servers": bootstrap, "compression.type": "lz4", "linger.ms": 20})
        self._topic, self._rate = topic, rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stop.wait(_TICKS_S):
            due = int((time.monotonic() - began) * self._rate)
            for number in range(self.sent, due):
                value = (b"%016x" % (number * 2654435761)) * (VALUE_BYTES // 16)
                self._producer.produce(self._topic, key=b"%08d" % (number % 10**8), value=value)
            self.sent = due
            self._producer.poll(0)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        if left := self._producer.flush(120):
            raise RuntimeError(f"{left} records were not sent within 120 s")
        return self.sent


def sample(own: psutil.Process, broker: int) -> dict[str, float]:
    """Resident bytes, threads and open files of the driver, its JVM and its Python workers; the broker is left out."""
    found = dict.fromkeys(FIGURES, 0.0)
    for process in [own, *own.children(recursive=True)]:
        try:
            if process.pid == broker:
                continue
            with process.oneshot():
                used, name = process.memory_info().rss, Path(process.exe()).name
                found["threads"] += process.num_threads()
                found["files"] += process.num_fds()
        except psutil.Error:
            continue  # it ended meanwhile
        found["processes"] += 1
        if name.startswith("java"):
            found["jvm_bytes"] += used
        else:
            found["python_bytes"] += used
            if process != own:
                found["worker_bytes"] = max(found["worker_bytes"], used)
    return found


def trend(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Medians of the second and of the last quarter, and the highest value since the first quarter."""
    quarter = len(samples) // 4
    early, late, settled = samples[quarter : 2 * quarter], samples[-quarter:], samples[quarter:]
    return {
        figure: {
            "second_quarter": statistics.median(s[figure] for s in early),
            "last_quarter": statistics.median(s[figure] for s in late),
            "highest": max(s[figure] for s in settled),
        }
        for figure in FIGURES
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance")
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--rate", type=int, default=2_000, help="records a second")
    parser.add_argument("--interval", default="1 second", help="between two batches")
    parser.add_argument("--out", type=Path, default=Path("build/bench-endurance.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        broker = brokers.start("kafka", Path(folder, "kafka"), dies_with_parent=True)
        try:
            report = measure(broker, Path(folder), given)
        finally:
            broker.stop()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1))
    print(json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=1))


def measure(broker: Any, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    for topic in ("endurance-in", "endurance-direct", "endurance-rows"):
        create_topic(broker.bootstrap, topic)
    pipelines = {
        f"endurance-{path}": delivered.Pipeline(
            name=f"endurance-{path}",
            guarantee="exactly_once",
            checkpoint=str(folder / path),
            source=delivered.kafka(broker.bootstrap, subscribe="endurance-in", startingOffsets="earliest"),
            transform=transform,
            sinks=[delivered.kafka(broker.bootstrap, topic=f"endurance-{path}")],
            trigger=given.interval,
        )
        for path, transform in (
            ("direct", delivered.arrow(select=["key", "value"])),
            ("rows", "SELECT key, value FROM source"),
        )
    }
    spark = session("endurance", "local[2]", {"spark.driver.memory": "1g"})
    spark.sparkContext.setLogLevel("ERROR")
    feed = Feed(broker.bootstrap, "endurance-in", given.rate)
    queries = {name: pipeline.start(spark) for name, pipeline in pipelines.items()}
    own, samples = psutil.Process(), []
    began = time.monotonic()
    while time.monotonic() - began < 60 * given.minutes:
        if any(query.awaitTermination(_SAMPLE_S / len(queries)) for query in queries.values()):
            raise RuntimeError("a query ended: " + "; ".join(str(q.exception()) for q in queries.values()))
        samples.append({"s": round(time.monotonic() - began, 1), **sample(own, broker.pid)})
        if len(samples) % 60 == 0:
            print(json.dumps(samples[-1]), flush=True)
    sent = feed.stop()
    batches = {}
    for name, query in queries.items():
        query.processAllAvailable()
        batches[name] = (query.lastProgress or {})["batchId"] + 1
        pipelines[name].stop(query)
    audits = {name: pipeline.audit(spark) for name, pipeline in pipelines.items()}
    spark.stop()
    return {
        "minutes": given.minutes,
        "rate": given.rate,
        "interval": given.interval,
        "sent": sent,
        "batches": batches,
        "arrived": {name: count(broker.bootstrap, name) for name in pipelines},
        "audit": {name: str(audit.verdict) for name, audit in audits.items()},
        "trend": trend(samples),
        "versions": versions(),
        "origin": origin(),
        "samples": samples[:: max(1, len(samples) // _KEPT)],
    }


if __name__ == "__main__":
    main()

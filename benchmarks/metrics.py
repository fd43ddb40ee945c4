"""`python -m benchmarks.metrics`: what metrics cost a pipeline that works as fast as it can; into build/metrics.json.

Records per second of the same topic through the same pipeline, in turn without metrics and with `--metrics-port`, which
is scraped every 5 s, three times as often as Prometheus does by default. And, as such ratios vary by more than what is
looked for: the processor time of a scrape, as a share of the machine at that interval.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import origin
from benchmarks.__main__ import create_topic, fill
from delivered.checkpoint import history
from delivered_lab import brokers
from delivered_lab.brokers.servers import free_ports

RECORDS = 8_000_000
PAIRS = 3
EVERY_S = 5.0
SCRAPES = 40


def scraped(port: int, ended: threading.Event, took: list[float]) -> None:
    while not ended.wait(EVERY_S):
        with suppress(OSError):  # not there yet
            began = time.monotonic()
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read()
            took.append(time.monotonic() - began)


def run(file: Path, checkpoint: Path, metrics: bool) -> tuple[float, list[float]]:
    """Records per second of the last two thirds of the batches, all warm; seconds of each scrape."""
    (port,), ended, took = free_ports(1), threading.Event(), list[float]()
    options = ["--metrics-port", str(port)] if metrics else []
    command = [sys.executable, "-m", "delivered.cli.main", "run", str(file), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    scraper = threading.Thread(target=scraped, args=(port, ended, took))
    if metrics:
        scraper.start()
    if process.wait(600):
        raise RuntimeError(f"{command} ended with {process.returncode}")
    ended.set()
    reports = history.batches(str(checkpoint))
    first, *rest = reports[len(reports) // 3 :]
    seconds = (rest[-1].decided_at_ms - first.decided_at_ms) / 1000
    return sum(sum(r.records.values()) for r in rest) / seconds, took


def scrape_cpu_s(file: Path) -> float:
    """Processor time of one scrape, in `delivered metrics` and in the broker together."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "delivered.cli.main", "metrics", str(file), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.readline()  # "serving"
    try:
        places = [psutil.Process(process.pid), *brokers_below()]
        before = 0.0
        for number in range(SCRAPES + 5):
            if number == 5:  # connections are warm
                before = sum(sum(p.cpu_times()[:2]) for p in places)
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read()
        return (sum(sum(p.cpu_times()[:2]) for p in places) - before) / SCRAPES
    finally:
        process.kill()
        process.wait()


def brokers_below() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.name() == "java"]


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="metrics-"))
    broker = brokers.start("kafka", folder / "kafka", dies_with_parent=True)
    rates: dict[str, list[float]] = {"without": [], "with": []}
    scrapes: list[float] = []
    try:
        create_topic(broker.bootstrap, "orders")
        fill(broker.bootstrap, "orders", RECORDS)
        for number in range(2 * PAIRS):
            metrics, checkpoint = number % 2 == 1, folder / f"checkpoint{number}"
            create_topic(broker.bootstrap, f"clean{number}")
            to = {"kafka.bootstrap.servers": broker.bootstrap}
            pipeline: dict[str, Any] = {
                "pipeline": f"fast{number}", "guarantee": "exactly_once", "checkpoint": str(checkpoint),
                "trigger": "available_now", "master": "local[2]",
                "source": {"format": "kafka", **to, "subscribe": "orders", "startingOffsets": "earliest",
                           "maxOffsetsPerTrigger": 300_000},
                "sinks": [{"format": "kafka", **to, "topic": f"clean{number}"}],
            }  # fmt: skip
            file = folder / f"fast{number}.yaml"
            file.write_text(yaml.safe_dump(pipeline), encoding="utf-8")
            rate, took = run(file, checkpoint, metrics)
            rates["with" if metrics else "without"].append(round(rate))
            scrapes += took
            print(f"{'with' if metrics else 'without'} metrics: {rate:,.0f} records/s, {len(took)} scrapes", flush=True)
        each = scrape_cpu_s(file)
    finally:
        broker.stop()
    with_, without = statistics.median(rates["with"]), statistics.median(rates["without"])
    found = {
        "origin": origin(),
        "records_per_s": rates,
        "ratio": round(with_ / without, 4),
        "scrape_every_s": EVERY_S,
        "scrape_s": round(statistics.median(scrapes), 3),
        "scrape_cpu_ms": round(each * 1000, 1),
        "share_of_two_cores": round(each / EVERY_S / 2, 5),
        "share_of_two_cores_every_15_s": round(each / 15 / 2, 5),
    }
    out = Path("build") / "metrics.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

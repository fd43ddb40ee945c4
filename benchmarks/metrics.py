"""`python -m benchmarks.metrics`: what metrics cost a pipeline that works as fast as it can; into build/metrics.json.

Two topics, one three times the other, through the same pipeline without metrics and with `--metrics-port`, which is
scraped every 5 s, three times as often as Prometheus does by default; which goes first alternates. Processor time of
pipeline and broker at both sizes tells what metrics cost once, at the start, from what they cost per record. And the
processor time of one scrape, and records per second, which vary from run to run by more than what is looked for.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import origin
from benchmarks.__main__ import create_topic, fill
from delivered.checkpoint import history
from delivered_lab import brokers
from delivered_lab.brokers.servers import free_ports

RECORDS = (8_000_000, 24_000_000)
PAIRS = 3
EVERY_S = 5.0
SCRAPES = 40


def scraped(port: int, ended: threading.Event, took: list[float]) -> None:
    while not ended.wait(EVERY_S):
        with suppress(OSError):  # not there yet
            began = time.monotonic()
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read()
            took.append(time.monotonic() - began)


@dataclass(frozen=True)
class Run:
    """One run of the pipeline.

    Attributes:
        records_per_s: of the last two thirds of the batches, all warm.
        cpu_s: processor time of all of the pipeline's processes and the broker, start included.
        scrapes_s: how long each scrape took.
    """

    records_per_s: float
    cpu_s: float
    scrapes_s: list[float]


def run(file: Path, checkpoint: Path, metrics: bool) -> Run:
    (port,), ended, took = free_ports(1), threading.Event(), list[float]()
    options = ["--metrics-port", str(port)] if metrics else []
    command = [sys.executable, "-m", "delivered.cli.main", "run", str(file), *options]
    before = used_cpu_s()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    scraper = threading.Thread(target=scraped, args=(port, ended, took))
    if metrics:
        scraper.start()
    if process.wait(600):
        raise RuntimeError(f"{command} ended with {process.returncode}")
    ended.set()
    cpu_s = used_cpu_s() - before
    reports = history.batches(str(checkpoint))
    first, *rest = reports[len(reports) // 3 :]
    seconds = (rest[-1].decided_at_ms - first.decided_at_ms) / 1000
    return Run(sum(sum(r.records.values()) for r in rest) / seconds, cpu_s, took)


def used_cpu_s() -> float:
    """Of the broker, and of all processes that have ended below this one."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(sum(p.cpu_times()[:2]) for p in brokers_below())


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
    runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
    try:
        for records in RECORDS:
            create_topic(broker.bootstrap, f"orders{records}")
            fill(broker.bootstrap, f"orders{records}", records)
        for number in range(2 * PAIRS * len(RECORDS)):
            records = RECORDS[number // 2 % len(RECORDS)]
            kind = "with" if (number + number // (2 * len(RECORDS))) % 2 else "without"
            checkpoint = folder / f"checkpoint{number}"
            create_topic(broker.bootstrap, f"clean{number}")
            to = {"kafka.bootstrap.servers": broker.bootstrap}
            pipeline: dict[str, Any] = {
                "pipeline": f"fast{number}", "guarantee": "exactly_once", "checkpoint": str(checkpoint),
                "trigger": "available_now", "master": "local[2]",
                "source": {"format": "kafka", **to, "subscribe": f"orders{records}", "startingOffsets": "earliest",
                           "maxOffsetsPerTrigger": 300_000},
                "sinks": [{"format": "kafka", **to, "topic": f"clean{number}"}],
            }  # fmt: skip
            file = folder / f"fast{number}.yaml"
            file.write_text(yaml.safe_dump(pipeline), encoding="utf-8")
            done = run(file, checkpoint, kind == "with")
            runs[kind, records].append(done)
            print(f"{records:,} records {kind} metrics: {done}", flush=True)
        each = scrape_cpu_s(file)
    finally:
        broker.stop()
    small, large = RECORDS
    cpu_s = {k: [statistics.median(r.cpu_s for r in runs[k, n]) for n in RECORDS] for k in ("without", "with")}
    per_record = {k: (s[1] - s[0]) / (large - small) * 1e6 for k, s in cpu_s.items()}
    once = {k: s[0] - per_record[k] * small / 1e6 for k, s in cpu_s.items()}
    found = {
        "origin": origin(),
        "records": RECORDS,
        "pairs": PAIRS,
        "cpu_us_per_record": {k: round(v, 3) for k, v in per_record.items()},
        "start_cpu_s": {k: round(v, 2) for k, v in once.items()},
        "records_per_s": {k: [round(r.records_per_s) for r in runs[k, large]] for k in ("without", "with")},
        "scrape_every_s": EVERY_S,
        "scrape_s": round(statistics.median(s for n in RECORDS for r in runs["with", n] for s in r.scrapes_s), 3),
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

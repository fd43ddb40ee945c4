"""`make bench-audit`: what it costs to audit new records behind sealed ones, into build/bench-audit.json.

A pipeline copies a Kafka topic exactly once. After 0, 1, 10 and 50 million sealed records, 100,000 more are copied and
audited, in turn: by Spark in a session that is warm, and by `delivered audit` from the shell, start included. Beside
it, a full audit of the first sizes. The records of the larger sizes are sealed by `--from-now`, which reads none of
them; nothing in a continued audit depends on how they were sealed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import origin
from benchmarks.__main__ import create_topic, delete_topic, fill, versions
from delivered import Pipeline
from delivered_lab import brokers

NEW = 100_000
SIZES = (0, 1_000_000, 10_000_000, 50_000_000)
FULL_MAX = 1_000_000
"""Records of a full audit, as a comparison."""
ROUNDS = 3
MASTER = "local[2]"


@dataclass
class Usage:
    """
    Attributes:
        peak_mib: resident memory of a process and those below it, at most.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_mib: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)


def shell(*arguments: str, codes: tuple[int, ...] = (0,)) -> Usage:
    """Run `delivered` as a user does.

    Args:
        codes: exit codes that are no failure.
    """
    command = [sys.executable, "-m", "delivered.cli.main", *arguments]
    began, usage = time.monotonic(), Usage()
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    times: dict[int, float] = {}
    while process.poll() is None:
        memory = 0
        with suppress(psutil.Error):
            for one in (process, *process.children(recursive=True)):
                memory += one.memory_info().rss
                times[one.pid] = sum(one.cpu_times()[:2])
        usage.peak_mib = max(usage.peak_mib, memory / 2**20)
        try:
            process.wait(0.02)
        except psutil.TimeoutExpired:
            continue
    usage.seconds, usage.cpu_s = time.monotonic() - began, sum(times.values())
    out, err = process.communicate()
    if process.returncode not in codes:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{out[-3000:]}\n{err[-3000:]}")
    if "json" in arguments:
        usage.report = json.loads(out)
    return usage


def pipeline_file(folder: Path, bootstrap: str, topic: str) -> Path:
    to = {"kafka.bootstrap.servers": bootstrap}
    pipeline: dict[str, Any] = {
        "pipeline": f"copy-{topic}",
        "guarantee": "exactly_once",
        "checkpoint": str(folder / f"{topic}-checkpoint"),
        "trigger": "available_now",
        "master": MASTER,
        "source": {"format": "kafka", **to, "subscribe": topic, "startingOffsets": "earliest"},
        "sinks": [{"format": "kafka", **to, "topic": f"{topic}-out"}],
    }
    pipeline["source"]["maxOffsetsPerTrigger"] = 3_000_000
    file = folder / f"{topic}.yaml"
    file.write_text(yaml.safe_dump(pipeline), encoding="utf-8")
    return file


def add(file: Path, bootstrap: str, topic: str, records: int) -> None:
    fill(bootstrap, topic, records)
    shell("run", str(file))


def checked(report: dict[str, Any], records: int) -> None:
    if report["verdict"] != "held" or report["counts"]["sent"] != records:
        raise RuntimeError(f"not a valid run: {records:,} records expected, and {json.dumps(report)[:3000]}")


def measure(bootstrap: str, folder: Path, size: int) -> dict[str, Any]:
    """Audits behind `size` sealed records."""
    topic = f"t{size}"
    create_topic(bootstrap, topic)
    create_topic(bootstrap, f"{topic}-out")
    file = pipeline_file(folder, bootstrap, topic)
    found: dict[str, Any] = {"sealed": size}
    if size:
        add(file, bootstrap, topic, size)
        if size <= FULL_MAX:
            full = shell("audit", str(file), "--full", "--spark", "--output", "json")
            checked(full.report, size)
            found["full"] = {"seconds": round(full.seconds, 2), "cpu_s": round(full.cpu_s, 2)}
        else:
            shell("audit", str(file), "--from-now", codes=(0, 3))
    found["shell"] = []
    for _ in range(ROUNDS):
        add(file, bootstrap, topic, NEW)
        one = shell("audit", str(file), "--output", "json")
        checked(one.report, NEW)
        found["shell"].append(
            {"seconds": round(one.seconds, 2), "cpu_s": round(one.cpu_s, 2), "peak_mib": round(one.peak_mib)}
        )
    found["warm"] = warm(file, bootstrap, topic)
    delete_topic(bootstrap, topic)
    delete_topic(bootstrap, f"{topic}-out")
    return found


def warm(file: Path, bootstrap: str, topic: str) -> list[dict[str, Any]]:
    """Audits by Spark, all in one session; the first is left out."""
    from delivered.spark.session import session

    pipeline = Pipeline.from_file(file)
    spark = session("bench-audit", MASTER)
    rounds = []
    try:
        for number in range(ROUNDS + 1):
            add(file, bootstrap, topic, NEW)
            began = time.monotonic()
            report = pipeline.audit(spark)
            seconds = time.monotonic() - began
            checked(report.to_dict(), NEW)
            if number:
                rounds.append({"seconds": round(seconds, 2)})
    finally:
        spark.stop()
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="sealed records")
    parser.add_argument("--out", type=Path, default=Path("build/bench-audit.json"))
    given = parser.parse_args()
    found = []
    given.out.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-audit-") as folder:
        broker = brokers.start("kafka", Path(folder) / "kafka", dies_with_parent=True)
        try:
            for size in given.sizes:
                found.append(measure(broker.bootstrap, Path(folder), size))
                print(json.dumps(found[-1]), flush=True)
                of = {"new": NEW, "rounds": ROUNDS, "cores": os.cpu_count(), "versions": versions(), "origin": origin()}
                given.out.write_text(json.dumps({**of, "runs": found}, indent=1) + "\n", encoding="utf-8")
        finally:
            broker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

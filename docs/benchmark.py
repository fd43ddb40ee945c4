"""What `make bench` measured last, as a page. `python -m docs.benchmark build/bench.json` stores a run."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "benchmark.json"

_HEAD = """# Benchmark

Written by `make docs` from the last stored run of `make bench`: {records:,} records of 8 + 100 bytes from one topic of
4 partitions into another, lz4, acks=all, one machine with {cores} cores that runs Spark, its workers and the broker.
Each repetition runs all cases in turn, each in a session and a JVM of its own, from the start of the query to its
end; what arrived is counted by a reader of its own before a rate counts. Batches are of 3 million records.

*Spark's own* is the Kafka connector that Spark ships (JARs, at least once). *Direct* is `delivered.Pipeline` with an
Arrow transform or none: records do not pass through the JVM.
"""


def page() -> str:
    """The page; it says so if nothing was measured yet."""
    if not STORED.exists():
        return "# Benchmark\n\nNot measured yet: `make bench`, then `python -m docs.benchmark build/bench.json`.\n"
    run: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    versions = run["versions"]
    rest = ", ".join(f"{name} {v}" for name, v in versions.items() if name != "cores")
    lines = [_HEAD.format(records=run["records"], cores=versions["cores"])]
    lines += ["| ratio of records per second | median | each repetition |", "|---|---:|---|"]
    for ratio in run["ratios"]:
        lines.append(f"| {ratio['name']} | {ratio['ratio']:.2f} | {_each(ratio['ratios'])} |")
    lines += ["", "| case | records/s, median | CPU, us a record | largest worker, MiB | JVM, MiB |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for case in run["cases"]:
        cpu = statistics.median(case["cpu_us_per_record"])
        worker, jvm = (case[k] / 2**20 for k in ("peak_worker_bytes", "peak_jvm_bytes"))
        lines.append(f"| {case['name']} | {case['median']:,.0f} | {cpu:.2f} | {worker:,.0f} | {jvm:,.0f} |")
    lines += ["", "CPU is that of Spark and its workers, not the broker's. The cases named *memory* ran once.", ""]
    lines += ["| from the send of one record until a read-committed reader has it | median, ms | p95, ms |"]
    lines += ["|---|---:|---:|"]
    for case in run["one_record"]:
        lines.append(
            f"| {case['name'].removeprefix('one record, ')} | {case['median_ms']:.0f} | {case['p95_ms']:.0f} |"
        )
    return "\n".join([*lines, "", f"Versions: {rest}.", ""])


def _each(ratios: list[float]) -> str:
    return ", ".join(f"{r:.2f}" for r in ratios)


if __name__ == "__main__":
    shutil.copyfile(sys.argv[1], STORED)

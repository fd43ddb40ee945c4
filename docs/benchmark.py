"""What `make bench`, `bench-postgres` and `bench-delta` measured last, as a page.

`python -m docs.benchmark build/bench.json build/bench-postgres.json ...` stores runs.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

_HEAD = """# Benchmark

Written by `make docs` from the last stored run of `make bench`: {records:,} records of 8 + 100 bytes from one topic of
4 partitions into another, lz4, acks=all, on one machine with {cores} cores that runs Spark, its workers and the broker.
Each repetition runs all cases in turn, each in its own session and JVM, from the start of the query to its end. A
separate reader counts what arrived before a rate is accepted. Batches have 3 million records.

*Spark's own* is the Kafka connector that ships with Spark (JARs, at least once). *Direct* is `delivered.Pipeline` with
an Arrow transform or none: records do not pass through the JVM.
"""

_TABLES = {
    "bench-postgres": """## PostgreSQL

`make bench-postgres`: {rows:,} rows of ten columns from Parquet files, appended to one table of a server on the same
machine with {cores} cores. *Plain COPY* is one Python process per core, each with one transaction and no ledger: with
Arrow's own driver (ADBC), with psycopg from CSV that Arrow writes, and with this sink's encoder, the toughest baseline.
*Engine alone* adds ledger, marker and fingerprints, without Spark. *Direct* is a whole query from start to end or, for
*running query*, one batch of a running query.
""",
    "bench-delta": """## Delta Lake

`make bench-delta`: the same {rows:,} rows, appended to a local table. `write_deltalake` neither calls fsync nor
computes fingerprints; this sink's time includes both.
""",
}
"""Stem of the report's name -> what stands above its figures."""


def page() -> str:
    """The page; benchmarks without a stored run are marked as not measured."""
    return "\n".join([_kafka(), *(_table(name, head) for name, head in _TABLES.items())])


def _table(name: str, head: str) -> str:
    """A run of one of the benchmarks of table sinks."""
    stored = _stored(name)
    if not stored.exists():
        todo = f"`make {name}`, then `python -m docs.benchmark build/{name}.json`"
        return f"{head.splitlines()[0]}\n\nNot measured yet: {todo}.\n"
    run: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
    lines = [
        head.format(**run),
        "| ratio of rows per second | median | each repetition | by CPU |",
        "|---|---:|---|---:|",
    ]
    for ratio in run["ratios"]:
        each = _each(ratio["ratios"])
        lines.append(f"| {ratio['name']} | {ratio['ratio']:.2f} | {each} | {ratio['cpu_ratio']:.2f} |")
    lines += [
        "",
        "| case | rows/s, median | CPU, us a row | largest worker, MiB | JVM, MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for case, runs in run["cases"].items():
        rate = run["rows"] / statistics.median(r["seconds"] for r in runs)
        cpu = statistics.median(1e6 * r["cpu_seconds"] / run["rows"] for r in runs)
        worker, jvm = (max(r[k] for r in runs) / 2**20 for k in ("worker_bytes", "jvm_bytes"))
        lines.append(f"| {case} | {rate:,.0f} | {cpu:.2f} | {worker:,.0f} | {jvm:,.0f} |")
    return "\n".join([*lines, "", f"Versions: {_versions(run['versions'])}.", ""])


def _kafka() -> str:
    stored = _stored("bench")
    if not stored.exists():
        return "# Benchmark\n\nNot measured yet: `make bench`, then `python -m docs.benchmark build/bench.json`.\n"
    run: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
    versions = run["versions"]
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
    lines += ["", "CPU is that of Spark and its workers, without the broker. The *memory* cases ran once.", ""]
    lines += ["| latency of one record, send to read-committed reader | median, ms | p95, ms |"]
    lines += ["|---|---:|---:|"]
    for case in run["one_record"]:
        lines.append(
            f"| {case['name'].removeprefix('one record, ')} | {case['median_ms']:.0f} | {case['p95_ms']:.0f} |"
        )
    return "\n".join([*lines, "", f"Versions: {_versions(versions)}.", ""])


def _versions(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {v}" for name, v in found.items() if name != "cores")


def _stored(name: str) -> Path:
    return HERE / f"{name.replace('bench', 'benchmark')}.json"


def _each(ratios: list[float]) -> str:
    return ", ".join(f"{r:.2f}" for r in ratios)


if __name__ == "__main__":
    for report in map(Path, sys.argv[1:]):
        shutil.copyfile(report, _stored(report.stem))

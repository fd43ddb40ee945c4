"""What `make bench`, `bench-postgres`, `bench-delta` and `bench-pulsar` measured last, as a page.

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

This page shows rates, CPU and memory, compared with Spark's own sinks and Flink in one run (`make bench`). Look here
before you size a pipeline.

{records:,} records of 8 + 100 bytes go from one topic of 4 partitions into another, lz4, acks=all, on one machine with
{cores} cores that runs Spark, its workers and the broker. Each repetition runs all cases in turn, each in its own
session and JVM, from the start of the query to its end. A separate reader counts what arrived before a rate is
accepted. Batches have 3 million records.

*Spark's own* is the Kafka connector that ships with Spark (JARs, at least once). *Direct* is `delivered.Pipeline` with
an Arrow transform or none: records do not pass through the JVM.{flink}

![Records per second of each case](benchmark.svg)
"""

_FLINK = """ *Flink* is Flink SQL with its Kafka connector, from the
submission of the job to its end, in one process, set up for speed: object reuse, parallelism 2, checkpoints every 3 s,
a bounded scan, larger fetches and producer batches than by default (`benchmarks/peer_apps/flink_bench.py`)."""

_SHARDS = """## Shards

{rows:,} records a batch from Spark's own Kafka source through `repartition(n)` into the sink; the median of {batches}
batches after the first, in ms, and how it compares with Spark's own sink.
"""

_GOALS: tuple[tuple[str, str, str, float], ...] = (
    ("exactly_once, direct / Flink, exactly once", "ratio", ">=", 1.75),
    ("exactly_once, direct / Flink, exactly once", "cpu", "<=", 0.5),
    ("exactly_once / at_least_once, direct", "ratio", ">=", 0.97),
    ("at_most_once, direct / at_least_once, direct", "ratio", ">=", 1.0),
    ("exactly_once / Spark's own at least once", "ratio", ">=", 1.5),
)
"""Name of a ratio, records per second or CPU a record, and what it should be."""

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
    "bench-pulsar": """## Pulsar

`make bench-pulsar`: {rows:,} records of 8 + 100 bytes into a topic of two partitions of a server on the same machine
with {cores} cores. *Pulsar's own client* is one Python process per core with
one producer: batches as large as this sink's, ten thousand messages in flight; no ledger, no fingerprint. *Engine
alone* is without Spark. The goal: exactly_once at 0.8 or more of the client's rate. CPU is that of the client side.
""",
}
"""Stem of the report's name -> what stands above its figures."""


_ENDURANCE = """## Hours of running

`make endurance`: two exactly_once pipelines in one Spark session, directly and through Spark's rows, from one topic at
{rate:,} records/s, a batch every {interval}, for {minutes:.0f} minutes. {sent:,} records were sent.

{arrived}

The driver, its JVM and its workers, sampled every ten seconds:

| | median of the second quarter | median of the last quarter | highest since the first quarter |
|---|---:|---:|---:|
"""
_FIGURES = {
    "jvm_bytes": "memory of the JVM, MiB",
    "python_bytes": "memory of all Python processes, MiB",
    "worker_bytes": "memory of the largest worker, MiB",
    "processes": "processes",
    "threads": "threads",
    "files": "open files and sockets",
}


def page() -> str:
    """The page; benchmarks without a stored run are marked as not measured."""
    parts = [_kafka(), _audits(), _endurance(), *(_table(name, head) for name, head in _TABLES.items())]
    return "\n".join(filter(None, parts))


_AUDITS = """## Audits

`make bench-audit`: a pipeline has copied a Kafka topic exactly once, and its batches are sealed. {new:,} more records
are copied, and audited: by `delivered audit` in a shell, start included, and by Spark in a session that is warm. One
machine with {cores} cores runs all of it; seconds are medians of {rounds} runs, each of which leaves {new:,} more
sealed records.

| sealed before | shell, s | CPU, s | memory, MiB | Spark, warm, s | full audit by Spark, from the shell, s | commit |
|---:|---:|---:|---:|---:|---:|---|
"""


def _audits() -> str:
    stored = _stored("bench-audit")
    if not stored.exists():
        return ""
    run: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
    lines = []
    for one in run["runs"]:
        seconds, cpu, memory = (statistics.median(r[k] for r in one["shell"]) for k in ("seconds", "cpu_s", "peak_mib"))
        warm = statistics.median(r["seconds"] for r in one["warm"])
        full = f"{one['full']['seconds']:.1f}" if "full" in one else ""
        of = one.get("commit") or run.get("origin", {}).get("commit", "")
        lines.append(f"| {one['sealed']:,} | {seconds:.2f} | {cpu:.2f} | {memory:,.0f} | {warm:.2f} | {full} | {of} |")
    first, last = (statistics.median(r["seconds"] for r in run["runs"][at]["shell"]) for at in (0, -1))
    warm_first, warm_last = (statistics.median(r["seconds"] for r in run["runs"][at]["warm"]) for at in (0, -1))
    note = f"Last line against first: {last / first:.2f} in the shell, {warm_last / warm_first:.2f} by Spark."
    end = ["", note, "", _origin(run), ""]
    return _AUDITS.format(**run) + "\n".join([*lines, *end])


def _endurance() -> str:
    stored = _stored("bench-endurance")
    if not stored.exists():
        return ""
    run: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
    arrived = "\n".join(
        f"- `{name}`: {count:,} arrived, in {run['batches'][name]:,} batches; audit: {run['audit'][name]}"
        for name, count in run["arrived"].items()
    )
    rows = []
    for figure, name in _FIGURES.items():
        unit = 2**20 if figure.endswith("_bytes") else 1
        cells = (f"{run['trend'][figure][k] / unit:,.0f}" for k in ("second_quarter", "last_quarter", "highest"))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return _ENDURANCE.format(**{**run, "arrived": arrived}) + "\n".join([*rows, "", _origin(run), ""])


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
    return "\n".join([*lines, "", _origin(run), ""])


def _kafka() -> str:
    stored = _stored("bench")
    if not stored.exists():
        return "# Benchmark\n\nNot measured yet: `make bench`, then `python -m docs.benchmark build/bench.json`.\n"
    run: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8"))
    versions = run["versions"]
    flink = _FLINK if any(case["name"].startswith("flink") for case in run["cases"]) else ""
    lines = [_HEAD.format(records=run["records"], cores=versions["cores"], flink=flink)]
    lines += ["| ratio of records per second | median | each repetition | CPU a record |", "|---|---:|---|---:|"]
    for ratio in run["ratios"]:
        lines.append(f"| {ratio['name']} | {ratio['ratio']:.2f} | {_each(ratio['ratios'])} | {_cpu(ratio)} |")
    lines += ["", *_goals(run), *_why(run)]
    lines += ["| case | records/s, median | CPU, us a record | visible after, s | largest worker, MiB | JVM, MiB |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for case in run["cases"]:
        cpu = statistics.median(case["cpu_us_per_record"])
        visible = f"{statistics.median(case['visible_seconds']):.1f}" if "visible_seconds" in case else "-"
        worker, jvm = (case[k] / 2**20 for k in ("peak_worker_bytes", "peak_jvm_bytes"))
        lines.append(f"| {case['name']} | {case['median']:,.0f} | {cpu:.2f} | {visible} | {worker:,.0f} | {jvm:,.0f} |")
    lines += [
        "",
        "CPU is that of the client side, without the broker. *Visible*: from the",
        "start until a read-committed reader could read the last record. The *memory* cases ran once.",
        "",
        *_shards(run),
    ]
    lines += ["| latency of one record, send to read-committed reader | median, ms | p95, ms |"]
    lines += ["|---|---:|---:|"]
    for case in run["one_record"]:
        lines.append(
            f"| {case['name'].removeprefix('one record, ')} | {case['median_ms']:.0f} | {case['p95_ms']:.0f} |"
        )
    return "\n".join([*lines, "", _origin(run), ""])


def _cpu(ratio: dict[str, Any]) -> str:
    return f"{ratio['cpu']:.2f}" if "cpu" in ratio else "-"


def _goals(run: dict[str, Any]) -> list[str]:
    """What the project set out to reach, and whether this run did."""
    ratios = {ratio["name"]: ratio for ratio in run["ratios"]}
    goals = [
        (f"{name}, {'records/s' if key == 'ratio' else 'CPU a record'}", ratios[name][key], sign, goal)
        for name, key, sign, goal in _GOALS
        if key in ratios.get(name, {})
    ]
    spark = {s["partitions"]: s["batch_ms"] for s in run.get("shards", ()) if s["case"] == "Spark's own"}
    for shard in run.get("shards", ()):
        goal = {"at_least_once": 1.5, "exactly_once": 2.0}.get(shard["case"])
        if goal and shard["partitions"] == 200 and 200 in spark:
            goals.append((f"200 shards, {shard['case']} / Spark's own", shard["batch_ms"] / spark[200], "<=", goal))
    goals += [
        (f"first batch beyond a later one, {first['case']}, ms", first["beyond_ms"], "<=", 1500.0)
        for first in run.get("first_batch", ())
        if first["case"] == "exactly_once"
    ]
    goals += [
        (f"{case['name']}, largest worker, MiB", case["peak_worker_bytes"] / 2**20, "<=", 256.0)
        for case in run["cases"]
        if case["name"].startswith("memory, direct")
    ]
    goals += [
        (f"{case['name']}, median, ms", case["median_ms"], "<=", 200.0)
        for case in run["one_record"]
        if case["name"] == "one record, exactly_once"
    ]
    rows = [
        f"| {n} | {sign} {goal:g} | {v:.{2 if v < 10 else 0}f} | {_reached(v, sign, goal)} |"
        for n, v, sign, goal in goals
    ]
    return ["| goal | limit | found | reached |", "|---|---:|---:|---|", *rows, ""] if rows else []


def _why(run: dict[str, Any]) -> list[str]:
    """Where the time of the fastest case goes, from its batches."""
    case = next((c for c in run["cases"] if c["name"] == "exactly_once, direct" and c.get("batches_ms")), None)
    if case is None:
        return []
    first = statistics.median(batches[0] for batches in case["batches_ms"])
    later = statistics.median(ms for batches in case["batches_ms"] for ms in batches[1:])
    whole = run["records"] / case["median"]
    rate = 3_000_000 / later * 1000
    return [
        f"**Where the time goes.** Of the {whole:.1f} s of *exactly_once, direct*, the first batch takes "
        f"{first / 1000:.1f} s, a later one of 3 million records {later / 1000:.1f} s: {rate:,.0f} records/s. The "
        "difference is the start: the JVM loads and compiles Spark's classes, and Python processes import, one after "
        "the other ([decision 087](decisions/087-forked-planning-processes.md)). "
        "The guarantees differ by less than the repetitions do.",
        "",
    ]


def _reached(value: float, sign: str, goal: float) -> str:
    return "yes" if (value >= goal if sign == ">=" else value <= goal) else "no"


def _shards(run: dict[str, Any]) -> list[str]:
    if not (found := run.get("shards")):
        return []
    partitions = sorted({s["partitions"] for s in found})
    ms = {(s["case"], s["partitions"]): s["batch_ms"] for s in found}
    head = " | ".join(f"n = {p}" for p in partitions)
    lines = [_SHARDS.format(**run["shards_of"]), f"| sink | {head} |", f"|---|{'---:|' * len(partitions)}"]
    for name in dict.fromkeys(s["case"] for s in found):
        cells = (f"{ms[name, p]:,.0f} ({ms[name, p] / ms[found[0]['case'], p]:.2f})" for p in partitions)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "How much longer the first batch of a session takes than a later one, n = 1, in ms: "]
    lines[-1] += ", ".join(f"{f['case']} {f['beyond_ms']:,.0f}" for f in run.get("first_batch", ())) + "."
    return [*lines, ""]


def _origin(run: dict[str, Any]) -> str:
    """Of which code a run was, when, by which command, and with which versions."""
    versions = ", ".join(f"{name} {v}" for name, v in run["versions"].items() if name != "cores")
    of = run.get("origin")
    if of is None:
        return f"Commit and date of this run were not recorded. Versions: {versions}."
    load = f" (load average before the run: {of['load']:.1f})" if "load" in of else ""
    return f"`{of['command']}` ran on {of['date']}, at commit {of['commit']}{load}. Versions: {versions}."


def _stored(name: str) -> Path:
    return HERE / f"{name.replace('bench', 'benchmark')}.json"


def _each(ratios: list[float]) -> str:
    return ", ".join(f"{r:.2f}" for r in ratios)


if __name__ == "__main__":
    for report in map(Path, sys.argv[1:]):
        shutil.copyfile(report, _stored(report.stem))

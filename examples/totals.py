"""`python -m examples.totals`: revenue by carrier and day of 336,776 flights, as running totals, killed ten times.

Compares the table in SQLite with sums in plain Python, to the cent, for output modes update and complete; writes
build/totals.json, with what `delivered verify` found of operators (build/verify.json). Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from benchmarks import origin
from examples.demo.flights import COUNT, flights
from examples.demo.killing import JVM, TIMEOUT_S, live_and_die

from delivered.connectors.log import append
from delivered_lab.verify.matrix import read_results
from delivered_lab.verify.workloads import WORKLOADS

SQL = """
SELECT get_json_object(text, '$.carrier') AS carrier, substr(get_json_object(text, '$.event'), 1, 10) AS day,
       count(*) AS flights, sum(CAST(39.90 + 0.14 * CAST(get_json_object(text, '$.distance') AS INT) AS DECIMAL(18, 2)))
       AS revenue
FROM (SELECT CAST(value AS STRING) AS text FROM source) GROUP BY carrier, day
"""
BATCHES = 12
CRASHES = (
    "write.stage:after@batch=1",
    "write.prepare:before@batch=2",
    "write.prepare:after@batch=3",
    "commit.decide:before@batch=4",
    "commit.apply:before@batch=5",
    "commit.apply:after@batch=6",
    "commit.decide:after@batch=7",
    "log:before@batch=8",
    "recover.apply:before@batch=8",
    "recover.apply:after@batch=8",
)
Key = tuple[str, str]
Totals = dict[Key, tuple[int, Decimal]]


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        rows: in the sink.
        missing, extra, different: keys.
        recomputed_equal: the sink holds what a computation over all events gives.
    """

    workload: str
    sink: str
    events: int
    kills: int
    rows: int
    missing: int
    extra: int
    different: int
    recomputed_equal: bool


def events(count: int) -> pa.Table:
    """So many flights, the year's as often as needed."""
    year = flights()
    return pa.concat_tables([year] * (count // COUNT) + [year.slice(0, count % COUNT)])


def recomputed(table: pa.Table) -> Totals:
    """The same totals, in cents and plain Python."""
    counts: Counter[Key] = Counter()
    cents: Counter[Key] = Counter()
    for value in table.column("value").to_pylist():
        flight = json.loads(value)
        key = (str(flight["carrier"]), str(flight["event"])[:10])
        counts[key] += 1
        cents[key] += 3990 + 14 * int(flight["distance"])
    return {key: (n, Decimal(cents[key]) / 100) for key, n in counts.items()}


def in_sink(database: Path) -> Totals:
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute("SELECT carrier, day, flights, revenue FROM revenue").fetchall()
    finally:
        connection.close()
    found = {(carrier, day): (n, Decimal(str(revenue))) for carrier, day, n, revenue in rows}
    if len(found) != len(rows):
        raise RuntimeError(f"{database} holds {len(rows)} rows of {len(found)} keys")
    return found


def described(mode: str, table: pa.Table, folder: Path) -> Path:
    """The file of a pipeline over these events, in an empty folder."""
    append(str(folder / "events"), table, partition_by=2)
    pipeline = {
        "pipeline": "totals", "guarantee": "exactly_once", "checkpoint": "checkpoint", "output_mode": mode,
        "source": {"format": "log", "path": "events", "maxOffsetsPerTrigger": -(-table.num_rows // BATCHES)},
        "transform": {"sql": SQL, "deterministic": True},
        "sinks": [{"format": "sqlite", "path": "revenue.db", "table": "revenue"}],
        "trigger": "available_now", "master": "local[2]", "spark": JVM,
    }  # fmt: skip
    file = folder / "totals.yaml"
    file.write_text(yaml.safe_dump(pipeline), encoding="utf-8")
    return file


def run(mode: str, table: pa.Table, crashes: Sequence[str], folder: Path, show: Callable[[str], None]) -> Result:
    """One pipeline in an empty folder, until its source is empty."""
    file = described(mode, table, folder)
    seen: list[str] = []

    def progress(done: int, hit: list[str]) -> None:
        for point in hit[len(seen) :]:
            show(f"killed at {point}; {done} batches are done")
        seen[:] = hit

    timeout_s = max(TIMEOUT_S, table.num_rows / 1_000)  # a busy machine reads so many events a second, starts included
    life = live_and_die(file, crashes, folder, folder / "checkpoint", progress, timeout_s)
    return compared(mode, table, folder, len(life.kills))


def compared(mode: str, table: pa.Table, folder: Path, kills: int) -> Result:
    """The sink with a computation over all events."""
    expected, found = recomputed(table), in_sink(folder / "revenue.db")
    different = sum(found[key] != expected[key] for key in expected.keys() & found.keys())
    return Result(
        workload=f"revenue by carrier and day, {mode}",
        sink="sqlite",
        events=table.num_rows,
        kills=kills,
        rows=len(found),
        missing=len(expected.keys() - found.keys()),
        extra=len(found.keys() - expected.keys()),
        different=different,
        recomputed_equal=found == expected,
    )


def of_operators(file: Path) -> list[Result]:
    """One of each workload and sink of the verifier's operators that ran, over all of its cases."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in read_results(file)["results"] if file.exists() else ():
        workload = WORKLOADS.get(case["workload"])
        if workload is not None and workload.oracle is not None and case["verdict"] in ("held", "broken"):
            found.setdefault((case["workload"], case["sink"]), []).append(case)
    return [
        Result(
            workload=name,
            sink=sink,
            events=WORKLOADS[name].records,
            kills=sum(f.startswith("kill") for c in cases for f in c["faults"]),
            rows=max(int(c["delivered"]) for c in cases),
            recomputed_equal=all(c["verdict"] == "held" for c in cases),
            **{what: sum(int(c[what]) for c in cases) for what in ("missing", "extra", "different")},
        )
        for (name, sink), cases in found.items()
    ]


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--events", type=int, default=COUNT, help="how many; more than a year holds repeat it")
    given.add_argument("--out", type=Path, default=Path("build"), help="where results go")
    arguments = given.parse_args()
    table, results = events(arguments.events), []
    for mode in ("update", "complete"):
        folder = (arguments.out / "totals" / mode).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{mode}: {table.num_rows:,} events", flush=True)
        results.append(run(mode, table, CRASHES, folder, lambda text: print(f"  {text}", flush=True)))
        print(f"  {results[-1]}", flush=True)
    results += of_operators(arguments.out / "verify.json")
    file = arguments.out / "totals.json"
    report = {"origin": origin(), "results": [asdict(r) for r in results]}
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(file)
    return 0 if all(r.recomputed_equal for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())

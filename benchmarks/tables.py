"""What the benchmarks of table sinks share: the rows, one process per case, ratios of pairs, the table at the end."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks import origin

console = Console()
CORES = os.cpu_count() or 1
FILES = 20
CASE_TIMEOUT_S = 900


def rows(first: int, count: int) -> pa.Table:
    """Ten columns, about 100 bytes a row."""
    rng = np.random.default_rng(first)
    at = 1_700_000_000_000_000 + rng.integers(0, 10**12, count)
    names = pa.array([f"customer-{i:06d}" for i in range(1000)])
    cities = pa.array(["Berlin", "Lisboa", "São Paulo", "Oslo", "Reykjavík"])
    cents = np.stack([rng.integers(0, 10**7, count), np.zeros(count, np.int64)], axis=1).copy()
    return pa.table(
        {
            "id": pa.array(np.arange(first, first + count)),
            "customer": pa.array(rng.integers(0, 10**6, count).astype(np.int32)),
            "name": names.take(pa.array(rng.integers(0, 1000, count))),
            "city": cities.take(pa.array(rng.integers(0, 5, count))),
            "amount": pa.Array.from_buffers(pa.decimal128(12, 2), count, [None, pa.py_buffer(cents)]),
            "price": pa.array(rng.random(count)),
            "paid": pa.array(rng.random(count) < 0.5),
            "day": pa.array((at // 86_400_000_000).astype(np.int32)).cast(pa.date32()),
            "at": pa.array(at).cast(pa.timestamp("us", "UTC")),
            "note": pa.array([None if i % 10 == 0 else f"note {i} of some length" for i in range(count)]),
        }
    )


def files(folder: Path) -> list[str]:
    return sorted(str(p) for p in folder.glob("*.parquet"))


def shares(folder: Path) -> list[list[str]]:
    """Files for one process per core; none is empty."""
    return [share for i in range(CORES) if (share := files(folder)[i::CORES])]


def batches(paths: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        yield from pq.ParquetFile(path).iter_batches(32_768)


@dataclass(frozen=True)
class Data:
    """Folders of Parquet files below one: `all`, and `one` to warm up with, a file for each core.

    Attributes:
        rows: in `all`.
    """

    folder: Path
    rows: int

    @property
    def all(self) -> Path:
        return self.folder / "all"

    @property
    def one(self) -> Path:
        return self.folder / "one"


@contextmanager
def data(count: int, made_by: Callable[[int, int], pa.Table] = rows) -> Iterator[Data]:
    """`count` rows, rounded down to full files, in a folder that is removed afterwards.

    Args:
        made_by: (number of the first row, count) -> rows.
    """
    per_file = count // FILES
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        made = Data(Path(folder), per_file * FILES)
        for place in (made.all, made.one):
            place.mkdir()
        console.print(f"Writing {FILES} Parquet files of {per_file:,} rows ...")
        for i in range(FILES):
            pq.write_table(made_by(i * per_file, per_file), made.all / f"{i:02d}.parquet")
        for i in range(CORES):
            (made.one / f"{i:02d}.parquet").hardlink_to(made.all / f"{i:02d}.parquet")
        yield made


def parser(name: str, *inner: str, rows: int = 5_000_000) -> argparse.ArgumentParser:
    """Options that all these benchmarks have; `inner` are those that one passes to its own cases."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    made.add_argument("--rows", type=int, default=rows)
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--only", default="", help="run cases whose name contains this")
    made.add_argument("--out", type=Path, default=Path(f"build/bench-{name}.json"))
    for option in ("case", "folder", *inner):
        made.add_argument(f"--{option}", help=argparse.SUPPRESS)
    return made


def say(result: dict[str, float]) -> None:
    """From a case's process to the one that measures."""
    print("RESULT " + json.dumps(result), flush=True)


def require(name: str, found: int, wanted: int) -> None:
    """A case counts if every row arrived."""
    if found != wanted:
        raise RuntimeError(f"{name} is invalid: {found:,} rows arrived of {wanted:,}")


def measure(
    module: str, names: Sequence[str], given: argparse.Namespace, made: Data, *inner: str,
    after: Callable[[], None] = lambda: None,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """Every case in a process of its own, in turn, `given.repetitions` times.

    Args:
        inner: more of a case's command line.
        after: called after each case.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(given.repetitions):
        for name in (n for n in names if given.only in n):
            command = [sys.executable, "-m", f"benchmarks.{module}", "--rows", str(made.rows), "--case", name]
            command += ["--folder", str(made.folder), *inner]
            done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=False)
            after()
            line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
            if line is None:
                raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-6000:]}")
            last = json.loads(line.removeprefix("RESULT "))
            runs.setdefault(name, []).append(last)
            cpu = 1e6 * last["cpu_seconds"] / made.rows
            console.print(
                f"{repetition + 1}/{given.repetitions} {name}: {last['seconds']:.1f} s, {cpu:.2f} us of CPU per row"
            )
    return runs


def report(
    runs: dict[str, list[dict[str, Any]]], count: int, ratios: Sequence[tuple[str, str]], packages: Sequence[str]
) -> dict[str, Any]:
    """Ratios of rates repetition by repetition, so that a drift of the machine's speed does not count."""
    found = []
    for over, under in ratios:
        if over in runs and under in runs:
            pairs = [b["seconds"] / a["seconds"] for a, b in zip(runs[over], runs[under], strict=True)]
            cpu = [b["cpu_seconds"] / a["cpu_seconds"] for a, b in zip(runs[over], runs[under], strict=True)]
            found.append(
                {
                    "name": f"{over} / {under}",
                    "ratio": statistics.median(pairs),
                    "ratios": pairs,
                    "cpu_ratio": statistics.median(cpu),
                }
            )
    return {
        "rows": count,
        "cases": runs,
        "ratios": found,
        "versions": {n: version(n) for n in packages},
        "cores": CORES,
        "origin": origin(),
    }


def finish(found: dict[str, Any], out: Path) -> None:
    """Keep the report and show it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1))
    table = Table("case", "seconds (median)", "rows/s", "CPU us per row", "largest worker MiB", "JVM MiB")
    for name, runs in found["cases"].items():
        seconds = statistics.median(r["seconds"] for r in runs)
        table.add_row(
            name,
            f"{seconds:.1f}",
            f"{found['rows'] / seconds:,.0f}",
            f"{statistics.median(1e6 * r['cpu_seconds'] / found['rows'] for r in runs):.2f}",
            f"{max(r['worker_bytes'] for r in runs) / 2**20:,.0f}",
            f"{max(r['jvm_bytes'] for r in runs) / 2**20:,.0f}",
        )
    console.print(table)
    for ratio in found["ratios"]:
        each = ", ".join(f"{r:.2f}" for r in ratio["ratios"])
        console.print(f"{ratio['name']}: {ratio['ratio']:.2f}  ({each}); by CPU {ratio['cpu_ratio']:.2f}")

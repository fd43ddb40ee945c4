"""`make bench-delta`: exactly once into a Delta table against plain `write_deltalake` of the same batches, in one run.

Every case writes the same Parquet files (5 million rows of 10 columns by default) into a fresh local table. A case runs
in a process of its own and warms up with one file a core, so that no start of a JVM or of a Python worker is in its
time. `write_deltalake` makes no fsync, and ours does; it is measured as it is, once with one process (the library uses
every core) and once with one process per core, each with its own commit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from rich.console import Console
from rich.table import Table

from benchmarks import parquet_source
from benchmarks.postgres import files, rows
from benchmarks.run_case import Memory, cpu_seconds

console = Console()
CORES = os.cpu_count() or 1
FILES = 20
Case = Callable[[Path, str], None]
"""Called twice, with a folder of Parquet files and a table's path: to warm up, and to be measured."""


def batches(paths: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        yield from pq.ParquetFile(path).iter_batches(32_768)


def _append(paths: Sequence[str], table: str) -> None:
    schema = pq.read_schema(paths[0])
    write_deltalake(table, pa.RecordBatchReader.from_batches(schema, batches(paths)), mode="append")


def plain_one() -> Case:
    pool = multiprocessing.get_context("spawn").Pool(1)
    return lambda folder, table: pool.starmap(_append, [(files(folder), table)])  # type: ignore[func-returns-value]


def plain_each() -> Case:
    pool = multiprocessing.get_context("spawn").Pool(CORES)

    def run(folder: Path, table: str) -> None:
        shares = [share for i in range(CORES) if (share := files(folder)[i::CORES])]
        DeltaTable.create(table, pq.read_schema(shares[0][0]))
        pool.starmap(_append, [(share, table) for share in shares], chunksize=1)

    return run


def without_spark() -> Case:
    """Our engine and sink with one Python process per core: what the guarantee itself costs."""
    pool = multiprocessing.get_context("spawn").Pool(CORES)

    def run(folder: Path, table: str) -> None:
        from delivered.commit.context import Context
        from delivered.commit.decide import commit_batch
        from delivered.commit.recover import plan_batch
        from delivered.connectors.delta import CONNECTOR
        from delivered.contract import ready_target
        from delivered.model.guarantee import Guarantee
        from delivered.model.identity import Scope
        from delivered.model.work import CheckpointView, Owner

        sink = CONNECTOR.sink({"path": table})
        ready_target(sink, pq.read_schema(files(folder)[0]))
        scope = Scope(uuid.uuid4().hex, sink.name, "i")
        context = Context(scope, Guarantee.EXACTLY_ONCE, Owner("o"), sink.ledger(scope), sink.resource(scope))
        plan = plan_batch(context, CheckpointView("i", 0, "{}", None), first=True)
        shares = [share for i in range(CORES) if (share := files(folder)[i::CORES])]
        said = pool.starmap(_shard, [(sink, plan, i, share) for i, share in enumerate(shares)], chunksize=1)
        commit_batch(context, 0, "{}", said)

    return run


def _shard(sink: Any, plan: Any, shard: int, share: Sequence[str]) -> Any:
    from delivered.write.shard import write_shard

    return write_shard(sink, plan, shard, 0, batches(share), pq.read_schema(share[0]))


def spark_direct() -> Case:
    """A stream whose rows do not pass through the JVM, as with `delivered.arrow` between two ends of ours."""
    from delivered.spark.direct import mark_sink, mark_source
    from delivered.spark.session import session
    from delivered.write.direct import ArrowTransform, Direct

    spark = session("bench", f"local[{CORES}]", {"spark.driver.memory": "1g"})
    spark.sparkContext.setLogLevel("ERROR")

    def run(folder: Path, table: str) -> None:
        parquet_source.register(spark)
        reader = spark.readStream.format(parquet_source.FORMAT).option("path", str(folder)).option("shards", CORES)
        read = Direct(parquet_source.ParquetSource(str(folder), CORES), ArrowTransform())
        query = (
            mark_sink(mark_source(reader).load().writeStream, read)
            .format("delivered_delta")
            .option("guarantee", "exactly_once")
            .option("pipeline", uuid.uuid4().hex)
            .option("path", table)
            .option("checkpointLocation", tempfile.mkdtemp(prefix="bench-"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    return run


PLAIN, EACH = "write_deltalake, one process", "write_deltalake, one process per core"
ENGINE, DIRECT = "engine alone, exactly_once", "delivered direct, exactly_once"
CASES: dict[str, Callable[[], Case]] = {
    PLAIN: plain_one,
    EACH: plain_each,
    ENGINE: without_spark,
    DIRECT: spark_direct,
}
RATIOS = ((ENGINE, PLAIN), (ENGINE, EACH), (DIRECT, PLAIN), (DIRECT, EACH))


def run_one(name: str, folder: Path, wanted: int) -> None:
    """In a process of its own. Prints one line of JSON."""
    case = CASES[name]()
    case(folder / "one", str(folder / "warm"))
    memory = Memory()
    cpu, began = cpu_seconds(), time.perf_counter()
    case(folder / "all", str(folder / "table"))
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    memory.stop()
    found = DeltaTable(str(folder / "table"))
    sizes = pa.table(found.get_add_actions(flatten=True)).select(["size_bytes", "num_records"]).to_pylist()
    count = sum(row["num_records"] for row in sizes)
    if count != wanted:
        raise RuntimeError(f"{name} is invalid: {count:,} rows arrived of {wanted:,}")
    result = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "worker_bytes": memory.worker,
        "jvm_bytes": memory.jvm,
        "table_bytes": sum(row["size_bytes"] for row in sizes),
    }
    print("RESULT " + json.dumps(result), flush=True)


def measure(folder: Path, given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(given.repeat):
        for name in CASES:
            if given.only not in name:
                continue
            command = [sys.executable, "-m", "benchmarks.delta", "--rows", str(given.rows), "--case", name]
            command += ["--folder", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            for table in ("warm", "table"):
                shutil.rmtree(folder / table, ignore_errors=True)
            line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
            if line is None:
                raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-6000:]}")
            runs.setdefault(name, []).append(json.loads(line.removeprefix("RESULT ")))
            last = runs[name][-1]
            console.print(
                f"{repetition + 1}/{given.repeat} {name}: {last['seconds']:.1f} s, "
                f"{1e6 * last['cpu_seconds'] / given.rows:.2f} us of CPU per row"
            )
    return runs


def report(runs: dict[str, list[dict[str, Any]]], count: int) -> dict[str, Any]:
    found = []
    for over, under in RATIOS:
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
    names = ("pyspark", "deltalake", "pyarrow", "numpy")
    return {"rows": count, "cases": runs, "ratios": found, "versions": {n: version(n) for n in names}, "cores": CORES}


def show(found: dict[str, Any]) -> None:
    table = Table("case", "seconds (median)", "rows/s", "CPU us per row", "largest worker MiB", "table MiB")
    for name, runs in found["cases"].items():
        seconds = statistics.median(r["seconds"] for r in runs)
        table.add_row(
            name,
            f"{seconds:.1f}",
            f"{found['rows'] / seconds:,.0f}",
            f"{statistics.median(1e6 * r['cpu_seconds'] / found['rows'] for r in runs):.2f}",
            f"{max(r['worker_bytes'] for r in runs) / 2**20:,.0f}",
            f"{max(r['table_bytes'] for r in runs) / 2**20:,.0f}",
        )
    console.print(table)
    for ratio in found["ratios"]:
        each = ", ".join(f"{r:.2f}" for r in ratio["ratios"])
        console.print(f"{ratio['name']}: {ratio['ratio']:.2f}  ({each}); by CPU {ratio['cpu_ratio']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("build/bench-delta.json"))
    for name in ("case", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_one(given.case, Path(given.folder), given.rows)
        return
    with tempfile.TemporaryDirectory(prefix="bench-delta-") as folder:
        everything, one = Path(folder) / "all", Path(folder) / "one"
        for place in (everything, one):
            place.mkdir()
        per_file = given.rows // FILES
        console.print(f"Writing {FILES} Parquet files of {per_file:,} rows ...")
        for i in range(FILES):
            pq.write_table(rows(i * per_file, per_file), everything / f"{i:02d}.parquet")
        for i in range(CORES):  # one for each worker
            (one / f"{i:02d}.parquet").hardlink_to(everything / f"{i:02d}.parquet")
        given.rows = per_file * FILES
        found = report(measure(Path(folder), given), given.rows)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1))
    show(found)


if __name__ == "__main__":
    main()

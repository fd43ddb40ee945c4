"""Start a broker, fill a topic, run the cases in turn, print and keep the ratios."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from rich.console import Console
from rich.table import Table

from benchmarks import origin
from benchmarks.cases import (
    FLINK_AT_LEAST,
    FLINK_EXACTLY,
    LATENCY,
    MEMORY,
    RATIOS,
    SHARDS,
    SHARDS_BATCHES,
    SHARDS_ROWS,
    THROUGHPUT,
    Case,
)
from benchmarks.peers import FLINK_JARS, FLINK_PACKAGES, flink
from delivered_lab import brokers
from delivered_lab.brokers import kafka

PARTITIONS = 4
KEY_BYTES, VALUE_BYTES = 8, 100
_LOOK_S = 0.1
console = Console()


def create_topic(bootstrap: str, name: str, partitions: int = PARTITIONS) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.create_topics([NewTopic(name, partitions, 1)]).values():
        future.result()


def delete_topic(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.delete_topics([name]).values():
        future.result()


def fill(bootstrap: str, topic: str, records: int) -> None:
    """Keys count up; values are hexadecimal digits of random bytes, so that compression has something to do."""
    producer = Producer({"bootstrap.servers": bootstrap, "compression.type": "lz4", "linger.ms": 50, "acks": "all"})
    pool = os.urandom(VALUE_BYTES * 4096).hex()
    for number in range(records):
        at = (number * 37) % (len(pool) - VALUE_BYTES)
        while True:
            try:
                producer.produce(
                    topic,
                    key=b"%08d" % (number % 10**8),
                    value=pool[at : at + VALUE_BYTES],
                    partition=number % PARTITIONS,
                )
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(120):
        raise RuntimeError("the topic could not be filled within 120 s of the last record")


def count(bootstrap: str, topic: str) -> int:
    """Records that a read-committed reader finds, by reading them."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.queue.backoff.ms": 20,  # the default waits a second whenever the queue is full
        }
    )
    consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    found, open_partitions = 0, PARTITIONS
    heard = time.monotonic()
    while open_partitions:
        # Waits for as many as are asked for, also at the end, where fewer are left.
        for message in consumer.consume(10_000, 0.2):
            heard = time.monotonic()
            error = message.error()
            if error is None:
                found += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                open_partitions -= 1
            else:
                raise RuntimeError(f"reading {topic} back failed: {error}")
        if time.monotonic() - heard > 60:
            raise RuntimeError(f"nothing more of {topic} came for 60 s after {found:,} records")
    consumer.close()
    return found


class Visible:
    """When read-committed readers could read the last record of a topic. Jobs end later: Flink's once a checkpoint is
    complete, Spark's once the batch is logged and no other follows."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._ask = {TopicPartition(topic, p): OffsetSpec.latest() for p in range(PARTITIONS)}
        self._ends = [0] * PARTITIONS
        self.last_at = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _read(self) -> list[int]:
        level = IsolationLevel.READ_COMMITTED
        return [f.result().offset for f in self._admin.list_offsets(self._ask, isolation_level=level).values()]

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            with suppress(KafkaException):  # a new topic has no leader yet
                if (ends := self._read()) != self._ends:
                    self._ends, self.last_at = ends, time.time()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def run(case: Case, bootstrap: str, topic_in: str, records: int | None) -> dict[str, Any]:
    """One repetition of one case, checked by counting what arrived.

    Args:
        records: that must arrive; None: not counted.
    """
    topic_out = f"out-{uuid.uuid4().hex[:8]}"
    create_topic(bootstrap, topic_out)
    visible = Visible(bootstrap, topic_out)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run_case", case.name, bootstrap, topic_in, topic_out],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    visible.stop()
    line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
    if line is None:
        raise RuntimeError(f"{case.name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    if "began_at" in result:
        result["visible_seconds"] = visible.last_at - result["began_at"]
    if records is not None:
        found = count(bootstrap, topic_out)
        if found != records:
            raise RuntimeError(f"{case.name} is invalid: {found:,} records arrived of {records:,}")
    delete_topic(bootstrap, topic_out)
    return result


def repeat(
    cases: Sequence[Case], bootstrap: str, topic_in: str, records: int, repetitions: int
) -> dict[str, list[dict[str, Any]]]:
    """All cases in turn, so that a drift of the machine's speed meets all of them."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(repetitions):
        for case in cases:
            result = run(case, bootstrap, topic_in, records * max(1, len(case.partitions)))
            runs.setdefault(case.name, []).append(result)
            said = result.get("batch_ms") or f"{records / result['seconds']:,.0f} records/s"
            console.print(f"{repetition + 1}/{repetitions} {case.name}: {said}", soft_wrap=True)
    return runs


def versions() -> dict[str, str]:
    names = ("pyspark", "confluent-kafka", "kafka-python", "pyarrow", "numpy", "delivered")
    return {n: version(n) for n in names} | {
        "python": platform.python_version(),
        "kafka": kafka.VERSION,
        "flink": FLINK_PACKAGES[0].partition("==")[2],
        "flink-sql-connector-kafka": FLINK_JARS[0][2],
        "cores": str(os.cpu_count()),
    }


def summary(name: str, runs: list[dict[str, Any]], records: int) -> dict[str, Any]:
    rates = [records / r["seconds"] for r in runs]
    return {
        "name": name,
        "records_per_second": rates,
        "median": statistics.median(rates),
        "visible_seconds": [r["visible_seconds"] for r in runs],
        "cpu_us_per_record": [1e6 * r["cpu_seconds"] / records for r in runs],
        "peak_worker_bytes": max(r["worker_bytes"] for r in runs),
        "peak_jvm_bytes": max(r["jvm_bytes"] for r in runs),
        "batches_ms": [r["batches_ms"] for r in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "--records", type=int, default=9_000_000, help="in the topic; three repetitions take about 25 minutes"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    given = parser.parse_args()
    began = time.monotonic()
    if given.only in FLINK_AT_LEAST or given.only in FLINK_EXACTLY:
        flink()  # installs it; not while a case is timed
    with tempfile.TemporaryDirectory(prefix="bench-kafka-") as folder:
        broker = brokers.start("kafka", Path(folder), dies_with_parent=True)
        try:
            report = measure(broker.bootstrap, given)
        finally:
            broker.stop()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1))
    show(report)
    console.print(f"{(time.monotonic() - began) / 60:.0f} minutes, {given.out}")


def measure(bootstrap: str, given: argparse.Namespace) -> dict[str, Any]:
    def chosen(cases: tuple[Case, ...]) -> list[Case]:
        return [c for c in cases if given.only in c.name]

    console.print(f"Filling a topic with {given.records:,} records of {KEY_BYTES} + {VALUE_BYTES} bytes ...")
    create_topic(bootstrap, "bench-in")
    fill(bootstrap, "bench-in", given.records)
    runs = repeat(chosen(THROUGHPUT), bootstrap, "bench-in", given.records, given.repetitions)
    runs |= repeat(chosen(MEMORY), bootstrap, "bench-in", given.records, 1)
    cases = [summary(name, found, given.records) for name, found in runs.items()]
    in_shards: dict[str, list[dict[str, Any]]] = {}
    if chosen(SHARDS):
        records = SHARDS_ROWS * SHARDS_BATCHES
        create_topic(bootstrap, "bench-shards")
        fill(bootstrap, "bench-shards", records)
        in_shards = repeat(chosen(SHARDS), bootstrap, "bench-shards", records, given.repetitions)
    latencies = []
    for case in chosen(LATENCY):
        topic_in = f"one-{uuid.uuid4().hex[:8]}"
        create_topic(bootstrap, topic_in)
        latencies.append({"name": case.name, **run(case, bootstrap, topic_in, None)})
        console.print(f"{case.name}: median {latencies[-1]['median_ms']:.0f} ms")
    return {
        "records": given.records,
        "cases": cases,
        "ratios": ratios(runs),
        "shards": [
            {
                "partitions": partitions,
                "case": case.name.removeprefix("shards, "),
                "batch_ms": statistics.median(r["batch_ms"][str(partitions)] for r in in_shards[case.name]),
                "each_ms": [r["batch_ms"][str(partitions)] for r in in_shards[case.name]],
            }
            for case in chosen(SHARDS)
            for partitions in case.partitions
        ],
        "first_batch": [
            {
                "case": case.name.removeprefix("shards, "),
                "beyond_ms": statistics.median(r["first_beyond_ms"] for r in in_shards[case.name]),
                "each_ms": [r["first_beyond_ms"] for r in in_shards[case.name]],
            }
            for case in chosen(SHARDS)
        ],
        "shards_of": {"rows": SHARDS_ROWS, "batches": SHARDS_BATCHES - 1},
        "one_record": latencies,
        "versions": versions(),
        "origin": origin(),
    }


def ratios(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Repetition by repetition, so that a drift of the machine's speed does not count."""
    found = []
    for name, over, under in RATIOS:
        if over in runs and under in runs:
            both = list(zip(runs[over], runs[under], strict=True))
            pairs = [b["seconds"] / a["seconds"] for a, b in both]
            cpu = statistics.median(a["cpu_seconds"] / b["cpu_seconds"] for a, b in both)
            found.append({"name": name, "ratio": statistics.median(pairs), "ratios": pairs, "cpu": cpu})
    return found


def show(report: dict[str, Any]) -> None:
    table = Table("case", "records/s (median)", "CPU us per record", "worker MiB", "JVM MiB")
    for case in report["cases"]:
        table.add_row(
            case["name"],
            f"{case['median']:,.0f}",
            f"{statistics.median(case['cpu_us_per_record']):.2f}",
            f"{case['peak_worker_bytes'] / 2**20:,.0f}",
            f"{case['peak_jvm_bytes'] / 2**20:,.0f}",
        )
    console.print(table)
    for ratio in report["ratios"]:
        each = ", ".join(f"{r:.2f}" for r in ratio["ratios"])
        console.print(f"{ratio['name']}: {ratio['ratio']:.2f}  ({each}); CPU a record {ratio['cpu']:.2f}")
    for shard in report["shards"]:
        console.print(f"{shard['case']}, {shard['partitions']} partitions: {shard['batch_ms']:,.0f} ms a batch")
    for first in report["first_batch"]:
        console.print(f"{first['case']}: the first batch takes {first['beyond_ms']:,.0f} ms more than a later one")
    for case in report["one_record"]:
        console.print(f"{case['name']}: median {case['median_ms']:.0f} ms, p95 {case['p95_ms']:.0f} ms")


if __name__ == "__main__":
    main()

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
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

from benchmarks.cases import LATENCY, MEMORY, RATIOS, THROUGHPUT, Case
from delivered import brokers
from delivered.brokers import kafka

PARTITIONS = 4
KEY_BYTES, VALUE_BYTES = 8, 100
console = Console()


def create_topic(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.create_topics([NewTopic(name, PARTITIONS, 1)]).values():
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


def run(case: Case, bootstrap: str, topic_in: str, records: int | None) -> dict[str, Any]:
    """One repetition of one case, checked by counting what arrived."""
    topic_out = f"out-{uuid.uuid4().hex[:8]}"
    create_topic(bootstrap, topic_out)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run_case", case.name, bootstrap, topic_in, topic_out],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
    if line is None:
        raise RuntimeError(f"{case.name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    if records is not None:
        found = count(bootstrap, topic_out)
        if found != records:
            raise RuntimeError(f"{case.name} is invalid: {found:,} records arrived of {records:,}")
        result["records_per_second"] = records / result["seconds"]
    delete_topic(bootstrap, topic_out)
    return result


def versions() -> dict[str, str]:
    names = ("pyspark", "confluent-kafka", "kafka-python", "pyarrow", "numpy", "delivered")
    return {n: version(n) for n in names} | {
        "python": platform.python_version(),
        "kafka": kafka.VERSION,
        "cores": str(os.cpu_count()),
    }


def summary(case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [r["records_per_second"] for r in runs]
    return {
        "name": case.name,
        "records_per_second": rates,
        "median": statistics.median(rates),
        "cpu_us_per_record": [1e6 * r["cpu_seconds"] / (r["records_per_second"] * r["seconds"]) for r in runs],
        "peak_worker_bytes": max(r["worker_bytes"] for r in runs),
        "peak_jvm_bytes": max(r["jvm_bytes"] for r in runs),
        "batches_ms": [r["batches_ms"] for r in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--records", type=int, default=9_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-kafka-") as folder:
        broker = brokers.start("kafka", Path(folder), dies_with_parent=True)
        try:
            report = measure(broker.bootstrap, given)
        finally:
            broker.stop()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1))
    show(report)


def measure(bootstrap: str, given: argparse.Namespace) -> dict[str, Any]:
    def chosen(cases: tuple[Case, ...]) -> list[Case]:
        return [c for c in cases if given.only in c.name]

    console.print(f"Filling a topic with {given.records:,} records of {KEY_BYTES} + {VALUE_BYTES} bytes ...")
    create_topic(bootstrap, "bench-in")
    fill(bootstrap, "bench-in", given.records)
    runs: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(given.repeat):
        for case in chosen(THROUGHPUT):
            result = run(case, bootstrap, "bench-in", given.records)
            runs.setdefault(case.name, []).append(result)
            cpu = 1e6 * result["cpu_seconds"] / given.records
            rate = f"{result['records_per_second']:,.0f} records/s, {cpu:.2f} us CPU per record"
            console.print(f"{repetition + 1}/{given.repeat} {case.name}: {rate}", soft_wrap=True)
    for case in chosen(MEMORY):
        runs[case.name] = [run(case, bootstrap, "bench-in", given.records)]
        console.print(f"{case.name}: worker {runs[case.name][0]['worker_bytes'] / 2**20:,.0f} MiB")
    cases = [summary(c, runs[c.name]) for c in (*chosen(THROUGHPUT), *chosen(MEMORY))]
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
        "one_record": latencies,
        "versions": versions(),
    }


def ratios(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Repetition by repetition, so that a drift of the machine's speed does not count."""
    found = []
    for name, over, under in RATIOS:
        if over in runs and under in runs:
            pairs = [
                a["records_per_second"] / b["records_per_second"] for a, b in zip(runs[over], runs[under], strict=True)
            ]
            found.append({"name": name, "ratio": statistics.median(pairs), "ratios": pairs})
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
        console.print(f"{ratio['name']}: {ratio['ratio']:.2f}  ({', '.join(f'{r:.2f}' for r in ratio['ratios'])})")
    for case in report["one_record"]:
        console.print(f"{case['name']}: median {case['median_ms']:.0f} ms, p95 {case['p95_ms']:.0f} ms")


if __name__ == "__main__":
    main()

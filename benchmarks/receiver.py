"""The receiver against the same client without a log. `python -m benchmarks.receiver`: build/bench-receiver.json.

Both take the same messages out of one queue with the same prefetch, in one process; the rates are from the first
message taken to the last one acknowledged. Rounds alternate, and medians are compared. Latency is from a message's
arrival to its acknowledgement, the oldest of every append, at a tenth of the full rate.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pika

import delivered
from delivered import brokers

MESSAGES = 40_000
ROUNDS = 3
BODY = b"x" * 200
PREFETCH = 20_000
QUEUE = "bench"


def main() -> int:
    folder = Path("build/bench-receiver").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    with brokers.start("rabbitmq", folder / "rabbitmq", dies_with_parent=True) as broker:
        plain, received = [], []
        for number in range(ROUNDS):
            send(broker.url, MESSAGES, f"a{number}")
            plain.append(MESSAGES / without_log(broker.url, MESSAGES))
            send(broker.url, MESSAGES, f"b{number}")
            received.append(MESSAGES / with_receiver(broker.url, MESSAGES, folder / f"log{number}"))
            print(f"round {number}: {plain[-1]:,.0f}/s without a log, {received[-1]:,.0f}/s received", flush=True)
        rate, bare = statistics.median(received), statistics.median(plain)
        p50, p99 = latency(broker.url, folder / "log", max(500, int(rate / 10)))
    result = {
        "messages": MESSAGES,
        "bytes": len(BODY),
        "without_log_per_s": round(bare),
        "received_per_s": round(rate),
        "ratio": round(rate / bare, 3),
        "latency_ms_p50": p50,
        "latency_ms_p99": p99,
    }
    Path("build/bench-receiver.json").write_text(json.dumps(result, indent=2))
    print(json.dumps(result))
    return 0


def connect(url: str) -> Any:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    return connection, channel


def send(url: str, count: int, name: str, per_s: float | None = None) -> None:
    connection, channel = connect(url)
    began = time.monotonic()
    for n in range(count):
        properties = pika.BasicProperties(message_id=f"{name}-{n:08d}-0123456789abcdef", delivery_mode=2)
        channel.basic_publish("", QUEUE, BODY, properties)
        if per_s is not None and n % 50 == 0:
            connection.sleep(max(0.0, began + n / per_s - time.monotonic()))
    while channel.queue_declare(QUEUE, passive=True).method.message_count < count and per_s is None:
        connection.sleep(0.1)
    connection.close()


def without_log(url: str, count: int) -> float:
    """The client alone: take, and acknowledge a thousand at a time."""
    connection, channel = connect(url)
    channel.basic_qos(prefetch_count=PREFETCH)
    taken, began = 0, 0.0

    def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        nonlocal taken, began
        del properties, body
        began = began or time.monotonic()
        taken += 1
        if taken % 1_000 == 0 or taken == count:
            channel.basic_ack(method.delivery_tag, multiple=True)

    channel.basic_consume(QUEUE, on_message)
    while taken < count:
        connection.process_data_events(1)
    seconds = time.monotonic() - began
    connection.close()
    return seconds


def source(url: str, log: Path, **options: Any) -> delivered.Endpoint:
    return delivered.endpoint("rabbitmq", url=url, queue=QUEUE, log=str(log), prefetch=PREFETCH, **options)


def with_receiver(url: str, count: int, log: Path) -> float:
    times: list[float] = []
    done = threading.Event()

    def report(number: int, counts: Any) -> None:
        del number
        times.append(time.monotonic())
        if not firsts:
            firsts.append(times[0] - counts.latencies_s[0])  # when the oldest message of the first append arrived
        if counts.acknowledged >= count:
            done.set()

    firsts: list[float] = []
    delivered.receive(source(url, log), stop=done.is_set, report=report)
    return times[-1] - firsts[0]


def latency(url: str, log: Path, per_s: float) -> tuple[float, float]:
    seen: list[float] = []
    count = int(per_s * 10)
    sender = threading.Thread(target=send, args=(url, count, "latency", per_s))
    sender.start()
    done = threading.Event()

    def report(number: int, counts: Any) -> None:
        del number
        seen[:] = counts.latencies_s
        if counts.acknowledged >= count:
            done.set()

    delivered.receive(source(url, log), stop=done.is_set, idle_s=20, report=report)
    sender.join()
    ordered = sorted(seen)
    return round(1000 * ordered[len(ordered) // 2], 1), round(1000 * ordered[len(ordered) * 99 // 100], 1)


if __name__ == "__main__":
    sys.exit(main())

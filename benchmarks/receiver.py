"""The receiver against the same client without a log. `python -m benchmarks.receiver [rabbitmq | activemq]`:
build/bench-receiver.json, build/bench-receiver-activemq.json.

Both take the same messages out of one queue with the same prefetch, in one process; the rates are from the first
message taken to the last one acknowledged. Rounds alternate, and the ratio is the median of theirs: a machine's speed
changes more between rounds than within one. Latency is from a message's arrival to its acknowledgement, the oldest of
every append, at a tenth of the full rate.
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

import delivered
from benchmarks.queues import BODY, QUEUES, Bench
from delivered_lab import brokers

MESSAGES = 100_000
ROUNDS = 15


def main(system: str = "rabbitmq") -> int:
    name = "bench-receiver" if system == "rabbitmq" else f"bench-receiver-{system}"
    folder = Path("build", name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    with brokers.start(system, folder / system, dies_with_parent=True) as broker:
        queue = QUEUES[system](broker.url)
        plain, received = [], []
        for number in range(ROUNDS):
            queue.send(MESSAGES, f"a{number}")
            plain.append(MESSAGES / queue.without_log(MESSAGES))
            queue.send(MESSAGES, f"b{number}")
            received.append(MESSAGES / with_receiver(queue, MESSAGES, folder / f"log{number}"))
            print(f"round {number}: {plain[-1]:,.0f}/s without a log, {received[-1]:,.0f}/s received", flush=True)
        rate, bare = statistics.median(received), statistics.median(plain)
        ratios = [with_log / without for with_log, without in zip(received, plain, strict=True)]
        p50, p99 = latency(queue, folder / "log", max(500, int(rate / 10)))
    result = {
        "messages": MESSAGES,
        "bytes": len(BODY),
        "without_log_per_s": round(bare),
        "received_per_s": round(rate),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 2) for ratio in sorted(ratios)],
        "latency_ms_p50": p50,
        "latency_ms_p99": p99,
    }
    Path("build", f"{name}.json").write_text(json.dumps(result, indent=2))
    print(json.dumps(result))
    return 0


def with_receiver(queue: Bench, count: int, log: Path) -> float:
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
    delivered.receive(queue.source(log), stop=done.is_set, report=report)
    return times[-1] - firsts[0]


def latency(queue: Bench, log: Path, per_s: float) -> tuple[float, float]:
    seen: list[float] = []
    count = int(per_s * 10)
    sender = threading.Thread(target=queue.send, args=(count, "latency", per_s))
    sender.start()
    done = threading.Event()

    def report(number: int, counts: Any) -> None:
        del number
        seen[:] = counts.latencies_s
        if counts.acknowledged >= count:
            done.set()

    delivered.receive(queue.source(log), stop=done.is_set, idle_s=20, report=report)
    sender.join()
    ordered = sorted(seen)
    return round(1000 * ordered[len(ordered) // 2], 1), round(1000 * ordered[len(ordered) * 99 // 100], 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""RabbitMQ -> receiver -> log -> Spark -> PostgreSQL, exactly once, with a kill in the middle of each part.

    python -m examples.bridge_rabbitmq            the pipeline's batches run without Spark, in seconds
    python -m examples.bridge_rabbitmq --spark    the same with `delivered run`, and `delivered audit` at the end

Real servers are fetched and started on 127.0.0.1. A sender confirms every order, and sends some again, as one does that
lost an answer. Two receivers run; one is killed with the messages it holds. Then the pipeline is killed right after a
batch was decided. At the end PostgreSQL is compared with what was sent.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pika
import psutil
import psycopg

from delivered import brokers
from delivered.testing.supervisor import run

ORDERS = 3_000
SENT_AGAIN = 7
"""Every so many-th order is sent twice."""
QUEUE = "orders"


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--spark", action="store_true", help="run the pipeline with Spark, and audit it")
    with_spark = given.parse_args().spark
    folder = Path("build/bridge-rabbitmq").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (
        brokers.start("rabbitmq", folder / "rabbitmq", dies_with_parent=True, say=tell) as rabbitmq,
        brokers.start("postgres", folder / "postgres", dies_with_parent=True, say=tell) as postgres,
    ):
        file = write_pipeline(folder, rabbitmq.url, postgres.url)
        receive(rabbitmq.url, file)
        deliver(file, with_spark)
        wrong = compare(postgres.url)
        if with_spark:
            tell("delivered audit")
            wrong += subprocess.run([*DELIVERED, "audit", str(file)], check=False).returncode
    tell("nothing lost, nothing twice" if not wrong else f"{wrong} faults")
    return 1 if wrong else 0


DELIVERED = [sys.executable, "-m", "delivered.cli.main"]


def write_pipeline(folder: Path, rabbitmq: str, postgres: str) -> Path:
    file = folder / "orders.yaml"
    pipeline = {
        "pipeline": "orders",
        "guarantee": "exactly_once",
        "checkpoint": str(folder / "checkpoint"),
        "source": {
            "format": "rabbitmq",
            "url": rabbitmq,
            "queue": QUEUE,
            "log": str(folder / "log"),
            "receiveMessagesMax": 100,
            "maxOffsetsPerTrigger": 800,
        },
        "transform": {"select": ["value", "offset"]},
        "sinks": [{"format": "postgres", "url": postgres, "dbtable": "orders", "ifNotExists": True}],
    }
    file.write_text(json.dumps(pipeline, indent=2))  # JSON is YAML
    return file


def send(url: str) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    channel.confirm_delivery()
    for n in range(ORDERS):
        for _ in range(2 if n % SENT_AGAIN == 0 else 1):
            properties = pika.BasicProperties(message_id=f"order-{n}", delivery_mode=2)
            channel.basic_publish("", QUEUE, b"%d" % n, properties)
    connection.close()


def receive(url: str, file: Path) -> None:
    """Two receivers while the sender sends; one is killed when it has messages."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    connection.channel().queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    connection.close()
    sender = threading.Thread(target=send, args=(url,))
    sender.start()
    command = [*DELIVERED, "receive", str(file), "--processes", "2", "--idle-seconds", "5", "-o", "json"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    log = file.parent / "log" / "_delta_log"
    while not (log / "00000000000000000004.json").exists() and running.poll() is None:
        time.sleep(0.02)
    victim = [p for p in psutil.Process(running.pid).children() if "spawn_main" in " ".join(p.cmdline())][-1]
    victim.kill()
    tell(f"killed receiver {victim.pid}; the other goes on, and it is started again")
    out, _ = running.communicate(timeout=300)
    sender.join()
    said = json.loads(out.splitlines()[-1])
    tell(f"receivers that lived: {said['entered']:,} orders entered the log, {said['repeated']:,} came again")


def deliver(file: Path, with_spark: bool) -> None:
    """Run the pipeline until all is delivered; it is killed once, right after a batch was decided."""
    engine = [sys.executable, "-m", "delivered.verify.loop", str(file)]
    command = [*DELIVERED, "run", str(file), "--available-now"] if with_spark else engine
    done = run(command, "commit.decide:after@batch=2", file.parent / "hits", timeout_s=300)
    for kill in done.kills:
        tell(f"killed the pipeline at {kill.hit.point}, {kill.processes} processes; it is started again")
    if done.exit_code != 0 or not done.kills:
        raise SystemExit(f"the pipeline ended with {done.exit_code} after {len(done.kills)} kills")


def compare(url: str) -> int:
    """PostgreSQL against what was sent. Returns how many orders are lost, doubled or strange."""
    with psycopg.connect(url) as connection:
        rows: list[Any] = connection.execute("SELECT value, count(*) FROM orders GROUP BY value").fetchall()
    found = {int(bytes(value)): count for value, count in rows}
    lost = ORDERS - sum(1 for n in range(ORDERS) if n in found)
    twice = sum(1 for count in found.values() if count > 1)
    strange = sum(1 for n in found if not 0 <= n < ORDERS)
    tell(f"PostgreSQL: {len(found):,} of {ORDERS:,} orders; {lost} lost, {twice} twice, {strange} strange")
    return lost + twice + strange


def tell(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""An application with an outbox, and a consumer with an inbox, that kill or stop themselves at a point of one message.

    python -m delivered_lab.verify.applications SPEC

Variants are broken on purpose, for tests of the judge.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from delivered.patterns import outbox
from delivered.patterns.inbox import Delivery, consume, from_kafka, from_rabbitmq, from_rocketmq, inbox


def server_kind(dialect: str) -> str:
    """What serves a dialect here, as named by `delivered_lab.brokers`."""
    return "mariadb" if dialect == "mysql" else dialect


def connect(dialect: str, url: str) -> Any:
    if dialect == "postgres":
        import psycopg

        return psycopg.connect(url)
    if dialect == "mysql":
        import pymysql

        host, _, port = url.rpartition(":")
        return pymysql.connect(host=host, port=int(port), user="delivered", database="dev", charset="utf8mb4")
    return sqlite3.connect(url)


def execute(connection: Any, statement: str) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    cursor.execute(statement)
    return list(cursor.fetchall()) if cursor.description else []


class Killer:
    """SIGKILL, or SIGSTOP (`stops`), at a point of message n."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.point, self.n = spec["point"], spec["n"]
        self._signal = signal.SIGSTOP if spec.get("stops") else signal.SIGKILL

    def __call__(self, point: str, n: int) -> None:
        if (point, n) == (self.point, self.n):
            os.kill(os.getpid(), self._signal)


def application(spec: dict[str, Any]) -> None:
    """Requests carry their message's id, so a client that got no answer asks again with the same one."""
    reached = Killer(spec)
    connection = connect(spec["dialect"], spec["url"])
    other = connect(spec["dialect"], spec["url"]) if spec["variant"] == "other_transaction" else None
    layout = outbox.Layout(table=spec["outbox"])
    for n in spec.get("numbers") or range(len(spec["ids"])):
        message = outbox.new_id() if spec["variant"] == "id_per_try" else spec["ids"][n]
        reached("before", n)
        if spec.get("asks") and execute(connection, f"SELECT 1 FROM {spec['orders']} WHERE n = {n}"):  # noqa: S608
            continue  # the source may have deleted the message, so its id protects no more
        entry = outbox.put(
            other or connection, id=message, aggregate_type="order", aggregate_id=str(n), type="created",
            payload={"n": n}, on_duplicate="ignore", layout=layout,
        )  # fmt: skip
        if other is not None:
            other.commit()
        reached("in", n)
        if entry.stored:
            execute(connection, f"INSERT INTO {spec['orders']} VALUES ({n}, '{message}')")  # noqa: S608
            reached("in_late", n)
        connection.commit()
        reached("after", n)


def consumer(spec: dict[str, Any]) -> None:
    """A loop over a broker's messages until none is left; prints how many were repeats."""
    reached, variant = Killer(spec), spec["variant"]
    connection = connect(spec["dialect"], spec["url"])
    other = connect(spec["dialect"], spec["url"]) if variant == "other_transaction" else connection
    repeats = 0

    def effect(n: int, message_id: str) -> None:
        execute(connection, f"INSERT INTO {spec['effects']} VALUES ({n}, '{message_id}')")  # noqa: S608

    for n, delivery in BROKERS[spec["broker"]](spec):
        message_id = delivery.id if isinstance(delivery.id, str) else (delivery.id or b"").decode()
        reached("before", n)
        if not variant:
            at_last = partial(_acknowledged, reached, n, delivery)
            with consume(
                connection, replace(delivery, acknowledge=at_last), consumer="mail", table=spec["inbox"]
            ) as first:
                reached("in", n)
                if first:
                    effect(n, message_id)
                reached("in_late", n)
            repeats += not first
            continue
        if variant == "ack_before_commit":
            delivery.acknowledge()
        with inbox(other, message_id, consumer="mail", table=spec["inbox"]) as first:
            if (first or variant == "no_inbox") and other is connection:
                effect(n, message_id)
            repeats += not first
            reached("in", n)
        if other is not connection:
            other.commit()
            reached("in_late", n)
            if first:
                effect(n, message_id)
        reached("in_late", n)
        connection.commit()
        reached("after", n)
        if variant != "ack_before_commit":
            delivery.acknowledge()
    sys.stdout.write(f"{repeats}\n")


def _acknowledged(reached: Killer, n: int, delivery: Delivery) -> None:
    reached("after", n)
    delivery.acknowledge()


def read_rabbitmq(spec: dict[str, Any]) -> Iterator[tuple[int, Delivery]]:
    import pika

    broker = pika.BlockingConnection(pika.URLParameters(spec["address"]))
    channel = broker.channel()
    channel.basic_qos(prefetch_count=4)
    while (got := channel.basic_get(spec["queue"]))[0] is not None:
        method, properties, body = got
        yield json.loads(body)["n"], from_rabbitmq(channel, method, properties)
        broker.process_data_events(0)  # what was acknowledged is sent
    broker.close()


def read_kafka(spec: dict[str, Any]) -> Iterator[tuple[int, Delivery]]:
    from confluent_kafka import Consumer, TopicPartition

    broker = Consumer(
        {
            "bootstrap.servers": spec["address"], "group.id": spec.get("group", f"{spec['queue']}-mail"),
            "enable.auto.commit": False, "auto.offset.reset": "earliest", "enable.partition.eof": True,
        }
    )  # fmt: skip
    broker.assign([TopicPartition(spec["queue"], 0)])
    while (message := broker.poll(60)) is not None and message.error() is None:
        yield json.loads(message.value() or b"")["n"], from_kafka(broker, message)
    broker.close()


def read_rocketmq(spec: dict[str, Any]) -> Iterator[tuple[int, Delivery]]:
    from delivered_lab.verify.systems.rocketmq import quiet_library

    client = quiet_library()
    from rocketmq.v5.exception.client_exception import InternalErrorException

    configuration = client.ClientConfiguration(spec["address"], client.Credentials())
    broker = client.SimpleConsumer(
        configuration, spec["group"], {spec["queue"]: client.FilterExpression()}, await_duration=5
    )
    broker.startup()

    def received() -> list[Any]:
        """A proxy (5.5.0) answers with an error until it has the new client's settings."""
        deadline = time.monotonic() + 10
        while True:
            try:
                return list(broker.receive(1, 2) or ())
            except InternalErrorException:
                if time.monotonic() > deadline:
                    raise

    while found := received():
        for message in found:
            yield json.loads(message.body)["n"], from_rocketmq(broker, message)
    broker.shutdown()


BROKERS = {"rabbitmq": read_rabbitmq, "kafka": read_kafka, "rocketmq": read_rocketmq}


def run_process(spec: dict[str, Any]) -> tuple[int, str]:
    """Run this module as a process; its exit code and output. Raises RuntimeError if it failed by itself."""
    command = [sys.executable, "-m", __name__, json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(done.stderr)
    return done.returncode, done.stdout


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    {"application": application, "consumer": consumer}[spec["role"]](spec)

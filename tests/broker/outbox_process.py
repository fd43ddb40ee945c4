"""An application with an outbox, and a consumer with an inbox, that kill themselves at a point of one message."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from delivered import outbox
from delivered.inbox import inbox

ROOT = Path(__file__).parents[2]


def connect(dialect: str, url: str) -> Any:
    if dialect == "postgres":
        import psycopg

        return psycopg.connect(url)
    if dialect == "mysql":
        import pymysql

        host, _, port = url.rpartition(":")
        return pymysql.connect(host=host, port=int(port), user="delivered", database="dev", charset="utf8mb4")
    return sqlite3.connect(url)


def run(connection: Any, statement: str) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    cursor.execute(statement)
    return list(cursor.fetchall()) if cursor.description else []


class Killer:
    """SIGKILL at a point of message n."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.point, self.n = spec["point"], spec["n"]

    def __call__(self, point: str, n: int) -> None:
        if (point, n) == (self.point, self.n):
            os.kill(os.getpid(), signal.SIGKILL)


def application(spec: dict[str, Any]) -> None:
    """Requests carry their message's id, so a client that got no answer asks again with the same one."""
    reached = Killer(spec)
    connection = connect(spec["dialect"], spec["url"])
    other = connect(spec["dialect"], spec["url"]) if spec["variant"] == "other_transaction" else None
    layout = outbox.Layout(table=spec["outbox"])
    for n, given in enumerate(spec["ids"]):
        message = outbox.new_id() if spec["variant"] == "id_per_try" else given
        reached("before", n)
        if spec.get("asks") and run(connection, f"SELECT 1 FROM {spec['orders']} WHERE n = {n}"):
            continue  # the source may have deleted the message, so its id protects no more
        entry = outbox.put(
            other or connection, id=message, aggregate_type="order", aggregate_id=str(n), type="created",
            payload={"n": n}, on_duplicate="ignore", layout=layout,
        )  # fmt: skip
        if other is not None:
            other.commit()
        reached("in", n)
        if entry.stored:
            run(connection, f"INSERT INTO {spec['orders']} VALUES ({n}, '{message}')")
            reached("in_late", n)
        connection.commit()
        reached("after", n)


def consumer(spec: dict[str, Any]) -> None:
    """A loop over RabbitMQ until its queue is empty."""
    import pika

    reached, variant = Killer(spec), spec["variant"]
    connection = connect(spec["dialect"], spec["url"])
    other = connect(spec["dialect"], spec["url"]) if variant == "other_transaction" else connection
    broker = pika.BlockingConnection(pika.URLParameters(spec["rabbitmq"]))
    channel = broker.channel()
    channel.basic_qos(prefetch_count=4)
    repeats = 0
    while True:
        method, properties, body = channel.basic_get(spec["queue"])
        if method is None:
            break
        n = int(body)
        reached("before", n)
        if variant == "ack_before_commit":
            channel.basic_ack(method.delivery_tag)
            broker.process_data_events(0)
        with inbox(other, properties.message_id, consumer="mail", table=spec["inbox"]) as first:
            if first and other is connection:
                run(connection, f"INSERT INTO {spec['effects']} VALUES ({n}, '{properties.message_id}')")
            repeats += not first
            reached("in", n)
        if other is not connection:
            other.commit()
            reached("in_late", n)
            if first:
                run(connection, f"INSERT INTO {spec['effects']} VALUES ({n}, '{properties.message_id}')")
        reached("in_late", n)
        connection.commit()
        reached("after", n)
        if variant != "ack_before_commit":
            channel.basic_ack(method.delivery_tag)
    broker.close()
    print(repeats)


def kafka_consumer(spec: dict[str, Any]) -> None:
    """A loop over a topic until its end; an offset is committed after the effect's transaction."""
    from confluent_kafka import Consumer, TopicPartition

    reached = Killer(spec)
    connection = connect(spec["dialect"], spec["url"])
    broker = Consumer(
        {
            "bootstrap.servers": spec["kafka"], "group.id": f"{spec['topic']}-mail", "enable.auto.commit": False,
            "auto.offset.reset": "earliest", "enable.partition.eof": True,
        }
    )  # fmt: skip
    broker.assign([TopicPartition(spec["topic"], 0)])
    while not (message := broker.poll(60)).error():
        n, message_id = json.loads(message.value())["n"], dict(message.headers())["id"].decode()
        reached("before", n)
        with inbox(connection, message_id, consumer="mail", table=spec["inbox"]) as first:
            if first or spec["variant"] == "no_inbox":
                run(connection, f"INSERT INTO {spec['effects']} VALUES ({n}, '{message_id}')")
            reached("in", n)
        reached("in_late", n)
        connection.commit()
        reached("after", n)
        broker.commit(message, asynchronous=False)
    broker.close()


def run_process(spec: dict[str, Any]) -> tuple[int, str]:
    """Run this module as a process; its exit code and output."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.broker.outbox_process", json.dumps(spec)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, done.stdout


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    {"application": application, "consumer": consumer, "kafka_consumer": kafka_consumer}[spec["role"]](spec)

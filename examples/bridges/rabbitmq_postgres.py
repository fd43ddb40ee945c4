"""RabbitMQ -> receivers -> Spark -> PostgreSQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pika
import psycopg
from examples.bridges.bridge import SENT_AGAIN, order, order_id

from delivered_lab.brokers import Broker

QUEUE = "orders"


class RabbitmqPostgres:
    name = "rabbitmq-postgres"
    servers = ("rabbitmq", "postgres")
    received = True

    def open(self, servers: Mapping[str, Broker], folder: Path) -> dict[str, Any]:
        self._queue_url, self._table_url = servers["rabbitmq"].url, servers["postgres"].url
        with self._connected() as connection:
            connection.channel().queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        return {
            "source.url": self._queue_url,
            "source.password": "guest",
            "source.log": str(folder / "log"),
            "source.receiveMessagesMax": 100,
            "sink.url": self._table_url,
        }

    def send(self, numbers: range) -> None:
        with self._connected() as connection:
            channel = connection.channel()
            for n in numbers:
                if n == numbers[-1]:  # its confirm says that all before it are in, too
                    channel.confirm_delivery()
                properties = pika.BasicProperties(message_id=order_id(n), delivery_mode=2)
                for _ in range(2 if n % SENT_AGAIN == 0 else 1):
                    channel.basic_publish("", QUEUE, order(n), properties)

    def found(self) -> Counter[str]:
        try:
            with psycopg.connect(self._table_url) as connection:
                return Counter(dict(connection.execute("SELECT id, count(*) FROM orders GROUP BY id").fetchall()))
        except psycopg.errors.UndefinedTable:
            return Counter()

    def close(self) -> None:
        """Nothing is open."""

    def _connected(self) -> Any:
        return pika.BlockingConnection(pika.URLParameters(self._queue_url))

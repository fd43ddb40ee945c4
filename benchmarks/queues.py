"""Queues for benchmarks.receiver: how to fill one, and its client alone, without a log."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Protocol

import delivered

BODY = b"x" * 200
QUEUE = "bench"


class Bench(Protocol):
    def send(self, count: int, name: str, per_s: float | None = None) -> None:
        """Put messages into the queue; all are in it when this returns, unless a rate is given."""

    def without_log(self, count: int) -> float:
        """The client alone: take, and acknowledge a thousand at a time. Seconds from the first to the last."""

    def source(self, log: Path) -> delivered.Endpoint: ...


class Rabbitmq:
    prefetch = 20_000

    def __init__(self, url: str) -> None:
        self._url = url

    def send(self, count: int, name: str, per_s: float | None = None) -> None:
        import pika

        connection, channel = self._connect()
        began = time.monotonic()
        for n in range(count):
            properties = pika.BasicProperties(message_id=f"{name}-{n:08d}-0123456789abcdef", delivery_mode=2)
            channel.basic_publish("", QUEUE, BODY, properties)
            if per_s is not None and n % 50 == 0:
                connection.sleep(max(0.0, began + n / per_s - time.monotonic()))
        while channel.queue_declare(QUEUE, passive=True).method.message_count < count and per_s is None:
            connection.sleep(0.1)
        connection.close()

    def without_log(self, count: int) -> float:
        connection, channel = self._connect()
        channel.basic_qos(prefetch_count=self.prefetch)
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

    def source(self, log: Path) -> delivered.Endpoint:
        return delivered.endpoint("rabbitmq", url=self._url, queue=QUEUE, log=str(log), prefetch=self.prefetch)

    def _connect(self) -> Any:
        import pika

        connection = pika.BlockingConnection(pika.URLParameters(self._url))
        channel = connection.channel()
        channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        return connection, channel


class Activemq:
    """The client alone acknowledges each message in the thread in which it arrives, and waits for the last receipt."""

    def __init__(self, url: str) -> None:
        self._url = url

    def send(self, count: int, name: str, per_s: float | None = None) -> None:
        connection, _, receipts = self._connect(lambda _: None)
        began = time.monotonic()
        for n in range(count):
            headers = {"id": f"{name}-{n:08d}-0123456789abcdef", "persistent": "true", "destination-type": "ANYCAST"}
            if n == count - 1:
                headers["receipt"] = "last"
            connection.send(QUEUE, BODY, headers=headers)
            if per_s is not None and n % 50 == 0:
                time.sleep(max(0.0, began + n / per_s - time.monotonic()))
        receipts.wait(120)
        connection.disconnect()

    def without_log(self, count: int) -> float:
        taken, began = 0, 0.0

        def on_message(frame: Any) -> None:
            nonlocal taken, began
            began = began or time.monotonic()
            taken += 1
            connection.ack(frame.headers["ack"], receipt="last" if taken == count else None)

        connection, subscribe, receipts = self._connect(on_message)
        subscribe()
        receipts.wait(120)
        seconds = time.monotonic() - began
        connection.disconnect()
        return seconds

    def source(self, log: Path) -> delivered.Endpoint:
        return delivered.endpoint("activemq", url=self._url, queue=QUEUE, log=str(log), idHeader="id")

    def _connect(self, on_message: Any) -> Any:
        import stomp

        from delivered.connectors.activemq import PREFETCH_BYTES

        class Listener(stomp.ConnectionListener):
            def on_message(self, frame: Any) -> None:
                on_message(frame)

            def on_receipt(self, _: Any) -> None:
                receipts.set()

        receipts = threading.Event()
        host, _, port = self._url.removeprefix("stomp://").rpartition(":")
        connection = stomp.Connection12([(host, int(port))], auto_decode=False)
        connection.set_listener("bench", Listener())
        connection.connect(wait=True)
        headers = {"consumer-window-size": str(PREFETCH_BYTES), "subscription-type": "ANYCAST"}

        def subscribe() -> None:
            connection.subscribe(QUEUE, "bench", ack="client-individual", headers=headers)

        return connection, subscribe, receipts


QUEUES: dict[str, type[Rabbitmq] | type[Activemq]] = {"rabbitmq": Rabbitmq, "activemq": Activemq}

"""Streams and a queue of RabbitMQ as sources: an exchange before each, so that a message carries its record's key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delivered.verify.clients.base import Row, as_text
from delivered.verify.clients.queue import ANSWER_TIMEOUT_S, Queue
from delivered.verify.services import wait_for
from delivered.verify.workloads import PARTITIONS, Record

_PASSWORD = "guest"  # noqa: S105 - of a server of the verifier's, on the loopback
_WAIT_S = 0.2
_END = "delivered-verify-end"


class RabbitStreams:
    """A stream for each partition; they keep what was read.

    Args:
        url: of the server.
    """

    system = "rabbitmq_stream"

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.streams = [f"{name}-{n}" for n in range(PARTITIONS)]

    def create(self) -> None:
        channel = _channel(self.url)
        for stream in self.streams:
            _declare(channel, stream, "stream")
        channel.connection.close()

    def options(self) -> dict[str, Any]:
        return {
            "format": self.system,
            "url": _without_password(self.url),
            "password": _PASSWORD,
            "streams": ",".join(self.streams),
            "startingOffsets": "earliest",
        }

    def send(self, records: Sequence[Record]) -> None:
        for number, stream in enumerate(self.streams):
            part = [r for r in records if r.partition % PARTITIONS == number]
            if part:
                _publish(self.url, stream, part)

    def read(self) -> list[Row]:
        """
        Raises:
            TimeoutError: not everything came within 30 s.
        """
        return [row for stream in self.streams for row in self._read(stream)]

    def offsets(self, logged: Any) -> dict[str, int]:
        return {stream: int(at) for stream, at in logged.items()}

    def address(self) -> dict[str, Any]:
        return {"system": self.system, "url": self.url, "name": self.name}

    def _read(self, stream: str) -> list[Row]:
        """Up to a message of the judge's own behind everything: nothing reads the stream after the judge."""
        channel = _channel(self.url)
        channel.basic_qos(prefetch_count=1_000)
        found: list[Row] = []
        try:
            _publish(self.url, stream, [], end=True)
            deadline = time.monotonic() + ANSWER_TIMEOUT_S
            given = {"x-stream-offset": "first"}
            for method, properties, body in channel.consume(stream, inactivity_timeout=_WAIT_S, arguments=given):
                if method is None:
                    if time.monotonic() > deadline:
                        break
                    continue
                channel.basic_ack(method.delivery_tag)
                if properties.message_id == _END:
                    return found
                at = int(properties.headers["x-stream-offset"])
                found.append(Row(stream, at, method.routing_key, as_text(body) or ""))
        finally:
            channel.connection.close()
        raise TimeoutError(f"the stream {stream} could not be read to its end within {ANSWER_TIMEOUT_S:.0f} s")


class RabbitQueue(Queue):
    """A quorum queue.

    Args:
        folder: of the server's data; None: the queue is there already.
    """

    system = "rabbitmq"

    def __init__(
        self, url: str, name: str, log: Path | str, folder: Path | None = None, connector: str | None = None
    ) -> None:
        super().__init__(name, log, connector)
        self.url = url
        self._folder = folder

    def create(self) -> None:
        channel = _channel(self.url)
        _declare(channel, self.name, "quorum")
        channel.connection.close()
        # As in rabbitmq.py: killed too early, the server forgets how to write to the queue.
        wait_for(self._is_written_down, ANSWER_TIMEOUT_S, f"{self.name} is on the server's disk")

    def place(self) -> dict[str, Any]:
        return {"url": _without_password(self.url), "password": _PASSWORD, "queue": self.name}

    def send(self, records: Sequence[Record]) -> None:
        if records:
            _publish(self.url, self.name, records)

    def left(self) -> int:
        channel = _channel(self.url)
        found = channel.queue_declare(self.name, passive=True).method.message_count
        channel.connection.close()
        return int(found)

    def address(self) -> dict[str, Any]:
        return {"system": self.system, "url": self.url, "name": self.name, "log": str(self.log)}

    def _is_written_down(self) -> bool:
        name = self.name.encode()
        return self._folder is None or any(name in f.read_bytes() for f in self._folder.rglob("quorum/*/names.dets"))


def _declare(channel: Any, name: str, kind: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    channel.queue_delete(name)
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind})
    channel.queue_bind(name, name)


def _publish(url: str, exchange: str, records: Sequence[Record], end: bool = False) -> None:
    """The confirm of the last message says that all before it on its channel are in."""
    import pika

    channel = _channel(url)
    given = [(r.key or "", r.id, r.value) for r in records] + ([("", _END, "")] if end else [])
    for at, (key, name, value) in enumerate(given, 1):
        if at == len(given):
            channel.confirm_delivery()
        properties = pika.BasicProperties(message_id=name, delivery_mode=2)
        channel.basic_publish(exchange, key, value.encode(), properties)
    channel.connection.close()


def _channel(url: str) -> Any:
    import pika

    return pika.BlockingConnection(pika.URLParameters(url)).channel()


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    user, at, place = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{place}"

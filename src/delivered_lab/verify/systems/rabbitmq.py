"""RabbitMQ: as the sink, an exchange with a stream, which can be reread; as sources, streams and a quorum queue, each
behind an exchange, so that a message carries its record's key."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delivered_lab.verify.systems.base import Row, SourceClient, SourceKind, SourcePlace, System, as_text, wait_for
from delivered_lab.verify.systems.messages import ANSWER_TIMEOUT_S, CONFIRM_TIMEOUT_S, END, Messages, Queue, sending
from delivered_lab.verify.workloads import PARTITIONS, Record

_PASSWORD = "guest"  # noqa: S105 - of a server of the verifier's, on the loopback
_WAIT_S = 0.2


class RabbitExchange(Messages):
    system = "rabbitmq"
    _channel: Any = None

    def create(self) -> None:
        channel = _open(self._server.url)
        channel.exchange_delete(self.name)
        # Alone: a confirmed message is in one queue at least, and after a restart a stream takes messages last.
        _declare(channel, self._stream, "stream", self.name)
        channel.connection.close()

    def remove(self) -> None:
        channel = _open(self._server.url)
        channel.exchange_delete(self.name)
        channel.queue_delete(self._stream)
        channel.connection.close()
        self.disconnect()

    def place(self) -> dict[str, Any]:
        return {"url": f"amqp://guest@{self._address}/", "password": _PASSWORD, "exchange": self.name}

    def take(self, after: int | None) -> list[Row]:
        if self._channel is None:
            self._channel = _open(self._server.url)
        found: list[Row] = []
        for message in _messages(self._channel, self._stream, "first" if after is None else after + 1):
            if message is None:
                break
            at, properties, _, body = message
            if after is not None and at <= after:
                continue  # a consumer begins at the chunk that contains the offset
            if properties.message_id == END:
                self.met.add(body)
                continue
            after = at
            found.append(Row(self._stream, at, None, body))
        return found

    def mark(self) -> None:
        super().mark()
        _publish(self._server.url, "", [(self._stream, END, self.last)])

    def disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None and channel.connection.is_open:
            channel.connection.close()

    @property
    def _stream(self) -> str:
        return f"{self.name}-judge"


@dataclass
class RabbitStreams(SourceClient):
    """A stream per partition, which retains what was read.

    Attributes:
        url: of the server.
    """

    system = "rabbitmq_stream"
    url: str
    name: str

    @property
    def streams(self) -> list[str]:
        return [f"{self.name}-{n}" for n in range(PARTITIONS)]

    def create(self) -> None:
        channel = _open(self.url)
        for stream in self.streams:
            _declare(channel, stream, "stream", stream)
        channel.connection.close()

    def options(self) -> dict[str, Any]:
        place = {"url": _without_password(self.url), "password": _PASSWORD, "streams": ",".join(self.streams)}
        return {"format": self.system, **place, "startingOffsets": "earliest"}

    def send(self, records: Sequence[Record]) -> None:
        for number, stream in enumerate(self.streams):
            _publish_records(self.url, stream, [r for r in records if r.partition % PARTITIONS == number])

    def read(self) -> list[Row]:
        """Raises TimeoutError: not everything came within 30 s."""
        return [row for stream in self.streams for row in self._read(stream)]

    def offsets(self, logged: Any) -> dict[str, int]:
        return {stream: int(at) for stream, at in logged.items()}

    def _read(self, stream: str) -> list[Row]:
        """Up to the judge's own message behind everything: nothing reads the stream after the judge."""
        channel = _open(self.url)
        found: list[Row] = []
        try:
            _publish(self.url, stream, [("", END, "")])
            deadline = time.monotonic() + CONFIRM_TIMEOUT_S
            for message in _messages(channel, stream, "first"):
                if message is None:
                    if time.monotonic() > deadline:
                        break
                    continue
                at, properties, key, body = message
                if properties.message_id == END:
                    return found
                found.append(Row(stream, at, key, body))
        finally:
            channel.connection.close()
        raise TimeoutError(f"the stream {stream} could not be read to its end within {CONFIRM_TIMEOUT_S:.0f} s")


@dataclass
class RabbitQueue(Queue):
    """A quorum queue.

    Attributes:
        folder: of the server's data; None: the queue exists already.
    """

    system = "rabbitmq"
    url: str
    folder: Path | None = None

    def create(self) -> None:
        channel = _open(self.url)
        _declare(channel, self.name, "quorum", self.name)
        channel.connection.close()
        if self.folder is not None:
            _wait_until_written(Path(self.folder), self.name)

    def place(self) -> dict[str, Any]:
        return {"url": _without_password(self.url), "password": _PASSWORD, "queue": self.name}

    def send(self, records: Sequence[Record]) -> None:
        _publish_records(self.url, self.name, records)

    def left(self) -> int:
        channel = _open(self.url)
        count = channel.queue_declare(self.name, passive=True).method.message_count
        channel.connection.close()
        return int(count)


def _open(url: str) -> Any:
    import pika

    channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
    channel.basic_qos(prefetch_count=1_000)
    return channel


def _declare(channel: Any, queue: str, kind: str, exchange: str) -> None:
    channel.exchange_declare(exchange, "fanout", durable=True)
    channel.queue_delete(queue)
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
    channel.queue_bind(queue, exchange)


def _publish_records(url: str, exchange: str, records: Sequence[Record]) -> None:
    _publish(url, exchange, [(r.key or "", r.id, r.value) for r in records])


def _publish(url: str, exchange: str, messages: Sequence[tuple[str, str, str]]) -> None:
    """Publish routing key, id and body of each. The confirm of the last one covers all before it on its channel."""
    import pika

    if not messages:
        return
    channel = _open(url)
    for at, (key, name, body) in enumerate(messages, 1):
        if at == len(messages):
            channel.confirm_delivery()
        properties = pika.BasicProperties(message_id=name, delivery_mode=2)
        channel.basic_publish(exchange, key, body.encode(), properties)
    channel.connection.close()


def _messages(channel: Any, stream: str, offset: int | str) -> Iterator[tuple[int, Any, str, str] | None]:
    """Offset, properties, routing key and body of a stream's messages; None: nothing came within 0.2 s."""
    arguments = {"x-stream-offset": offset}
    for method, properties, body in channel.consume(stream, inactivity_timeout=_WAIT_S, arguments=arguments):
        if method is None:
            yield None
            continue
        channel.basic_ack(method.delivery_tag)
        yield int(properties.headers["x-stream-offset"]), properties, method.routing_key, as_text(body) or ""


def _wait_until_written(folder: Path, queue: str) -> None:
    """RabbitMQ (3.10) persists a quorum queue's name shortly after it confirmed the declaration. A kill in between
    leaves a queue that cannot be written to."""

    def written() -> bool:
        return any(queue.encode() in f.read_bytes() for f in folder.rglob("quorum/*/names.dets"))

    wait_for(written, ANSWER_TIMEOUT_S, f"{queue} is on the server's disk")


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    user, at, place = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{place}"


def _queue(at: SourcePlace) -> RabbitQueue:
    return RabbitQueue(at.queue, at.log, at.server.url, at.server.folder, connector=at.connector)


SYSTEM = System(
    (sending(RabbitExchange),),
    (
        SourceKind(
            "rabbitmq_stream", RabbitStreams, lambda at: RabbitStreams(at.server.url, at.queue), server="rabbitmq"
        ),
        SourceKind("rabbitmq", RabbitQueue, _queue, server="rabbitmq", queue=True),
    ),
)

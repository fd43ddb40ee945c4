"""An exchange of RabbitMQ with two queues: one as users have it, and a stream, which can be read again and again."""

from __future__ import annotations

from typing import Any

from delivered.verify.clients.base import Row, as_text
from delivered.verify.clients.messages import ANSWER_TIMEOUT_S, Messages
from delivered.verify.services import wait_for

_WAIT_S = 0.2
_END = "delivered-verify-end"


class RabbitExchange(Messages):
    system = "rabbitmq"
    _connection: Any = None
    _channel: Any = None

    def create(self) -> None:
        channel = self._open()
        channel.exchange_delete(self.name)
        channel.exchange_declare(self.name, "fanout", durable=True)
        for queue, kind in ((self.name, "quorum"), (self._stream, "stream")):
            channel.queue_delete(queue)
            channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
            channel.queue_bind(queue, self.name)
        channel.connection.close()
        # RabbitMQ (3.10) writes down a quorum queue's name a moment after it said that the queue is declared. One that
        # is killed before leaves a queue that nobody can write to.
        wait_for(self._is_written_down, ANSWER_TIMEOUT_S, f"{self.name} is on the server's disk")

    def remove(self) -> None:
        channel = self._open()
        channel.exchange_delete(self.name)
        channel.queue_delete(self.name)
        channel.queue_delete(self._stream)
        channel.connection.close()
        self.disconnect()

    def sink_options(self) -> dict[str, Any]:
        return {"format": "rabbitmq", "url": f"amqp://guest@{self._given}/", "password": "guest", "exchange": self.name}

    def take(self, after: int | None) -> list[Row]:
        if self._channel is None:
            self._channel = self._open()
            self._connection = self._channel.connection
            self._channel.basic_qos(prefetch_count=1_000)
        found: list[Row] = []
        offset: Any = "first" if after is None else after + 1
        given = {"x-stream-offset": offset}
        for method, properties, body in self._channel.consume(
            self._stream, inactivity_timeout=_WAIT_S, arguments=given
        ):
            if method is None:
                break
            self._channel.basic_ack(method.delivery_tag)
            at = int(properties.headers["x-stream-offset"])
            if after is not None and at <= after:
                continue  # a consumer begins at the chunk that holds the offset
            if properties.message_id == _END:
                self.met.add(body.decode())
                continue
            after = at
            found.append(Row(self._stream, at, None, as_text(body) or ""))
        return found

    def mark(self) -> None:
        import pika

        super().mark()
        channel = self._open()
        channel.confirm_delivery()
        given = pika.BasicProperties(message_id=_END, delivery_mode=2)
        channel.basic_publish("", self._stream, self.last.encode(), given)
        channel.connection.close()

    def all_taken(self) -> bool:
        return self.last in self.met

    def disconnect(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and connection.is_open:
            connection.close()

    def _is_written_down(self) -> bool:
        name = self.name.encode()
        return any(name in f.read_bytes() for f in self._server.folder.rglob("quorum/*/names.dets"))

    @property
    def _stream(self) -> str:
        return f"{self.name}-judge"

    def _open(self) -> Any:
        import pika

        return pika.BlockingConnection(pika.URLParameters(self._server.url)).channel()

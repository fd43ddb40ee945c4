"""A queue of ActiveMQ Artemis, consumed over STOMP. What was handed out and not acknowledged when the broker died comes
again, under the broker's own number: by that it is known."""

from __future__ import annotations

import queue
from typing import Any

from delivered.verify.clients.base import Row, as_text
from delivered.verify.clients.messages import Messages

_WAIT_S = 0.2
_RECEIPT_TIMEOUT_S = 10.0
_END = "delivered-verify-end"


class ArtemisQueue(Messages):
    system = "activemq"
    _connection: Any = None

    def create(self) -> None:
        self._frames: queue.Queue[Any] = queue.Queue()
        self._known: set[str] = set()
        self._subscribed()

    def sink_options(self) -> dict[str, Any]:
        return {"format": "activemq", "url": f"stomp://{self._given}", "queue": self.name, "keyHeader": "key"}

    def take(self, after: int | None) -> list[Row]:
        connection = self._subscribed()
        at = -1 if after is None else after
        found: list[Row] = []
        while True:
            try:
                frame = self._frames.get(timeout=_WAIT_S)
            except queue.Empty:
                break
            if isinstance(frame, Exception):
                if found:
                    self._frames.put(frame)
                    break
                raise frame
            number = frame.headers["message-id"].rpartition(",")[2]  # behind that of the consumer
            if number not in self._known:
                self._known.add(number)
                if frame.headers.get("judge") == _END:
                    self.met.add(as_text(frame.body) or "")
                else:
                    at += 1
                    found.append(Row(self.name, at, None, as_text(frame.body) or ""))
            connection.ack(frame.headers["ack"])
        return found

    def mark(self) -> None:
        """The queue is in order: this comes behind everything."""
        super().mark()
        headers = {"judge": _END, "persistent": "true", "destination-type": "ANYCAST"}
        self._subscribed().send(self.name, self.last.encode(), headers=headers)

    def all_taken(self) -> bool:
        return self.last in self.met

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._frames = queue.Queue()
        if connection is not None and connection.is_connected():
            connection.disconnect()

    def _subscribed(self) -> Any:
        if self._connection is not None:
            return self._connection
        import stomp

        host, _, port = self._server.bootstrap.rpartition(":")
        connection = stomp.Connection12([(host, int(port))], auto_decode=False, reconnect_attempts_max=1)
        frames = self._frames

        class Listener(stomp.ConnectionListener):  # type: ignore[misc]
            def on_message(self, frame: Any) -> None:
                frames.put(frame)

            def on_disconnected(self) -> None:
                frames.put(ConnectionError("the connection ended"))

            def on_error(self, frame: Any) -> None:
                frames.put(ConnectionError(str(frame.body)))

        connection.set_listener("judge", Listener())
        connection.connect(wait=True)
        given = {"subscription-type": "ANYCAST"}
        connection.subscribe(self.name, "judge", ack="client-individual", headers=given)
        self._connection = connection
        return connection

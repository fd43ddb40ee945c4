"""A queue of ActiveMQ Artemis as a source, over STOMP: made by a question to the broker's management, filled with a
receipt for each message."""

from __future__ import annotations

import json
import queue
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delivered.verify.clients.queue import ANSWER_TIMEOUT_S, Queue
from delivered.verify.workloads import Record

ID, KEY = "sent-as", "key"


class ArtemisFeed(Queue):
    """
    Args:
        bootstrap: host and port of the broker.
    """

    system = "activemq"

    def __init__(self, bootstrap: str, name: str, log: Path | str, connector: str | None = None) -> None:
        super().__init__(name, log, connector)
        self.bootstrap = bootstrap

    def create(self) -> None:
        made = {"name": self.name, "address": self.name, "routing-type": "ANYCAST", "durable": True}
        asked = {"_AMQ_ResourceName": "broker", "_AMQ_OperationName": "createQueue"}
        self._ask(asked, json.dumps([json.dumps({**made, "auto-delete": False})]))

    def left(self) -> int:
        return int(self._ask({"_AMQ_ResourceName": f"queue.{self.name}", "_AMQ_Attribute": "messageCount"}, ""))

    def place(self) -> dict[str, Any]:
        return {"url": f"stomp://{self.bootstrap}", "queue": self.name, "idHeader": ID, "keyHeader": KEY}

    def send(self, records: Sequence[Record]) -> None:
        connection, frames = self._open()
        for r in records:
            headers = {"persistent": "true", "destination-type": "ANYCAST", ID: r.id, KEY: r.key or ""}
            connection.send(self.name, r.value.encode(), headers=headers, receipt=r.id)
        for _ in records:
            _expect(frames, "receipt")
        connection.disconnect()

    def address(self) -> dict[str, Any]:
        return {"system": self.system, "bootstrap": self.bootstrap, "name": self.name, "log": str(self.log)}

    def _ask(self, headers: dict[str, str], body: str) -> Any:
        """A question to the broker's management."""
        connection, frames = self._open()
        connection.auto_content_length = False  # a text message: management reads no other
        replies = f"judge.{uuid.uuid4().hex}"
        connection.subscribe(replies, "r", headers={"subscription-type": "MULTICAST", "receipt": "r"})
        _expect(frames, "receipt")
        connection.send("activemq.management", body, headers={**headers, "reply-to": replies})
        answer = _expect(frames, "message")
        connection.disconnect()
        if answer.headers.get("_AMQ_OperationSucceeded") != "true":
            raise RuntimeError(f"ActiveMQ refused {headers}: {answer.body!r}")
        return json.loads(answer.body)[0] if answer.body else None

    def _open(self) -> tuple[Any, queue.Queue[tuple[str, Any]]]:
        import stomp

        host, _, port = self.bootstrap.rpartition(":")
        connection = stomp.Connection12([(host, int(port))], auto_decode=False, reconnect_attempts_max=1)
        frames: queue.Queue[tuple[str, Any]] = queue.Queue()

        class Listener(stomp.ConnectionListener):  # type: ignore[misc]
            def on_message(self, frame: Any) -> None:
                frames.put(("message", frame))

            def on_receipt(self, frame: Any) -> None:
                frames.put(("receipt", frame))

            def on_error(self, frame: Any) -> None:
                frames.put(("error", frame))

            def on_disconnected(self) -> None:
                frames.put(("the connection ended", None))

        connection.set_listener("judge", Listener())
        connection.connect(wait=True)
        return connection, frames


def _expect(frames: queue.Queue[tuple[str, Any]], kind: str) -> Any:
    """
    Raises:
        ConnectionError: something else came, or nothing.
    """
    try:
        found, frame = frames.get(timeout=ANSWER_TIMEOUT_S)
    except queue.Empty:
        raise ConnectionError(f"no {kind} within {ANSWER_TIMEOUT_S:.0f} s") from None
    if found != kind:
        raise ConnectionError(f"{found} in place of a {kind}")
    return frame

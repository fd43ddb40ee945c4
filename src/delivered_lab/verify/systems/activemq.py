"""A queue of ActiveMQ Artemis, over STOMP.

As the sink it is consumed: messages delivered but not acknowledged when the broker died are redelivered under the
broker's own number, which identifies them. As the source it is created through the broker's management address, and
filled with a receipt for each message.
"""

from __future__ import annotations

import json
import queue
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from delivered_lab.verify.systems.base import Row, SourceKind, SourcePlace, System, as_text
from delivered_lab.verify.systems.messages import CONFIRM_TIMEOUT_S, END, Messages, Queue, sending
from delivered_lab.verify.workloads import Record

ID, KEY = "sent-as", "key"
_WAIT_S = 0.2
Frames = queue.Queue[tuple[str, Any]]
"""What arrived: "message", "receipt", or the text of an error; and its frame."""


class ArtemisQueue(Messages):
    system = "activemq"
    _connection: Any = None

    def create(self) -> None:
        self._frames: Frames = queue.Queue()
        self._known: set[str] = set()
        self._subscribed()

    def place(self) -> dict[str, Any]:
        return {"url": f"stomp://{self._address}", "queue": self.name, "keyHeader": "key"}

    def take(self, after: int | None) -> list[Row]:
        connection = self._subscribed()
        at = -1 if after is None else after
        found: list[Row] = []
        while True:
            try:
                kind, frame = self._frames.get(timeout=_WAIT_S)
            except queue.Empty:
                break
            if kind != "message":
                if found:
                    self._frames.put((kind, frame))
                    break
                raise ConnectionError(kind)
            number = frame.headers["message-id"].rpartition(",")[2]  # follows the consumer's id
            if number not in self._known:
                self._known.add(number)
                if frame.headers.get("judge") == END:
                    self.met.add(as_text(frame.body) or "")
                else:
                    at += 1
                    found.append(Row(self.name, at, None, as_text(frame.body) or ""))
            connection.ack(frame.headers["ack"])
        return found

    def mark(self) -> None:
        """The queue is ordered: this comes after everything."""
        super().mark()
        headers = {"judge": END, "persistent": "true", "destination-type": "ANYCAST"}
        self._subscribed().send(self.name, self.last.encode(), headers=headers)

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._frames = queue.Queue()
        if connection is not None and connection.is_connected():
            connection.disconnect()

    def _subscribed(self) -> Any:
        if self._connection is None:
            connection, self._frames = _open(self._server.bootstrap)
            headers = {"subscription-type": "ANYCAST"}
            connection.subscribe(self.name, "judge", ack="client-individual", headers=headers)
            self._connection = connection
        return self._connection


@dataclass
class ArtemisSource(Queue):
    """
    Attributes:
        bootstrap: host and port of the broker.
    """

    system = "activemq"
    bootstrap: str

    def create(self) -> None:
        queue = {"name": self.name, "address": self.name, "routing-type": "ANYCAST", "durable": True}
        operation = {"_AMQ_ResourceName": "broker", "_AMQ_OperationName": "createQueue"}
        self._ask(operation, json.dumps([json.dumps({**queue, "auto-delete": False})]))

    def left(self) -> int:
        return int(self._ask({"_AMQ_ResourceName": f"queue.{self.name}", "_AMQ_Attribute": "messageCount"}, ""))

    def place(self) -> dict[str, Any]:
        return {"url": f"stomp://{self.bootstrap}", "queue": self.name, "idHeader": ID, "keyHeader": KEY}

    def send(self, records: Sequence[Record]) -> None:
        connection, frames = _open(self.bootstrap)
        for r in records:
            headers = {"persistent": "true", "destination-type": "ANYCAST", ID: r.id, KEY: r.key or ""}
            connection.send(self.name, r.value.encode(), headers=headers, receipt=r.id)
        for _ in records:
            _expect(frames, "receipt")
        connection.disconnect()

    def _ask(self, headers: dict[str, str], body: str) -> Any:
        """Send a request to the broker's management."""
        connection, frames = _open(self.bootstrap)
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


def _open(bootstrap: str) -> tuple[Any, Frames]:
    import stomp

    host, _, port = bootstrap.rpartition(":")
    connection = stomp.Connection12([(host, int(port))], auto_decode=False, reconnect_attempts_max=1)
    frames: Frames = queue.Queue()

    class Listener(stomp.ConnectionListener):  # type: ignore[misc]
        def on_message(self, frame: Any) -> None:
            frames.put(("message", frame))

        def on_receipt(self, frame: Any) -> None:
            frames.put(("receipt", frame))

        def on_error(self, frame: Any) -> None:
            frames.put((f"the broker refused: {frame.body}", frame))

        def on_disconnected(self) -> None:
            frames.put(("the connection ended", None))

    connection.set_listener("judge", Listener())
    connection.connect(wait=True)
    return connection, frames


def _expect(frames: Frames, kind: str) -> Any:
    """Raises ConnectionError: something else came, or nothing."""
    try:
        found, frame = frames.get(timeout=CONFIRM_TIMEOUT_S)
    except queue.Empty:
        raise ConnectionError(f"no {kind} within {CONFIRM_TIMEOUT_S:.0f} s") from None
    if found != kind:
        raise ConnectionError(f"{found} in place of a {kind}")
    return frame


def _source(at: SourcePlace) -> ArtemisSource:
    return ArtemisSource(at.queue, at.log, at.server.bootstrap, connector=at.connector)


SYSTEM = System(
    (sending(ArtemisQueue),),
    (SourceKind("activemq", ArtemisSource, _source, server="activemq", queue=True),),
    # What a killed server wrote stays in the page cache: no case cuts the power.
    properties={"journalDatasync": "false"},
)

"""One connection, and what the broker said as errors of ours."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from delivered.connectors.activemq.options import Place
from delivered.model.errors import DeliveredError, MissingExtra, Refused, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.options import resolve_secret

HEARTBEAT_MS = 10_000
"""Both ways. A broker that is silent for 15 s, or a receiver for 20, is taken for gone."""
_READ_BYTES = 65_536
"""The client reads 1 KiB at a time, and joins what it has with every read: too slow for large messages."""
_CLOSE_S = 3.0


def stomp() -> Any:
    """The client library, imported where it is used. Raises MissingExtra."""
    os.environ.setdefault("STOMP_SKIP_HOSTNAME_SCAN", "1")  # else its import asks DNS for this machine's names
    try:
        import stomp
    except ImportError:
        raise MissingExtra("activemq") from None
    return stomp


class Session:
    """A connection whose frames arrive in a thread of the client's. Used by one thread besides.

    Attributes:
        changed: guards all that the client's thread leaves here.
        arrived: messages that nobody took yet.
        unconfirmed: receipts that were asked for and did not come, oldest first.
        failed: why the connection can no longer be used.
    """

    def __init__(self, options: Place) -> None:
        """Raises Unreachable, Refused."""
        client = stomp()
        self.options = options
        self.changed = threading.Condition()
        self.arrived: deque[Any] = deque()
        self.unconfirmed: dict[str, None] = {}
        self.failed: DeliveredError | None = None
        self.server = ""
        self._receipts = 0
        self._closing = self._gone = False
        self.frames = client.Connection12(
            [(options.host, options.port)],
            auto_decode=False,
            heartbeats=(HEARTBEAT_MS, HEARTBEAT_MS),
            reconnect_attempts_max=1,
            timeout=CONNECT_TIMEOUT_S,
        )
        transport = self.frames.transport
        transport.receive = lambda: _read(transport)
        self.frames.set_listener("delivered", self)
        password = None if options.password is None else resolve_secret("password", options.password)
        try:
            self.frames.connect(options.user, password, wait=False)
        except (client.exception.StompException, OSError) as error:
            raise self._unreachable(str(error) or "no connection") from error
        try:
            self.wait(lambda: bool(self.server), CONNECT_TIMEOUT_S, "open a STOMP connection")
        except DeliveredError:
            self.close()
            raise

    @property
    def is_artemis(self) -> bool:
        return "Artemis" in self.server

    def receipt(self) -> str:
        """A fresh name, for the header `receipt` of the next frame: it comes back when the broker is done with it."""
        self._receipts += 1
        name = f"r{self._receipts}"
        with self.changed:
            self.unconfirmed[name] = None
        return name

    def transmit(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Call a method of `frames`. Raises Unreachable, or what the broker said before."""
        try:
            call(*arguments, **named)
        except (stomp().exception.StompException, OSError) as error:
            with self.changed:
                # The broker says why before it closes the connection, and its word may be on its way still.
                self.changed.wait_for(lambda: self.failed is not None, _CLOSE_S)
                self.failed = self.failed or self._unreachable(str(error) or type(error).__name__)
            raise self.failed from error

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Until `condition` holds. Raises what the broker said instead; Unreachable when it says nothing."""
        with self.changed:
            done = self.changed.wait_for(lambda: self.failed is not None or condition(), timeout_s)
            if self.failed is not None:
                raise self.failed
        if not done:
            raise self._unreachable(f"it did not {what} within {timeout_s:.0f} s")

    def settle(self, what: str) -> None:
        """Wait for every receipt. Raises as `wait`."""
        self.wait(lambda: not self.unconfirmed, REQUEST_TIMEOUT_S, what)

    def close(self) -> None:
        """Say goodbye, so that the broker takes back at once what was not acknowledged. May be called again."""
        if self._closing:
            return
        self._closing = True
        failures = (stomp().exception.StompException, OSError, AttributeError)  # the client forgets a lost socket
        with contextlib.suppress(*failures):
            if self.failed is None:
                self.frames.disconnect()
                with self.changed:
                    self.changed.wait_for(lambda: self._gone, _CLOSE_S)
        with contextlib.suppress(*failures):
            self.frames.transport.disconnect_socket()

    def on_connected(self, frame: Any) -> None:
        with self.changed:
            self.server = frame.headers.get("server") or "a server that gives no name"
            self.changed.notify_all()

    def on_message(self, frame: Any) -> None:
        with self.changed:
            self.arrived.append(frame)
            self.changed.notify_all()

    def on_receipt(self, frame: Any) -> None:
        with self.changed:
            self.unconfirmed.pop(frame.headers.get("receipt-id"), None)
            self.changed.notify_all()

    def on_error(self, frame: Any) -> None:
        said = f"{frame.headers.get('message', '')} {(frame.body or b'').decode(errors='replace')}"
        self._fail(explained(" ".join(said.split())[:500], self.options))

    def on_disconnected(self) -> None:
        self._gone = True
        self._fail(self._unreachable("the connection was lost"))

    def on_heartbeat_timeout(self) -> None:
        self._fail(self._unreachable("it sent no heart-beat"))

    def on_send(self, frame: Any) -> None:
        """The client looks for this method at every frame."""

    def _fail(self, error: DeliveredError) -> None:
        with self.changed:
            if self.failed is None and not self._closing:
                self.failed = error
            self.changed.notify_all()

    def _unreachable(self, said: str) -> Unreachable:
        return Unreachable(
            "ACTIVEMQ_UNREACHABLE",
            f"ActiveMQ at {self.options.place} did not answer, or the connection was lost: {said}",
            next_step="check that the server runs and speaks STOMP there, and the url",
        )


def _read(transport: Any) -> bytes:
    """In place of the client's own; nothing: the connection is gone.

    A line feed by itself, for it may be a heart-beat: the client (9.0) drops a message that comes after two of them in
    one read, and takes the NULs in its body for the ends of frames.
    """
    try:
        peer = transport.socket
        found: bytes = peer.recv(1 if peer.recv(1, socket.MSG_PEEK) == b"\n" else _READ_BYTES)
    except (OSError, AttributeError):
        return b""
    return found


def explained(said: str, options: Place) -> DeliveredError:
    """What an ERROR frame tells, in plain words."""
    lower = said.lower()
    if re.search(r"amq229031|validate user|password is invalid|security error|authentication", lower):
        return Refused(
            "ACTIVEMQ_CREDENTIALS",
            f"ActiveMQ at {options.place} turned the user or the password away: {said}",
            next_step="check the user in the url and the option password",
        )
    if re.search(r"permission|not authorized|amq229032|amq229213", lower):
        return Refused(
            "ACTIVEMQ_PERMISSION",
            f"ActiveMQ at {options.place} does not let this user: {said}",
            next_step=f"grant send, or consume, on {options.queue!r} in its security-settings",
        )
    if "disconnected by server" in lower:
        return UsageError(
            "QUEUE_GONE",
            f"ActiveMQ at {options.place} ended the consumer: the queue {options.queue!r} was deleted. It said: {said}",
            next_step="make the queue again, and start `delivered receive`",
        )
    if re.search(r"not exist|amq339001|amq229017|non-?existent", lower):
        return UsageError(
            "QUEUE_MISSING",
            f"There is no queue {options.queue!r} at {options.place}: {said}",
            next_step="make it (anycast, durable), or mend the option queue",
        )
    if re.search(r"amq339011|error sending message", lower):  # it does not say why, and shows the whole message
        return DeliveredError(
            "MESSAGE_REFUSED",
            f"ActiveMQ at {options.place} refused a message for {options.queue!r}: the queue is full "
            "(address-full-policy FAIL), or the message too large for it; the server's log says which.",
            next_step="make room in the queue; the batch is handled as its guarantee says",
        )
    return DeliveredError("ACTIVEMQ_SAID", f"ActiveMQ at {options.place} refused a request: {said}")

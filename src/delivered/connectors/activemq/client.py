"""One connection with or without TLS, and translation of the broker's errors."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from delivered.connectors.activemq import Place
from delivered.model.errors import DeliveredError, Refused, Unreachable, UsageError, extra
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.options import resolve_secret
from delivered.model.patience import left_s

# A connected socket with TLS.
#
# The client's own TLS mode polls the socket, so it misses frames that TLS has already decrypted, and never notices a
# closed peer. A plain `ssl.SSLSocket` is for one thread at a time; here one reads while another writes.

_READ_BYTES = 65_536


class TlsSocket:
    """What the client uses of a socket, blocking. One thread reads, any thread writes."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float) -> None:
        """Handshake. Does not close `raw` if it fails.

        Raises:
            ssl.SSLCertVerificationError: the certificate is not trusted, or of another host.
            OSError: the handshake failed, or took longer than `timeout_s`.
        """
        self._raw = raw
        context.options |= ssl.OP_NO_RENEGOTIATION  # during one, a write would have to wait for a read
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._state = threading.Lock()
        self._order = threading.Lock()
        """Held while sending, so that records arrive in the order of their encryption; never by the reader, which would
        otherwise wait for a peer that waits for it."""
        self._clear = b""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._raw.settimeout(_left(deadline))
                self._feed()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(deadline)  # the alert that explains it to the server
                raise
            else:
                break
        self._flush(deadline)
        raw.settimeout(None)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As socket.recv, with MSG_PEEK or no flag. Raises OSError, also if the peer did not announce the end."""
        while not self._clear:
            with self._state:
                try:
                    self._clear = self._tls.read(_READ_BYTES)
                    if not self._clear:
                        return b""
                    break
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return b""
            self._feed()
        data = self._clear[:size]
        if not flags & socket.MSG_PEEK:
            self._clear = self._clear[size:]
        return data

    def sendall(self, data: bytes) -> None:
        with self._order:
            with self._state:
                if data:
                    self._tls.write(data)
                encrypted = self._to_send.read()
            self._raw.sendall(encrypted)

    def getsockname(self) -> tuple[str, int]:
        address: tuple[str, int] = self._raw.getsockname()
        return address

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        self._raw.close()

    def _feed(self) -> None:
        data = self._raw.recv(_READ_BYTES)
        with self._state:
            if data:
                self._received.write(data)
            else:
                self._received.write_eof()

    def _flush(self, deadline: float) -> None:
        if self._to_send.pending:
            self._raw.settimeout(_left(deadline))
            self._raw.sendall(self._to_send.read())


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the TLS handshake took too long")
    return left


# One connection, and translation of the broker's errors.

HEARTBEAT_MS = 10_000
"""Heart-beats in both directions. A broker that is silent for 15 s, or a receiver for 20 s, counts as dead."""
"""The client reads 1 KiB at a time and concatenates after every read: too slow for large messages."""
_CLOSE_S = 3.0


def stomp() -> Any:
    """The client library, imported on use. Raises MissingExtra."""
    os.environ.setdefault("STOMP_SKIP_HOSTNAME_SCAN", "1")  # otherwise importing it queries DNS
    with extra("activemq"):
        import stomp
    return stomp


class Session:
    """A connection whose frames arrive in the client's thread; used by one other thread.

    Attributes:
        changed: guards all state that the client's thread writes.
        arrived: messages not yet returned.
        unconfirmed: requested receipts that have not arrived, oldest first.
        failed: why the connection is unusable.
    """

    def __init__(self, options: Place) -> None:
        """Raises Unreachable, Refused; UsageError: a certificate was not accepted, or a file of TLS cannot be used."""
        client = stomp()
        self.options = options
        self.changed = threading.Condition()
        self.arrived: deque[Any] = deque()
        self.unconfirmed: dict[str, None] = {}
        self.failed: DeliveredError | None = None
        self.server = ""
        self._receipts = 0
        self._closing = self._disconnected = False
        self._lost = ""
        self.frames = client.Connection12(
            [(options.host, options.port)], auto_decode=False, heartbeats=(HEARTBEAT_MS, HEARTBEAT_MS)
        )
        transport = self.frames.transport
        transport.receive = lambda: self._read(transport)
        transport.attempt_connection = lambda: self._dial(transport)
        self.frames.set_listener("delivered", self)
        password = None if options.password is None else resolve_secret("password", options.password)
        try:
            self.frames.connect(options.user, password, wait=False)
        except (client.exception.StompException, OSError) as error:
            raise self._unreachable(str(error) or "no connection") from error
        try:
            self.wait(lambda: bool(self.server), left_s(CONNECT_TIMEOUT_S), "open a STOMP connection")
        except DeliveredError as error:
            self.failed = error  # not asked to say goodbye, which would be waited for
            self.close()
            raise

    @property
    def is_artemis(self) -> bool:
        return "Artemis" in self.server

    def receipt(self) -> str:
        """A new id for the header `receipt` of the next frame; the broker returns it once the frame is processed."""
        self._receipts += 1
        name = f"r{self._receipts}"
        with self.changed:
            self.unconfirmed[name] = None
        return name

    def transmit(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Call a method of `frames`. Raises Unreachable, or the broker's earlier error."""
        try:
            call(*arguments, **named)
        except (stomp().exception.StompException, OSError) as error:
            with self.changed:
                # The broker sends the reason before it closes the connection; it may still be in flight.
                self.changed.wait_for(lambda: self.failed is not None, _CLOSE_S)
                self.failed = self.failed or self._unreachable(str(error) or type(error).__name__)
            raise self.failed from error

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until `condition` holds. Raises the broker's error; Unreachable if it does not answer."""
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
        """Disconnect, so that the broker requeues unacknowledged messages at once. Idempotent."""
        if self._closing:
            return
        self._closing = True
        failures = (stomp().exception.StompException, OSError, AttributeError)  # the client forgets a lost socket
        with contextlib.suppress(*failures):
            if self.failed is None:
                self.frames.disconnect()
                with self.changed:
                    self.changed.wait_for(lambda: self._disconnected, left_s(_CLOSE_S))
        with contextlib.suppress(*failures):
            self.frames.transport.disconnect_socket()

    def on_connected(self, frame: Any) -> None:
        with self.changed:
            self.server = frame.headers.get("server") or "an unnamed server"
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
        detail = f"{frame.headers.get('message', '')} {(frame.body or b'').decode(errors='replace')}"
        self._fail(explained(" ".join(detail.split())[:500], self.options))

    def on_disconnected(self) -> None:
        self._disconnected = True
        self._fail(self._unreachable(self._lost or "the connection was lost"))

    def on_heartbeat_timeout(self) -> None:
        self._fail(self._unreachable("it sent no heart-beat"))

    def on_send(self, frame: Any) -> None:
        """Required by the client."""

    def _dial(self, transport: Any) -> None:
        """Replaces the client's own, which reports no reasons. Raises OSError, UsageError."""
        options = self.options
        context = options.tls_context() if options.tls else None
        raw = socket.create_connection((options.host, options.port), left_s(CONNECT_TIMEOUT_S))
        try:
            if context is None:
                raw.settimeout(None)
                transport.socket = raw
            else:
                transport.socket = TlsSocket(raw, context, options.host, left_s(CONNECT_TIMEOUT_S))
        except OSError as error:
            raw.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise options.untrusted(f"stomp+ssl://{options.place}", error) from None
            raise
        transport.current_host_and_port = (options.host, options.port)

    def _read(self, transport: Any) -> bytes:
        """Replaces the client's own; empty: the connection is closed.

        Returns a line feed by itself, as it may be a heart-beat: the client (9.0) drops a message that follows two of
        them in one read, and takes NULs in its body for ends of frames.
        """
        try:
            peer = transport.socket
            data: bytes = peer.recv(1 if peer.recv(1, socket.MSG_PEEK) == b"\n" else _READ_BYTES)
        except AttributeError:
            return b""
        except OSError as error:
            self._lost = f"the connection was lost: {error}"
            return b""
        return data

    def _fail(self, error: DeliveredError) -> None:
        with self.changed:
            if self.failed is None and not self._closing:
                self.failed = error
            self.changed.notify_all()

    def _unreachable(self, detail: str) -> Unreachable:
        return Unreachable("ACTIVEMQ_UNREACHABLE", place=self.options.place, detail=detail)


def explained(detail: str, options: Place) -> DeliveredError:
    """Translate an ERROR frame."""
    lower = detail.lower()
    if re.search(r"amq229031|validate user|password is invalid|security error|authentication", lower):
        return Refused("ACTIVEMQ_CREDENTIALS", place=options.place, detail=detail)
    if re.search(r"permission|not authorized|amq229032|amq229213", lower):
        return Refused("ACTIVEMQ_PERMISSION", place=options.place, detail=detail, queue=options.queue)
    if "disconnected by server" in lower:
        return UsageError("QUEUE_GONE.ACTIVEMQ", place=options.place, queue=options.queue, detail=detail)
    if re.search(r"not exist|amq339001|amq229017|non-?existent", lower):
        return UsageError("QUEUE_MISSING.ACTIVEMQ", queue=options.queue, place=options.place, detail=detail)
    if re.search(r"amq339011|error sending message", lower):  # without the reason, but with all of the message
        return DeliveredError("MESSAGE_REFUSED.ACTIVEMQ", place=options.place, queue=options.queue)
    return DeliveredError("ACTIVEMQ_ERROR", place=options.place, detail=detail)

"""One connection to a Pulsar broker, authenticated: requests side by side, answers read by a thread of its own.

The thread answers the brokers' pings, too: they close a connection that is silent for a minute, and with it the
producers of a task whose rows come slowly.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from delivered.clients.pulsar.commands import (
    CLIENT_VERSION,
    FAILED,
    MESSAGE,
    PROTOCOL_VERSION,
    REDIRECT,
    NoAnswer,
    NotSent,
    Rejected,
    Unreadable,
    decode,
    encode,
    frame_size,
    words,
)
from delivered.model.limits import CONNECT_TIMEOUT_S

_PING_AFTER_S = 30.0
_SILENT_S_MAX = 60.0
_MESSAGE_BYTES_MAX = 5 << 20
"""If a broker does not say."""
_REQUESTS = {"producer_success", "success"}
"""Answers, beside those whose name ends with _response."""


@dataclass(frozen=True)
class Settings:
    """How to connect.

    Attributes:
        addresses: (host, port) of the service; a lookup tells which broker serves a topic.
        tls: makes a context; None: without TLS.
        credentials: name of the method and its data, asked for each connection; None: no authentication.
    """

    addresses: Sequence[tuple[str, int]]
    tls: Callable[[], ssl.SSLContext] | None = None
    credentials: Callable[[], tuple[str, bytes]] | None = None


class Receiver(Protocol):
    """What a producer learns from its connection's thread."""

    def received(self, sequence_id: int, ledger: int, entry: int) -> None: ...

    def refused(self, error: Rejected) -> None: ...

    def lost(self, reason: str) -> None: ...


class Connection:
    """Thread-safe. A forked process must open its own.

    Attributes:
        name: "host:port".
        message_bytes_max: what the broker accepts as a message.
        closed: why it is closed; None: open.
    """

    def __init__(self, address: tuple[str, int], settings: Settings, timeout_s: float, through: str = "") -> None:
        """
        Args:
            through: "host:port" of the broker that a proxy at `address` connects to; empty: no proxy.

        Raises:
            NotSent: no connection. Rejected: the broker refused the credentials. ssl.SSLError.
        """
        self.name = through or f"{address[0]}:{address[1]}"
        self.closed: str | None = None
        self._settings = settings
        self._pid = os.getpid()
        self._io = threading.Lock()  # OpenSSL does not allow reading and writing at the same time
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._answers: dict[int, Future[Any]] = {}
        self._producers: dict[int, Receiver] = {}
        self._last_id = 0
        self._heard_s = time.monotonic()
        self._connected: Future[Any] = Future()
        deadline = time.monotonic() + timeout_s
        try:
            self._sock = _connected(address, settings, timeout_s)
        except ssl.SSLCertVerificationError:
            raise
        except (OSError, ValueError, OverflowError) as error:
            raise NotSent(f"{self.name}: {type(error).__name__}: {error}") from None
        threading.Thread(target=self._read, daemon=True, name=f"delivered-pulsar-{self.name}").start()
        fields: dict[str, Any] = {"proxy_to_broker_url": through} if through else {}
        if settings.credentials is not None:
            fields["auth_method_name"], fields["auth_data"] = settings.credentials()
        try:
            self.post(
                encode(
                    "connect",
                    client_version=CLIENT_VERSION,
                    protocol_version=PROTOCOL_VERSION,
                    feature_flags=MESSAGE["FeatureFlags"](supports_auth_refresh=True),
                    **fields,
                ),
                deadline,
            )
            answer = self.wait(self._connected, deadline)
        except NoAnswer as error:
            self.close(str(error))
            raise NotSent(str(error)) from None
        except BaseException as error:
            self.close(str(error))
            raise
        self.message_bytes_max = answer.max_message_size or _MESSAGE_BYTES_MAX

    @property
    def usable(self) -> bool:
        return self.closed is None and self._pid == os.getpid()

    def ask(self, name: str, deadline: float, **fields: Any) -> Any:
        """The answer to a request.

        Raises:
            NoAnswer, Rejected
        """
        return self.wait(self.request(name, deadline, **fields), deadline)

    def request(self, name: str, deadline: float, **fields: Any) -> Future[Any]:
        """Send a request; `wait` returns its answer. Raises NotSent."""
        number, answer = self._next_id(), Future[Any]()
        with self._state:
            self._answers[number] = answer
        try:
            self.post(encode(name, request_id=number, **fields), deadline)
        except NotSent:
            with self._state:
                self._answers.pop(number, None)
            raise
        return answer

    def wait(self, answer: Future[Any], deadline: float) -> Any:
        """Raises NoAnswer, Rejected. After a time-out the connection is closed: it may be a broker that is paused."""
        try:
            return answer.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self.close("no answer in time")
            raise NoAnswer(f"{self.name}: no answer in time") from None

    def attach(self, producer: Receiver) -> int:
        """A producer's number on this connection."""
        number = self._next_id()
        with self._state:
            self._producers[number] = producer
        return number

    def detach(self, number: int) -> None:
        with self._state:
            self._producers.pop(number, None)

    def post(self, frame: bytes, deadline: float) -> None:
        """Send a frame. Raises NotSent: the connection is broken, or became so."""
        with self._sending:
            self._write(frame, deadline)

    def _post_unless_busy(self, name: str, **fields: Any) -> None:
        """Whatever is being sent tells the broker as well that this end is alive; its reader may not wait for it."""
        if self._sending.acquire(blocking=False):
            try:
                self._write(encode(name, **fields), time.monotonic() + _PING_AFTER_S)
            finally:
                self._sending.release()

    def _write(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        if not self.usable:
            raise NotSent(f"{self.name}: {self.closed or 'opened by another process'}")
        try:
            while view:
                try:
                    with self._io:
                        view = view[self._sock.send(view) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    self._poll(select.POLLOUT, deadline)
                except ssl.SSLWantReadError:
                    self._poll(select.POLLIN, deadline)
        except (OSError, ValueError) as error:  # a part of the frame may be on its way
            self.close(f"{type(error).__name__}: {error}")
            raise NotSent(f"{self.name}: {self.closed}") from None

    def close(self, why: str = "closed") -> None:
        """Requests in flight fail with NoAnswer, producers are lost. Idempotent."""
        with self._state:
            if self.closed is not None:
                return
            self.closed = why
            answers, producers = [self._connected, *self._answers.values()], [*self._producers.values()]
            self._answers.clear()
            self._producers.clear()
        if self._pid == os.getpid():  # else it would end the connection of the parent
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._sock.close()
        for answer in answers:
            if not answer.done():
                answer.set_exception(NoAnswer(f"{self.name}: {why}"))
        for producer in producers:
            producer.lost(f"{self.name}: {why}")

    def _next_id(self) -> int:
        with self._state:
            self._last_id += 1
            return self._last_id

    def _read(self) -> None:
        try:
            while self.closed is None:
                self._handle(*decode(self._exactly(frame_size(self._exactly(4)))))
        except (OSError, ValueError, Unreadable, NotSent) as error:
            self.close(str(error) or type(error).__name__)
        except Exception as error:  # whatever a foreign command raises ends this connection, never its users
            self.close(f"a command that cannot be handled: {type(error).__name__}: {error}")

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                with self._io:
                    count = self._sock.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._await_bytes()
                continue
            except ssl.SSLWantWriteError:
                self._poll(select.POLLOUT, time.monotonic() + _SILENT_S_MAX)
                continue
            if count == 0:
                raise ConnectionResetError("closed by the broker")
            view = view[count:]
        self._heard_s = time.monotonic()
        return bytes(data)

    def _await_bytes(self) -> None:
        """Wait for something to read; ask the broker whether it is there if it is silent."""
        for _ in range(2):
            with suppress(TimeoutError):
                return self._poll(select.POLLIN, time.monotonic() + _PING_AFTER_S)
            if time.monotonic() - self._heard_s > _SILENT_S_MAX:
                break
            self._post_unless_busy("ping")
        raise ConnectionResetError(f"silent for {time.monotonic() - self._heard_s:.0f} s")

    def _poll(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock.fileno(), event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError("timed out")

    def _handle(self, name: str, command: Any) -> None:
        match name:
            case "send_receipt":
                if (producer := self._producer(command.producer_id)) is not None:
                    producer.received(command.sequence_id, command.message_id.ledger, command.message_id.entry)
            case "send_error":
                if (producer := self._producer(command.producer_id)) is not None:
                    producer.refused(Rejected(command.error, words(command.message)))
            case "close_producer":
                if (producer := self._producer(command.producer_id)) is not None:
                    self.detach(command.producer_id)
                    producer.lost(f"{self.name}: the broker closed the producer")
            case "ping":
                self._post_unless_busy("pong")
            case "connected":
                if not self._connected.done():
                    self._connected.set_result(command)
            case "auth_challenge":
                self._answer_challenge()
            case "error":
                self._fail(command.request_id, Rejected(command.error, words(command.message)))
            case "producer_success" if command.HasField("producer_ready") and not command.producer_ready:
                pass  # waits for exclusive access; another answer follows
            case _ if name in _REQUESTS or name.endswith("_response"):
                failed = name in FAILED and command.response == FAILED[name]
                if failed or (name not in _REQUESTS and command.HasField("error")):
                    self._fail(command.request_id, Rejected(command.error, words(command.message)))
                elif (answer := self._answer(command.request_id)) is not None:
                    answer.set_result(command)

    def _fail(self, number: int, error: Rejected) -> None:
        answer = self._answer(number)
        if answer is None and not self._connected.done():  # of the login: it belongs to no request
            answer = self._connected
        if answer is not None:
            answer.set_exception(error)

    def _answer(self, number: int) -> Future[Any] | None:
        with self._state:
            return self._answers.pop(number, None)

    def _producer(self, number: int) -> Receiver | None:
        with self._state:
            return self._producers.get(number)

    def _answer_challenge(self) -> None:
        if self._settings.credentials is None:
            raise Unreadable("the broker asks for credentials, and there are none")
        method, data = self._settings.credentials()
        response = MESSAGE["AuthData"](auth_method_name=method, auth_data=data)
        fields = {"client_version": CLIENT_VERSION, "protocol_version": PROTOCOL_VERSION, "response": response}
        self.post(encode("auth_response", **fields), time.monotonic() + _PING_AFTER_S)


def _connected(address: tuple[str, int], settings: Settings, timeout_s: float) -> socket.socket:
    sock = socket.create_connection(address, max(0.1, timeout_s))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if settings.tls is not None:
            sock = settings.tls().wrap_socket(sock, server_hostname=address[0].rstrip("."))
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


# The brokers of a cluster: which one serves a topic, and a connection to it.

_REDIRECTS_MAX = 20
_Place = tuple[tuple[str, int], str]
"""Address to connect to, and the broker behind it if that is a proxy's."""


class Cluster:
    """Connections of one process, each to one broker, shared by all of its threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._open: dict[_Place, Connection] = {}
        self._places: dict[str, _Place] = {}

    def partitions(self, topic: str, deadline: float) -> int:
        """Number of partitions; 0: the topic has none, or does not exist yet. Creates nothing.

        Raises:
            NoAnswer, Rejected, ssl.SSLError
        """
        asked = self._service(deadline).ask("partitions", deadline, topic=topic, metadata_auto_creation_enabled=False)
        return int(asked.partitions)

    def serving(self, topic: str, deadline: float, *, again: bool = False) -> Connection:
        """A connection to the broker that serves a topic, of one partition.

        Args:
            again: what is known of it may be outdated.

        Raises:
            NoAnswer, Rejected, ssl.SSLError
        """
        with self._lock:
            place = None if again else self._places.get(topic)
            known = None if place is None else self._open.get(place)
        if known is not None and known.usable:
            return known
        place = self._look_up(topic, deadline)
        with self._lock:
            self._places[topic] = place
        return self._connection(place, deadline)

    def close(self) -> None:
        with self._lock:
            connections, self._open, self._places = [*self._open.values()], {}, {}
        for connection in connections:
            connection.close()

    def _look_up(self, topic: str, deadline: float) -> _Place:
        connection, authoritative = self._service(deadline), False
        for _ in range(_REDIRECTS_MAX):
            answer = connection.ask("lookup", deadline, topic=topic, authoritative=authoritative)
            broker = _address(answer.url if self._settings.tls is None else answer.url_tls, connection.name)
            service = self._settings.addresses[0]
            place = (service, f"{broker[0]}:{broker[1]}") if answer.proxy_through_service_url else (broker, "")
            if answer.response != REDIRECT:
                return place
            connection, authoritative = self._connection(place, deadline), answer.authoritative
        raise NoAnswer(f"{_REDIRECTS_MAX} redirects for {topic}")

    def _service(self, deadline: float) -> Connection:
        errors = []
        for address in self._settings.addresses:
            try:
                return self._connection((address, ""), deadline)
            except NotSent as error:
                errors.append(str(error))
        raise NotSent("; ".join(errors))

    def _connection(self, place: _Place, deadline: float) -> Connection:
        with self._lock:
            known = self._open.get(place)
            if known is not None and known.usable:
                return known
        timeout_s = max(0.1, min(CONNECT_TIMEOUT_S, deadline - time.monotonic()))
        made = Connection(place[0], self._settings, timeout_s, place[1])
        with self._lock:
            other = self._open.get(place)
            if other is None or not other.usable:
                self._open[place] = made
                return made
        made.close()  # another thread was faster
        return other


def _address(url: str, broker: str) -> tuple[str, int]:
    """Raises NoAnswer: the broker named no address."""
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise NoAnswer(f"{broker} names {url[:100]!r} as a broker")

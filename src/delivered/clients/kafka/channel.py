"""One connection to a Kafka broker: opened, authenticated, requests in flight side by side, large fields not copied.

kafka-python encodes and decodes messages and speaks SASL. Frames are read and written here: its own connection costs
3 ms of CPU for each MB received (decision 054). Nothing reads in the background: the caller that waits for a
response reads what arrives, for all.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from delivered.clients.kafka import (
    PORT,
    Closed,
    CredentialsRefused,
    NoAnswer,
    NoCredentials,
    NotSent,
    Rejected,
    mechanism_of,
    protocol_of,
)
from delivered.model.errors import InvariantBroken, Unreachable
from delivered.model.limits import KAFKA_RESPONSE_BYTES_MAX
from delivered.model.options import parse_addresses
from delivered.model.patience import left_s

if TYPE_CHECKING:
    from delivered.clients.kafka.sasl import Tls

_FRAME = struct.Struct(">ihhi")
"""Request: size of what follows, API key, API version, correlation id."""
_RESPONSE = struct.Struct(">i")
_API_VERSIONS = 18
_PARTS_MAX = 64
_TLS_RECORDS = (b"\x15", b"\x16")
"""How an alert or a handshake starts."""
_SILENCE_S = 5.0
"""A response that takes longer: ask whether the broker is still in the cluster."""
_IDLE_S_MAX = 540.0
"""Brokers close idle connections after 600 s by default."""

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview


class _Late(OSError):
    """A deadline passed."""


class Pending:
    """A request that was sent. Thread-safe.

    Attributes:
        left_cluster: asks other brokers whether this one is no longer among them. A broker that is paused or cut off
            keeps its connections, and would be waited for in vain.
    """

    left_cluster: Callable[[], bool] | None = None

    def __init__(self, channel: Channel, correlation_id: int, flexible: bool, decode: Any) -> None:
        self._channel = channel
        self._decode = decode
        self.correlation_id = correlation_id
        self.flexible = flexible
        self.sent_s = time.monotonic()
        self._frame: memoryview | None = None
        self._error: str | None = None

    def ready(self, timeout_s: float = 0.0) -> bool:
        """Whether the response is here, or will never come; waits at most this long."""
        return self._over or self._channel.read_until(self, time.monotonic() + timeout_s)

    @property
    def _over(self) -> bool:
        return self._frame is not None or self._error is not None

    def body(self, timeout_s: float) -> memoryview:
        """The response without its header, in memory of its own.

        Raises:
            NoAnswer: the connection broke, the broker left the cluster, or there was no response in time. Then the
                connection is closed.
        """
        deadline = time.monotonic() + timeout_s
        while not self.ready(min(_SILENCE_S, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                self._channel.timed_out = True
                self._channel.close(f"no response within {max(0.0, timeout_s):.0f} s")
            elif self.left_cluster is not None and self.left_cluster():
                self._channel.close("it left the cluster before it answered")
        if self._frame is None:
            raise NoAnswer(f"{self._channel.name}: {self._error}")
        try:
            return self._frame[header_bytes(self._frame, self.flexible) :]
        except (IndexError, ValueError) as error:
            raise self._unreadable(error) from None

    def answer(self, timeout_s: float) -> Any:
        """The response as kafka-python's message. Raises as `body`."""
        body = self.body(timeout_s)
        try:
            return complete(self._decode(body))
        except Exception as error:  # kafka-python raises anything for bytes that are no such message
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> NoAnswer:
        self._channel.close(f"a response that cannot be read: {type(error).__name__}: {str(error)[:100]}")
        return NoAnswer(f"{self._channel.name}: {self._channel.closed}")

    def arrived(self, frame: memoryview) -> None:
        self._frame = frame

    def failed(self, error: str) -> None:
        if not self._over:
            self._error = error


class Channel:
    """An open connection, authenticated. Thread-safe. A forked process must open its own.

    Attributes:
        versions: kafka-python's view of the API versions that the broker supports.
        features: finalized features of the cluster: {"transaction.version": 2}.
        closed: why it is closed; None: open.
        timed_out: because the broker was silent, not by the broker.
    """

    def __init__(self, host: str, port: int, security: Security, timeout_s: float) -> None:
        """Connect.

        Raises:
            NotSent: no connection. Closed: the broker ended it. Rejected: TLS or authentication failed.
        """
        self.name = f"{host}:{port}"
        self._host = host
        self.closed: str | None = None
        self.timed_out = False
        self.features: dict[str, int] = {}
        self._security = security
        self._pid = os.getpid()
        self._io = threading.Lock()  # OpenSSL does not allow reading and writing at the same time
        self._sending = threading.RLock()  # a request may have to renew the session first
        self._turn = threading.Condition()
        self._reading = False
        self._in_flight: deque[Pending] = deque()
        self._correlation_id = 0
        self._used_s = time.monotonic()
        self._expires_s = float("inf")
        self._alert = False
        self._head = memoryview(bytearray(4))
        self._frame: memoryview | None = None
        self._left = self._head
        deadline = time.monotonic() + timeout_s
        try:
            self._sock = connected(host, port, security, timeout_s)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError) as error:
            raise Closed(f"{self.name}: {type(error).__name__}: {error}") from None
        except TimeoutError as error:  # also of TLS
            raise NotSent(f"{self.name}: {type(error).__name__}: {error}") from None
        except ssl.SSLError as error:
            raise Rejected(f"{self.name}: {error}", tls=True) from None
        except (OSError, OverflowError, ValueError) as error:  # a broker names others: port 999999, a host of 64 dots
            raise NotSent(f"{self.name}: {type(error).__name__}: {error}") from None
        try:
            self._read_versions(deadline)
            if security.mechanism is not None:
                self._authenticate(deadline)
        except BaseException as error:
            self.close(str(error))
            if isinstance(error, NoAnswer) and self._alert:  # of TLS 1.3, after the handshake: about our certificate
                raise Rejected(str(error), tls=True) from None
            if type(error) in (NoAnswer, NotSent):
                if self.timed_out:
                    raise NotSent(str(error)) from None
                raise Closed(str(error), answered=hasattr(self, "versions")) from None
            raise

    def _authenticate(self, deadline: float) -> None:
        started_s, self._expires_s = time.monotonic(), float("inf")
        ask = lambda request: self.post(request).answer(deadline - time.monotonic())  # noqa: E731
        self._expires_s = started_s + authenticate(ask, self.name, self._host, self._security)

    def _renew_session(self, timeout_s: float) -> None:
        """Authenticate again before the broker would close the connection (KIP-368). Requests in flight are answered
        first; others wait.
        """
        if time.monotonic() < self._expires_s:
            return
        try:
            self._authenticate(time.monotonic() + timeout_s)
        except BaseException as error:
            self.close(f"the session was not renewed: {error}")
            if isinstance(error, NoAnswer) and not isinstance(error, NotSent):
                raise NotSent(str(error)) from None
            raise

    def _read_versions(self, deadline: float) -> None:
        from kafka.protocol.broker_version_data import BrokerVersionData
        from kafka.protocol.metadata import ApiVersionsRequest

        version = ApiVersionsRequest.max_version
        while True:
            request = ApiVersionsRequest(version=version, client_software_name=CLIENT_ID, client_software_version="1")
            answer = self.post(request).answer(deadline - time.monotonic())
            if answer.error_code != 35 or version == 0:  # UNSUPPORTED_VERSION: the broker is older
                break
            version = min([k.max_version for k in answer.api_keys if k.api_key == _API_VERSIONS], default=0)
        self.versions = BrokerVersionData(
            api_versions={k.api_key: (k.min_version, k.max_version) for k in answer.api_keys}
        )
        for feature in getattr(answer, "finalized_features", None) or ():
            self.features[feature.name] = feature.max_version_level

    def usable(self) -> bool:
        """Whether to send further requests here. False: closed by one side, or idle for long."""
        if self.closed is not None or self._pid != os.getpid():
            return False
        with self._turn:
            if self._in_flight or self._reading:
                return True
            if time.monotonic() - self._used_s < _IDLE_S_MAX and self._silent():
                return True
        self.close("idle or closed by the broker")
        return False

    def _silent(self) -> bool:
        """Nothing is in flight: whatever arrives means that the broker closed the connection."""
        try:
            with self._io:
                self._sock.recv_into(self._head, 1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except (OSError, ValueError):
            pass
        return False

    def post(self, request: Any, timeout_s: float = 30.0) -> Pending:
        """Send one of kafka-python's requests.

        Args:
            timeout_s: for sending.

        Raises:
            NotSent: the connection is broken, or the broker is too old for the request.
        """
        from kafka.errors import IncompatibleBrokerVersion
        from kafka.protocol.api_header import ResponseClassRegistry

        version = request.API_VERSION
        if version is None:
            try:
                version = request.API_VERSION = self.versions.api_version(request)
            except IncompatibleBrokerVersion as error:
                raise NotSent(f"{self.name}: {error}") from None
        request.with_header()
        response = ResponseClassRegistry.get_response_class(request.header)
        flexible = request.flexible_version_q(version)
        key = request.API_KEY
        return self.send(
            key,
            version,
            [request.encode()],
            flexible,
            decode=response.decode,
            flexible_answer=flexible and key != _API_VERSIONS,
            timeout_s=timeout_s,
        )

    def send(
        self,
        key: int,
        version: int,
        parts: Sequence[Buffer],
        flexible: bool,
        *,
        decode: Any = None,
        flexible_answer: bool | None = None,
        timeout_s: float = 30.0,
    ) -> Pending:
        """Send a request whose body is the concatenation of `parts`, which are not copied.

        Args:
            flexible: whether the headers have tagged fields.

        Raises:
            NotSent: the connection is broken.
        """
        client = self._security.client_id.encode()
        tail = struct.pack(">h", len(client)) + client + (b"\0" if flexible else b"")
        size = 8 + len(tail) + sum(memoryview(p).nbytes for p in parts)
        with self._sending:
            self._renew_session(timeout_s)
            self._correlation_id = (self._correlation_id + 1) % 2**31
            pending = Pending(
                self, self._correlation_id, flexible if flexible_answer is None else flexible_answer, decode
            )
            head = _FRAME.pack(size, key, version, self._correlation_id) + tail
            with self._turn:
                if self.closed is not None:
                    raise NotSent(f"{self.name}: {self.closed}")
                self._in_flight.append(pending)
            try:
                self._write([memoryview(head), *(memoryview(p).cast("B") for p in parts)], time.monotonic() + timeout_s)
            except BaseException as error:
                self._alert = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
                self.timed_out = isinstance(error, _Late)
                self.close(f"{type(error).__name__}: {error}")
                if isinstance(error, (OSError, ValueError)):
                    raise NotSent(f"{self.name}: {type(error).__name__}: {error}") from None
                raise
        return pending

    def _write(self, parts: list[memoryview], deadline: float) -> None:
        at = 0
        while at < len(parts):
            try:
                with self._io:
                    if self._security.trust is None:
                        sent = self._sock.sendmsg(parts[at : at + _PARTS_MAX])
                    else:
                        sent = self._sock.send(parts[at])
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, deadline)
                continue
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
                continue
            while at < len(parts) and sent >= len(parts[at]):
                sent -= len(parts[at])
                at += 1
            if sent:
                parts[at] = parts[at][sent:]
        self._used_s = time.monotonic()

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock.fileno(), event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise _Late("timed out")

    def read_until(self, wanted: Pending, deadline: float) -> bool:
        """Read responses until this one is there, or the deadline passes. One thread reads, for all that wait."""
        while not wanted._over:
            with self._turn:
                while self._reading and not wanted._over:
                    if (left := deadline - time.monotonic()) <= 0:
                        return False
                    self._turn.wait(left)
                if wanted._over:
                    break
                self._reading = True
            try:
                self._read_frame(deadline)
            except _Late:
                return wanted._over
            except (OSError, ValueError, NoAnswer) as error:
                self._alert = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
                self.close(f"{type(error).__name__}: {error}")
                wanted.failed(self.closed or str(error))
            finally:
                with self._turn:
                    self._reading = False
                    self._turn.notify_all()
        return True

    def _read_frame(self, deadline: float) -> None:
        """Read one response. After a time-out, the next call goes on where this one stopped."""
        while self._left:
            try:
                with self._io:
                    n = self._sock.recv_into(self._left)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN, deadline)
                continue
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
                continue
            if n == 0:
                raise ConnectionResetError("closed by the broker")
            self._left = self._left[n:]
            if not self._left and self._frame is None:
                [size] = _RESPONSE.unpack(self._head)
                if not 4 <= size <= KAFKA_RESPONSE_BYTES_MAX:
                    raise NoAnswer(f"a response of {size} bytes: not a Kafka broker, or a broken connection")
                # numpy does not clear the memory first.
                self._left = self._frame = np.empty(size, np.uint8).data
        frame, self._frame, self._left = self._frame or self._head, None, self._head
        self._used_s = time.monotonic()
        [correlation_id] = _RESPONSE.unpack(frame[:4])
        with self._turn:
            pending = self._in_flight[0] if self._in_flight else None
            if pending is None or pending.correlation_id != correlation_id:
                raise NoAnswer(f"a response to no request in flight ({correlation_id})")
            self._in_flight.popleft()
        pending.arrived(frame)

    def close(self, why: str = "closed") -> None:
        """Requests in flight fail with NoAnswer. Idempotent."""
        with self._turn:
            if self.closed is not None:
                return
            self.closed = why
            if self._pid == os.getpid():  # else it would end the connection of the parent
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                self._sock.close()
            while self._in_flight:
                self._in_flight.popleft().failed(why)
            self._turn.notify_all()


# Security of a connection: TLS, then a SASL dialog.

CLIENT_ID = "delivered"
_LIFETIME = 0.85
"""Of the lifetime that a broker grants to a SASL session: then it is renewed before the next request (KIP-368)."""


class _Protocol(NamedTuple):
    tls: bool
    sasl: bool


_PROTOCOLS = {
    "PLAINTEXT": _Protocol(tls=False, sasl=False),
    "SSL": _Protocol(tls=True, sasl=False),
    "SASL_PLAINTEXT": _Protocol(tls=False, sasl=True),
    "SASL_SSL": _Protocol(tls=True, sasl=True),
}
"""Looked up, never matched by a prefix: an unknown name must not mean a connection without TLS."""


@dataclass(frozen=True)
class Security:
    """How to connect: TLS if there are its settings, SASL if there is a mechanism.

    Attributes:
        client: settings by librdkafka's names, secrets resolved.
    """

    trust: Tls | None = None
    mechanism: str | None = None
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    client_id: str = CLIENT_ID

    @property
    def tls(self) -> ssl.SSLContext | None:
        return None if self.trust is None else self.trust.context()


def security(client: Mapping[str, str]) -> Security:
    """How to connect, from librdkafka's settings. Raises UsageError: files or texts of TLS cannot be used."""
    protocol = protocol_of(client)
    if protocol not in _PROTOCOLS:
        raise InvariantBroken("KAFKA_PROTOCOL", protocol=protocol, known=", ".join(_PROTOCOLS))
    trust = None
    if _PROTOCOLS[protocol].tls:
        from delivered.clients.kafka.sasl import Tls  # nor are logins loaded without SASL

        trust = Tls(client)
    mechanism = mechanism_of(client) if _PROTOCOLS[protocol].sasl else None
    return Security(trust, mechanism, client, client.get("client.id", CLIENT_ID))


def connected(host: str, port: int, security: Security, timeout_s: float) -> socket.socket:
    """A connected socket that does not block, TLS negotiated. Raises OSError, ssl.SSLError."""
    sock = socket.create_connection((host, port), max(0.1, timeout_s))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if (context := security.tls) is not None:
            sock = context.wrap_socket(sock, server_hostname=host.rstrip("."))
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def authenticate(ask: Callable[[Any], Any], name: str, host: str, security: Security) -> float:
    """Authenticate a connection by SASL: a new one, or one whose session is to be renewed.

    Args:
        ask: sends a request of kafka-python's and returns its answer.
        name: of the broker, in errors.

    Returns:
        Seconds for which the session may be used.

    Raises:
        Rejected: the broker rejected the mechanism or the credentials.
        NoCredentials: none can be had now.
    """
    from kafka.errors import KafkaError
    from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

    from delivered.clients.kafka.sasl import start_dialog

    mechanism = str(security.mechanism)
    answer = ask(SaslHandshakeRequest(mechanism=mechanism, version=1))
    if answer.error_code:
        raise Rejected(
            f"{name}: the broker rejected the SASL mechanism {mechanism!r} (error {answer.error_code}; it "
            f"supports {', '.join(answer.mechanisms or ()) or 'none here'})",
        )
    try:
        dialog = start_dialog(mechanism, host, security.client)
        while not dialog.is_done():
            answer = ask(SaslAuthenticateRequest(auth_bytes=dialog.auth_bytes(), max_version=2))
            if answer.error_code:
                raise Rejected(f"{name}: {answer.error_message or answer.error_code}")
            dialog.receive(answer.auth_bytes)
    except (KafkaError, KeyError, ValueError) as error:
        raise Rejected(f"{name}: SASL {mechanism}: {error}") from None
    if not dialog.is_authenticated():
        raise Rejected(f"{name}: SASL {mechanism}: not authenticated")
    lifetime_ms = getattr(answer, "session_lifetime_ms", 0) or 0
    return lifetime_ms / 1000 * _LIFETIME if lifetime_ms > 0 else float("inf")


def unreachable(servers: str, error: NoAnswer, tls: bool | None = None) -> Unreachable:
    """Args: tls: whether the connection was to be encrypted; None: unknown."""
    if isinstance(error, (NoCredentials, CredentialsRefused)):
        return Unreachable("KAFKA_NO_CREDENTIALS", servers=servers, error=error)
    if isinstance(error, Rejected) and not error.tls:
        return Unreachable("KAFKA_CREDENTIALS.REJECTED", servers=servers, error=error)
    if _listens(servers):
        code = "KAFKA_NO_ANSWER.SILENT"
        if isinstance(error, Closed) and not error.answered and not (tls is not None and _speaks(servers, not tls)):
            code = "KAFKA_NO_ANSWER.CLOSED"  # as a load balancer does whose broker starts
        elif isinstance(error, Closed | Rejected):
            code = "KAFKA_CREDENTIALS.CLOSED"
        return Unreachable(code, servers=servers, error=error)
    return Unreachable("KAFKA_UNREACHABLE.CONNECT", servers=servers, error=error)


def _listens(servers: str) -> bool:
    for address in parse_addresses(servers, port=PORT):
        try:
            socket.create_connection(address, left_s(1)).close()
        except OSError:
            continue
        return True
    return False


def _speaks(servers: str, tls: bool) -> bool:
    """Whether a server answers with TLS, or Kafka's protocol without it."""
    hello = struct.pack(">ihhih", 10, _API_VERSIONS, 0, 0, -1)
    if tls:
        sent = ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="kafka").do_handshake()
        hello = sent.read()
    for address in parse_addresses(servers, port=PORT):
        try:
            with socket.create_connection(address, left_s(1)) as sock:
                sock.sendall(hello)
                start = sock.recv(8, socket.MSG_WAITALL)
        except OSError:
            continue
        if start[:1] in _TLS_RECORDS if tls else start[4:] == bytes(4):
            return True
    return False


# Whether a broker's answer is what the protocol says: kafka-python takes null and empty lists for anything.


def complete(message: Any) -> Any:
    """A message of kafka-python's, or a part of it, without null where the protocol has none. Raises ValueError."""
    version = message._version
    for declared in message._struct.fields.values():
        if version is not None and not declared.for_version_q(version):
            continue
        value = getattr(message, declared.name, None)
        if value is None:
            if (declared.is_array() or declared.is_struct_array()) and not declared.nullable_for_version_q(version):
                raise ValueError(f"{declared.name} is null")
        elif declared.is_struct_array():
            for each in value:
                complete(each)
        elif declared.is_struct():
            complete(value)
    return message


def only(rows: Sequence[T] | None, what: str) -> T:
    """The one that was asked for. Raises NoAnswer: the broker answers about none, or about several."""
    if rows is None or len(rows) != 1:
        raise NoAnswer(f"an answer with {0 if rows is None else len(rows)} {what}, where 1 was asked for")
    return rows[0]


# Parts of Kafka's frames that are read by hand.


def header_bytes(frame: memoryview, flexible: bool) -> int:
    """Length of a response's header: the correlation id and, if flexible, tagged fields."""
    at = 4
    if flexible:
        count, at = varint(frame, at)
        for _ in range(count):
            _, at = varint(frame, at)
            size, at = varint(frame, at)
            at += size
    if at > len(frame):
        raise ValueError(f"a header of {at} bytes in {len(frame)}")
    return at


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number of 32 bits, and where it ends. Raises IndexError, ValueError."""
    value = 0
    for place in range(5):
        value |= (data[at + place] & 127) << 7 * place
        if data[at + place] < 128 and value < 1 << 32:
            return value, at + place + 1
    raise ValueError("a number of more than 32 bits")

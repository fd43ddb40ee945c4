"""One connection to a Pulsar broker, authenticated, and the commands of its protocol.

Requests go side by side; a thread of the connection reads the answers.

It answers the brokers' pings, too: they close a connection that is silent for a minute, and with it the
producers of a task whose rows come slowly.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol
from urllib.parse import urlsplit

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from delivered.clients.kafka.record_batch import library
from delivered.model.limits import CONNECT_TIMEOUT_S, PULSAR_COMMAND_BYTES_MAX

# Commands: their fields, frames, and the brokers' errors.
#
# Fields have the numbers and wire types that the protocol gives them; enumerations are written as numbers, which is the
# same on the wire. Only fields that are used are described, the others are skipped when they are read.

PROTOCOL_VERSION = 21
CLIENT_VERSION = "delivered"

_PARTS = {
    "KeyValue": "1 key string, 2 value string",
    "MessageId": "1 ledger uint64, 2 entry uint64",
    "AuthData": "1 auth_method_name string, 2 auth_data bytes",
    "FeatureFlags": "1 supports_auth_refresh bool",
    "Schema": "1 name string, 3 schema_data bytes, 4 type int32",
    "MessageMetadata": (
        "1 producer_name string, 2 sequence_id uint64, 3 publish_time uint64, 4 properties KeyValue*, "
        "6 partition_key string, 8 compression int32, 9 uncompressed_size uint32, 11 num_messages_in_batch int32, "
        "12 event_time uint64, 16 schema_version bytes, 22 txnid_least_bits uint64, 23 txnid_most_bits uint64, "
        "24 highest_sequence_id uint64, 25 null_value bool, 26 uuid string, 27 num_chunks_from_msg int32, "
        "28 total_chunk_msg_size int32, 29 chunk_id int32"
    ),
    "SingleMessageMetadata": (
        "1 properties KeyValue*, 2 partition_key string, 3 payload_size int32, 5 event_time uint64, "
        "8 sequence_id uint64, 9 null_value bool"
    ),
}
"""Parts of commands, and what stands before a message's payload."""

_TXN = "2 txnid_least_bits uint64, 3 txnid_most_bits uint64"
_ERROR = "4 error int32, 5 message bytes"  # texts of brokers need not be UTF-8
_COMMANDS = {
    "connect": (
        2,
        "1 client_version string, 3 auth_data bytes, 4 protocol_version int32, 5 auth_method_name string, "
        "6 proxy_to_broker_url string, 10 feature_flags FeatureFlags",
    ),
    "connected": (3, "1 server_version bytes, 2 protocol_version int32, 3 max_message_size int32"),
    "producer": (
        5,
        "1 topic string, 2 producer_id uint64, 3 request_id uint64, 4 producer_name string, 7 schema Schema, "
        "9 user_provided_producer_name bool, 12 txn_enabled bool",
    ),
    "send": (
        6,
        "1 producer_id uint64, 2 sequence_id uint64, 3 num_messages int32, 4 txnid_least_bits uint64, "
        "5 txnid_most_bits uint64, 6 highest_sequence_id uint64, 7 is_chunk bool",
    ),
    "send_receipt": (7, "1 producer_id uint64, 2 sequence_id uint64, 3 message_id MessageId"),
    "send_error": (8, "1 producer_id uint64, 2 sequence_id uint64, 3 error int32, 4 message bytes"),
    "success": (13, "1 request_id uint64"),
    "error": (14, "1 request_id uint64, 2 error int32, 3 message bytes"),
    "close_producer": (15, "1 producer_id uint64, 2 request_id uint64"),
    "producer_success": (
        17,
        "1 request_id uint64, 2 producer_name string, 3 last_sequence_id int64, 4 schema_version bytes, "
        "6 producer_ready bool",
    ),
    "ping": (18, ""),
    "pong": (19, ""),
    "partitions": (21, "1 topic string, 2 request_id uint64, 6 metadata_auto_creation_enabled bool"),
    "partitions_response": (
        22,
        "1 partitions uint32, 2 request_id uint64, 3 response int32, 4 error int32, 5 message bytes",
    ),
    "lookup": (23, "1 topic string, 2 request_id uint64, 3 authoritative bool"),
    "lookup_response": (
        24,
        "1 url string, 2 url_tls string, 3 response int32, 4 request_id uint64, 5 authoritative bool, 6 error int32, "
        "7 message bytes, 8 proxy_through_service_url bool",
    ),
    "auth_challenge": (36, "2 challenge AuthData"),
    "auth_response": (37, "1 client_version string, 2 response AuthData, 3 protocol_version int32"),
    "new_txn": (50, "1 request_id uint64, 2 ttl_ms uint64, 3 tc_id uint64"),  # the protocol calls it txn_ttl_seconds
    "new_txn_response": (51, f"1 request_id uint64, {_TXN}, {_ERROR}"),
    "add_partitions": (52, f"1 request_id uint64, {_TXN}, 4 partitions string*"),
    "add_partitions_response": (53, f"1 request_id uint64, {_TXN}, {_ERROR}"),
    "end_txn": (56, f"1 request_id uint64, {_TXN}, 4 action int32"),
    "end_txn_response": (57, f"1 request_id uint64, {_TXN}, {_ERROR}"),
    "join_coordinator": (62, "1 request_id uint64, 2 tc_id uint64"),
    "join_coordinator_response": (63, "1 request_id uint64, 2 error int32, 3 message bytes"),
}
"""Name -> number of the command and of its field in `BaseCommand`, which are the same, and its fields."""

REDIRECT = 0
"""Kind of an answer to a lookup."""
FAILED = {"lookup_response": 2, "partitions_response": 1}
"""Kind of an answer that is an error."""
COMMIT, ABORT = 0, 1


class Error(IntEnum):
    """Errors of brokers that mean something to a caller."""

    AUTHENTICATION = 3
    AUTHORIZATION = 4
    SERVICE_NOT_READY = 6
    TOPIC_NOT_FOUND = 11
    TOO_MANY_REQUESTS = 14
    PRODUCER_BUSY = 16
    INCOMPATIBLE_SCHEMA = 18
    COORDINATOR_NOT_FOUND = 20
    INVALID_TXN_STATUS = 21
    NOT_ALLOWED = 22
    TXN_CONFLICT = 23
    TXN_NOT_FOUND = 24
    PRODUCER_FENCED = 25


ELSEWHERE = frozenset({0, 1, 2, Error.SERVICE_NOT_READY, Error.TOO_MANY_REQUESTS, Error.COORDINATOR_NOT_FOUND})
"""The request may succeed later, or at another broker. 0, 1, 2: unknown, metadata, persistence."""


class NoAnswer(Exception):
    """The connection broke, or no answer came in time: what was requested may have been done."""


class NotSent(NoAnswer):
    """There was no connection: what was requested was not done."""


class Rejected(Exception):
    """A broker's answer: it did not do what was requested.

    Attributes:
        code: see `Error`.
    """

    def __init__(self, code: int, text: str) -> None:
        name = Error(code).name if code in Error._value2member_map_ else "error"
        super().__init__(f"{name} ({code}): {text}" if text else f"{name} ({code})")
        self.code = code

    @property
    def may_pass(self) -> bool:
        return self.code in ELSEWHERE


class Unreadable(Exception):
    """Bytes that are no frame of the protocol."""


def _classes() -> dict[str, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="delivered_pulsar.proto", package="delivered", syntax="proto2")
    base = "1 type int32, " + ", ".join(f"{number} {name} {name}" for name, (number, _) in _COMMANDS.items())
    texts = {**_PARTS, **{name: fields for name, (_, fields) in _COMMANDS.items()}, "Base": base}
    for message, text in texts.items():
        described = file.message_type.add(name=message)
        for number, name, kind in (part.split() for part in text.split(", ") if part):
            plain, many = kind.rstrip("*"), kind.endswith("*")
            added = described.field.add(name=name, number=int(number))
            added.label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
            if plain in texts:
                added.type, added.type_name = field.TYPE_MESSAGE, f".delivered.{plain}"
            else:
                added.type = field.Type.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {m: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"delivered.{m}")) for m in texts}


MESSAGE = _classes()
"""Message classes by name."""
_NAMES = {number: name for name, (number, _) in _COMMANDS.items()}
_SIZES = struct.Struct(">II")
_SIZE = struct.Struct(">I")
_CHECKED = struct.Struct(">HI")
_MAGIC = 0x0E01


def encode(name: str, **fields: Any) -> bytes:
    """The frame of a command without payload."""
    return _SIZES.pack(len(command := _command(name, fields)) + 4, len(command)) + command


def encode_send(metadata: Any, payload: bytes, **fields: Any) -> bytes:
    """The frame of `send`. Without the compiled part it has no checksum, which is optional."""
    command, head = _command("send", fields), metadata.SerializeToString()
    body = b"".join((_SIZE.pack(len(head)), head, payload))
    if (loaded := library()) is not None:
        body = _CHECKED.pack(_MAGIC, loaded.rb_crc32c(body, len(body), 0)) + body
    return b"".join((_SIZES.pack(4 + len(command) + len(body), len(command)), command, body))


def _command(name: str, fields: dict[str, Any]) -> bytes:
    number = _COMMANDS[name][0]
    return bytes(MESSAGE["Base"](type=number, **{name: MESSAGE[name](**fields)}).SerializeToString())


def frame_size(head: bytes) -> int:
    """Bytes that follow the first four of a frame. Raises Unreadable."""
    [size] = _SIZE.unpack(head)
    if not 4 < size <= PULSAR_COMMAND_BYTES_MAX:
        raise Unreadable(f"a command of {size} bytes: not a Pulsar broker, or a broken connection")
    return int(size)


def decode(frame: bytes) -> tuple[str, Any]:
    """Name and fields of a command, from what follows a frame's first four bytes; the name is empty for others.

    Raises:
        Unreadable
    """
    [size] = _SIZE.unpack(frame[:4])
    if size > len(frame) - 4:
        raise Unreadable(f"a command of {size} bytes in a frame of {len(frame)}")
    try:
        base = MESSAGE["Base"].FromString(frame[4 : 4 + size])
    except DecodeError:
        raise Unreadable("bytes that are no command") from None
    name = _NAMES.get(base.type, "")
    if name and not base.HasField(name):
        raise Unreadable(f"a command {name} without its fields")
    return name, getattr(base, name) if name else None


def words(text: bytes) -> str:
    """A broker's error text, shortened."""
    return " ".join(text.decode(errors="replace").split())[:300]


# A connection.

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

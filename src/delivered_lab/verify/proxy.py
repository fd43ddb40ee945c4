"""A network between clients and a server that stalls, breaks, and follows rules.

`StreamProxy` knows no protocol, and breaks connections after a number of pieces in one direction. Those of Kafka,
Pulsar, PostgreSQL and MySQL know the framing of messages, and lose, delay and repeat single requests and replies;
clients connect without TLS. TCP cannot lose a reply alone: to lose one is to lose the connection after the server did
the work.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

HOST = "127.0.0.1"
ASKED, ANSWERED = "asked", "answered"
"""Directions of a piece through a `StreamProxy`; a piece is the result of one socket read."""
_PIECE = 1 << 16
_CONNECT_TIMEOUT_S = 5.0
_LATE_ANSWER_S = 15.0
_FRAME_BYTES_MAX = 128 << 20
_MESSAGE_BYTES_MAX = 64 << 20
_QUERY, _PARSE = b"Q", b"P"
_COMMAND_QUERY = 3
_BEGINS = ("BEGIN", "START TRANSACTION", "XA START")


class NetworkFault(StrEnum):
    LOSE_REQUEST = "lose_request"
    """The request never arrives; the connection breaks."""
    LOSE_REPLY = "lose_reply"
    """The server does the work; its reply never arrives; the connection breaks."""
    DELAY_REPLY = "delay_reply"
    """The reply, and everything behind it on this connection, is late."""
    LATE_REQUEST = "late_request"
    """The connection breaks for the client at once; the request still reaches the server later."""
    RESET = "reset"
    """The connection is reset before the request leaves."""


@dataclass(frozen=True)
class Fired:
    """A request that a rule hit.

    Attributes:
        api: kind of request; client: its sender, as far as the protocol shows.
    """

    rule: str
    api: str
    version: int = 0
    correlation: int = 0
    client: str = ""


@dataclass
class Rule:
    """What to do with some requests.

    Attributes:
        request: which: an API of Kafka, a command of Pulsar, the beginning of a statement ("COMMIT" matches only that,
            not COMMIT PREPARED), or the direction of a piece.
        within: for a statement, a text in an earlier statement of its transaction; for an API or a command, a part of
            the client id, or of the client's version; empty: any.
        skip: let this many matching requests pass first.
        times: then hit this many; every: one in this many matching requests, from then on.
        seconds: of a delay.
    """

    request: str
    fault: NetworkFault
    within: str = ""
    skip: int = 0
    times: int = 1
    every: int = 1
    seconds: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.request.lower()}" + (f" of {self.within}" if self.within else "")


S = TypeVar("S")


class Proxy(ABC, Generic[S]):
    """Listens on a free port of 127.0.0.1 until closed. `S` is its state per connection.

    Args:
        server: address of the real server, "127.0.0.1:port".
        on_fire: called for every request that a rule hit, from a thread of the proxy, before anything is done to it.
    """

    def __init__(self, server: str, on_fire: Callable[[Fired], None] | None = None) -> None:
        host, _, port = server.rpartition(":")
        self._real = (host, int(port))
        self._on_fire = on_fire
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._open = threading.Event()
        self._open.set()
        self._closed = False
        self._listening = socket.create_server((HOST, 0), backlog=64)
        self.frames: dict[str, int] = {}
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def bootstrap(self) -> str:
        """Its own address, for clients."""
        return f"{HOST}:{self._listening.getsockname()[1]}"

    def add(self, *rules: Rule) -> None:
        with self._lock:
            self._rules.extend(rules)

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    @property
    def waiting(self) -> list[str]:
        """Names of rules that have not fired in full."""
        with self._lock:
            return [r.name for r in self._rules if r.times > 0]

    def reset_all(self) -> int:
        """Break every connection; return the number of open sockets."""
        with self._lock:
            sockets = list(self._sockets)
        for s in sockets:
            reset(s)
        return len(sockets)

    @contextlib.contextmanager
    def black_hole(self) -> Iterator[None]:
        """While the context is open, nothing arrives anywhere, and no connection breaks."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def close(self) -> None:
        self._closed = True
        self._open.set()
        close(self._listening)
        self.reset_all()

    # -- for the subclass of a protocol ------------------------------------------------------------------------------

    @abstractmethod
    def session(self) -> S:
        """State of a new connection. Its requests and its replies run in a thread each."""

    @abstractmethod
    def request(self, client: socket.socket) -> bytes:
        """The client's next message, or a part of one; empty: the connection ended."""

    @abstractmethod
    def match(self, message: bytes, session: S) -> Rule | None:
        """The rule that a message matches."""

    @abstractmethod
    def reply(self, server: socket.socket) -> bytes:
        """The same for the server."""

    @abstractmethod
    def answered(self, reply: bytes, session: S) -> tuple[bytes, Rule | None]:
        """What the client gets for a reply, and the rule that it matches."""

    def greet(self, client: socket.socket, server: socket.socket) -> None:
        """Forward what a client sends before its first message."""

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._real, _CONNECT_TIMEOUT_S)
            except OSError:
                reset(client)
                continue
            server.settimeout(None)
            for s in (client, server):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            session = self.session()
            for run in (self._requests, self._replies):
                threading.Thread(target=self._pump, args=(run, client, server, session), daemon=True).start()

    def _pump(
        self,
        run: Callable[[socket.socket, socket.socket, S], None],
        client: socket.socket,
        server: socket.socket,
        session: S,
    ) -> None:
        with contextlib.suppress(OSError, EOFError, struct.error):
            run(client, server, session)
        for s in (client, server):
            close(s)
        with self._lock:
            self._sockets -= {client, server}

    def _requests(self, client: socket.socket, server: socket.socket, session: S) -> None:
        self.greet(client, server)
        while message := self.request(client):
            self._open.wait()
            rule = self.match(message, session)
            if rule is not None and rule.fault is NetworkFault.LATE_REQUEST:
                return self._late(client, server, message, rule.seconds)
            if rule is not None and rule.fault is NetworkFault.RESET:
                return reset(client)
            if rule is not None and rule.fault is NetworkFault.LOSE_REQUEST:
                return None
            server.sendall(message)
        return None

    def _replies(self, client: socket.socket, server: socket.socket, session: S) -> None:
        while part := self.reply(server):
            self._open.wait()
            part, rule = self.answered(part, session)
            if rule is not None and rule.fault is NetworkFault.LOSE_REPLY:
                return
            if rule is not None and rule.fault is NetworkFault.DELAY_REPLY:
                time.sleep(rule.seconds)
            client.sendall(part)

    def _late(self, client: socket.socket, server: socket.socket, message: bytes, seconds: float) -> None:
        """The client sees a broken connection; the server gets the request long after its sender has moved on. Only for
        requests of one message."""
        with self._lock:
            self._sockets.discard(server)
        reset(client)
        time.sleep(seconds)
        with contextlib.suppress(OSError):
            server.sendall(message)
            server.settimeout(_LATE_ANSWER_S)
            self.reply(server)

    def _hit(self, name: str, fits: Callable[[Rule], bool], fired: Callable[[str], Fired]) -> Rule | None:
        """Count a request of this name; return the rule that it matches, if its turn has come."""
        hit = self._next(name, fits)
        if hit is not None and self._on_fire is not None:
            self._on_fire(fired(hit.name))
        return hit

    def _next(self, name: str, fits: Callable[[Rule], bool]) -> Rule | None:
        with self._lock:
            self.frames[name] = self.frames.get(name, 0) + 1
            for rule in self._rules:
                if rule.times == 0 or not fits(rule):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                    continue
                rule.skip = rule.every - 1
                rule.times -= 1
                return rule
        return None


class StreamProxy(Proxy[None]):
    """For an unknown protocol: a rule breaks the connection at the piece that it hits."""

    def session(self) -> None:
        return None

    def request(self, client: socket.socket) -> bytes:
        return client.recv(_PIECE)

    def match(self, message: bytes, session: None) -> Rule | None:
        del session
        return self._way(message, ASKED)

    def reply(self, server: socket.socket) -> bytes:
        return server.recv(_PIECE)

    def answered(self, reply: bytes, session: None) -> tuple[bytes, Rule | None]:
        del session
        return reply, self._way(reply, ANSWERED)

    def _way(self, piece: bytes, way: str) -> Rule | None:
        return self._hit(way, lambda rule: rule.request == way, lambda name: Fired(name, f"{len(piece)} bytes"))


def read_exactly(source: socket.socket, size: int) -> bytes:
    """Raises EOFError: the connection ended early."""
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the connection ended")
        parts += part
    return bytes(parts)


def close(s: socket.socket) -> None:
    # Closing alone would leave a thread that reads from the socket blocked forever.
    with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        s.close()


def reset(s: socket.socket) -> None:
    with contextlib.suppress(OSError):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    close(s)


# -- Kafka -------------------------------------------------------------------------------------------------------------


class Api(StrEnum):
    """Those that a rule can name."""

    PRODUCE = "produce"
    FETCH = "fetch"
    LIST_OFFSETS = "list_offsets"
    METADATA = "metadata"
    FIND_COORDINATOR = "find_coordinator"
    INIT_PRODUCER_ID = "init_producer_id"
    ADD_PARTITIONS_TO_TXN = "add_partitions_to_txn"
    END_TXN = "end_txn"
    DESCRIBE_CLUSTER = "describe_cluster"


API_KEYS = dict(zip((0, 1, 2, 3, 10, 22, 24, 26, 60), Api, strict=True))
# Produce and Fetch name the partition's leader if the addressed broker is not, or not yet, the leader (KIP-951): a
# client then goes there at once, without asking for metadata.
_NAMES_BROKERS = frozenset({Api.METADATA, Api.FIND_COORDINATOR, Api.DESCRIBE_CLUSTER, Api.PRODUCE, Api.FETCH})


@dataclass
class _Pending:
    """Requests of one connection that await their reply."""

    asked: dict[int, tuple[str, Rule | None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class KafkaProxy(Proxy[_Pending]):
    """Knows only what all frames share: the length, and in a request the API key, its version and a correlation id.
    Where a response names the broker's address, it replaces the port with its own: in every version of these responses
    the port follows the host as four bytes, so their layout need not be known."""

    def session(self) -> _Pending:
        return _Pending()

    def request(self, client: socket.socket) -> bytes:
        return _read_frame(client)

    def match(self, message: bytes, session: _Pending) -> Rule | None:
        key, version, correlation, length = struct.unpack_from(">hhih", message, 4)
        client = message[14 : 14 + max(length, 0)].decode("utf-8", "replace")
        api = API_KEYS.get(key, str(key))
        hit = self._hit(
            api,
            lambda rule: rule.request == api and rule.within in client,
            lambda name: Fired(name, api, version, correlation, client),
        )
        with session.lock:
            session.asked[correlation] = (api, hit)
        return hit

    def reply(self, server: socket.socket) -> bytes:
        return _read_frame(server)

    def answered(self, reply: bytes, session: _Pending) -> tuple[bytes, Rule | None]:
        (correlation,) = struct.unpack_from(">i", reply, 4)
        with session.lock:
            api, rule = session.asked.pop(correlation, ("", None))
        return self._readdressed(reply) if api in _NAMES_BROKERS else reply, rule

    def _readdressed(self, frame: bytes) -> bytes:
        host, port = self._real
        own = self._listening.getsockname()[1]
        return frame.replace(host.encode() + struct.pack(">i", port), host.encode() + struct.pack(">i", own))


def _read_frame(source: socket.socket) -> bytes:
    """Including its length prefix."""
    head = read_exactly(source, 4)
    (size,) = struct.unpack(">i", head)
    if not 0 <= size <= _FRAME_BYTES_MAX:
        raise EOFError(f"a frame of {size} bytes")
    return head + read_exactly(source, size)


# -- Pulsar ------------------------------------------------------------------------------------------------------------


class Command(StrEnum):
    """Those that a rule can name."""

    SEND = "send"
    NEW_TXN = "new_txn"
    ADD_PARTITION_TO_TXN = "add_partition_to_txn"
    END_TXN = "end_txn"


_COMMANDS = dict(zip((6, 50, 52, 56), Command, strict=True))
"""By number; that of its answer follows."""
_CONNECT, _LOOKED_UP = 2, 24
_CLIENT = re.compile(rb"\n(.)([ -~]+)", re.DOTALL)


@dataclass
class _Talk:
    """State of one connection.

    Attributes:
        client: what the client says of its version.
        hit: rules that await an answer, by the answer's number.
    """

    client: str = ""
    hit: dict[int, Rule] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class PulsarProxy(Proxy[_Talk]):
    """Knows the frame, and of a command its number, which comes first in it. Where an answer to a lookup names the
    broker's address, it writes its own. A reply that is lost may be that to another request of the same kind that is in
    flight: the connection breaks, so the client gets neither."""

    def session(self) -> _Talk:
        return _Talk()

    def request(self, client: socket.socket) -> bytes:
        return _read_frame(client)

    def match(self, message: bytes, session: _Talk) -> Rule | None:
        number = _number(message)
        if number == _CONNECT and (found := _CLIENT.search(message, 8)):
            session.client = found[2][: found[1][0]].decode()
        if (command := _COMMANDS.get(number)) is None:
            return None
        hit = self._hit(
            command,
            lambda rule: rule.request == command and rule.within in session.client,
            lambda name: Fired(name, command, client=session.client),
        )
        if hit is not None:
            with session.lock:
                session.hit[number + 1] = hit
        return hit

    def reply(self, server: socket.socket) -> bytes:
        return _read_frame(server)

    def answered(self, reply: bytes, session: _Talk) -> tuple[bytes, Rule | None]:
        number = _number(reply)
        with session.lock:
            rule = session.hit.pop(number, None)
        return self._readdressed(reply) if number == _LOOKED_UP else reply, rule

    def _readdressed(self, frame: bytes) -> bytes:
        """Raises EOFError: the addresses differ in length, which the answer holds, too."""
        own, real = self.bootstrap.encode(), f"{self._real[0]}:{self._real[1]}".encode()
        if len(own) != len(real):
            raise EOFError(f"an address as long as {self.bootstrap} is needed")
        return frame.replace(real, own)


def _number(frame: bytes) -> int:
    """Of the command: field 1 of the message behind two sizes."""
    return frame[9]


# -- SQL databases -----------------------------------------------------------------------------------------------------


@dataclass
class _Session:
    """State of one connection.

    Attributes:
        statements: of the current transaction.
        hit: a rule that awaits the next answer.
    """

    statements: list[str] = field(default_factory=list)
    hit: Rule | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class SqlProxy(Proxy[_Session]):
    """See the module."""

    @abstractmethod
    def statement(self, message: bytes) -> str | None:
        """The statement in a client message; None: there is none."""

    def session(self) -> _Session:
        return _Session()

    def match(self, message: bytes, session: _Session) -> Rule | None:
        text = self.statement(message)
        if text is None:
            return None
        text = text.strip()
        if text.upper().startswith(_BEGINS):
            session.statements.clear()
        session.statements.append(text)
        word = text.split(None, 1)[0].upper() if text else ""
        hit = self._hit(word, lambda r: _fits(r, text, session.statements), lambda name: Fired(name, text[:80]))
        with session.lock:
            session.hit = hit or session.hit
        return hit

    def reply(self, server: socket.socket) -> bytes:
        return server.recv(1 << 16)

    def answered(self, reply: bytes, session: _Session) -> tuple[bytes, Rule | None]:
        """Except while a session opens, clients send one request at a time: the next message answers the statement."""
        with session.lock:
            hit, session.hit = session.hit, None
        return reply, hit


def _fits(rule: Rule, statement: str, transaction: list[str]) -> bool:
    same = statement == rule.request if rule.request == "COMMIT" else statement.startswith(rule.request)
    return same and (not rule.within or any(rule.within in s for s in transaction))


class PostgresProxy(SqlProxy):
    """Protocol version 3: a client's first message has a length and no type; all others have a type, a length that
    counts itself, and the rest. Clients connect with `sslmode=disable&gssencmode=disable`."""

    def greet(self, client: socket.socket, server: socket.socket) -> None:
        server.sendall(_counted(client))

    def request(self, client: socket.socket) -> bytes:
        return read_exactly(client, 1) + _counted(client)

    def statement(self, message: bytes) -> str | None:
        kind = message[:1]
        if kind not in (_QUERY, _PARSE):
            return None
        return message[5:].split(b"\0")[0 if kind == _QUERY else 1].decode("utf-8", "replace")


class MysqlProxy(SqlProxy):
    """MySQL and MariaDB: a length of three bytes, a sequence number within the exchange, and the rest. The server
    speaks first; a client's command has number 0, and its first byte is the command."""

    def request(self, client: socket.socket) -> bytes:
        head = read_exactly(client, 4)
        return head + read_exactly(client, int.from_bytes(head[:3], "little"))

    def statement(self, message: bytes) -> str | None:
        if message[3] != 0 or message[4:5] != bytes([_COMMAND_QUERY]):
            return None
        return message[5:].decode("utf-8", "replace")


def _counted(source: socket.socket) -> bytes:
    """A length that counts itself, and the rest."""
    head = read_exactly(source, 4)
    (size,) = struct.unpack(">i", head)
    if not 4 <= size <= _MESSAGE_BYTES_MAX:
        raise EOFError(f"a message of {size} bytes")
    return head + read_exactly(source, int(size) - 4)

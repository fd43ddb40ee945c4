"""A network between Kafka's clients and its broker that loses, delays and repeats what it is told to, frame by frame.

Knows only what every frame has: its length, and of a request the API's key, its version and a correlation id. Where a
response names the broker's address, the port is overwritten by the proxy's own: the port follows the host as four
bytes in every version of these responses, so their layout need not be known.

A reply alone cannot vanish from a TCP stream: to lose one is to lose the connection after the broker did the work.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

HOST = "127.0.0.1"
_FRAME_BYTES_MAX = 128 << 20
_CONNECT_TIMEOUT_S = 5.0


class Api(IntEnum):
    """Those that a rule can name."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    FIND_COORDINATOR = 10
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    END_TXN = 26
    DESCRIBE_CLUSTER = 60


_NAMES_BROKERS = frozenset({Api.METADATA, Api.FIND_COORDINATOR, Api.DESCRIBE_CLUSTER})


class Mischief(StrEnum):
    LOSE_REQUEST = "lose_request"
    """The request never arrives; the connection breaks."""
    LOSE_REPLY = "lose_reply"
    """The broker does the work; its reply never arrives; the connection breaks."""
    DELAY_REPLY = "delay_reply"
    """The reply, and all behind it on this connection, comes later."""
    LATE_REQUEST = "late_request"
    """The connection breaks for the client at once; the request arrives at the broker later all the same."""
    RESET = "reset"
    """The connection is reset before the request leaves."""


@dataclass
class Rule:
    """What to do with some frames of one API.

    Attributes:
        skip: so many matching frames pass first.
        times: so many are hit then; every: of so many matching frames one, from then on.
        seconds: of a delay.
        client: only of clients whose id contains this text.
    """

    api: Api
    mischief: Mischief
    skip: int = 0
    times: int = 1
    every: int = 1
    seconds: float = 1.0
    client: str = ""

    @property
    def name(self) -> str:
        return f"{self.mischief}:{self.api.name.lower()}"


@dataclass(frozen=True)
class Fired:
    """A frame that a rule hit."""

    rule: str
    api: str
    version: int
    correlation: int
    client: str


@dataclass
class _Pending:
    """Requests of one connection that wait for their reply."""

    asked: dict[int, tuple[int, Rule | None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Proxy:
    """Listens on a free port of 127.0.0.1 until it is closed.

    Args:
        broker: address of the real broker, "127.0.0.1:port".
        on_fire: called with every frame that a rule hit, from a thread of the proxy, before anything is done to it.
    """

    def __init__(self, broker: str, on_fire: Callable[[Fired], None] | None = None) -> None:
        host, _, port = broker.rpartition(":")
        self._broker = (host, int(port))
        self._on_fire = on_fire
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._open = threading.Event()
        self._open.set()
        self._closed = False
        self._server = socket.create_server((HOST, 0), backlog=64)
        self.frames: dict[str, int] = {}
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self._server.getsockname()[1]}"

    def add(self, *rules: Rule) -> None:
        with self._lock:
            self._rules.extend(rules)

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    @property
    def waiting(self) -> list[str]:
        """Names of rules that did not fire in full."""
        with self._lock:
            return [r.name for r in self._rules if r.times > 0]

    def reset_all(self) -> int:
        """Break every connection; return how many sockets were open."""
        with self._lock:
            found = list(self._sockets)
        for s in found:
            _reset(s)
        return len(found)

    @contextlib.contextmanager
    def black_hole(self) -> Any:
        """While it lasts, nothing arrives anywhere, and no connection breaks."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def close(self) -> None:
        self._closed = True
        self._open.set()
        _close(self._server)
        self.reset_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(self._broker, _CONNECT_TIMEOUT_S)
            except OSError:
                _reset(client)
                continue
            broker.settimeout(None)
            for s in (client, broker):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, broker}
            pending = _Pending()
            for run in (self._requests, self._replies):
                threading.Thread(target=self._pump, args=(run, client, broker, pending), daemon=True).start()

    def _pump(self, run: Any, client: socket.socket, broker: socket.socket, pending: _Pending) -> None:
        with contextlib.suppress(OSError, EOFError, struct.error):
            run(client, broker, pending)
        for s in (client, broker):
            _close(s)
        with self._lock:
            self._sockets -= {client, broker}

    def _requests(self, client: socket.socket, broker: socket.socket, pending: _Pending) -> None:
        while True:
            frame = _read_frame(client)
            self._open.wait()
            api, version, correlation = struct.unpack_from(">hhi", frame)
            rule = self._match(api, frame, version, correlation)
            if rule is not None and rule.mischief in (Mischief.LOSE_REQUEST, Mischief.RESET):
                if rule.mischief is Mischief.RESET:
                    _reset(client)
                return
            if rule is not None and rule.mischief is Mischief.LATE_REQUEST:
                self._late(client, broker, frame, rule.seconds)
                return
            with pending.lock:
                pending.asked[correlation] = (api, rule)
            _write_frame(broker, frame)

    def _replies(self, client: socket.socket, broker: socket.socket, pending: _Pending) -> None:
        while True:
            frame = _read_frame(broker)
            self._open.wait()
            (correlation,) = struct.unpack_from(">i", frame)
            with pending.lock:
                api, rule = pending.asked.pop(correlation, (-1, None))
            if rule is not None and rule.mischief is Mischief.LOSE_REPLY:
                return
            if rule is not None and rule.mischief is Mischief.DELAY_REPLY:
                time.sleep(rule.seconds)
            if api in _NAMES_BROKERS:
                frame = self._readdressed(frame)
            _write_frame(client, frame)

    def _late(self, client: socket.socket, broker: socket.socket, frame: bytes, seconds: float) -> None:
        """The client sees a broken connection; the broker gets the request when its sender has long moved on."""
        self._sockets.discard(broker)
        _reset(client)
        time.sleep(seconds)
        with contextlib.suppress(OSError):
            _write_frame(broker, frame)
            broker.settimeout(5)
            _read_frame(broker)

    def _match(self, api: int, frame: bytes, version: int, correlation: int) -> Rule | None:
        client = _client_id(frame)
        with self._lock:
            name = Api(api).name.lower() if api in set(Api) else str(api)
            self.frames[name] = self.frames.get(name, 0) + 1
            for rule in self._rules:
                if rule.api != api or rule.times == 0 or rule.client not in client:
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                    continue
                rule.skip = rule.every - 1
                rule.times -= 1
                hit = rule
                break
            else:
                return None
        if self._on_fire is not None:
            self._on_fire(Fired(hit.name, name, version, correlation, client))
        return hit

    def _readdressed(self, frame: bytes) -> bytes:
        host, port = self._broker
        mine = self._server.getsockname()[1]
        return frame.replace(host.encode() + struct.pack(">i", port), host.encode() + struct.pack(">i", mine))


def _client_id(frame: bytes) -> str:
    (length,) = struct.unpack_from(">h", frame, 8)
    return frame[10 : 10 + max(length, 0)].decode("utf-8", "replace")


def _read_frame(source: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", _read(source, 4))
    if not 0 <= size <= _FRAME_BYTES_MAX:
        raise EOFError(f"a frame of {size} bytes")
    return _read(source, size)


def _read(source: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the connection ended")
        parts += part
    return bytes(parts)


def _write_frame(target: socket.socket, frame: bytes) -> None:
    target.sendall(struct.pack(">i", len(frame)) + frame)


def _close(s: socket.socket) -> None:
    # A socket that is only closed would leave a thread that reads from it waiting for ever.
    with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        s.close()


def _reset(s: socket.socket) -> None:
    with contextlib.suppress(OSError):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _close(s)

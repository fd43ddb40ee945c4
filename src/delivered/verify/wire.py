"""A network between clients and a server that stands still, breaks and is put under rules; what it carries, a proxy of
one protocol knows."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

HOST = "127.0.0.1"
_CONNECT_TIMEOUT_S = 5.0


class NetworkFault(StrEnum):
    LOSE_REQUEST = "lose_request"
    """The request never arrives; the connection breaks."""
    LOSE_REPLY = "lose_reply"
    """The server does the work; its reply never arrives; the connection breaks."""
    DELAY_REPLY = "delay_reply"
    """The reply, and all behind it on this connection, comes later."""
    LATE_REQUEST = "late_request"
    """The connection breaks for the client at once; the request arrives at the server later all the same."""
    RESET = "reset"
    """The connection is reset before the request leaves."""


@dataclass(frozen=True)
class Fired:
    """A request that a rule hit.

    Attributes:
        api: which kind of request; client: who sent it, as far as the protocol says.
    """

    rule: str
    api: str
    version: int = 0
    correlation: int = 0
    client: str = ""


class AnyRule(Protocol):
    """What to do with some requests.

    Attributes:
        skip: so many matching requests pass first.
        times: so many are hit then; every: of so many matching requests one, from then on.
    """

    fault: NetworkFault
    skip: int
    times: int
    every: int

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=AnyRule)


class Wire(ABC, Generic[R]):
    """Listens on a free port of 127.0.0.1 until it is closed.

    Args:
        server: address of the real server, "127.0.0.1:port".
        on_fire: called with every request that a rule hit, from a thread of the proxy, before anything is done to it.
    """

    def __init__(self, server: str, on_fire: Callable[[Fired], None] | None = None) -> None:
        host, _, port = server.rpartition(":")
        self._real = (host, int(port))
        self._on_fire = on_fire
        self._rules: list[R] = []
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

    def add(self, *rules: R) -> None:
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
            reset(s)
        return len(found)

    @contextlib.contextmanager
    def black_hole(self) -> Iterator[None]:
        """While it lasts, nothing arrives anywhere, and no connection breaks."""
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

    @abstractmethod
    def _carry(self, client: socket.socket, server: socket.socket) -> tuple[Callable[[], None], Callable[[], None]]:
        """What carries requests, and what carries replies, of one connection; each runs in a thread of its own until
        it returns, or meets the end of its stream."""

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
            for run in self._carry(client, server):
                threading.Thread(target=self._pump, args=(run, client, server), daemon=True).start()

    def _pump(self, run: Callable[[], None], client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, struct.error):
            run()
        for s in (client, server):
            close(s)
        with self._lock:
            self._sockets -= {client, server}

    def _hit(self, name: str, fits: Callable[[R], bool]) -> R | None:
        """Count a request of this name; return the rule that it falls under, if its turn has come."""
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

    def _fired(self, hit: Fired) -> None:
        if self._on_fire is not None:
            self._on_fire(hit)


def read_exactly(source: socket.socket, size: int) -> bytes:
    """
    Raises:
        EOFError: the connection ended before.
    """
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the connection ended")
        parts += part
    return bytes(parts)


def close(s: socket.socket) -> None:
    # A socket that is only closed would leave a thread that reads from it waiting for ever.
    with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        s.close()


def reset(s: socket.socket) -> None:
    with contextlib.suppress(OSError):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    close(s)

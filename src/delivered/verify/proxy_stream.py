"""A network that knows nothing of what it carries: connections break when so many pieces have gone one way."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from delivered.verify.wire import Fired, NetworkFault, Wire

_PIECE = 1 << 16
ASKED, ANSWERED = "asked", "answered"


@dataclass
class StreamRule:
    """A piece is what one read of a socket gives.

    Attributes:
        fault: LOSE_REQUEST: what the client sent is lost; LOSE_REPLY: what the server answered. The connection
            breaks.
        skip, times, every: see `wire.AnyRule`.
    """

    fault: NetworkFault
    skip: int = 0
    times: int = 1
    every: int = 1

    @property
    def way(self) -> str:
        return ASKED if self.fault is NetworkFault.LOSE_REQUEST else ANSWERED

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.way}"


class StreamProxy(Wire[StreamRule]):
    """See the module."""

    def _carry(self, client: socket.socket, server: socket.socket) -> tuple[Callable[[], None], Callable[[], None]]:
        return lambda: self._one_way(client, server, ASKED), lambda: self._one_way(server, client, ANSWERED)

    def _one_way(self, origin: socket.socket, target: socket.socket, way: str) -> None:
        while part := origin.recv(_PIECE):
            self._open.wait()
            rule = self._hit(way, lambda r: r.way == way)
            if rule is not None:
                self._fired(Fired(rule.name, f"{len(part)} bytes"))
                return
            target.sendall(part)

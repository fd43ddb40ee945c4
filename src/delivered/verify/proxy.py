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
from enum import IntEnum

from delivered.verify.wire import Fired, NetworkFault, Wire, read_exactly, reset

_FRAME_BYTES_MAX = 128 << 20


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


# Produce and Fetch name the partition's leader when the broker that was asked is not, or not yet, the leader (KIP-951):
# a client that reads this goes there at once, without asking for metadata.
_NAMES_BROKERS = frozenset({Api.METADATA, Api.FIND_COORDINATOR, Api.DESCRIBE_CLUSTER, Api.PRODUCE, Api.FETCH})


@dataclass
class Rule:
    """What to do with some frames of one API.

    Attributes:
        skip, times, every: see `wire.AnyRule`.
        seconds: of a delay.
        client: only of clients whose id contains this text.
    """

    api: Api
    fault: NetworkFault
    skip: int = 0
    times: int = 1
    every: int = 1
    seconds: float = 1.0
    client: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.api.name.lower()}"


@dataclass
class _Pending:
    """Requests of one connection that wait for their reply."""

    asked: dict[int, tuple[int, Rule | None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Proxy(Wire[Rule]):
    """Between Kafka's clients and its broker."""

    def _carry(self, client: socket.socket, server: socket.socket) -> tuple[Callable[[], None], Callable[[], None]]:
        pending = _Pending()
        return lambda: self._requests(client, server, pending), lambda: self._replies(client, server, pending)

    def _requests(self, client: socket.socket, broker: socket.socket, pending: _Pending) -> None:
        while True:
            frame = _read_frame(client)
            self._open.wait()
            api, version, correlation = struct.unpack_from(">hhi", frame)
            rule = self._match(api, frame, version, correlation)
            if rule is not None and rule.fault in (NetworkFault.LOSE_REQUEST, NetworkFault.RESET):
                if rule.fault is NetworkFault.RESET:
                    reset(client)
                return
            if rule is not None and rule.fault is NetworkFault.LATE_REQUEST:
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
            if rule is not None and rule.fault is NetworkFault.LOSE_REPLY:
                return
            if rule is not None and rule.fault is NetworkFault.DELAY_REPLY:
                time.sleep(rule.seconds)
            if api in _NAMES_BROKERS:
                frame = self._readdressed(frame)
            _write_frame(client, frame)

    def _late(self, client: socket.socket, broker: socket.socket, frame: bytes, seconds: float) -> None:
        """The client sees a broken connection; the broker gets the request when its sender has long moved on."""
        self._sockets.discard(broker)
        reset(client)
        time.sleep(seconds)
        with contextlib.suppress(OSError):
            _write_frame(broker, frame)
            broker.settimeout(5)
            _read_frame(broker)

    def _match(self, api: int, frame: bytes, version: int, correlation: int) -> Rule | None:
        client = _client_id(frame)
        name = Api(api).name.lower() if api in set(Api) else str(api)
        hit = self._hit(name, lambda rule: rule.api == api and rule.client in client)
        if hit is not None:
            self._fired(Fired(hit.name, name, version, correlation, client))
        return hit

    def _readdressed(self, frame: bytes) -> bytes:
        host, port = self._real
        mine = self._listening.getsockname()[1]
        return frame.replace(host.encode() + struct.pack(">i", port), host.encode() + struct.pack(">i", mine))


def _client_id(frame: bytes) -> str:
    (length,) = struct.unpack_from(">h", frame, 8)
    return frame[10 : 10 + max(length, 0)].decode("utf-8", "replace")


def _read_frame(source: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", read_exactly(source, 4))
    if not 0 <= size <= _FRAME_BYTES_MAX:
        raise EOFError(f"a frame of {size} bytes")
    return read_exactly(source, size)


def _write_frame(target: socket.socket, frame: bytes) -> None:
    target.sendall(struct.pack(">i", len(frame)) + frame)


__all__ = ["Api", "Fired", "NetworkFault", "Proxy", "Rule"]

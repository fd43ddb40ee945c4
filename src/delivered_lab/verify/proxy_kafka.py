"""A network between Kafka's clients and its broker that loses, delays and repeats frames as its rules say.

Knows only what all frames share: the length, and in a request the API key, its version and a correlation id. Where a
response names the broker's address, the proxy replaces the port with its own: in every version of these responses the
port follows the host as four bytes, so their layout need not be known.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import StrEnum

from delivered_lab.verify.proxy import Fired, Proxy, Rule, read_exactly

_FRAME_BYTES_MAX = 128 << 20


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
    """Between Kafka's clients and its broker."""

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

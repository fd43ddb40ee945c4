"""A RocketMQ server that lies: a lost connection that says why, at once and with bounded memory."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from delivered.connectors.rocketmq import RocketmqSinkOptions
from delivered.connectors.rocketmq.remoting import ROUTE, Answer, Cluster, Peer, stored
from delivered.model.errors import Unreachable


def options(port: int) -> RocketmqSinkOptions:
    given = {"endpoints": "localhost:1", "topic": "t", "messageType": "transaction", "nameServers": f"127.0.0.1:{port}"}
    given["ledger"] = "/tmp/ledger.db"
    return RocketmqSinkOptions.parse(given)


def frame(head: Any, body: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack(">ii", 4 + len(text) + len(body), len(text)) + text + body


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """Answers the first request of each connection with these bytes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)  # ends accept(), as close() would not
        listening.close()


OK = {"code": 0, "flag": 1, "opaque": 1}


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack(">ii", 2**31 - 1, 10) + b"x" * 10,
        struct.pack(">ii", -5, 10) + b"x" * 10,
        struct.pack(">ii", 8, 1000) + b"x" * 4,
        frame(b"not JSON"), frame([1]), frame(7), frame({"flag": "x"}), frame(b"[" * 100_000), frame({}),
        frame({**OK, "opaque": [1]}), frame({**OK, "code": None}), frame({**OK, "extFields": [1]}),
        frame({**OK, "code": "9" * 5_000}), frame(b'{"flag": 1, "opaque": 1, "code": ' + b"9" * 5_000 + b"}"),
    ],
)  # fmt: skip
def test_a_frame_that_is_none_ends_the_connection(answer: bytes) -> None:
    with server(answer) as port:
        peer = Peer(f"127.0.0.1:{port}", options(port))
        with pytest.raises(Unreachable, match="ROCKETMQ_UNREACHABLE"):
            peer.ask(ROUTE, {})
        assert peer.lost and len(peer.lost) <= 300
        peer.close()


QUEUES = {"brokerName": "b", "perm": 6, "writeQueueNums": 4}
BROKER = {"brokerName": "b", "brokerAddrs": {"0": "127.0.0.1:1"}}


@pytest.mark.parametrize(
    "route",
    [
        b"not JSON", [], {}, {"brokerDatas": None, "queueDatas": []}, {"brokerDatas": [7], "queueDatas": []},
        {"brokerDatas": [BROKER], "queueDatas": [{**QUEUES, "writeQueueNums": 2**31}]},
        {"brokerDatas": [BROKER], "queueDatas": [{**QUEUES, "writeQueueNums": "x"}]},
        {"brokerDatas": [{**BROKER, "brokerAddrs": {"0": "127.0.0.1:999999"}}], "queueDatas": [QUEUES]},
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_route_that_is_none_is_refused(route: Any) -> None:
    body = route if isinstance(route, bytes) else json.dumps(route).encode()
    with server(frame(OK, body)) as port:
        cluster = Cluster(options(port))
        with pytest.raises(Unreachable, match="it sent no route"):
            cluster.places()
        cluster.close()


def test_a_number_that_is_none_is_refused() -> None:
    with server(b"") as port:
        peer = Peer(f"127.0.0.1:{port}", options(port))
        for fields in ({}, {"offset": "x"}, {"offset": "9" * 5_000}):
            with pytest.raises(Unreachable, match="without a number 'offset'"):
                peer.number(Answer(0, fields), "offset")
        peer.close()


@pytest.mark.parametrize(("size", "length"), [(0, 0), (-1, 0), (200, -1), (200, 2**31 - 1)])
def test_messages_that_are_none(size: int, length: int) -> None:
    head = struct.pack(">iiiiiqqiq", size, 0, 0, 0, 0, 0, 0, 0, 0) + bytes(28) + struct.pack(">qi", 0, length)
    with pytest.raises((ValueError, struct.error)):
        list(stored(head + bytes(200)))

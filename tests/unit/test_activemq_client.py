"""The STOMP client parses bytes however they arrive: in pieces, joined, after heart-beats."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.options import ActivemqOptions
from delivered.model.errors import Refused, Unreachable

parse = ActivemqOptions.parse

CONNECTED = b"CONNECTED\nversion:1.2\nserver:bytes/1\nheart-beat:0,0\n\n\0"


def message(body: bytes, number: int = 0) -> bytes:
    return b"MESSAGE\nid:%d\ncontent-length:%d\n\n%s\0" % (number, len(body), body)


@contextmanager
def says(*pieces: bytes, answers: bool = True) -> Iterator[str]:
    """URL of a server that sends these bytes after CONNECT, each in its own packet."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer.recv(4_096)
                for piece in pieces if answers else ():
                    peer.sendall(piece)
                    time.sleep(0.05)
                peer.recv(4_096)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"stomp://127.0.0.1:{server.getsockname()[1]}"


def session(url: str) -> Session:
    return Session(parse({"url": url, "queue": "q", "log": "/x"}))


@pytest.mark.parametrize("gap", [b"\n", b"\n\n", b"\n\n\n\n"])
@pytest.mark.parametrize("body", [b"x", b"a\0b\n\0", b"\n\n\0", b""])
def test_heart_beats_before_a_message_cost_no_message(gap: bytes, body: bytes) -> None:
    large = b"\0\n" * 100_000
    with says(CONNECTED, gap + message(body), gap + message(large, 1) + gap + message(body, 2)) as url:
        made = session(url)
        made.wait(lambda: len(made.arrived) == 3, 10, "say three messages")
        made.close()
    assert [f.body for f in made.arrived] == [body, large, body]
    assert [f.headers["id"] for f in made.arrived] == ["0", "1", "2"]


def test_a_message_in_many_pieces_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = message(b"\n\n\0body\n\0")
    with says(CONNECTED, *(whole[n : n + 3] for n in range(0, len(whole), 3))) as url:
        made = session(url)
        made.wait(lambda: bool(made.arrived), 10, "say a message")
        made.close()
    assert made.arrived[0].body == b"\n\n\0body\n\0"


def test_a_server_that_says_nothing_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivered.connectors.activemq.client.CONNECT_TIMEOUT_S", 0.3)
    with says(answers=False) as url, pytest.raises(Unreachable, match=r"did not open a STOMP connection within"):
        session(url)


def test_an_error_instead_of_a_connection_is_explained() -> None:
    said = b"ERROR\nmessage:AMQ229031: Unable to validate user from 127.0.0.1\n\n\0"
    with says(said) as url, pytest.raises(Refused, match="rejected the user or the password"):
        session(url)

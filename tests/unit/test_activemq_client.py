"""The STOMP client parses bytes however they arrive: in pieces, joined, after heart-beats."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.certificates import Authority

from delivered.connectors.activemq import ActivemqOptions, ActivemqSinkOptions
from delivered.connectors.activemq.client import Session
from delivered.model.errors import Refused, Unreachable, UsageError

parse = ActivemqOptions.parse

CONNECTED = b"CONNECTED\nversion:1.2\nserver:bytes/1\nheart-beat:0,0\n\n\0"


def message(body: bytes, number: int = 0) -> bytes:
    return b"MESSAGE\nid:%d\ncontent-length:%d\n\n%s\0" % (number, len(body), body)


@contextmanager
def says(*pieces: bytes, answers: bool = True, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """URL of a server that sends these bytes after CONNECT, each in its own packet."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            try:
                peer = peer if tls is None else tls.wrap_socket(peer, server_side=True)
            except ssl.SSLError:  # the client refuses it
                return
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer.recv(4_096)
                for piece in pieces if answers else ():
                    peer.sendall(piece)
                    time.sleep(0.05)
                peer.recv(4_096)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"stomp{'' if tls is None else '+ssl'}://127.0.0.1:{server.getsockname()[1]}"


def session(url: str, **more: str) -> Session:
    return Session(parse({"url": url, "queue": "q", "log": "/x", **more}))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, dict[str, str]]:
    """A server's, and the option that trusts it."""
    folder, authority = tmp_path_factory.mktemp("tls"), Authority()
    (folder / "ca.pem").write_text(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server").files(folder, "server"))
    return context, {"tlsTrustCertsFile": str(folder / "ca.pem")}


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


Tls = tuple[ssl.SSLContext, dict[str, str]]


def test_messages_that_arrive_in_one_tls_record_or_in_many_are_all_read(tls: Tls) -> None:
    """More than the client reads at once: nothing else arrives that would wake it for the rest."""
    small = b"".join(message(b"\n\0", n) for n in range(1_000))
    large = message(b"\0\n" * 1_000_000, 1_000)
    with says(CONNECTED, b"\n" + small + large, tls=tls[0]) as url:
        made = session(url, **tls[1])
        made.wait(lambda: len(made.arrived) == 1_001, 30, "send its messages")
        made.close()
    assert [f.headers["id"] for f in made.arrived] == [str(n) for n in range(1_001)]


@pytest.mark.parametrize("announced", [True, False])
def test_a_peer_that_closes_its_tls_is_noticed(tls: Tls, announced: bool) -> None:
    opened = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer = tls[0].wrap_socket(server.accept()[0], server_side=True)
            peer.recv(4_096)
            peer.sendall(CONNECTED)
            opened.wait(10)
            if announced:
                with contextlib.suppress(OSError):
                    peer.unwrap()
            peer.close()

        threading.Thread(target=serve, daemon=True).start()
        made = session(f"stomp+ssl://127.0.0.1:{server.getsockname()[1]}", **tls[1])
        opened.set()
        with pytest.raises(Unreachable, match="the connection was lost"):
            made.wait(lambda: False, 8, "close")
        made.close()


def test_both_sides_send_at_once_over_tls(tls: Tls) -> None:
    """More than fits in any buffer, so a reader that waits for the writer, or the reverse, would stand still."""
    count = 300
    body = b"x" * 100_000
    with socket.create_server(("127.0.0.1", 0)) as server:
        received = []

        def serve() -> None:
            peer = tls[0].wrap_socket(server.accept()[0], server_side=True)
            peer.recv(4_096)
            peer.sendall(CONNECTED)
            for n in range(count):
                peer.sendall(message(body, n))  # and only then reads
            ends = 0
            while ends < count:
                ends += peer.recv(65_536).count(b"\0")
            received.append(ends)
            peer.sendall(b"RECEIPT\nreceipt-id:r1\n\n\0")
            peer.recv(4_096)

        threading.Thread(target=serve, daemon=True).start()
        made = session(f"stomp+ssl://127.0.0.1:{server.getsockname()[1]}", **tls[1])
        made.receipt()
        for _ in range(count):
            made.transmit(made.frames.send, "q", body)
        made.settle("answer")
        assert len(made.arrived) == count
        assert received
        made.close()


def test_a_server_that_is_silent_in_the_handshake_is_told_in_time(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivered.connectors.activemq.client.CONNECT_TIMEOUT_S", 0.3)
    with says(answers=False) as url, pytest.raises(Unreachable, match="did not answer"):
        session(url.replace("stomp:", "stomp+ssl:"), **tls[1])


def test_a_certificate_that_is_not_trusted_is_refused(tls: Tls) -> None:
    with says(CONNECTED, tls=tls[0]) as url, pytest.raises(UsageError, match="CERTIFICATE_REFUSED"):
        session(url)


def test_a_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    authority = Authority()
    (tmp_path / "ca.pem").write_text(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server", hosts=("elsewhere.example",)).files(tmp_path, "server"))
    with says(CONNECTED, tls=context) as url, pytest.raises(UsageError, match="IP address mismatch"):
        session(url, tlsTrustCertsFile=str(tmp_path / "ca.pem"))


@pytest.mark.parametrize(("options", "name"), [(ActivemqOptions, "idHeader"), (ActivemqSinkOptions, "idHeader"),
                                               (ActivemqSinkOptions, "keyHeader")])  # fmt: skip
@pytest.mark.parametrize("header", ["message-id", "timestamp", "persistent"])
def test_a_header_of_each_delivery_is_no_id(
    options: type[ActivemqOptions | ActivemqSinkOptions], name: str, header: str
) -> None:
    """Artemis gives a redelivered message another message-id: its copy would not be recognised."""
    given = {"url": "stomp://h", "queue": "q", "log" if options is ActivemqOptions else "ledger": "/x"}
    assert options.parse({**given, name: "id"})
    with pytest.raises(UsageError, match=f"OPTION_VALUE.*'{name}' is '{header}'.*senders set"):
        options.parse({**given, name: header})

"""Token server, schema registry, Pulsar's admin API: an answer that is huge, a bomb, endless, or points elsewhere."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from delivered.clients.kafka import tokens
from delivered.clients.kafka.outcomes import CredentialsRefused, NoCredentials
from delivered.connectors.pulsar import admin
from delivered.connectors.pulsar.options import SourceOptions
from delivered.kits.schemas import registry
from delivered.model import answers
from delivered.model.errors import DeliveredError
from delivered.model.patience import within

REFUSED = (NoCredentials, CredentialsRefused, DeliveredError)
OAUTH = "sasl.oauthbearer."


class Service:
    """Answers every request with these bytes, and then one byte every 20 ms while `drips`. Counts requests."""

    def __init__(self, answer: bytes, drips: bytes = b"") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answer, self._drips = answer, drips
        self.requests = 0
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.recv(65536)
            self.requests += 1
            client.sendall(self._answer)
            while self._drips and not self.ended.wait(0.02):
                client.sendall(self._drips)

    def close(self) -> None:
        self.ended.set()
        self._listener.close()


@contextlib.contextmanager
def service(answer: bytes, drips: bytes = b"") -> Iterator[Service]:
    made = Service(answer, drips)
    yield made
    made.close()


def token(url: str) -> object:
    tokens._known.clear()
    return tokens.token_for({f"{OAUTH}token.endpoint.url": url, f"{OAUTH}client.id": "a", f"{OAUTH}client.secret": "b"})


def schema(url: str) -> object:
    with within(0.2):
        return registry.Registry((("url", url), ("basic.auth.user.info", "a:b"))).find("orders-value", None)


def partitions(url: str) -> object:
    made = SourceOptions.parse({"topics": "t", "url": "pulsar://127.0.0.1:1", "adminUrl": url})
    return admin.Admin(made).partitions("persistent://public/default/t")


CLIENTS = [token, schema, partitions]


def head(*lines: str, status: int = 200) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", "Content-Type: application/json", *lines, "", ""]).encode()


BOMB = gzip.compress(b'{"access_token": "' + b"x" * 200_000_000, 9, mtime=0)


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "gzip, gzip"])
def test_a_compressed_answer_is_not_unpacked(ask: Callable[[str], object], encoding: str) -> None:
    with service(head(f"Content-Encoding: {encoding}", f"Content-Length: {len(BOMB)}") + BOMB) as made:
        tracemalloc.start()
        with pytest.raises(REFUSED):
            ask(made.url)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize(
    ("start", "drips"),
    [
        (head("Content-Length: 1000000000"), b" "),
        (head("Transfer-Encoding: chunked"), b"1\r\n \r\n"),
        (head("Content-Length: 1000000000", status=500), b" "),
        (head("Connection: close"), b" "),
    ],
    ids=["a byte at a time", "a chunk at a time", "of an error", "until it is closed"],
)
def test_a_body_that_drips_is_given_up(
    ask: Callable[[str], object], start: bytes, drips: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (answers, registry):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.3)
    with service(start, drips) as made, pytest.raises(REFUSED):
        ask(made.url)


@pytest.mark.parametrize("ask", [token, partitions])
def test_a_head_that_drips_is_given_up(ask: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "CONNECT_TIMEOUT_S", 0.3)
    with service(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x") as made, pytest.raises(REFUSED):
        ask(made.url)


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_body_has_a_bound(ask: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tokens, registry, admin):
        monkeypatch.setattr(module, "_ANSWER_BYTES_MAX", 1 << 20)
    with service(head("Connection: close") + b" " * (8 << 20)) as made:
        tracemalloc.start()
        with pytest.raises(REFUSED):
            ask(made.url)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 6 << 20


@pytest.mark.parametrize("ask", [token, schema])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_credentials_follow_no_redirection(ask: Callable[[str], object], status: int) -> None:
    with service(head("Content-Length: 2") + b"{}") as other:
        answer = head(f"Location: {other.url}/x", "Content-Length: 0", status=status)
        with service(answer) as made, pytest.raises(REFUSED):
            ask(made.url)
        assert other.requests == 0


@pytest.mark.parametrize("ask", [token, schema])
@pytest.mark.parametrize("body", [b"<p>hello</p>", b"[]", b"7", b'{"id": "x"', b"\xff"])
def test_a_body_that_is_no_answer(ask: Callable[[str], object], body: bytes) -> None:
    with service(head(f"Content-Length: {len(body)}") + body) as made, pytest.raises(REFUSED):
        ask(made.url)

"""What an HTTP step makes of replies that no service should give."""

from __future__ import annotations

import contextlib
import functools
import gzip
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import httpx
import pytest

from delivered.model.answers import limited
from delivered.patterns.saga import definition
from delivered.patterns.saga.definition import Call, Http, Rejected, Verb, stored_result

CALL = Call("s", "1", "pay", Verb.DO, "k", {}, {}, 1)


@contextlib.contextmanager
def service(head: bytes, parts: Iterator[bytes]) -> Iterator[str]:
    """A server that answers one request with these bytes, part by part, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener, listener.accept()[0] as client, contextlib.suppress(OSError):
            client.recv(65536)
            client.sendall(head)
            for part in parts:
                client.sendall(part)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    thread.join(30)


def reply(status: int, body: bytes, kind: str = "text/html") -> tuple[bytes, Iterator[bytes]]:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode(), iter([body])


@pytest.mark.parametrize(
    ("body", "kind", "result"),
    [
        (b"<p>paid</p>", "text/html", "<p>paid</p>"),
        (b"{broken", "application/json", "{broken"),
        (b"\xff\xfe", "application/json", "\ufffd\ufffd"),
        (b"[" * 100_000, "application/json", "[" * 1_000),
        (b"9" * 5_000, "application/json", "9" * 1_000),
        (b'{"charge": NaN}', "application/json", '{"charge": NaN}'),
        (b"", "text/plain", None),
        (b'{"charge": 7}', "text/plain", {"charge": 7}),
        (b"paid", "text/plain; charset=hex", "paid"),
        (b"paid", "text/plain; charset=undefined", "paid"),
        (b"xn--\xff", "text/plain; charset=idna", "xn--\ufffd"),
        (b"\\ud800", "text/plain; charset=unicode_escape", "?"),
        (b"a\0b", "text/plain", "a\ufffdb"),
        (b'"\\ud800"', "application/json", '"\\ud800"'),
        (b'{"a": 1e400}', "application/json", '{"a": 1e400}'),
        (b'"\\u0000"', "application/json", '"\\u0000"'),
    ],
)
def test_2xx_is_done_whatever_the_body_is(body: bytes, kind: str, result: object) -> None:
    with service(*reply(200, body, kind)) as url:
        found = Http(url)(CALL)
    assert found == result
    stored_result(found)


def bomb() -> bytes:
    return gzip.compress(b"x" * 64_000_000, mtime=0)


@pytest.mark.parametrize(
    ("head", "body", "result"),
    [
        (b"Content-Length: 100", b"pai", "pai"),
        (b"Transfer-Encoding: chunked", b"3\r\npai\r\nzz", "pai"),
        (b"Content-Encoding: gzip", b"no gzip", None),
        (b"Content-Encoding: gzip", gzip.compress(b'{"charge": 7}', mtime=0), {"charge": 7}),
        (b"Content-Encoding: br", b"\x00\x01", None),
        (b"Content-Encoding: gzip", bomb, "x" * 1_000),
        (b"Content-Encoding: gzip, gzip", lambda: gzip.compress(bomb(), mtime=0), None),
    ],
    ids=["cut off", "bad chunk", "not gzip", "gzip", "unknown encoding", "bomb", "bomb in gzip"],
)
def test_2xx_is_done_whatever_becomes_of_the_body(
    head: bytes, body: bytes | Callable[[], bytes], result: object
) -> None:
    """Cut off, not in the encoding that it names, or a bomb."""
    sent = body() if callable(body) else body
    start = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + head + b"\r\n\r\n"
    tracemalloc.start()
    try:
        with service(start, iter([sent])) as url:
            assert Http(url)(CALL) == result
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()


def test_4xx_is_rejected_with_a_bounded_reason() -> None:
    with service(*reply(422, b"no" * 1_000_000)) as url, pytest.raises(Rejected) as caught:
        Http(url)(CALL)
    assert len(str(caught.value)) < 400


def test_a_reply_that_does_not_end_is_given_up_after_the_timeout() -> None:
    def forever() -> Iterator[bytes]:
        for _ in range(600):
            yield b"x"
            time.sleep(0.05)

    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
    with service(head, forever()) as url:
        assert str(Http(url, timeout_s=0.5)(CALL)).startswith("x"), "the status says that it is done"


@pytest.mark.parametrize("through_a_proxy", [False, True])
@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 "])
def test_a_reply_whose_head_does_not_end_is_given_up_after_the_timeout(
    head: bytes, through_a_proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes well within the limit of a wait; it is open whether the call was done."""

    def forever() -> Iterator[bytes]:
        for _ in range(600):
            yield b"x"
            time.sleep(0.05)

    with service(head, forever()) as url:
        if through_a_proxy:
            monkeypatch.setenv("HTTP_PROXY", url)
            monkeypatch.setenv("NO_PROXY", "")
        made = functools.cache(lambda _: limited(httpx.Client()))  # it knows the proxy
        monkeypatch.setattr(definition, "_http_client", made)
        with pytest.raises(httpx.ReadTimeout):
            Http("http://service.invalid/" if through_a_proxy else url, timeout_s=0.5)(CALL)

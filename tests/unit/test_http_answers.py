"""Token server, schema registry, Pulsar's admin API: an answer that is huge, a bomb, endless, or points elsewhere."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest

from delivered.clients.kafka import CredentialsRefused, NoCredentials, sasl
from delivered.connectors.activemq import queue
from delivered.connectors.iceberg import client as iceberg
from delivered.connectors.pulsar import SourceOptions
from delivered.connectors.pulsar import client as admin
from delivered.kits.schemas import Format, registry
from delivered.model import answers
from delivered.model.errors import DeliveredError
from delivered.model.patience import within
from delivered.pipeline.registry import connectors

REFUSED = (NoCredentials, CredentialsRefused, DeliveredError)
OAUTH = "sasl.oauthbearer."


class Service:
    """Answers every request with these bytes, and then one byte every 20 ms while `drips`. Counts requests."""

    def __init__(self, answer: bytes, drips: bytes = b"") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.answer, self._drips = answer, drips
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
            client.sendall(self.answer)
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
    sasl._known.clear()
    return sasl.token_for({f"{OAUTH}token.endpoint.url": url, f"{OAUTH}client.id": "a", f"{OAUTH}client.secret": "b"})


def schema(url: str) -> object:
    with within(0.2):
        return registry.Registry((("url", url), ("basic.auth.user.info", "a:b"))).find("orders-value", None)


def partitions(url: str) -> object:
    made = SourceOptions.parse({"topics": "t", "url": "pulsar://127.0.0.1:1", "adminUrl": url})
    return admin.Admin(made).partitions("persistent://public/default/t")


CLIENTS = [token, schema, partitions]


def head(*lines: str, status: int = 200) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", "Content-Type: application/json", *lines, "", ""]).encode()


@cache
def bomb() -> bytes:
    return gzip.compress(b'{"access_token": "' + b"x" * 200_000_000, 9, mtime=0)


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "gzip, gzip"])
def test_a_compressed_answer_is_not_unpacked(ask: Callable[[str], object], encoding: str) -> None:
    with service(head(f"Content-Encoding: {encoding}", f"Content-Length: {len(bomb())}") + bomb()) as made:
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


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_head_that_drips_is_given_up(ask: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (answers, registry):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.3)
    with service(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x") as made, pytest.raises(REFUSED):
        ask(made.url)


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_body_has_a_bound(ask: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sasl, registry, admin):
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


TOPIC = "persistent://public/default/t"


def pulsar(ask: Callable[[admin.Admin], object]) -> Callable[[str], Callable[[], object]]:
    def to(url: str) -> Callable[[], object]:
        made = SourceOptions.parse({"topics": "t", "url": "pulsar://127.0.0.1:1", "adminUrl": url})
        return partial(ask, admin.Admin(made))

    return to


def registered(ask: Callable[[registry.Registry], object]) -> Callable[[str], Callable[[], object]]:
    return lambda url: partial(ask, registry.Registry((("url", url),)))


EVERY: dict[str, Callable[[str], Callable[[], object]]] = {
    "token": lambda url: partial(token, url),
    "partitions": pulsar(lambda a: a.partitions(TOPIC)),
    "bounds": pulsar(lambda a: a.bounds(TOPIC)),
    "before": pulsar(lambda a: a.before(TOPIC, 1)),
    "deduplicates": pulsar(lambda a: a.deduplicates(TOPIC)),
    "schema of a topic": pulsar(lambda a: a.schema(TOPIC)),
    "consumers": pulsar(lambda a: a.consumers(TOPIC, "s")),
    "subject": registered(lambda r: r.find("s", None)),
    "by id": registered(lambda r: r.by_id(7)),
    "accepts": registered(lambda r: r.accepts("s", Format.AVRO, '"string"')),
    "register": registered(lambda r: r.register("s", Format.AVRO, '"string"')),
}
SHAPES = [
    "[]", "7", "null", "true", '"text"', "1e999", "NaN", "9" * 5000, "[" * 100_000, "{}", '{"id": null}', '{"x": 1}',
    '{"partitions": "3"}', '{"partitions": -1}', '{"partitions": 4611686018427387904}', '{"partitions": true}',
    '{"ledgers": 7, "cursors": [], "lastConfirmedEntry": 7}',
    '{"ledgers": [7], "cursors": {}, "lastConfirmedEntry": "1:1", "currentLedgerEntries": 1}',
    '{"ledgers": [], "cursors": {"s": null}, "lastConfirmedEntry": "1:1"}',
    '{"ledgers": [], "cursors": {}, "lastConfirmedEntry": "evil"}', '{"ledgerId": "1", "entryId": {}}',
    '{"version": "1", "type": 7, "data": null}', '{"version": 1, "type": "AVRO", "data": {}}',
    '{"deduplicationStatus": 7, "subscriptions": []}', '{"deduplicationStatus": {}, "subscriptions": {"s": 7}}',
    '{"deduplicationStatus": [], "subscriptions": {"s": {"consumers": 7}}}',
    '{"schema": null, "id": 1, "version": 1}', '{"schema": {}, "id": 1, "version": 1}',
    '{"schema": "1", "id": "x", "version": [], "schemaType": 7}',
    '{"schema": "1", "id": 1, "version": 1, "references": 7}',
    '{"schema": "1", "id": 1, "version": 1, "references": [7]}',
    '{"schema": "1", "id": 1, "version": 1, "references": [{"name": "a", "subject": {}, "version": "z"}]}',
    '{"is_compatible": "false"}', '{"access_token": 7}', '{"access_token": "a", "expires_in": "soon"}',
    '{"access_token": "a", "expires_in": NaN}', '{"access_token": "a", "expires_in": [1]}',
    '{"access_token": "a\\r\\nb", "expires_in": 60}', '{"access_token": "", "expires_in": 60}',
]  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_json_of_another_shape(name: str) -> None:
    accepted = []
    with service(b"") as made, within(0.0):
        ask = EVERY[name](made.url)
        for shape in SHAPES:
            made.answer = head(f"Content-Length: {len(shape)}", "Connection: close") + shape.encode()
            try:
                ask()
                accepted.append(shape)
            except REFUSED as why:
                assert made.url in str(why) or "bearer" in str(why), shape
    fitting = [s for s in SHAPES if s.startswith("{") and "deduplicationStatus" not in s]
    assert accepted == (fitting if name == "deduplicates" else []), "each of its fields may be missing"


@pytest.mark.parametrize(
    "body", [b"7", b"{}", b"[]", b"[[7]]", b'["{"]', b'["7"]', b'["[]"]', b"[1, 2]", b"[" * 100_000]
)
def test_a_management_answer_of_another_shape(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(queue.Management):
        def __init__(self, session: object) -> None:
            pass

        def _ask(self, headers: dict[str, str], body_sent: str) -> answers.JsonAnswer:
            return answers.JsonAnswer.read(body).only()

    monkeypatch.setattr(queue, "Management", Asked)
    place: Any = SimpleNamespace(queue="q", place="localhost:61613")
    (finding,) = queue.findings(SimpleNamespace(is_artemis=True), place, receives=True)  # type: ignore[arg-type]
    assert finding.code == "ACTIVEMQ_SETTINGS_UNKNOWN"


def test_a_catalogs_answer_of_another_shape() -> None:
    sink = connectors()["iceberg"].sinks
    assert sink is not None
    shapes = ["[]", "7", "null", "{}", '{"defaults": 7, "overrides": []}', "[" * 100_000,
              '{"defaults": {}, "overrides": {}, "endpoints": [7]}',
              '{"defaults": {"uri": 7}, "overrides": {"token": []}}']  # fmt: skip
    with service(b"") as made, within(0.0):
        for shape in shapes:
            made.answer = head(f"Content-Length: {len(shape)}", "Connection: close") + shape.encode()
            options: Any = sink.options.parse(
                {"table": "a.b", "catalog.type": "rest", "catalog.uri": f"{made.url}/{len(shape)}"}
            )
            with pytest.raises(DeliveredError, match=r"TABLE_UNREACHABLE"):
                iceberg.open_table(options)

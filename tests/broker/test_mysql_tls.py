"""MySQL over TLS: what a connection verifies, in the sink, the outbox source and the saga log alike."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.front import certificate
from tests.support.servers import Mysql

from delivered.connectors.mysql import CONNECTOR
from delivered.connectors.mysql.client import connect
from delivered.connectors.outbox import OutboxOptions
from delivered.connectors.outbox import client as outbox
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, UsageError
from delivered.patterns.saga.log import Log

Connect = Callable[[str], Any]


def by_sink(url: str) -> Any:
    return connect(CONNECTOR.sink({"url": url, "dbtable": "t", "password": "env:MYSQL_TEST_PASSWORD"}).options)


def by_outbox(url: str) -> Any:
    return outbox.connect(OutboxOptions.parse({"url": url, "password": "env:MYSQL_TEST_PASSWORD"}))


def by_saga(url: str) -> Any:
    return Log(url, password="env:MYSQL_TEST_PASSWORD")._connect_client()


CLIENTS = pytest.mark.parametrize("client", [by_sink, by_outbox, by_saga])


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYSQL_TEST_PASSWORD", "s3cret")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A certificate for 127.0.0.1, which is its own issuer; and another one that signs nothing here."""
    own, other = (certificate(tmp_path_factory.mktemp(name)) for name in ("own", "other"))
    for path in own.values():
        path.chmod(0o644)
        path.parent.chmod(0o755)
    return {**own, "other": other["certificate"]}


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Iterator[Mysql]:
    settings = {"ssl_cert": str(files["certificate"]), "ssl_key": str(files["key"])}
    server = Mysql.start(tmp_path_factory.mktemp("encrypted") / "mysql", settings)
    server.execute("SET PASSWORD = PASSWORD('s3cret')")
    yield server
    server.end()


def cipher(connection: Any) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
        return str(cursor.fetchone()[1])


@CLIENTS
def test_a_ca_verifies_the_servers_certificate(client: Connect, encrypted: Mysql, files: dict[str, Path]) -> None:
    connection = client(f"{encrypted.url}?ssl_ca={files['certificate']}")
    assert cipher(connection)
    connection.close()
    with pytest.raises(UsageError, match="CERTIFICATE_REFUSED") as caught:
        client(f"{encrypted.url}?ssl_ca={files['other']}")
    assert "set ssl_ca to the issuer's certificate" in (caught.value.next_step or "")


@CLIENTS
def test_a_ca_verifies_the_servers_name(client: Connect, encrypted: Mysql, files: dict[str, Path]) -> None:
    url = encrypted.url.replace("127.0.0.1", "localhost")  # the certificate is for the address
    with pytest.raises(UsageError, match=r"CERTIFICATE_REFUSED.*Hostname mismatch"):
        client(f"{url}?ssl_ca={files['certificate']}")
    connection = client(f"{url}?ssl_ca={files['certificate']}&ssl_verify_identity=false")
    assert cipher(connection)
    connection.close()


@CLIENTS
def test_without_a_ca_the_systems_trust_store_counts(client: Connect, encrypted: Mysql) -> None:
    with pytest.raises(UsageError, match="CERTIFICATE_REFUSED"):
        client(f"{encrypted.url}?ssl_verify_cert=true")
    connection = client(f"{encrypted.url}?ssl_verify_cert=false")
    assert cipher(connection)
    connection.close()


@CLIENTS
def test_a_server_without_tls_is_refused_where_tls_is_asked_for(
    client: Connect, mysql: Mysql, files: dict[str, Path]
) -> None:
    with pytest.raises(Exception, match="SSL"):
        client(f"{mysql.url}?ssl_ca={files['certificate']}")


def test_that_is_a_mistake_and_no_outage(mysql: Mysql, files: dict[str, Path]) -> None:
    (finding,) = mysql.sink(url=f"{mysql.url}?ssl_ca={files['certificate']}").preflight(Guarantee.EXACTLY_ONCE)
    assert (finding.code, finding.refuses, finding.transient) == ("TLS_ABSENT", True, False)


@CLIENTS
@pytest.mark.parametrize(
    "query",
    [
        "ssl_verify_cert=1", "ssl_verify_cert=yes", "ssl_verify_identity=0", "ssl_verify_cert=", "ssl_ca=",
        "useSSL=true",
        "ssl_ca=/ca.pem&ssl_verify_cert=false", "ssl_verify_cert=false&ssl_verify_identity=true", "ssl_key=/key.pem",
    ],
)  # fmt: skip
def test_words_that_are_not_understood_are_refused(client: Connect, query: str) -> None:
    with pytest.raises(DeliveredError, match=query.partition("=")[0]) as caught:
        client(f"mysql://delivered@127.0.0.1:1/dev?{query}")
    assert caught.value.code == "DELIVERED_OPTION_VALUE"


class Greedy:
    """A server that asks for the password in clear, and keeps what it is sent."""

    def __init__(self, plugin: bytes) -> None:
        self.plugin, self.received = plugin, b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        # The greeting of MySQL's protocol, then a request to change to another login method.
        with self._listener, self._listener.accept()[0] as client:
            low, high = 0x0200 | 0x8000 | 0x0008, 0x0008  # protocol 4.1, secure connection; plugins
            greeting = b"\x0a8.0.36\0" + struct.pack("<I", 1) + b"12345678\0" + struct.pack("<HBHH", low, 45, 2, high)
            greeting += bytes([21]) + bytes(10) + b"123456789012\0mysql_native_password\0"
            self._send(client, 0, greeting)
            client.recv(65536)
            self._send(client, 2, b"\xfe" + self.plugin + b"\0" + b"\x02Password: ")
            client.settimeout(5)
            try:
                self.received = client.recv(65536)
            except TimeoutError:
                self.received = b"nothing"

    @staticmethod
    def _send(client: socket.socket, number: int, payload: bytes) -> None:
        client.sendall(struct.pack("<I", len(payload))[:3] + bytes([number]) + payload)


@CLIENTS
@pytest.mark.parametrize("plugin", [b"mysql_clear_password", b"dialog"])
def test_no_server_gets_the_password_in_clear(client: Connect, plugin: bytes) -> None:
    server = Greedy(plugin)
    with pytest.raises(UsageError, match="PASSWORD_IN_CLEAR"):
        client(f"mysql://delivered@127.0.0.1:{server.port}/dev")
    server.thread.join(10)
    assert b"s3cret" not in server.received

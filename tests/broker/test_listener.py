"""A pipeline that was given another system's host and port is told what listens there."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.spark.log_to_sqlite import produce
from tests.support.front import certificate

import delivered
from delivered.model.errors import Unreachable
from delivered.pipeline import facts
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import identify
from delivered.planner import Refusal

SERVERS = {
    "kafka": facts.KAFKA,
    "postgres": facts.POSTGRES,
    "mysql": facts.MYSQL,
    "rabbitmq": facts.RABBITMQ,
    "pulsar": facts.PULSAR,
    "activemq": facts.STOMP,
    "rocketmq": facts.GRPC,
}


def address(server: Any) -> tuple[str, int]:
    url = server.options["url"] if hasattr(server, "options") else getattr(server, "bootstrap", "") or server.url
    at = urlsplit(url if "//" in url else f"//{url}")
    return str(at.hostname), int(at.port or 0)


@contextmanager
def tls_in_front(host: str, port: int, files: dict[str, Path]) -> Iterator[int]:
    """A TLS listener that passes everything on to a server without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])

    class Front(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                suppress(OSError),
                socket.create_connection((host, port)) as behind,
                context.wrap_socket(self.request, server_side=True) as client,
            ):
                back = threading.Thread(target=copy, args=(behind, client))
                back.start()
                copy(client, behind)
                behind.shutdown(socket.SHUT_RDWR)
                back.join()

    def copy(reader: socket.socket, writer: socket.socket) -> None:
        with suppress(OSError):
            while chunk := reader.recv(65536):
                writer.sendall(chunk)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Front) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def planned(folder: Path, sink: Endpoint) -> Refusal:
    produce(folder / "in", 0, 1)
    pipeline = delivered.Pipeline(
        name="p",
        guarantee="at_least_once",
        checkpoint=folder / "checkpoint",
        source=delivered.log(str(folder / "in")),
        sinks=[sink],
    )
    answer = pipeline.plan()
    assert isinstance(answer, Refusal), answer
    assert not answer.transient, "waiting does not help"
    return answer


@pytest.mark.parametrize("name", list(SERVERS))
def test_a_server_is_recognised_and_told(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    host, port = address(request.getfixturevalue(name))
    assert identify(host, port) == (SERVERS[name], False)
    place = f"{host}:{port}"
    ledger = str(tmp_path / "ledger.db")
    other = (
        delivered.endpoint("rabbitmq", url=f"amqp://guest:guest@{place}/", routingKey="t", ledger=ledger)
        if name == "kafka"
        else delivered.kafka(place, topic="t")
    )
    answer = planned(tmp_path, other)
    expected = SERVERS["rabbitmq" if name == "kafka" else "kafka"]
    assert answer.code == "ANOTHER_SERVER"
    assert answer.reason == f"What answers at {place} is {SERVERS[name]}; the pipeline expects {expected} there."


def test_a_listener_without_tls_is_told(kafka: Any, tmp_path: Path) -> None:
    host, port = address(kafka)
    sink = delivered.kafka(f"{host}:{port}", topic="t", **{"kafka.security.protocol": "SSL"})
    answer = planned(tmp_path, sink)
    assert answer.reason.startswith(f"Kafka at {host}:{port} answers without TLS")
    assert "kafka.security.protocol" in answer.way_out


def test_a_listener_with_tls_alone_is_told(kafka: Any, tmp_path: Path) -> None:
    with tls_in_front(*address(kafka), certificate(tmp_path)) as port:
        assert identify("127.0.0.1", port) == (facts.KAFKA, True)
        answer = planned(tmp_path, delivered.kafka(f"127.0.0.1:{port}", topic="t"))
    assert answer.reason.startswith(f"Kafka at 127.0.0.1:{port} answers only over TLS"), answer


def test_wrong_credentials_stay_what_they_are(kafka: Any, tmp_path: Path) -> None:
    """The server is the right one: its own words are the reason."""
    login = {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "u",
        "kafka.sasl.password": "env:HOME",
    }
    with pytest.raises(Unreachable, match="rejected the SASL mechanism"):
        planned(tmp_path, delivered.kafka(":".join(map(str, address(kafka))), topic="t", **login))


def test_an_outbox_in_mysql_expects_mysql(mysql: Any) -> None:
    place = "{}:{}".format(*address(mysql))
    outbox = delivered.endpoint("outbox", url=f"mysql://me@{place}/shop", table="outbox")
    assert facts.find_another(outbox, "OUTBOX_UNREACHABLE", f"MySQL at {place} is unreachable") is None

"""RabbitMQ, its streams, and Pulsar over TLS that requires a certificate of the client's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.receive_help import drained
from tests.broker.send_help import rows, writer
from tests.support.certificates import client_files, tls_options
from tests.support.pulsar import read_all
from tests.support.servers import Pulsar, Rabbitmq

from delivered.connectors.pulsar import CONNECTOR as PULSAR
from delivered.connectors.rabbitmq import RabbitmqOptions
from delivered.connectors.rabbitmq.client import connect
from delivered.connectors.rabbitmq.queue import RabbitmqReceiver
from delivered.connectors.rabbitmq.stream import CONNECTOR as STREAM
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Promise
from delivered.pipeline.registry import find_sink
from delivered_lab.brokers.servers import free_ports

ROWS = [b"row %d" % n for n in range(20)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As `client_files`, and of a server."""
    folder = tmp_path_factory.mktemp("certificates")
    authority, found = client_files(folder, "delivered")
    certificate, key = authority.issue("server").files(folder, "server")
    return {**found, "server": str(certificate), "server_key": str(key)}


def send(made: Any) -> None:
    task = writer(made)
    task.stage(rows(len(ROWS)))
    assert task.prepare(Fingerprint()) == Promise()


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> Iterator[tuple[Rabbitmq, str]]:
    [port] = free_ports(1)
    server = Rabbitmq.start(
        tmp_path_factory.mktemp("rabbitmq"),
        {
            "listeners.ssl.1": f"127.0.0.1:{port}",
            "ssl_options.cacertfile": files["ca"],
            "ssl_options.certfile": files["server"],
            "ssl_options.keyfile": files["server_key"],
            "ssl_options.verify": "verify_peer",
            "ssl_options.fail_if_no_peer_cert": "true",
        },
    )
    yield server, f"amqps://guest:guest@127.0.0.1:{port}/"
    server.end()


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("no trusted authority", {"ca": "other_ca"}, "CERTIFICATE_REFUSED"),
    ("no certificate", {"who": None}, "UNREACHABLE"),
    ("another authority's", {"who": "stranger"}, "UNREACHABLE"),
]


@pytest.mark.matrix
def test_rabbitmq_and_its_streams(rabbitmq: tuple[Rabbitmq, str], files: dict[str, str], tmp_path: Path) -> None:
    server, url = rabbitmq
    queue, stream = server.queue(), server.queue("stream")
    ledger = {"ledger": str(tmp_path / "l.db")}
    for name in (queue, stream):
        made = find_sink("rabbitmq", {"url": url, "routingKey": name, **ledger, **tls_options(files)})
        assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
        send(made)
    receiver = RabbitmqReceiver(RabbitmqOptions.parse({"url": url, "queue": queue, "log": "/x", **tls_options(files)}))
    assert sorted(value for batch in drained(receiver) for value in batch.values) == sorted(ROWS)
    reads = STREAM.source({"url": url, "streams": stream, **tls_options(files)})
    assert reads.preflight() == []
    driver = reads.driver()
    pieces = [b for piece in driver.slices(*driver.batch()) for b in reads.read(piece)]
    assert sorted(pa.Table.from_batches(pieces).column("value").to_pylist()) == sorted(ROWS)


@pytest.mark.matrix
@pytest.mark.parametrize(("how", "given", "code"), WRONG)
def test_rabbitmq_refuses(
    rabbitmq: tuple[Rabbitmq, str], files: dict[str, str], how: str, given: dict[str, Any], code: str
) -> None:
    place = RabbitmqOptions.parse({"url": rabbitmq[1], "queue": "q", "log": "/x", **tls_options(files, **given)})
    with pytest.raises(DeliveredError, match=code):
        connect(place)


@pytest.fixture(scope="module")
def pulsar(tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> Iterator[Pulsar]:
    provider = "org.apache.pulsar.broker.authentication.AuthenticationProviderTls"
    server = Pulsar.start(
        tmp_path_factory.mktemp("pulsar"),
        {
            "tlsEnabledWithKeyStore": "false",
            "tlsCertificateFilePath": files["server"],
            "tlsKeyFilePath": files["server_key"],
            "tlsTrustCertsFilePath": files["ca"],
            "tlsRequireTrustedClientCertOnConnect": "true",
            "authenticationProviders": provider,
        },
        tls=True,
    )
    yield server
    server.end()


def at(pulsar: Pulsar) -> dict[str, str]:
    listeners = pulsar.broker.listeners
    return {"url": f"pulsar+ssl://{listeners['PULSAR_SSL']}", "adminUrl": f"https://{listeners['HTTPS']}"}


@pytest.mark.matrix
def test_pulsar(pulsar: Pulsar, files: dict[str, str], tmp_path: Path) -> None:
    topic = pulsar.topic(1)
    given = {**at(pulsar), **tls_options(files)}
    made = find_sink("pulsar", {**given, "topic": topic, "ledger": str(tmp_path / "l.db")})
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    send(made)
    reads = PULSAR.source({**given, "topics": topic, "startingOffsets": "earliest"})
    assert reads.preflight() == []
    assert sorted(read_all(reads).column("value").to_pylist()) == sorted(ROWS)


@pytest.mark.matrix
@pytest.mark.parametrize(("how", "given", "code"), WRONG)
def test_pulsar_refuses(pulsar: Pulsar, files: dict[str, str], how: str, given: dict[str, Any], code: str) -> None:
    reads = PULSAR.source({**at(pulsar), "topics": "t", "startingOffsets": "earliest", **tls_options(files, **given)})
    [finding] = reads.preflight()
    assert finding.refuses
    assert code in finding.code


PLACES: dict[str, Callable[[dict[str, str]], Any]] = {
    "activemq": lambda more: find_sink("activemq", {"url": "stomp://h", "queue": "q", "ledger": "/l", **more}),
    "rabbitmq": lambda more: find_sink("rabbitmq", {"url": "amqp://h", "routingKey": "q", "ledger": "/l", **more}),
    "rabbitmq_stream": lambda more: STREAM.source({"url": "amqp://h", "streams": "s", **more}),
    "pulsar": lambda more: PULSAR.source({"url": "pulsar://h", "adminUrl": "http://h", "topics": "t", **more}),
}


@pytest.mark.parametrize("system", PLACES)
def test_certificates_that_nothing_would_use_are_refused(system: str) -> None:
    for more in (
        {"tlsTrustCertsFile": "/ca"},
        {"tlsCertificateFile": "/c", "tlsKeyFile": "/k"},
        {"tlsCertificateFile": "/c"},
        {"tlsKeyFile": "/k"},
    ):
        with pytest.raises(UsageError, match="OPTION_CONFLICT"):
            PLACES[system](more)
    if "rabbitmq" in system:
        with pytest.raises(UsageError, match="ssl_options"):
            STREAM.source({"url": "amqps://h?ssl_options=None", "streams": "s"})


@pytest.mark.parametrize(
    ("system", "url"), [("activemq", "STOMP+SSL://h"), ("rabbitmq", "AMQPS://h"), ("rabbitmq_stream", "Amqps://h")]
)
def test_a_scheme_in_capitals_means_tls(system: str, url: str) -> None:
    assert PLACES[system]({"url": url, "tlsTrustCertsFile": "/ca"}).options.tls


def test_a_scheme_of_pulsar_in_capitals_means_what_it_says() -> None:
    made = PLACES["pulsar"]({"url": "PULSAR+SSL://h", "tlsTrustCertsFile": "/ca"})
    assert made.options.url == "pulsar+ssl://h"
    loud = PLACES["pulsar"]({"url": "PULSAR://h", "adminUrl": "HTTP://h", "token": "env:T"})
    assert loud.options.in_clear

"""ActiveMQ Artemis over TLS: who is trusted, what is refused, and a broker that is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.broker.receive_help import drained, numbered, pipeline_file, through_a_killed_broker
from tests.broker.send_help import rows, writer
from tests.support.certificates import client_files, tls_options
from tests.support.servers import Activemq

from delivered.connectors.activemq import DUPLICATE_ID, ActivemqOptions
from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.queue import ActivemqQueue, ActivemqReceiver
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Promise
from delivered.pipeline.registry import find_sink
from delivered_lab.brokers.servers import free_ports

pytestmark = pytest.mark.matrix
PASSWORD = "changeit"
NAMES = ("both", "open", "elsewhere")
"""Acceptors: one that requires clients' certificates, one that does not, one with a certificate of another host."""


class Secured:
    """A broker with three acceptors for TLS, and the files of its authority."""

    def __init__(self, folder: Path) -> None:
        authority, self.files = client_files(folder)
        elsewhere = authority.issue("server", hosts=("elsewhere.example",))
        (folder / "server.p12").write_bytes(authority.issue("server").store(PASSWORD))
        (folder / "elsewhere.p12").write_bytes(elsewhere.store(PASSWORD))
        self.ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
        properties: dict[str, str] = {}
        for name, port in self.ports.items():
            start = f"acceptorConfigurations.{name}"
            store = "elsewhere" if name == "elsewhere" else "server"
            factory = "org.apache.activemq.artemis.core.remoting.impl.netty.NettyAcceptorFactory"
            properties[f"{start}.factoryClassName"] = factory
            given = {
                "host": "127.0.0.1",
                "port": port,
                "protocols": "STOMP",
                "sslEnabled": "true",
                "keyStorePath": folder / f"{store}.p12",
                "keyStoreType": "PKCS12",
                "keyStorePassword": PASSWORD,
            }
            if name == "both":
                given |= {"needClientAuth": "true", "trustStorePath": self.files["ca"], "trustStoreType": "PEMCA"}
            properties |= {f"{start}.params.{k}": str(v) for k, v in given.items()}
        self.server = Activemq.start(folder / "server", properties)

    def options(self, acceptor: str = "both", ca: str = "ca", who: str | None = "client") -> dict[str, str]:
        return {"url": f"stomp+ssl://127.0.0.1:{self.ports[acceptor]}", **tls_options(self.files, ca, who)}

    def sink(self, folder: Path, queue: str, **more: str) -> Any:
        return find_sink("activemq", {**self.options(), "queue": queue, "ledger": str(folder / "l.db"), **more})


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("tls"))
    yield made
    made.server.end()


def place(given: dict[str, str], queue: str = "q") -> ActivemqOptions:
    return ActivemqOptions.parse({**given, "queue": queue, "log": "/x", "idHeader": DUPLICATE_ID})


def taken(options: ActivemqOptions) -> Counter[bytes]:
    return Counter(value for batch in drained(ActivemqReceiver(options)) for value in batch.values)


@pytest.mark.parametrize(("acceptor", "who"), [("both", "client"), ("open", None)])
def test_what_is_sent_arrives(secured: Secured, tmp_path: Path, acceptor: str, who: str | None) -> None:
    queue, given = secured.server.queue(), secured.options(acceptor, who=who)
    made = find_sink("activemq", {**given, "queue": queue, "ledger": str(tmp_path / "l.db")})
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    assert ActivemqQueue(place(given, queue)).preflight() == []
    task = writer(made)
    task.stage(rows(20_000))
    assert task.prepare(Fingerprint()) == Promise()
    secured.server.send(queue, [(None, b"\n\0" * 2_000_000)])
    expected = Counter({b"row %d" % n: 1 for n in range(20_000)} | {b"\n\0" * 2_000_000: 1})
    assert taken(place(given, queue)) == expected


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("no trusted authority", {"ca": "other_ca"}, "CERTIFICATE_REFUSED", "stomp.ssl://127.0.0.1:.*other-ca.pem"),
    ("another host's", {"acceptor": "elsewhere", "who": None}, "CERTIFICATE_REFUSED", "IP address mismatch"),
    ("no certificate", {"who": None}, "ACTIVEMQ_UNREACHABLE", "(?i)certificate"),
    ("another authority's", {"who": "stranger"}, "ACTIVEMQ_UNREACHABLE", "(?i)certificate"),
]


@pytest.mark.parametrize(("how", "given", "code", "words"), WRONG)
def test_what_is_refused(
    secured: Secured, tmp_path: Path, how: str, given: dict[str, Any], code: str, words: str
) -> None:
    options = secured.options(**given)
    with pytest.raises(DeliveredError, match=words) as caught:
        Session(place(options))
    assert caught.value.code == f"DELIVERED_{code}"
    [finding] = ActivemqQueue(place(options)).preflight()
    assert (finding.code, finding.refuses) == (code, True)
    made = find_sink("activemq", {**options, "queue": "q", "ledger": str(tmp_path / "l.db")})
    [finding] = made.preflight(Guarantee.AT_LEAST_ONCE)
    assert (finding.code, finding.refuses) == (code, True)


def test_plain_text_to_tls_and_tls_to_plain_text_are_refused(secured: Secured) -> None:
    plain = {"url": secured.options()["url"].replace("+ssl", "")}
    with pytest.raises(DeliveredError, match=r"stomp\+ssl:// for one with it") as caught:
        Session(place(plain))
    assert caught.value.code == "DELIVERED_ACTIVEMQ_UNREACHABLE"
    with pytest.raises(DeliveredError, match=r"stomp:// is for one without TLS") as caught:
        Session(place({**secured.options(), "url": secured.server.url.replace("stomp:", "stomp+ssl:")}))
    assert caught.value.code == "DELIVERED_ACTIVEMQ_UNREACHABLE"


def test_a_broker_killed_while_messages_are_received(secured: Secured, tmp_path: Path) -> None:
    server = secured.server
    queue = server.queue()
    server.send(queue, numbered())
    given = secured.options()
    file = pipeline_file(tmp_path, "activemq", given.pop("url"), queue, idHeader="id", receiveMessagesMax=50, **given)
    said = through_a_killed_broker(server, file, wait_s=120)
    assert said["reconnected"] >= 1
    assert said["repeated"] >= 50
    assert server.left(queue) == 0


def test_a_broker_killed_while_messages_are_sent(secured: Secured, tmp_path: Path) -> None:
    """The batch is sent again under the same ids, and the broker drops those that it has."""
    server = secured.server
    queue = server.queue()
    made = secured.sink(tmp_path, queue)
    task = writer(made)
    task.stage(rows(1_500))
    server.broker.kill()
    with pytest.raises(OutcomeUnknown, match="not confirmed"):
        task.stage(rows(1_500, 1_500))
        task.prepare(Fingerprint())
    task.abort()
    server.broker.restart()
    again = writer(made)
    again.stage(rows(3_000))
    assert again.prepare(Fingerprint()) == Promise()
    assert taken(place(secured.options(), queue)) == Counter(b"row %d" % n for n in range(3_000))

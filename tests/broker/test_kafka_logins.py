"""Every login of our Kafka client against a real broker, for records, ledger and admin alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from docs.logins import stored
from kafka.protocol.metadata import MetadataRequest
from tests.broker.sink_help import Rig
from tests.broker.source_help import read_all
from tests.support import stored_logins
from tests.support.logins import ODD_USER, PASSWORD, SESSION_S, STORE, USER, Logins, revocations
from tests.support.sweeps import sweep

from delivered.clients.kafka import client_options, resolved
from delivered.clients.kafka.channel import Channel, connected, security
from delivered.clients.kafka.protocol import Wire
from delivered.connectors.kafka import CONNECTOR
from delivered.model.errors import DeliveredError


@pytest.fixture(scope="module")
def logins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logins]:
    made = Logins(tmp_path_factory.mktemp("logins"))
    yield made
    made.close()


def used(logins: Logins, options: dict[str, str]) -> list[str]:
    """A batch exactly once, read again, by the same login. Returns what was done."""
    topic = logins.kafka.topic(1)
    rig = Rig(logins.kafka, topic, options={**options, "ledgerTopic": "__delivered_logins"})
    context = rig.context()
    done = ["claim the ledger"]
    decided = rig.commit(context, 0, rig.write(rig.plan(context, 0), shards=(0,)))
    assert decided is not None
    assert decided.batch == 0
    done += ["write records in a transaction", "decide and commit"]
    reads = CONNECTOR.source({**options, "subscribe": topic, "startingOffsets": "earliest"})
    deadline = time.monotonic() + 60
    # The brokers answer a commit before its markers are in all partitions.
    while not (table := read_all(reads)).num_rows and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(table.column("value").to_pylist()) == rig.expected([0], [0])
    done += ["list partitions and offsets", "read the records"]
    return done


LOGINS: dict[str, Callable[[Logins], dict[str, str]]] = {
    "PLAIN": lambda at: at.password("PLAIN"),
    "PLAIN, over TLS": lambda at: at.password("PLAIN", "SASL_SSL"),
    "SCRAM-SHA-256": lambda at: at.password("SCRAM-SHA-256"),
    "SCRAM-SHA-512, over TLS": lambda at: at.password("SCRAM-SHA-512", "SASL_SSL"),
    "SCRAM-SHA-512, a user with , and =": lambda at: at.password("SCRAM-SHA-512", user=ODD_USER),
    "SCRAM-SHA-512, sasl.jaas.config": lambda at: at.jaas(
        "SCRAM-SHA-512", "scram.ScramLoginModule", username=USER, password=PASSWORD),
    "OAUTHBEARER, client credentials": lambda at: at.by_token_server,
    "OAUTHBEARER, sasl.jaas.config": lambda at: at.by_token_server_in_jaas,
    "OAUTHBEARER, a function": lambda at: at.by_function,
    "OAUTHBEARER, records through librdkafka": lambda at: {**at.by_function, "client": "librdkafka"},
    "GSSAPI, keytab": lambda at: at.kerberos,
    "GSSAPI, sasl.jaas.config": lambda at: at.kerberos_in_jaas,
    "TLS, a revocation list": lambda at: {**at.password("PLAIN", "SASL_SSL"), **revocations(at)},
    "mutual TLS, PEM files": lambda at: at.files,
    "mutual TLS, PEM files, key with password": lambda at: at.mutual(
        ssl__ca__location=at.path("ca.pem"), ssl__certificate__location=at.path("locked.pem"),
        ssl__key__location=at.path("locked.key"), ssl__key__password=STORE),
    "mutual TLS, PEM text": lambda at: at.mutual(
        ssl__truststore__certificates=at.authority.pem, ssl__truststore__type="PEM", ssl__keystore__type="PEM",
        ssl__keystore__certificate__chain=at.client.pem, ssl__keystore__key=at.client.key(STORE),
        ssl__key__password=STORE),
    "mutual TLS, PEM text on one line": lambda at: at.mutual(
        ssl__truststore__certificates=" ".join(at.authority.pem.split("\n")),
        ssl__keystore__certificate__chain=at.client.pem.replace("\n", "\\n"), ssl__keystore__key=at.client.key()),
    "mutual TLS, PKCS12": lambda at: at.mutual(
        ssl__truststore__location=at.path("trust.p12"), ssl__truststore__type="PKCS12", ssl__truststore__password=STORE,
        ssl__keystore__location=at.path("client.p12"), ssl__keystore__type="PKCS12", ssl__keystore__password=STORE),
    "TLS 1.3 only": lambda at: {**at.files, "kafka.ssl.enabled.protocols": "TLSv1.3"},
    "TLS 1.2 only": lambda at: {**at.files, "kafka.ssl.enabled.protocols": "TLSv1.2"},
}  # fmt: skip


QUICK = {
    "PLAIN", "SCRAM-SHA-256", "OAUTHBEARER, client credentials", "GSSAPI, keytab", "TLS, a revocation list",
    "mutual TLS, PEM text", "mutual TLS, PKCS12", "TLS 1.3 only",
}  # fmt: skip
"""The others run in `make verify`: they differ in how the same login is written."""


@pytest.mark.parametrize("name", sweep(LOGINS, lambda name: name in QUICK))
def test_a_login_serves_records_ledger_and_admin(logins: Logins, name: str) -> None:
    options = LOGINS[name](logins)
    done = used(logins, options)
    written = {k.removeprefix("kafka."): v for k, v in options.items() if k != "kafka.bootstrap.servers"}
    shown = ("security.protocol", "sasl.mechanism", "ssl.keystore.type", "ssl.truststore.type", "ssl.enabled.protocols")
    row = {"options": [f"{k}={v}" if k in shown else k for k, v in written.items()], "did": done}
    stored_logins.compare("accepted", name, row)


WRONG: dict[str, tuple[Callable[[Logins], dict[str, str]], str]] = {
    "PLAIN, wrong password": (lambda at: {**at.password("PLAIN"), "kafka.sasl.password": "x"}, "KAFKA_CREDENTIALS"),
    "SCRAM-SHA-256, wrong password": (
        lambda at: {**at.password("SCRAM-SHA-256"), "kafka.sasl.password": "x"}, "KAFKA_CREDENTIALS"),
    "OAUTHBEARER, wrong secret": (
        lambda at: {**at.by_token_server, "kafka.sasl.oauthbearer.client.secret": "x"},
        "KAFKA_NO_CREDENTIALS.*401.*invalid_client"),
    "OAUTHBEARER, another audience": (
        lambda at: {**at.by_function, "kafka.sasl.oauthbearer.token.provider": "tests.support.token_server.foreign"},
        "KAFKA_CREDENTIALS.*invalid_token"),
    "GSSAPI, wrong principal": (
        lambda at: {**at.kerberos, "kafka.sasl.kerberos.principal": "bob"}, "KAFKA_NO_CREDENTIALS.*Kerberos"),
    "GSSAPI, wrong service": (
        lambda at: {**at.kerberos, "kafka.sasl.kerberos.service.name": "http"}, "KAFKA_NO_CREDENTIALS.*not found"),
    "TLS, unknown authority": (
        lambda at: {k: v for k, v in at.password("PLAIN", "SASL_SSL").items() if "ssl.ca" not in k}, "verify failed"),
    "TLS, revoked certificate of the broker": (
        lambda at: {**at.password("PLAIN", "SASL_SSL"), **revocations(at, at.server, name="revoked.pem")},
        "certificate revoked"),
    "TLS, no list of the authority": (
        lambda at: {**at.password("PLAIN", "SASL_SSL"), **at.foreign_revocations}, "unable to get certificate CRL"),
    "mutual TLS, no certificate": (lambda at: {**at.at("SSL"), **at.trusted}, "(?i)certificate"),
    "mutual TLS, another authority's certificate": (
        lambda at: {**at.mutual(ssl__ca__location=at.path("ca.pem")), **at.foreign_certificate}, "KAFKA_CREDENTIALS"),
    "mutual TLS, PKCS12, wrong password": (
        lambda at: at.mutual(ssl__ca__location=at.path("ca.pem"), ssl__keystore__location=at.path("client.p12"),
                             ssl__keystore__type="PKCS12", ssl__keystore__password="x"),
        "TLS_FILES.*Invalid password"),
    "mutual TLS, key without its password": (
        lambda at: at.mutual(ssl__ca__location=at.path("ca.pem"), ssl__certificate__location=at.path("locked.pem"),
                             ssl__key__location=at.path("locked.key")),
        "TLS_FILES"),
}  # fmt: skip


QUICK_WRONG = {"OAUTHBEARER, wrong secret", "GSSAPI, wrong principal", "TLS, revoked certificate of the broker"}


@pytest.mark.parametrize("name", sweep(WRONG, lambda name: name in QUICK_WRONG))
def test_a_wrong_login_is_refused_with_its_reason(logins: Logins, name: str) -> None:
    options, said = WRONG[name]
    with pytest.raises(DeliveredError, match=said) as refused:
        Wire(resolved(client_options(options(logins)))).nodes()
    assert PASSWORD not in str(refused.value)
    assert STORE not in str(refused.value)
    stored_logins.compare("refused", name, {"code": refused.value.code.removeprefix("DELIVERED_")})


def channel_of(options: dict[str, str]) -> Channel:
    given = resolved(client_options(options))
    host, port = given["bootstrap.servers"].split(":")
    return Channel(host, int(port), security(given), 30)


@pytest.mark.parametrize("version", sweep(["TLSv1.2", "TLSv1.3"], lambda version: version == "TLSv1.3"))
def test_the_version_of_tls_is_the_one_that_is_allowed(logins: Logins, version: str) -> None:
    given = resolved(client_options({**logins.files, "kafka.ssl.enabled.protocols": version}))
    host, port = given["bootstrap.servers"].split(":")
    with closing(connected(host, int(port), security(given), 30)) as sock:
        assert sock.version() == version  # type: ignore[attr-defined]


@pytest.mark.parametrize("login", sweep(["password", "tokens", "kerberos"], lambda login: login == "tokens"))
def test_a_session_is_renewed_on_its_connection(logins: Logins, login: str) -> None:
    """KIP-368: without it, the broker closes the connection at the first request after the session's end."""
    options = {
        "password": lambda: logins.password("SCRAM-SHA-512"),
        "tokens": lambda: logins.by_token_server,
        "kerberos": lambda: logins.kerberos,
    }[login]()
    topic = logins.kafka.topic(1)
    with closing(channel_of(options)) as channel:
        request = MetadataRequest.MetadataRequestTopic
        first = channel._sock.getsockname()
        started, answers = time.monotonic(), 0
        while time.monotonic() < started + 1.7 * SESSION_S:
            asked = MetadataRequest(topics=[request(name=topic)], allow_auto_topic_creation=False)
            waiting = [channel.post(asked) for _ in range(3)]
            assert all(len(each.answer(30).topics[0].partitions) == 1 for each in waiting)
            answers += len(waiting)
            time.sleep(0.05)
        assert answers > 3
        assert channel._sock.getsockname() == first
        assert channel.closed is None


def test_every_row_of_the_page_is_a_test() -> None:
    found = stored()
    assert set(found["accepted"]) == set(LOGINS)
    assert set(found["refused"]) == set(WRONG)

"""Which logins a plan accepts, tokens and their renewal, and files of TLS that change under a running query."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.certificates import Authority
from tests.support.token_server import CLIENT, SECRET, TokenServer

from delivered.clients.kafka import (
    SETTINGS,
    CredentialsRefused,
    NoCredentials,
    check_client,
    check_complete,
    client_options,
    jaas_settings,
    sasl,
)
from delivered.clients.kafka.sasl import Tls, build_context, pem, token_for
from delivered.connectors.kafka import CONNECTOR, SOURCE_SETTINGS, by_arrow, check_settings
from delivered.model.capability import Guarantee
from delivered.model.errors import UsageError

SERVERS = {"kafka.bootstrap.servers": "broker.example:9092"}
SASL = {**SERVERS, "kafka.security.protocol": "SASL_SSL"}
OAUTH = {**SASL, "kafka.sasl.mechanism": "OAUTHBEARER"}
OIDC = {
    **OAUTH,
    "kafka.sasl.oauthbearer.token.endpoint.url": "https://login.example/token",
    "kafka.sasl.oauthbearer.client.id": "me",
    "kafka.sasl.oauthbearer.client.secret": "env:SECRET",
}
UNSUPPORTED = [
    "ssl.providers", "ssl.provider", "ssl.protocol", "ssl.engine.location", "ssl.engine.id", "ssl.curves.list",
    "ssl.sigalgs.list", "ssl.engine.factory.class", "ssl.ca.certificate.stores", "ssl.keystore.locaton",
    "ssl.keymanager.algorithm", "ssl.trustmanager.algorithm", "ssl.secure.random.implementation",
    "sasl.kerberos.kinit.cmd", "sasl.kerberos.min.time.before.relogin", "sasl.kerberos.ticket.renew.jitter",
    "sasl.login.class", "sasl.login.refresh.window.factor", "sasl.oauthbearer.grant.type",
    "sasl.oauthbearer.assertion.file", "sasl.oauthbearer.metadata.authentication.type", "sasl.oauthbearer.clientid",
    "enable.sasl.oauthbearer.unsecure.jwt", "https.proxy", "sasl.password.callback",
]  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("part", ["source", "sink"])
def test_login_settings_that_no_connection_would_follow_are_refused_by_name(name: str, part: str) -> None:
    given = {**SERVERS, f"kafka.{name}": "x"}
    with pytest.raises(UsageError, match=rf"kafka\.{name.replace('.', '[.]')}"):
        CONNECTOR.source({**given, "subscribe": "t"}) if part == "source" else CONNECTOR.sink({**given, "topic": "t"})


def test_a_misspelt_login_setting_gets_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        check_client("owner", {**SERVERS, "kafka.ssl.keystore.pasword": "x"}, {})
    assert "'kafka.ssl.keystore.password'" in (caught.value.next_step or "")


KERBEROS = {**SASL, "kafka.sasl.mechanism": "GSSAPI"}
INCOMPLETE = [
    ({**SASL, "kafka.sasl.mechanism": "PLAIN"}, "PLAIN needs 'kafka.sasl.username'"),
    ({**SASL, "kafka.sasl.mechanism": "SCRAM-SHA-256", "kafka.sasl.username": "u"}, "needs 'kafka.sasl.password'"),
    ({**SASL, "kafka.sasl.username": "u", "kafka.sasl.password": "p"}, "which means GSSAPI"),
    ({**KERBEROS, "kafka.sasl.kerberos.principal": "me"}, "without a keytab"),
    (OAUTH, "needs either 'kafka.sasl.oauthbearer.token.endpoint.url' or 'kafka.sasl.oauthbearer.token.provider'"),
    ({**OIDC, "kafka.sasl.oauthbearer.token.provider": "os.getcwd"}, "needs either"),
    ({k: v for k, v in OIDC.items() if "secret" not in k}, "needs 'kafka.sasl.oauthbearer.client.secret'"),
    ({**OAUTH, "kafka.sasl.oauthbearer.token.provider": "no.such.function"}, "cannot be used here.*no"),
    ({**OAUTH, "kafka.sasl.oauthbearer.token.provider": "os.sep"}, "no function"),
    ({**OAUTH, "kafka.sasl.oauthbearer.token.provider": "nothing"}, "cannot be used here"),
    ({**OIDC, "kafka.sasl.oauthbearer.extensions": "auth=x"}, "extensions.*'auth'"),
    ({**OIDC, "kafka.sasl.oauthbearer.extensions": "a\x01b=x"}, "extensions"),
    ({**SERVERS, "kafka.ssl.key.pem": "k"}, "without 'kafka.ssl.certificate.pem'"),
    ({**SERVERS, "kafka.ssl.key.location": "k"}, "without 'kafka.ssl.certificate.location'"),
    (
        {**SERVERS, "kafka.ssl.certificate.location": "c", "kafka.ssl.keystore.certificate.chain": "c"},
        "both the client certificate",
    ),
    ({**SERVERS, "kafka.ssl.ca.location": "c", "kafka.ssl.truststore.certificates": "c"}, "both the trusted"),
    (
        {**SERVERS, "kafka.ssl.crl.location": "c", "kafka.enable.ssl.certificate.verification": "false"},
        "no certificate is verified",
    ),
]


@pytest.mark.parametrize(("given", "said"), INCOMPLETE)
def test_a_login_that_lacks_something_is_refused_before_anything_connects(given: dict[str, str], said: str) -> None:
    """No server is asked: there is none."""
    check_client("owner", given, {})
    with pytest.raises(UsageError, match=said):
        check_settings("owner", client_options(given))
    [finding] = CONNECTOR.sink({**given, "topic": "t"}).preflight(Guarantee.EXACTLY_ONCE)
    assert finding.refuses
    [finding] = CONNECTOR.source({**given, "subscribe": "t"}).preflight()
    assert finding.refuses


@pytest.mark.parametrize(
    "given",
    [
        OIDC,
        KERBEROS,
        {**OAUTH, "kafka.sasl.oauthbearer.token.provider": "os:getcwd"},
        {**SASL, "kafka.sasl.jaas.config": "env:J"},
    ],
)
def test_complete_logins_pass(given: dict[str, str]) -> None:
    check_client("owner", given, {})
    check_complete("owner", client_options(given))


@pytest.mark.parametrize("url", ["ftp://h/t", "https://", "https://h:999999/t", "https://u:p@h/t", "h/t"])
def test_a_token_server_has_an_address(url: str) -> None:
    with pytest.raises(UsageError, match="endpoint") as caught:
        check_client("owner", {**OIDC, "kafka.sasl.oauthbearer.token.endpoint.url": url}, {})
    assert "u:p" not in str(caught.value)


def test_what_librdkafka_cannot_log_in_with_is_refused_where_it_is_needed() -> None:
    for login in ({**KERBEROS}, {**SERVERS, "kafka.ssl.enabled.protocols": "tlsv1.3"}):
        client = client_options({**login})
        assert by_arrow("owner", "auto", client, SOURCE_SETTINGS)
        with pytest.raises(UsageError, match="client is librdkafka, and librdkafka does not have"):
            by_arrow("owner", "librdkafka", client, SOURCE_SETTINGS)
        with pytest.raises(UsageError, match=r"socket\.nagle\.disable.*librdkafka does not have"):
            by_arrow("owner", "auto", {**client, "socket.nagle.disable": "true"}, SOURCE_SETTINGS)


def test_java_logins_are_read() -> None:
    oauth = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
    assert jaas_settings(f'{oauth} clientId=\'a\' clientSecret="b\\"c" scope=d extension_x=y;', "OAUTHBEARER") == {
        "sasl.oauthbearer.client.id": "a",
        "sasl.oauthbearer.client.secret": 'b"c',
        "sasl.oauthbearer.scope": "d",
        "sasl.oauthbearer.extensions": "x=y",
    }
    kerberos = "com.sun.security.auth.module.Krb5LoginModule required"
    found = jaas_settings(f'{kerberos} useKeyTab=true storeKey=true keyTab="/k" principal="me@R";', "GSSAPI")
    assert found == {"sasl.kerberos.keytab": "/k", "sasl.kerberos.principal": "me@R"}
    assert set(found) <= SETTINGS
    for text, mechanism in (
        (f"{oauth} clientId=a;", "PLAIN"), (f"{oauth} hidden;", "OAUTHBEARER"), (f"{kerberos} hidden=1;", "GSSAPI"),
        (f"{oauth} clientId=hidden", "OAUTHBEARER"), ("org.example.Login required hidden=1;", "PLAIN"), ("", "PLAIN"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"sasl\.jaas\.config") as caught:
            jaas_settings(text, mechanism)
        assert "hidden;" not in str(caught.value)


@pytest.fixture
def server() -> Iterator[TokenServer]:
    made = TokenServer()
    yield made
    made.close()
    sasl._known.clear()


def oidc(server: TokenServer, **more: str) -> dict[str, str]:
    given = {"token.endpoint.url": f"{server.url}/token", "client.id": CLIENT, "client.secret": SECRET, **more}
    return {f"sasl.oauthbearer.{name.replace('__', '.')}": value for name, value in given.items()}


def test_a_token_serves_all_connections_until_it_is_renewed(server: TokenServer) -> None:
    first = token_for(oidc(server, scope="kafka"))
    assert token_for(oidc(server, scope="kafka")) is first
    assert server.issued == 1
    assert server.forms == [{"grant_type": ["client_credentials"], "scope": ["kafka"]}]
    assert token_for(oidc(server, scope="other")).text != first.text
    server.lifetime_s = 0.0  # as after four fifths of the lifetime
    token_for(oidc(server))
    issued = server.issued
    token_for(oidc(server))
    assert server.issued == issued + 1


def test_the_lifetime_does_not_depend_on_the_clock(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = token_for(oidc(server))
    now = time.time()
    for hour in (-3600.0, 3600.0):
        monkeypatch.setattr(sasl.time, "time", lambda at=now + hour: at)
        assert token_for(oidc(server)) is first


@pytest.mark.parametrize(
    ("status", "kind"), [(400, CredentialsRefused), (401, CredentialsRefused), (302, CredentialsRefused),
                         (307, CredentialsRefused), (429, NoCredentials), (500, NoCredentials), (503, NoCredentials)],
)  # fmt: skip
def test_what_a_token_server_refuses(server: TokenServer, status: int, kind: type[Exception]) -> None:
    server.fail = [status]
    with pytest.raises(kind, match=f"answered {status}: asked_for; by the test") as caught:
        token_for(oidc(server))
    assert type(caught.value) is kind
    assert SECRET not in str(caught.value)
    assert len(server.forms) == 1  # no redirect was followed, with the secret in its header
    assert token_for(oidc(server)).text


def test_no_token_server_and_no_token() -> None:
    nobody = {"sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1/t"}
    login = {"sasl.oauthbearer.client.id": "a", "sasl.oauthbearer.client.secret": "b"}
    with pytest.raises(NoCredentials, match="no answer from the token server"):
        token_for({**nobody, **login})


def _claims(config: str) -> str:
    server = TokenServer()
    server.lifetime_s = float(config)
    try:
        return server.token()
    finally:
        server.close()


def _given(config: str) -> object:
    return {
        "text": "abc", "none": None, "pair": ("abc", time.time() + 100), "past": ("abc", time.time() - 1),
        "four": ("abc", time.time() + 9, "me", {"team": "x"}), "line": ("a\nb", time.time() + 100),
        "bad": ("abc", time.time() + 9, "me", {"auth": "x"}), "number": 7,
    }[config]  # fmt: skip


def _raises(config: str) -> str:
    raise ValueError(config)


def provided(function: str, config: str) -> dict[str, str]:
    path = f"{__name__}.{function}"
    return {"sasl.oauthbearer.token.provider": path, "sasl.oauthbearer.config": config}


def test_a_function_gives_tokens() -> None:
    sasl._known.clear()
    assert token_for(provided("_given", "text")).text == "abc"
    assert token_for(provided("_given", "text")).fresh_until_s <= time.monotonic()  # asked for each connection
    assert token_for(provided("_given", "pair")).left_s > 50
    assert token_for(provided("_given", "four")).extensions == {"team": "x"}
    assert 100 < token_for(provided("_claims", "300")).left_s <= 301  # the token says it itself
    for config, error in (
        ("none", UsageError), ("number", UsageError), ("bad", UsageError), ("past", NoCredentials),
        ("line", CredentialsRefused),
    ):  # fmt: skip
        with pytest.raises(error):
            token_for(provided("_given", config))
    with pytest.raises(NoCredentials, match="raised ValueError: no luck"):
        token_for(provided("_raises", "no luck"))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_pem_text_in_every_spelling(authority: Authority) -> None:
    one_line = " ".join(authority.pem.split("\n"))
    for text in (authority.pem, one_line, authority.pem.replace("\n", "\\n"), authority.pem.strip()):
        assert pem(text) == authority.pem
    assert pem("") == ""
    for bad in ("nothing", "-----BEGIN CERTIFICATE----- abc"):
        with pytest.raises(UsageError, match="TLS_FILES"):
            build_context({"ssl.ca.pem": bad})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ssl.ca.location", "/no/such"), ("ssl.crl.location", "ca.pem"), ("ssl.crl.location", "/no/such"),
        ("ssl.keystore.location", "ca.pem"), ("ssl.truststore.location", "ca.pem"),
        ("ssl.certificate.location", "ca.pem"),
        ("ssl.cipher.suites", "NO_SUCH"), ("ssl.certificate.pem", "x"), ("ssl.ca.pem", "x"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / "ca.pem").write_text(authority.pem)
    with pytest.raises(UsageError, match="TLS_FILES"):
        Tls({name: str(tmp_path / value) if value == "ca.pem" else value})


def test_a_store_with_another_password_is_refused_without_showing_it(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "me.p12").write_bytes(authority.issue("me").store("hunter2"))
    store = {"ssl.keystore.location": str(tmp_path / "me.p12")}
    assert Tls({**store, "ssl.keystore.password": "hunter2"}).context()
    for wrong in ({"ssl.keystore.password": "hunter3"}, {}):
        with pytest.raises(UsageError, match="TLS_FILES") as caught:
            Tls({**store, **wrong})
        assert "hunter" not in str(caught.value)
    (tmp_path / "empty.p12").write_bytes(authority.trust_store("hunter2"))
    with pytest.raises(UsageError, match="no key with its certificate"):
        Tls({"ssl.keystore.location": str(tmp_path / "empty.p12"), "ssl.keystore.password": "hunter2"})


def test_replaced_files_are_used_and_half_written_ones_are_not(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ca.pem").write_text(authority.pem)
    crl = tmp_path / "crl.pem"
    crl.write_text(authority.revoked())
    made = Tls({"ssl.ca.location": str(tmp_path / "ca.pem"), "ssl.crl.location": str(crl)})
    first = made.context()
    assert first.verify_flags & ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    assert made.context() is first
    crl.write_text("-----BEGIN X509 CRL-----\nhalf")
    os.utime(crl, ns=(1, 1))
    with caplog.at_level(logging.WARNING, "delivered.kafka"):
        assert made.context() is first
    assert "stay in use" in caplog.text
    crl.unlink()
    assert made.context() is first
    crl.write_text(authority.revoked(authority.issue("x")))
    os.utime(crl, ns=(2, 2))
    second = made.context()
    assert second is not first
    assert made.context() is second


def test_versions_of_tls() -> None:
    check_client("owner", {**SASL, "kafka.ssl.enabled.protocols": "TLSv1.3, tlsv1.2"}, {})
    for old in ("TLSv1", "TLSv1.1", "SSLv3", "", "TLSv1.2,TLSv1.1", "1.3"):
        with pytest.raises(UsageError, match=r"ssl\.enabled\.protocols"):
            check_client("owner", {**SASL, "kafka.ssl.enabled.protocols": old}, {})
    context = build_context({"ssl.enabled.protocols": "TLSv1.3"})
    assert (context.minimum_version, context.maximum_version) == (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3)

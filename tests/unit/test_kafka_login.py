"""What `kafka.security.protocol` and its like may be: a misspelt word must not turn TLS or a login off."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
import yaml

from delivered.clients.kafka import Closed, NotSent, check_client, client_options, protocol_of, resolved
from delivered.clients.kafka.channel import security, unreachable
from delivered.connectors.kafka import CONNECTOR, SourceOptions
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.pipeline.definition import Definition
from delivered.pipeline.facts import gather

PLAIN = {"kafka.security.protocol": "SASL_PLAINTEXT", "kafka.sasl.mechanism": "PLAIN"}
SERVERS = {"kafka.bootstrap.servers": "broker.example:9092"}


def client(**given: str) -> dict[str, str]:
    values = {**SERVERS, **{f"kafka.{name.replace('_', '.')}": value for name, value in given.items()}}
    check_client("owner", values, {})
    return resolved(client_options(values))


@pytest.mark.parametrize(
    ("written", "tls", "sasl"),
    [("PLAINTEXT", False, False), ("ssl", True, False), ("sasl_plaintext", False, True), ("Sasl_Ssl", True, True)],
)
def test_the_four_protocols_in_any_case(written: str, tls: bool, sasl: bool) -> None:
    found = security(client(security_protocol=written, **({"sasl_mechanism": "plain"} if sasl else {})))
    assert (found.tls is not None, found.mechanism) == (tls, "PLAIN" if sasl else None)


@pytest.mark.parametrize(
    ("written", "suggested"),
    [
        ("TLS", "SSL"), ("SASL_SLL", "SASL_SSL"), ("SASL_TLS", "SASL_SSL"), ("SASL", "SASL_SSL"),
        ("sasl-ssl", "SASL_SSL"), ("SSLv3", "SSL"), ("PLAIN", "SASL_SSL"),
        ("", "SASL_SSL"), ("none", "SASL_SSL"), ("SASL_SSL;", "SASL_SSL"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", ["source", "sink"])
def test_any_other_protocol_is_refused_where_options_are_parsed(written: str, suggested: str, part: str) -> None:
    given = {**SERVERS, "kafka.security.protocol": written, "kafka.sasl.mechanism": "PLAIN"}
    with pytest.raises(UsageError, match=r"security\.protocol.*PLAINTEXT") as caught:
        if part == "source":
            SourceOptions.parse({**given, "subscribe": "t"})
        else:
            CONNECTOR.sink({**given, "topic": "t"})
    assert f'"{suggested}"' in (caught.value.next_step or "")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("ssl.endpoint.identification.algorithm", "htps"),
        ("ssl.endpoint.identification.algorithm", "false"),
        ("enable.ssl.certificate.verification", "flase"),
        ("enable.ssl.certificate.verification", "no"),
        ("sasl.mechanism", "SCRAM-SHA256"),
        ("sasl.mechanisms", "PLIAN"),
        ("isolation.level", "read-committed"),
        ("acks", "al"),
        ("request.required.acks", "al"),
        ("compression.type", "lz5"),
        ("ssl.keystore.type", "P12"),
    ],
)
def test_no_enumeration_takes_another_word(name: str, written: str) -> None:
    with pytest.raises(UsageError, match=name.replace(".", r"\.")) as caught:
        check_client("owner", {**SERVERS, "kafka.security.protocol": "SASL_SSL", f"kafka.{name}": written}, {})
    assert caught.value.code == "DELIVERED_OPTION_VALUE"


def test_a_reference_is_checked_where_it_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOCOL", "TLS")
    with pytest.raises(UsageError, match=r"security\.protocol"):
        client(security_protocol="env:PROTOCOL")
    monkeypatch.setenv("PROTOCOL", "ssl")
    assert security(client(security_protocol="env:PROTOCOL")).tls is not None
    monkeypatch.setenv("PROTOCOL", "PLAINTEXT")
    with pytest.raises(UsageError, match="nothing would log in"):
        client(security_protocol="env:PROTOCOL", sasl_mechanism="PLAIN")


def test_settings_that_the_protocol_leaves_unused_are_refused() -> None:
    secret = {"sasl_username": "me", "sasl_password": "env:P"}
    logins = (
        {"sasl_mechanism": "GSSAPI"}, {"sasl_mechanism": "PLAIN", "security_protocol": "SSL"}, secret,
        {**secret, "security_protocol": "SSL"}, {"sasl_kerberos_keytab": "/k"},
    )  # fmt: skip
    for login in logins:
        with pytest.raises(UsageError, match="nothing would log in"):
            client(**login)
    for plain in ("PLAINTEXT", "SASL_PLAINTEXT"):
        with pytest.raises(UsageError, match="nothing would be encrypted"):
            client(ssl_ca_location="/ca.pem", security_protocol=plain)
        client(enable_ssl_certificate_verification="false", ssl_endpoint_identification_algorithm="")
    for tls in ("ssl_endpoint_identification_algorithm", "ssl_truststore_password", "ssl_cipher_suites"):
        with pytest.raises(UsageError, match="nothing would be encrypted"):
            client(**{tls: "https"})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kafka.sasl.mechanism": "PLAIN"}, {"kafka.sasl.mechanisms": "SCRAM-SHA-256"}),
        ({"kafka.ssl.ca.location": "/a"}, {"kafka.ssl.truststore.location": "/b", "kafka.ssl.truststore.type": "PEM"}),
        ({"kafka.acks": "all"}, {"kafka.request.required.acks": "1"}),
        ({"kafka.max.request.size": "1000"}, {"kafka.message.max.bytes": "1001"}),
        ({"kafka.compression.type": "gzip"}, {"compression": "lz4"}),
    ],
)
def test_a_setting_with_two_names_has_one_value(first: dict[str, str], second: dict[str, str]) -> None:
    given = {**SERVERS, "topic": "t", "kafka.security.protocol": "SASL_SSL"}
    CONNECTOR.sink({**given, **first}), CONNECTOR.sink({**given, **second})
    with pytest.raises(UsageError, match="are the same option"):
        CONNECTOR.sink({**given, **first, **second})


def test_trusted_certificates_alone_mean_tls_for_every_client() -> None:
    given = {**SERVERS, "kafka.ssl.truststore.location": "/ca.pem", "kafka.ssl.truststore.type": "pem"}
    assert protocol_of(client_options(given)) == "SSL"
    assert protocol_of(client_options(SERVERS)) == "PLAINTEXT"


def test_certificate_and_name_are_verified_unless_the_words_say_no() -> None:
    found = security(client(security_protocol="SSL")).tls
    assert found is not None and (found.verify_mode, found.check_hostname) == (ssl.CERT_REQUIRED, True)
    anybody = security(client(security_protocol="SSL", ssl_endpoint_identification_algorithm="NONE")).tls
    assert anybody is not None and (anybody.verify_mode, anybody.check_hostname) == (ssl.CERT_REQUIRED, False)
    nothing = security(client(security_protocol="SSL", enable_ssl_certificate_verification="FALSE")).tls
    assert nothing is not None and nothing.verify_mode == ssl.CERT_NONE


def test_a_protocol_that_reaches_the_client_unchecked_opens_no_connection() -> None:
    with pytest.raises(InvariantBroken, match="KAFKA_PROTOCOL"):
        security({"security.protocol": "TLS"})


@pytest.mark.parametrize(
    ("system", "given", "said"),
    [
        ("kafka", {**SERVERS, "topic": "t", **PLAIN},
         "password in clear to broker.example"),
        ("kafka", {**SERVERS, "topic": "t", "kafka.security.protocol": "SSL",
                   "kafka.enable.ssl.certificate.verification": "False"}, "but the server is not verified"),
        ("kafka", {**SERVERS, "topic": "t", "kafka.security.protocol": "SSL",
                   "kafka.ssl.endpoint.identification.algorithm": "none"}, "its name is not verified"),
        ("postgres", {"url": "postgresql://db.example/shop?sslmode=require", "dbtable": "t"}, "not verified"),
        ("postgres", {"url": "postgresql://db.example/shop?ssl=true", "dbtable": "t"}, "not verified"),
        ("postgres", {"url": "postgresql://db.example/shop?sslmode=verify-ca", "dbtable": "t"}, "its name is not"),
        ("delta", {"path": "s3://b/t", "storage.allow_invalid_certificates": "true"}, "is not verified"),
        ("delta", {"path": "s3://b/t", "storage.aws_endpoint_url": "http://db.example:9000"}, "in clear to db.example"),
        ("iceberg", {"table": "a.b", "catalog.uri": "sqlite:///c.db", "catalog.s3.endpoint": "http://db.example:9000"},
         "in clear to db.example (option 'catalog.s3.endpoint')"),
        ("mysql", {"url": "mysql://db.example/shop?ssl_verify_cert=false", "dbtable": "t"}, "the server is"),
        ("mysql", {"url": "mysql://db.example/shop?ssl_ca=c&ssl_verify_identity=false", "dbtable": "t"}, "its name is"),
        ("postgres", {"url": "postgresql://db.example/shop", "dbtable": "t"}, "sslmode=prefer"),
        ("postgres", {"url": "postgresql:///shop?host=db.example&sslmode=disable", "dbtable": "t"}, "sslmode=disable"),
        ("postgres", {"url": "postgresql://db.example/shop?requiressl=0", "dbtable": "t"}, "sslmode=prefer"),
        ("mysql", {"url": "mysql://db.example/shop", "dbtable": "t"}, "not required to be encrypted"),
        ("mysql", {"url": "mysql://db.example/shop?&", "dbtable": "t"}, "not required to be encrypted"),
        ("iceberg", {"table": "a.b", "catalog.uri": "http://db.example:8181", "catalog.credential": "env:C"},
         "in clear to db.example"),
        ("rabbitmq", {"url": "amqp://me@mq.example", "password": "env:P", "ledger": "l"}, "in clear to mq.example"),
    ],
)  # fmt: skip
def test_the_plan_warns_of_what_travels_in_clear(system: str, given: dict[str, str], said: str, tmp_path: Path) -> None:
    def warnings(options: dict[str, str]) -> str:
        file = tmp_path / "p.yaml"
        sinks = [{"format": system, **options}]
        declared = {"pipeline": "p", "guarantee": "at_least_once", "checkpoint": str(tmp_path / "c"), "sinks": sinks}
        file.write_text(yaml.safe_dump({**declared, "source": {"format": "spark:rate"}}))
        request = gather(Definition.from_file(file), None, offline=True, takeover=False)
        return " ".join(f.message for f in request.findings)

    assert said in warnings(given)
    here = {"db.example": "localhost", "mq.example": "127.0.0.1", "broker.example": "[::1]"}
    near = {k: next((v.replace(far, h) for far, h in here.items() if far in v), v) for k, v in given.items()}
    assert near == given or not warnings(near)


def test_the_suggestion_of_an_option_is_the_nearest_word() -> None:
    with pytest.raises(DeliveredError) as caught:
        CONNECTOR.sink({**SERVERS, "topic": "t", "client": "librdkafa"})
    assert '"librdkafka"' in str(caught.value)


def test_a_broker_that_dies_in_the_dialog_has_refused_no_login() -> None:
    """It closed the connection, and listens no more; one that listens on, and had answered, expects something else."""
    for stays, code in ((False, "DELIVERED_KAFKA_UNREACHABLE"), (True, "DELIVERED_KAFKA_CREDENTIALS")):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            error = Closed(f"127.0.0.1:{port}: closed by the broker", answered=True)
            if not stays:
                listener.close()
            assert unreachable(f"127.0.0.1:{port}", error).code == code
            if stays:
                silent = unreachable(f"127.0.0.1:{port}", NotSent("no response within 3 s"))
                assert silent.code == "DELIVERED_KAFKA_NO_ANSWER" and silent.may_come_back

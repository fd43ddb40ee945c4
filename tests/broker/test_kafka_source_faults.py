"""Faults of the Kafka source: no broker, a broker that dies and returns, TLS, passwords, permissions."""

from __future__ import annotations

import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)
from tests.broker import source_help
from tests.broker.source_help import positions, produce, read_all, read_range, source, values
from tests.support.sweeps import KAFKA_CLIENTS

from delivered.clients.kafka import librdkafka
from delivered.connectors.kafka import reader
from delivered.contract.source import Slice
from delivered.model import patience
from delivered.model.errors import Unreachable, UsageError


@pytest.fixture(params=KAFKA_CLIENTS, autouse=True)
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(source_help.DEFAULTS, "client", request.param)
    return str(request.param)


@pytest.fixture
def nobody() -> Iterator[SimpleNamespace]:
    """An address that refuses connections: it is bound, so that no other test's server can start there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield SimpleNamespace(bootstrap=f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_broker_that_is_down_is_one_clear_error_in_time(
    nobody: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default within 15 s: tests/unit/test_limits.py."""
    monkeypatch.setattr(patience, "CONNECT_TIMEOUT_S", 1.0)
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        sources = [source(nobody, subscribe="t") for _ in range(3)]
        acts = [sources[0].driver().initial, sources[1].driver().batch]
        asked, found = [pool.submit(act) for act in acts], pool.submit(sources[2].preflight)
    for one in asked:
        with pytest.raises(Unreachable, match=rf"KAFKA_UNREACHABLE.*{nobody.bootstrap}.*refused.*bootstrap\.servers"):
            one.result()
    assert found.result()[0].code == "KAFKA_UNREACHABLE"
    assert time.monotonic() - started < 15


def test_a_broker_killed_and_restarted_in_mid_read(mortal_kafka: Any) -> None:
    kafka = mortal_kafka
    topic = kafka.topic(1)
    produce(kafka, topic, (b"%08d" % i + bytes(992) for i in range(60_000)))
    src = source(kafka, subscribe=topic)
    driver = src.driver()
    start, end = driver.batch()
    piece = driver.slices(start, end)[0]
    seen: list[int] = []
    for batch in src.read(piece):
        if not seen:
            kafka.broker.kill()
            restarter = threading.Timer(1.0, kafka.broker.restart)
            restarter.start()
        seen += batch.column("offset").to_pylist()
    restarter.join()
    assert seen == list(range(60_000))
    driver.close()


@pytest.mark.matrix  # a task's client does, above, and what waits is the same
def test_the_drivers_client_lives_through_a_kill_of_the_broker(mortal_kafka: Any) -> None:
    kafka = mortal_kafka
    topic = kafka.topic(1)
    produce(kafka, topic, (b"%d" % i for i in range(60_000)))
    src = source(kafka, subscribe=topic)
    driver = src.driver()
    _, end = driver.batch()
    kafka.broker.kill()
    restarter = threading.Timer(1.0, kafka.broker.restart)
    restarter.start()
    assert positions(driver.latest(end, None)) == {topic: {"0": 60_000}}
    restarter.join()
    produce(kafka, topic, [b"after"])
    last = driver.latest(end, None)
    assert values(read_range(src, driver, end, last)) == [b"after"]
    driver.close()


@pytest.mark.matrix
def test_a_broker_that_stays_away_in_mid_read_is_an_error_and_no_hang(
    mortal_kafka: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SOURCE_PATIENCE_S", 3.0)
    monkeypatch.setattr(reader, "_STALL_LOOK_S", 1.0)
    kafka = mortal_kafka
    topic = kafka.topic(1)
    produce(kafka, topic, (bytes(1000) for _ in range(60_000)))
    reading = source(kafka, subscribe=topic).read(Slice((topic, 0, 0, 60_000)))
    rows = next(reading).num_rows
    kafka.broker.kill()
    started = time.monotonic()
    with pytest.raises(Unreachable, match=rf"KAFKA_STALLED.*{topic}-0"):
        for batch in reading:
            rows += batch.num_rows
    assert rows < 60_000
    assert time.monotonic() - started < 30


def _read_tls(kafka: Any, protocol: str, topic: str, **options: str) -> list[bytes | None]:
    place = SimpleNamespace(bootstrap=kafka.broker.listeners[protocol])
    given = {f"kafka.{k.replace('_', '.')}": v for k, v in options.items()}
    return values(read_all(source(place, {"kafka.security.protocol": protocol, **given}, subscribe=topic)))


@pytest.mark.matrix
def test_tls_and_scram_and_permissions(
    new_kafka: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One broker for everything, as it takes seconds to start."""
    caplog.set_level(logging.DEBUG)
    password = 'p=a"s;s w0rd'
    kafka = new_kafka(tls=True, scram={"alice": password, "bob": "bobs"})
    topic = kafka.topic(1)
    produce(kafka, topic, [b"secret"])
    admin, ca = kafka.admin(), str(kafka.broker.certificate)
    rules = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:alice", "*", what, AclPermissionType.ALLOW)
        for kind, name, what in [
            (ResourceType.TOPIC, topic, AclOperation.READ),
            (ResourceType.TOPIC, topic, AclOperation.DESCRIBE),
        ]
    ]
    for made in admin.create_acls(rules).values():
        made.result(20)
    monkeypatch.setenv("ALICE_PASSWORD", password)
    (tmp_path / "password").write_text(password + "\n")
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required"
    quoted = password.replace('"', '\\"')
    (tmp_path / "jaas").write_text(f'{login} username="alice" password="{quoted}";')
    scram = {"sasl_mechanism": "SCRAM-SHA-512"}
    assert _read_tls(kafka, "SASL_SSL", topic, **scram, ssl_ca_location=ca, sasl_username="alice",
                     sasl_password="env:ALICE_PASSWORD") == [b"secret"]  # fmt: skip
    # As users of Spark's own source have it.
    assert _read_tls(kafka, "SASL_SSL", topic, **scram, ssl_truststore_type="PEM", ssl_truststore_location=ca,
                     sasl_jaas_config=f"file:{tmp_path / 'jaas'}") == [b"secret"]  # fmt: skip
    assert _read_tls(kafka, "SASL_PLAINTEXT", topic, **scram, sasl_username="alice",
                     sasl_password=f"file:{tmp_path / 'password'}") == [b"secret"]  # fmt: skip
    assert _read_tls(kafka, "SSL", topic, ssl_ca_location=ca) == [b"secret"]
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"CREDENTIALS_REFUSED.*kafka\.sasl"):
        _read_tls(kafka, "SASL_PLAINTEXT", topic, **scram, sasl_username="alice", sasl_password="wrong-one")
    with pytest.raises(Unreachable, match=r"CREDENTIALS_REFUSED"):
        _read_tls(kafka, "SSL", topic)  # an untrusted certificate
    with pytest.raises(UsageError, match=rf"(NOT_PERMITTED|TOPIC_MISSING).*{topic}"):
        _read_tls(kafka, "SASL_PLAINTEXT", topic, **scram, sasl_username="bob", sasl_password="bobs")
    assert time.monotonic() - started < 45
    with pytest.raises(UsageError, match=r"SECRET_MISSING.*'NO_SUCH_VARIABLE'"):
        _read_tls(kafka, "SASL_PLAINTEXT", topic, **scram, sasl_username="a", sasl_password="env:NO_SUCH_VARIABLE")
    with pytest.raises(UsageError, match=r"ssl\.truststore\.location.*JKS.*keytool"):
        _read_tls(kafka, "SSL", topic, ssl_truststore_location="/x.jks")
    # May describe, but not read.
    for made in admin.create_acls(
        [
            AclBinding(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:bob", "*",
                       AclOperation.DESCRIBE, AclPermissionType.ALLOW)
        ]
    ).values():  # fmt: skip
        made.result(20)
    with pytest.raises(UsageError, match=rf"NOT_PERMITTED.*{topic}"):
        _read_tls(kafka, "SASL_PLAINTEXT", topic, **scram, sasl_username="bob", sasl_password="bobs")
    # Secrets are nowhere to be seen.
    place = SimpleNamespace(bootstrap=kafka.broker.listeners["SASL_PLAINTEXT"])
    src = source(
        place,
        {"kafka.security.protocol": "SASL_PLAINTEXT", "kafka.sasl.mechanism": "SCRAM-SHA-512"},
        **{"kafka.sasl.username": "alice", "kafka.sasl.password": "in-clear-text"},
        subscribe=topic,
    )
    with pytest.raises(Unreachable) as refused:
        src.driver().initial()
    out = capfd.readouterr()
    shown = [repr(src), repr(src.capability()), str(refused.value), caplog.text, out.out, out.err]
    for secret in ("in-clear-text", password, quoted, "wrong-one"):
        assert not any(secret in text for text in shown)
    assert password not in repr(
        pickle.dumps(source(place, {"kafka.sasl.password": "env:ALICE_PASSWORD"}, subscribe="t"))
    )
    with pytest.raises(UsageError, match=r"OPTION_UNKNOWN.*kafka\.no\.such\.setting"):
        source(kafka, {"kafka.no.such.setting": "1"}, subscribe=topic).driver().initial()


def test_librdkafkas_own_words_go_to_logging(
    nobody: SimpleNamespace, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    consumer = librdkafka.Consumer("owner", {"bootstrap.servers": nobody.bootstrap}, headers=False)
    consumer.assign(("t", 0), 0)
    deadline = time.monotonic() + 60
    with caplog.at_level(logging.DEBUG, "delivered.kafka.client"):
        while "refused" not in caplog.text:
            consumer.fetch(1, 0.2)
            assert time.monotonic() < deadline
    consumer.close()
    assert "refused" not in capfd.readouterr().err

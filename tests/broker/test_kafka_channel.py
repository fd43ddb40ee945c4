"""Connections to brokers: requests side by side, threads, forks, broken connections."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import MetadataRequest
from tests.broker.source_help import produce

from delivered.clients.kafka import NoAnswer, NotSent, Rejected
from delivered.clients.kafka.channel import Channel, Security, security
from delivered.clients.kafka.protocol import Wire


def _ask_for(topic: str) -> Any:
    return MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False)


def test_requests_follow_each_other_and_threads_share_a_connection(kafka: Any) -> None:
    topics = [kafka.topic(n) for n in (1, 2, 3)]
    host, port = kafka.bootstrap.split(":")
    channel = Channel(host, int(port), Security(), 10)
    assert channel.features["transaction.version"] >= 1
    waiting = [channel.post(_ask_for(topics[i % 3])) for i in range(60)]
    # Waiting for the last one reads all before it.
    assert waiting[-1].ready(30)
    assert all(p.ready() for p in waiting)
    assert [len(p.answer(30).topics[0].partitions) for p in waiting] == [1, 2, 3] * 20

    def ask(i: int) -> int:
        return len(channel.post(_ask_for(topics[i % 3])).answer(30).topics[0].partitions)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(300))) == [1, 2, 3] * 100
    assert channel.usable()
    channel.close()
    assert not channel.usable()
    with pytest.raises(NotSent):
        channel.post(_ask_for(topics[0]))


def test_a_forked_process_opens_its_own_connections(kafka: Any) -> None:
    topic = kafka.topic(2)
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    assert len(wire.topic(topic).partitions) == 2
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = len(wire.topic(topic).partitions) == 2
            wire.close()
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    before = wire.channel()
    assert len(wire.topic(topic).partitions) == 2
    assert wire.channel() is before
    wire.close()


class _Silent:
    """A server that accepts connections and answers with these bytes, or not at all."""

    def __init__(self, answer: bytes = b"") -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._answer = answer
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._held.append(connection)
            connection.sendall(self._answer)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # ends accept(), as close() would not
        self._thread.join()
        self._socket.close()
        for one in self._held:
            one.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\2xx", b"\0\0\0\4\x7f\0\0\0"])
def test_a_server_that_is_no_broker_is_no_connection(answer: bytes) -> None:
    with closing(_Silent(answer)) as server, pytest.raises(NotSent):
        Channel("127.0.0.1", server.port, Security(), 0.3)


def _fetch_of_nothing(topic: str) -> Any:
    """A request that the broker, whose partition holds one record, answers after a minute."""
    place = FetchRequest.FetchTopic.FetchPartition(partition=0, fetch_offset=1, partition_max_bytes=1)
    return FetchRequest(
        max_wait_ms=60_000,
        min_bytes=1,
        max_version=12,
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=[place])],
    )


@pytest.mark.matrix  # test_kafka_two_phase.py kills a broker with requests in flight
def test_requests_in_flight_fail_when_the_connection_breaks(mortal_kafka: Any) -> None:
    kafka = mortal_kafka
    topic = kafka.topic(1)
    produce(kafka, topic, [b"x"])  # a partition whose leader has not begun is answered with an error at once
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    channel = wire.channel(wire.leader(topic, 0))
    waits = _fetch_of_nothing(topic)
    pending = [channel.post(waits) for _ in range(3)]
    assert not pending[0].ready(0.05)
    kafka.broker.kill()
    for one in pending:
        with pytest.raises(NoAnswer):
            one.answer(30)
    with pytest.raises(NotSent):
        wire.ask(_ask_for(topic))
    kafka.broker.restart()
    assert wire.patiently(lambda: wire.topic(topic)).error_code == 0
    wire.close()


@pytest.mark.matrix  # test_kafka_source_faults.py reads over TLS, with passwords
def test_tls_and_passwords(new_kafka: Any) -> None:
    kafka = new_kafka(tls=True, scram={"alice": "secret"})
    topic = kafka.topic(1)
    produce(kafka, topic, [b"x"])
    listeners, ca = kafka.broker.listeners, str(kafka.broker.certificate)
    scram = {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "alice"}

    def connect(protocol: str, **more: str) -> Channel:
        host, port = listeners[protocol].split(":")
        return Channel(host, int(port), security({"security.protocol": protocol, **more}), 10)

    for protocol, settings in (
        ("SSL", {"ssl.ca.location": ca}),
        ("SASL_PLAINTEXT", {**scram, "sasl.password": "secret"}),
        ("SASL_SSL", {**scram, "sasl.password": "secret", "ssl.ca.location": ca}),
    ):
        channel = connect(protocol, **settings)
        waiting = [channel.post(MetadataRequest(topics=None)) for _ in range(20)]
        assert {len(p.answer(30).brokers) for p in waiting} == {1}
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda _, c=channel: c.post(MetadataRequest(topics=None)).answer(30), range(40))
            assert {len(a.brokers) for a in answers} == {1}
        channel.close()
    with pytest.raises(Rejected) as wrong:
        connect("SASL_PLAINTEXT", **scram, **{"sasl.password": "wrong-one"})
    assert not wrong.value.tls
    assert "wrong-one" not in str(wrong.value)
    with pytest.raises(Rejected) as untrusted:
        connect("SSL")
    assert untrusted.value.tls
    started = time.monotonic()
    with pytest.raises(NotSent):
        channel = connect("SASL_PLAINTEXT", **{"security.protocol": "SSL", "ssl.ca.location": ca})
    assert time.monotonic() - started < 15

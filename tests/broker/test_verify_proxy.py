"""The lossy network between real clients and a real broker."""

from __future__ import annotations

import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from tests.support.servers import Kafka

from delivered_lab.verify.proxy import API_KEYS, Api, Fired, KafkaProxy, NetworkFault, Rule
from delivered_lab.verify.systems.kafka import Topic
from delivered_lab.verify.workloads import WORKLOADS, records


@pytest.fixture
def fired() -> list[Fired]:
    return []


@pytest.fixture
def proxy(kafka: Kafka, fired: list[Fired]) -> Iterator[KafkaProxy]:
    found = KafkaProxy(kafka.bootstrap, fired.append)
    yield found
    found.close()


@pytest.fixture
def topic(kafka: Kafka) -> Topic:
    found = Topic(kafka.bootstrap, f"proxied-{uuid.uuid4().hex[:8]}")
    found.create()
    return found


def transactional(proxy: KafkaProxy, **config: Any) -> Producer:
    settings = {"bootstrap.servers": proxy.bootstrap, "transactional.id": f"delivered.px.s.{uuid.uuid4().hex}"}
    producer = Producer(settings | config | {"log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    return producer


def test_clients_are_led_back_to_the_proxy_and_lost_replies_are_sent_again(
    proxy: KafkaProxy, topic: Topic, fired: list[Fired]
) -> None:
    proxy.add(Rule(Api.PRODUCE, NetworkFault.LOSE_REPLY, times=2), Rule(Api.PRODUCE, NetworkFault.LOSE_REQUEST, skip=3))
    sent = records(WORKLOADS["keyed"], 1, 300)
    Topic(proxy.bootstrap, topic.name).send(sent)
    assert sorted(f.rule for f in fired) == ["lose_reply:produce"] * 2 + ["lose_request:produce"][: len(fired) - 2]
    assert proxy.frames["produce"] > 2
    assert sorted(r.value for r in topic.read()) == sorted(r.value for r in sent)


@pytest.mark.parametrize("api", [Api.METADATA, Api.FIND_COORDINATOR, Api.DESCRIBE_CLUSTER, Api.PRODUCE, Api.FETCH])
def test_no_reply_names_the_broker_itself(api: Api) -> None:
    """A broker that is not the leader answers Produce and Fetch with the leader's address. After a topic's creation
    this is too brief to wait for, so the frames are handwritten."""
    key = next(k for k, a in API_KEYS.items() if a is api)
    with socket.create_server(("127.0.0.1", 0)) as broker:
        port = int(broker.getsockname()[1])

        def answer() -> None:
            connection, _ = broker.accept()
            with connection:
                request = connection.recv(1024)
                named = request[8:12] + b"\x0a127.0.0.1" + struct.pack(">i", port) + b"\x00"
                connection.sendall(struct.pack(">i", len(named)) + named)

        answering = threading.Thread(target=answer)
        answering.start()
        proxy = KafkaProxy(f"127.0.0.1:{port}")
        try:
            mine = int(proxy.bootstrap.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", mine), 10) as client:
                frame = struct.pack(">hhih", key, 12, 7, 1) + b"c"
                client.sendall(struct.pack(">i", len(frame)) + frame)
                reply = client.makefile("rb").read(4 + 4 + 10 + 4 + 1)
        finally:
            proxy.close()
            answering.join()
    assert reply[8:-1] == b"\x0a127.0.0.1" + struct.pack(">i", mine)


def test_a_lost_reply_means_that_the_broker_did_the_work(proxy: KafkaProxy, topic: Topic, fired: list[Fired]) -> None:
    producer = transactional(proxy, **{"socket.timeout.ms": 5000})
    producer.produce(topic.name, b"v", partition=0)
    producer.flush(10)
    assert topic.open_transactions("px")
    proxy.add(Rule(Api.END_TXN, NetworkFault.LOSE_REPLY))
    producer.commit_transaction(20)
    assert [f.api for f in fired] == ["end_txn"]
    assert [r.value for r in topic.read()] == ["v"]


def test_a_late_request_arrives_although_its_connection_broke(
    proxy: KafkaProxy, topic: Topic, fired: list[Fired]
) -> None:
    producer = transactional(proxy)
    producer.produce(topic.name, b"v", partition=0)
    producer.flush(10)
    proxy.add(
        Rule(Api.END_TXN, NetworkFault.LATE_REQUEST, seconds=0.5),
        Rule(Api.END_TXN, NetworkFault.LOSE_REQUEST, times=99),
    )
    with pytest.raises(KafkaException):
        producer.commit_transaction(0.4)
    deadline = time.monotonic() + 120
    while not topic.read():
        assert time.monotonic() < deadline, "the late EndTxn never arrived"
    assert fired[0].rule == "late_request:end_txn"


def test_in_a_black_hole_nothing_arrives_and_afterwards_all_does(proxy: KafkaProxy, topic: Topic) -> None:
    producer = Producer({"bootstrap.servers": proxy.bootstrap, "log_level": 0})
    producer.produce(topic.name, b"before", partition=0)
    assert producer.flush(20) == 0
    with proxy.black_hole():
        producer.produce(topic.name, b"after", partition=0)
        assert producer.flush(1) == 1
    assert producer.flush(30) == 0
    assert [r.value for r in topic.read()] == ["before", "after"]
    assert proxy.reset_all() > 0

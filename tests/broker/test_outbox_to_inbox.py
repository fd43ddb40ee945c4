"""An outbox, an at_least_once pipeline to Kafka and a consumer with an inbox: each effect once, whoever is killed."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Message
from tests.broker.outbox_help import shop
from tests.broker.send_help import writer
from tests.broker.sink_help import wait_for
from tests.kafka_tools import produce, read_committed
from tests.support.zygote import Zygote

from delivered.model.errors import BadRecord
from delivered.model.fingerprint import Fingerprint
from delivered.patterns.inbox import consume, ddl, from_kafka
from delivered.pipeline.registry import find_sink
from delivered_lab.verify.applications import BROKERS, run_process

MESSAGES = 30
ORDERS = "outbox.event.order"
POINTS = ["write.flush:after@batch=1", "commit.record:before@batch=3", "log:before@batch=5", "log:after@batch=7"]
"""Of the relay. Killed between the flush and the record, it sends the batch again."""
KILLS = [("before", 4), ("in", 9), ("in_late", 14), ("after", 19)]
"""Of the consumer, at a message."""


@pytest.mark.matrix  # test_outbox_kill.py and test_outbox_inbox.py kill either end
@pytest.mark.parametrize("variant", ["", "coordinates", "no_inbox"])
def test_an_at_least_once_pipeline_and_an_inbox_give_each_effect_once(
    variant: str, request: pytest.FixtureRequest, kafka: Any, tmp_path: Path, zygote: Zygote
) -> None:
    """By the outbox's id, or by the source's coordinates; the checker finds a consumer without an inbox."""
    box = shop(request, tmp_path, "sqlite-poll")
    effects = f"effects_{box.table}"
    box.execute(ddl("sqlite"), f"CREATE TABLE {effects} (n INTEGER, message VARCHAR(64))")
    sent, topic = box.send(*range(MESSAGES)), kafka.topic(1)
    zygote.load("outbox", "kafka")
    by = {"messageIdColumns": "topic,offset"} if variant == "coordinates" else {}
    relay = {
        "outbox": {"url": box.url, "dbtable": box.table},
        "kafka": {"kafka.bootstrap.servers": kafka.bootstrap, "topic": topic, **by},
        "checkpoint": str(tmp_path / "checkpoint"), "guarantee": "at_least_once", "rows_per_batch": 3,
    }  # fmt: skip
    kills, code = 0, -9
    while code:
        crash = ",".join(f"{p}!kill" for p in POINTS)
        code, error = zygote.run({**relay, "owner": f"owner-{kills}"}, tmp_path, crash)
        assert code in (0, -signal.SIGKILL), error
        kills += code != 0
    headers = [dict(m.headers()) for m in read_committed(kafka.bootstrap, topic)]
    if by:
        sent = [f"{ORDERS}-{n}" for n in range(1, MESSAGES + 1)]
    in_topic = Counter(h["delivered.id" if by else "id"].decode() for h in headers)
    assert set(in_topic) == set(sent)
    repeats = in_topic.total() - MESSAGES
    assert (kills, repeats > 0) == (len(POINTS), True), f"{kills} kills, {repeats} repeats: this shows nothing"

    consumer = {
        "role": "consumer", "dialect": box.dialect, "url": box.address, "inbox": "inbox", "effects": effects,
        "broker": "kafka", "address": kafka.bootstrap, "queue": topic,
        "variant": "" if by else variant,
    }  # fmt: skip
    for point, n in KILLS:
        assert run_process({**consumer, "point": point, "n": n})[0] == -9
    assert run_process({**consumer, "point": "", "n": -1})[0] == 0
    found = Counter(m for (m,) in box.execute(f"SELECT message FROM {effects}"))
    doubled = sum(n - 1 for n in found.values())
    assert set(found) == set(sent)
    assert bool(doubled) is (variant == "no_inbox"), f"{doubled} effects doubled"


def test_a_batch_in_hand_acknowledges_no_message_that_was_given_back(kafka: Any, tmp_path: Path) -> None:
    """The application goes on with the others, and ends before it has read that message again."""
    topic = kafka.topic(1)
    produce(kafka.bootstrap, topic, [(None, b"%d" % n) for n in range(6)])
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.execute(ddl("sqlite"))
    seen = []
    for fails in (2, None):
        with contextlib.closing(
            Consumer(
                {"bootstrap.servers": kafka.bootstrap, "group.id": topic, "enable.auto.commit": False,
                 "auto.offset.reset": "earliest"}
            )
        ) as consumer:  # fmt: skip
            consumer.subscribe([topic])
            held = list[Message]()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and (not held or held[-1].offset() < 5):
                held += consumer.consume(6, 1.0)
            for message in held:
                delivery = replace(from_kafka(consumer, message), id=message.value())
                with contextlib.suppress(TimeoutError), consume(connection, delivery, consumer="mail") as first:
                    if message.offset() == fails:
                        raise TimeoutError
                    seen.append((message.offset(), first))
    assert [n for n, first in seen if first] == [0, 1, 3, 4, 5, 2]
    assert seen[5:] == [(2, True), (3, False), (4, False), (5, False)]


@pytest.mark.parametrize("broker", ["kafka", "rabbitmq"])
def test_a_message_whose_effect_failed_comes_again(broker: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Not only after a restart: with Kafka, committing a later offset would acknowledge it."""
    server = request.getfixturevalue(broker)
    queue = server.topic(1) if broker == "kafka" else server.queue()
    sent = [(str(n), b'{"n": %d}' % n) for n in range(5)]
    if broker == "kafka":
        options = {"kafka.bootstrap.servers": server.bootstrap, "topic": queue, "messageIdColumns": "message_id"}
        task = writer(find_sink("kafka", options))
        task.stage(pa.record_batch({"message_id": [i for i, _ in sent], "value": [v for _, v in sent]}))
        task.prepare(Fingerprint())
    else:
        server.send(queue, sent)
    address = server.bootstrap if broker == "kafka" else server.url
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.execute(ddl("sqlite"))
    connection.execute("CREATE TABLE effects (n INTEGER)")
    connection.commit()
    failed, refused = set[int](), []
    for _ in range(2):  # the second time nothing is left
        for n, delivery in BROKERS[broker]({"address": address, "queue": queue}):
            try:
                with consume(connection, delivery, consumer="mail") as first:
                    assert first
                    connection.execute("INSERT INTO effects VALUES (?)", (n,))
                    if n in (1, 3) and n not in failed:
                        failed.add(n)
                        raise TimeoutError
            except TimeoutError:
                refused.append(n)
    assert refused == [1, 3]
    assert Counter(n for (n,) in connection.execute("SELECT n FROM effects")) == Counter(range(5))


def test_a_message_without_an_id_is_not_acknowledged(rabbitmq: Any, tmp_path: Path) -> None:
    queue = rabbitmq.queue()
    rabbitmq.send(queue, [(None, b'{"n": 0}')])
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.execute(ddl("sqlite"))
    connection.commit()
    messages = BROKERS["rabbitmq"]({"address": rabbitmq.url, "queue": queue})
    with pytest.raises(BadRecord, match="message_id is None"), consume(connection, next(messages)[1], consumer="mail"):
        pass
    messages.close()
    wait_for(lambda: rabbitmq.left(queue) == 1)  # the server queues it again once it has seen the end of the session

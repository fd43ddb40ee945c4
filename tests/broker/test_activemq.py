"""ActiveMQ Artemis through the receiver: `delivered receive` as users run it, killed; the broker killed; bad input."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.broker.receive_help import (
    POINTS,
    each_once,
    entered,
    finish,
    numbered,
    pipeline_file,
    receive,
    through_a_killed_broker,
)
from tests.support.servers import Activemq

import delivered
from delivered.connectors.activemq import ActivemqOptions
from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.queue import ActivemqQueue, ActivemqReceiver, Management, messages_without_consumer
from delivered.connectors.log import CONNECTOR as LOG
from delivered.model.errors import BadRecord, Refused, Unreachable, UsageError
from delivered.model.work import Ok
from delivered_lab import brokers
from delivered_lab.supervisor import hits

parse = ActivemqOptions.parse


def made_file(folder: Path, activemq: Activemq, queue: str, **options: Any) -> Path:
    return pipeline_file(folder, "activemq", activemq.url, queue, **{"idHeader": "id", **options})


def given(activemq: Activemq, queue: str, **options: str) -> dict[str, str]:
    return {"url": activemq.url, "queue": queue, "log": "/x", "idHeader": "id", **options}


def rows(log: Path) -> list[dict[str, Any]]:
    driver = (source := LOG.source({"path": str(log), "includeHeaders": "true"})).driver()
    return [r for p in driver.slices(*driver.batch()) for b in source.read(p) for r in b.to_pylist()]


SWEEP = pytest.mark.matrix
QUICK = ("receive.ack:before",)
"""An ordered group of RocketMQ is killed before an append."""


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=() if p in QUICK else SWEEP) for p in POINTS if p != "receive.take:before"]
)
def test_killed_at_a_point_and_started_again(activemq: Activemq, tmp_path: Path, point: str) -> None:
    queue = activemq.queue()
    activemq.send(queue, numbered())
    file = made_file(tmp_path, activemq, queue)
    dies = receive(file, crash=f"{point}#3!kill")
    dies.communicate(timeout=60)
    assert dies.returncode == -signal.SIGKILL
    assert len(hits(tmp_path / "hits")) == 1
    said = finish(receive(file, "--idle-seconds", "1.5"))
    # On a busy machine the broker may take longer to requeue the dead receiver's messages.
    deadline = time.monotonic() + 60
    while activemq.kept(queue) and time.monotonic() < deadline:
        finish(receive(file, "--idle-seconds", "1.5"))
    assert activemq.kept(queue) == 0
    assert entered(tmp_path / "log") == each_once()
    assert said["repeated"] > 0 or point not in ("receive.persist:after", "receive.ack:before")


@pytest.mark.matrix
def test_the_broker_is_killed_between_take_and_acknowledgement(
    new_activemq: Callable[..., Activemq], tmp_path: Path
) -> None:
    """Messages taken before the kill can no longer be acknowledged; they are redelivered, and appended once."""
    activemq = new_activemq()
    queue = activemq.queue()
    activemq.send(queue, numbered())
    file = made_file(tmp_path, activemq, queue, receiveMessagesMax=50)
    said = through_a_killed_broker(activemq, file)
    assert said["reconnected"] >= 1
    assert said["unacknowledged"] >= 50
    assert said["repeated"] >= 50
    assert activemq.left(queue) == 0


@pytest.mark.matrix
def test_two_receivers_and_a_sender_that_sends_again(activemq: Activemq, tmp_path: Path) -> None:
    queue = activemq.queue()
    activemq.send(queue, [*numbered(), *numbered()[::3]])
    file = made_file(tmp_path, activemq, queue, receiveMessagesMax=100, prefetchBytes=100_000)
    process = receive(file, "--processes", "2", "--idle-seconds", "4")
    killed = False
    deadline = time.monotonic() + 120
    while not killed and time.monotonic() < deadline:
        time.sleep(1.5)
        for worker in psutil.Process(process.pid).children():
            if not killed and "spawn_main" in " ".join(worker.cmdline()):
                worker.kill()
                killed = True
    finish(process)
    assert killed
    assert entered(tmp_path / "log") == each_once()
    assert activemq.left(queue) == 0


@SWEEP
def test_a_receiver_that_is_silent_is_taken_for_gone_and_wakes_up(activemq: Activemq, tmp_path: Path) -> None:
    """F7: paused past the heart-beats; the broker redelivers its messages to another receiver; then it resumes."""
    queue = activemq.queue()
    activemq.send(queue, numbered(100))
    zombie = receive(made_file(tmp_path, activemq, queue, receiveLingerMs=3_000))
    deadline = time.monotonic() + 60
    while activemq.left(queue):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    zombie.send_signal(signal.SIGSTOP)
    while activemq.left(queue) < 100:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    finish(receive(made_file(tmp_path, activemq, queue), "--idle-seconds", "1"))
    assert entered(tmp_path / "log") == each_once(100)
    zombie.send_signal(signal.SIGCONT)
    time.sleep(4)
    zombie.send_signal(signal.SIGTERM)
    finish(zombie)
    assert entered(tmp_path / "log") == each_once(100)


def test_bodies_headers_and_ids_come_as_they_were_sent(activemq: Activemq, tmp_path: Path) -> None:
    queue = activemq.queue()
    strange = "a:b\\n\n\r é世 \\c"
    bodies = [
        b"",
        b"\x00",
        b"\x00\xff\n\n\x00",
        "é世\N{PILE OF POO}".encode(),
        b"MESSAGE\nid:x\n\n\x00",
        os.urandom(2_000_000),
    ]
    activemq.send(
        queue, [(f"{strange}{n}", b) for n, b in enumerate(bodies)], **{"käy": strange, "content-type": "x/y"}
    )
    finish(receive(made_file(tmp_path, activemq, queue, keyHeader="käy"), "--idle-seconds", "1"))
    found = rows(tmp_path / "log")
    assert [r["value"] for r in found] == bodies
    assert {r["key"] for r in found} == {strange.encode()}
    assert [r["headers"][0] for r in found] == [
        {"key": "delivered.id", "value": f"{strange}{n}".encode()} for n in range(len(bodies))
    ]
    assert {h["key"] for h in found[0]["headers"]} == {"delivered.id", "id", "n", "käy", "content-type"}
    assert abs(found[0]["timestamp"].timestamp() - time.time()) < 120


def test_no_more_than_the_window_is_held(activemq: Activemq) -> None:
    queue = activemq.queue()
    activemq.send(queue, [(str(n), b"x" * 1_000) for n in range(50)])
    receiver = ActivemqReceiver(parse(given(activemq, queue, prefetchBytes="20000")))

    def all_that_comes() -> list[Any]:
        handles: list[Any] = []
        while len(batch := receiver.receive(100, 1.0)):
            handles += batch.handles
        return handles

    handles = all_that_comes()
    assert 10 <= len(handles) <= 20
    assert receiver.acknowledge(handles[:5]) == Ok(5)
    assert len(all_that_comes()) == 5
    receiver.close()
    deadline = time.monotonic() + 120
    while activemq.left(queue) != 45:  # the broker requeues them when it notices the lost connection
        assert time.monotonic() < deadline, activemq.left(queue)
        time.sleep(0.05)


def test_the_flag_redelivered_lies_and_the_id_does_not(activemq: Activemq) -> None:
    """Redelivered messages look new; the broker's own ids change."""
    queue = activemq.queue()
    activemq.send(queue, numbered(10))
    seen: list[dict[str, tuple[str, str]]] = []
    for count in (10, 8):
        session = Session(parse(given(activemq, queue)))
        headers = {"subscription-type": "ANYCAST"}
        session.transmit(session.frames.subscribe, queue, "s", ack="client-individual", headers=headers)
        session.wait(lambda s=session, n=count: len(s.arrived) == n, 10, "send its messages")  # type: ignore[misc]
        came = [f.headers for f in session.arrived]
        seen.append({h["id"]: (h["redelivered"], h["message-id"]) for h in came})
        for headers in came[:2] if count == 10 else ():
            session.transmit(session.frames.ack, headers["ack"], receipt=session.receipt())
        session.settle("answer the acknowledgements")
        session.close()
    first, again = seen
    assert set(again) == {f"id{n}" for n in range(2, 10)}
    assert "false" in {flag for flag, _ in again.values()}
    assert all(first[i][1] != again[i][1] for i in again)


def test_a_message_without_an_id_or_too_large_stops_or_is_quarantined(activemq: Activemq, tmp_path: Path) -> None:
    queue = activemq.queue()
    activemq.send(queue, [("a", b"1"), (None, b"2"), ("c", b"333333")])
    options = given(activemq, queue, log=str(tmp_path / "log"))
    with pytest.raises(BadRecord, match="set no message id"):
        delivered.receive(delivered.endpoint("activemq", **options), idle_s=1)
    deadline = time.monotonic() + 120
    while activemq.left(queue) != 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    delivered.receive(delivered.endpoint("activemq", **options, badMessages="quarantine", messageBytesMax=5), idle_s=1)
    assert activemq.left(queue) == 0
    assert entered(tmp_path / "log") == Counter([b"1"])
    assert entered(tmp_path / "log.bad") == Counter([b"2", b"333333"])


@pytest.mark.parametrize(
    ("kind", "body", "headers"),
    [
        (5, b"\1\0\0\0\2" + b"\0\0\0\2a\0\6\0\0\0\1" + b"\0\0\0\2b\0\6\0\0\0\2", {}),
        (5, b"\1\0\0\0\1" + b"\0\0\0\2a\0\6\0\0\0\1", {"JMS_AMQP_ORIGINAL_ENCODING": "7"}),
        (2, b"\0\0\0\2ab", {"JMS_AMQP_ORIGINAL_ENCODING": "2",
                           "JMS_AMQP_ContentType": "application/x-java-serialized-object"}),
        (2, b"\0\0\0\2ab", {}),
    ],
    ids=["map", "map over AMQP", "object over AMQP", "object"],
)  # fmt: skip
def test_a_message_whose_content_stomp_loses_is_not_acknowledged(
    activemq: Activemq, kind: int, body: bytes, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """As JMS clients send it. An object's is empty, as a text may be: that is only a warning."""
    queue = activemq.queue()
    sent = {"id": "m", **headers}, kind, base64.b64encode(body).decode(), True, "delivered", "delivered"
    activemq.ask(f"address.{queue}", "sendMessage", *sent)
    receiver = ActivemqReceiver(parse({"url": activemq.url, "queue": queue, "log": "/x"}))
    try:
        if headers or kind == 5:
            with pytest.raises(BadRecord, match=rf"MESSAGE_NOT_BYTES.*Message \d+ in {queue} .*nothing was lost"):
                receiver.receive(10, 60)
        else:
            assert receiver.receive(10, 60).values == [b""]
            assert "is empty" in caplog.text
    finally:
        receiver.close()
    assert activemq.kept(queue) == 1


def test_without_a_header_for_ids_all_enter(activemq: Activemq, tmp_path: Path) -> None:
    queue = activemq.queue()
    activemq.send(queue, [("a", b"1"), ("a", b"1"), (None, b"2")])
    options = {k: v for k, v in given(activemq, queue, log=str(tmp_path / "log")).items() if k != "idHeader"}
    delivered.receive(delivered.endpoint("activemq", **options), idle_s=1)
    assert entered(tmp_path / "log") == Counter([b"1", b"1", b"2"])


def test_messages_that_the_broker_holds_for_nobody_are_told(activemq: Activemq) -> None:
    """Artemis sometimes leaves a killed receiver's first message so. Messages held by a receiver are not reported."""
    queue = activemq.queue()
    activemq.send(queue, numbered(2))
    options = parse(given(activemq, queue, log="/x"))
    session = Session(options)
    session.transmit(session.frames.subscribe, queue, "s", ack="client-individual")
    session.wait(lambda: len(session.arrived) == 2, 30, "hand out two messages")
    asking = Session(options)
    management = Management(asking)
    counts = [management.attribute(f"queue.{queue}", n).value(int) for n in ("deliveringCount", "consumerCount")]
    asking.close()
    assert counts == [2, 1]
    assert ActivemqQueue(options).preflight() == []
    session.close()
    assert list(messages_without_consumer(queue, *counts)) == []
    assert list(messages_without_consumer(queue, None, None)) == []
    (finding,) = messages_without_consumer(queue, 1, 0)
    assert (finding.code, finding.refuses) == ("MESSAGES_STUCK", False)
    assert finding.message.startswith(f"'{queue}' has 1 messages in delivery but no consumer")


def test_bad_input_is_told_clearly(activemq: Activemq, tmp_path: Path) -> None:
    good = given(activemq, activemq.queue(), log=str(tmp_path / "log"))

    def findings(**other: str) -> dict[str, bool]:
        return {f.code: f.refuses for f in ActivemqQueue(parse({**good, **other})).preflight()}

    user = activemq.url.replace("//", "//delivered@")
    assert findings() == {}
    assert findings(url=user, password="delivered") == {}
    assert findings(queue="nowhere") == {"QUEUE_NOT_YET": False}
    assert findings(queue=activemq.queue(durable=False)) == {"QUEUE_NOT_DURABLE": False}
    assert findings(queue=activemq.queue("MULTICAST")) == {"QUEUE_IS_TOPIC": True}
    assert findings(queue=activemq.queue(deadLetterAddress="")) == {"QUEUE_DROPS": True}
    assert findings(queue=activemq.queue(deadLetterAddress="", maxDeliveryAttempts=-1)) == {}
    assert findings(url=user, password="wrong") == {"ACTIVEMQ_CREDENTIALS": True}
    assert findings(url="stomp://127.0.0.1:9/") == {"ACTIVEMQ_UNREACHABLE": True}
    with pytest.raises(UsageError, match="is a topic"):
        delivered.receive(delivered.endpoint("activemq", **{**good, "queue": activemq.queue("MULTICAST")}))
    with pytest.raises(Refused, match="rejected the user or the password"):
        Session(parse({**good, "url": user, "password": "wrong"}))
    with pytest.raises(Unreachable):
        Session(parse({**good, "url": "stomp://127.0.0.1:9/"}))


def test_a_queue_that_is_deleted_ends_the_receiver(activemq: Activemq) -> None:
    queue = activemq.queue()
    receiver = ActivemqReceiver(parse(given(activemq, queue)))
    activemq.ask("broker", "destroyQueue", queue, True)
    with pytest.raises(UsageError, match="was deleted"):
        for _ in range(50):
            receiver.receive(10, 0.2)
    receiver.close()


@pytest.mark.matrix
def test_the_server_listens_on_the_loopback_alone_and_keeps_its_data(tmp_path: Path) -> None:
    broker = brokers.start("activemq", tmp_path / "a", dies_with_parent=True, heap_mb=256)
    server = psutil.Process(broker.pid)
    listening = {c.laddr.ip for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    assert server.children() == []
    made = Activemq(broker)
    queue = made.queue()
    made.send(queue, numbered(10))
    broker.kill()
    broker.restart()
    assert made.left(queue) == 10
    broker.stop()
    assert not psutil.pid_exists(broker.pid)

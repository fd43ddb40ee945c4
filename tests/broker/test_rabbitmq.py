"""RabbitMQ through the receiver: `delivered receive` as users run it, killed; the broker killed; bad input."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.broker.receive_help import (
    POINTS,
    all_that_comes,
    body,
    each_once,
    entered,
    finish,
    numbered,
    pipeline_file,
    receive,
)
from tests.broker.sink_help import wait_for
from tests.support.servers import Rabbitmq
from tests.support.sweeps import sweep

import delivered
from delivered.connectors.log import CONNECTOR as LOG
from delivered.connectors.log.produce import LogJournal
from delivered.connectors.rabbitmq import RabbitmqOptions
from delivered.connectors.rabbitmq.client import connect
from delivered.connectors.rabbitmq.queue import RabbitmqQueue, RabbitmqReceiver
from delivered.model.errors import BadRecord, DeliveredError, Refused, Unreachable, UsageError
from delivered.model.work import Ok
from delivered.operate.asking import status
from delivered_lab import brokers
from delivered_lab.supervisor import hits, release
from delivered_lab.verify.proxy import StreamProxy

parse = RabbitmqOptions.parse


@pytest.mark.parametrize(
    "point",
    sweep(
        [p for p in POINTS if p != "receive.take:before"],
        lambda p: p == "receive.ack:before",
    ),
)
def test_killed_at_a_point_and_started_again(rabbitmq: Rabbitmq, tmp_path: Path, point: str) -> None:
    queue = rabbitmq.queue()
    rabbitmq.send(queue, numbered())
    file = pipeline_file(tmp_path, "rabbitmq", rabbitmq.url, queue)
    dies = receive(file, crash=f"{point}#3!kill")
    said_last = dies.communicate(timeout=60)
    assert dies.returncode == -signal.SIGKILL, said_last
    assert len(hits(tmp_path / "hits")) == 1
    pipeline = delivered.Pipeline.from_file(file)
    assert [p.code for p in status(pipeline).problems] == ["DELIVERED_RECEIVER_GONE"]
    said = finish(receive(file, "--idle-seconds", "1.5"))
    assert (status(pipeline).problems, status(pipeline).receivers) == ((), {"source": ()})
    assert entered(tmp_path / "log") == each_once()
    assert rabbitmq.left(queue) == 0
    # At other points, too: an acknowledgement may be lost with the connection.
    assert said["repeated"] > 0 or point not in ("receive.persist:after", "receive.ack:before")


@pytest.mark.matrix
def test_senders_that_send_again_and_receivers_that_are_killed(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    """Two receivers, restarted when killed; every third message is sent twice."""
    queue = rabbitmq.queue()
    file = pipeline_file(tmp_path, "rabbitmq", rabbitmq.url, queue, receiveMessagesMax=100)
    process = receive(file, "--processes", "2", "--idle-seconds", "6")
    sender = threading.Thread(target=rabbitmq.send, args=(queue, [*numbered(), *numbered()[::3]]))
    sender.start()
    killed = 0
    deadline = time.monotonic() + 120
    while killed < 3 and time.monotonic() < deadline:
        time.sleep(1.2)
        workers = [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        if workers:
            workers[killed % len(workers)].kill()
            killed += 1
    sender.join()
    finish(process)
    assert killed == 3
    assert entered(tmp_path / "log") == each_once()
    assert rabbitmq.left(queue) == 0


def test_the_broker_is_killed_and_comes_back(new_rabbitmq: Callable[[], Rabbitmq], tmp_path: Path) -> None:
    rabbitmq = new_rabbitmq()
    queue = rabbitmq.queue()
    rabbitmq.send(queue, numbered(1_000))
    file = pipeline_file(tmp_path, "rabbitmq", rabbitmq.url, queue, receiveMessagesMax=50)
    process = receive(file)
    while not (tmp_path / "log" / "_delta_log" / "00000000000000000003.json").exists():
        time.sleep(0.01)
    rabbitmq.broker.kill()
    rabbitmq.broker.restart()
    deadline = time.monotonic() + 180
    while entered(tmp_path / "log") != each_once(1_000):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = finish(process)
    assert said["reconnected"] >= 1
    assert rabbitmq.left(queue) == 0


def test_sigterm_persists_what_was_taken(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    queue = rabbitmq.queue()
    rabbitmq.send(queue, numbered(100))
    file = pipeline_file(tmp_path, "rabbitmq", rabbitmq.url, queue, receiveLingerMs=60_000)
    # An empty queue does not prove it: messages may still be in flight.
    process = receive(file, crash="receive.take:after@received=100!wait")
    while not (taken := hits(tmp_path / "hits")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    release(taken[0][0])
    assert finish(process)["acknowledged"] == 100
    assert entered(tmp_path / "log") == each_once(100)


def test_a_connection_that_an_acknowledgement_found_broken_is_made_anew(rabbitmq: Rabbitmq) -> None:
    """`receive` is not the first to notice it; but the receiver must learn of it there, and reconnect."""
    queue = rabbitmq.queue()
    rabbitmq.send(queue, numbered(2))
    with closing(StreamProxy(rabbitmq.broker.bootstrap, lambda _: None)) as proxy:
        url = rabbitmq.url.replace(rabbitmq.broker.bootstrap, proxy.bootstrap)
        receiver = RabbitmqReceiver(parse({"url": url, "queue": queue, "log": "unused"}))
        taken = receiver.receive(1, 10.0)
        assert len(taken) == 1
        proxy.reset_all()
        deadline = time.monotonic() + 120
        while isinstance(receiver.acknowledge(taken.handles), Ok):
            assert time.monotonic() < deadline
        with pytest.raises(Unreachable):
            receiver.receive(1, 0.1)
        receiver.close()
    again = RabbitmqReceiver(parse({"url": rabbitmq.url, "queue": queue, "log": "unused"}))
    assert again.receive(1, 10.0).values == [body(0)]
    again.close()


def test_receivers_end_when_who_started_them_is_killed(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    queue = rabbitmq.queue()
    process = receive(pipeline_file(tmp_path, "rabbitmq", rabbitmq.url, queue), "--processes", "2")
    deadline = time.monotonic() + 120
    while len(workers := psutil.Process(process.pid).children(recursive=True)) < 3:  # and the resource tracker
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while rabbitmq.consumers(queue) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.communicate()
    assert psutil.wait_procs(workers, 20)[1] == []


def test_receivers_beside_a_pipeline_share_its_life(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    from delivered.pipeline.receive import run_receivers

    queue = rabbitmq.queue()
    source = delivered.endpoint("rabbitmq", url=rabbitmq.url, queue=queue, log=str(tmp_path / "log"))
    before = set(psutil.Process().children(recursive=True))
    with run_receivers(source, 1) as raise_failure:
        assert not [f for f in source.source().preflight() if f.refuses], "the log is there at once"
        rabbitmq.send(queue, numbered(100))
        deadline = time.monotonic() + 120
        while entered(tmp_path / "log") != each_once(100):
            raise_failure()
            assert time.monotonic() < deadline
            time.sleep(0.1)
    left = [p for p in set(psutil.Process().children(recursive=True)) - before if "spawn_main" in " ".join(p.cmdline())]
    assert left == []


def test_columns_of_a_message(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    queue = rabbitmq.queue()
    rabbitmq.send(queue, numbered(1))
    finish(receive(pipeline_file(tmp_path, "rabbitmq", rabbitmq.url, queue), "--idle-seconds", "1"))
    driver = (source := LOG.source({"path": str(tmp_path / "log"), "includeHeaders": "true"})).driver()
    (batch,) = source.read(driver.slices(*driver.batch())[0])
    (row,) = batch.to_pylist()
    assert (row["key"], row["value"], row["offset"]) == (queue.encode(), body(0), 0)
    assert row["headers"] == [
        {"key": "delivered.id", "value": b"id0"},
        {"key": "n", "value": b"1"},
        {"key": "s", "value": b"text"},
    ]


def test_no_more_than_the_prefetch_is_held(rabbitmq: Rabbitmq) -> None:
    queue = rabbitmq.queue()
    rabbitmq.send(queue, numbered(50))
    receiver = RabbitmqReceiver(parse({"url": rabbitmq.url, "queue": queue, "log": "/x", "prefetch": "20"}))
    handles = all_that_comes(receiver, 20)
    assert receiver.acknowledge(handles[:5]) == Ok(5)
    all_that_comes(receiver, 5)
    receiver.close()
    wait_for(lambda: rabbitmq.left(queue) == 45)


def test_a_message_without_an_id_stops_or_is_quarantined(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    queue = rabbitmq.queue()
    rabbitmq.send(queue, [("a", b"1"), (None, b"2"), ("c", b"333333"), ("", b"4"), ("", b"5")])
    options = {"url": rabbitmq.url, "queue": queue, "log": str(tmp_path / "log")}
    with pytest.raises(BadRecord, match="set no message id"):
        delivered.receive(delivered.endpoint("rabbitmq", **options), idle_s=1)
    while rabbitmq.left(queue) != 5:
        time.sleep(0.05)
    quarantine = delivered.endpoint("rabbitmq", **options, badMessages="quarantine", messageBytesMax=5)
    delivered.receive(quarantine, idle_s=1)
    assert rabbitmq.left(queue) == 0
    assert entered(tmp_path / "log") == Counter([b"1"])
    assert entered(tmp_path / "log.bad") == Counter([b"2", b"333333", b"4", b"5"])


def test_poison_is_quarantined_and_the_rest_enters(
    rabbitmq: Rabbitmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poison message blocks no others. A time in microseconds, where AMQP means seconds, saturates and is not one."""
    import pika

    write = LogJournal._write

    def refusing(self: LogJournal, batch: Any, fresh: Any) -> Any:
        if b"poison" in batch.values and not self._path.endswith(".bad"):
            raise ValueError("no record can be made of it")
        return write(self, batch, fresh)

    monkeypatch.setattr(LogJournal, "_write", refusing)
    queue = rabbitmq.queue()
    rabbitmq.send(queue, numbered(10))
    connection = rabbitmq.connect()
    wrong = pika.BasicProperties(message_id="wrong", delivery_mode=2, timestamp=1_700_000_000_000_000)
    connection.channel().basic_publish("", queue, b"late", wrong)
    connection.close()
    rabbitmq.send(queue, [("poison", b"poison")])
    rabbitmq.send(queue, [("last", b"last")])
    options = {"url": rabbitmq.url, "queue": queue, "log": str(tmp_path / "log")}
    with pytest.raises(DeliveredError, match="badMessages=quarantine"):
        delivered.receive(delivered.endpoint("rabbitmq", **options), idle_s=1)
    while rabbitmq.left(queue) != 13:
        time.sleep(0.05)
    counts: list[Any] = []
    quarantine = delivered.endpoint("rabbitmq", **options, badMessages="quarantine")
    delivered.receive(quarantine, idle_s=1, report=lambda _, c: counts.append(c))
    assert rabbitmq.left(queue) == 0
    assert (counts[-1].entered, counts[-1].quarantined, counts[-1].acknowledged) == (12, 1, 13)
    assert entered(tmp_path / "log") == each_once(10) + Counter([b"late", b"last"])
    assert entered(tmp_path / "log.bad") == Counter([b"poison"])


def test_a_full_log_stops_receiving_until_there_is_room(
    rabbitmq: Rabbitmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is full, the receiver holds nothing: every message is in the log or in the queue."""
    monkeypatch.setattr("delivered.model.limits.RECEIVE_UPKEEP_S", 0.2)
    queue = rabbitmq.queue()
    source = delivered.endpoint(
        "rabbitmq", url=rabbitmq.url, queue=queue, log=str(tmp_path / "log"), receiveMessagesMax=50, dedupWindow=10,
        logBytesMax=20_000, logReaders="orders", logKeepSeconds=0,
    )  # fmt: skip
    stop = threading.Event()
    counts: list[Any] = []
    thread = threading.Thread(
        target=delivered.receive, args=(source, 1, stop.is_set, None, lambda _, c: counts.append(c))
    )
    thread.start()
    sent = 0

    def wait_for(fact: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not fact():
            assert time.monotonic() < deadline, (sent, counts[-1:], rabbitmq.left(queue), rabbitmq.consumers(queue))
            time.sleep(0.05)

    def send() -> None:
        nonlocal sent
        rabbitmq.send(queue, [(f"id{n}", os.urandom(1_000)) for n in range(sent, sent + 20)])
        sent += 20

    def all_in_the_log() -> bool:
        return bool(counts) and counts[-1].entered == sent

    def holds_nothing() -> bool:
        return bool(counts) and not rabbitmq.consumers(queue) and rabbitmq.left(queue) == sent - counts[-1].entered > 0

    try:
        while not (counts and counts[-1].paused and holds_nothing()):
            send()
            wait_for(lambda: all_in_the_log() or holds_nothing())
        paused, entered_before = counts[-1].paused, counts[-1].entered
        send()
        assert holds_nothing()
        assert (counts[-1].paused, counts[-1].entered) == (paused, entered_before)
        log = LOG.source({"path": str(tmp_path / "log"), "reader": "orders"}).driver()

        def read_on() -> bool:
            log.acknowledge(log.newest() or {})
            return all_in_the_log()

        wait_for(read_on, 120)
    finally:
        stop.set()
        thread.join(120)
    assert rabbitmq.left(queue) == 0
    assert counts[-1].retired > 0


def test_bad_input_is_told_clearly(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    good = {"url": rabbitmq.url, "queue": rabbitmq.queue(), "log": str(tmp_path / "log")}

    def findings(**other: str) -> dict[str, bool]:
        return {f.code: f.refuses for f in RabbitmqQueue(parse({**good, **other})).preflight()}

    assert findings() == {}
    assert findings(queue="nowhere") == {"QUEUE_MISSING": True}
    assert findings(queue=rabbitmq.queue("classic")) == {"QUEUE_CLASSIC": False}
    assert findings(queue=rabbitmq.queue("classic", durable=False)) == {"QUEUE_NOT_DURABLE": False}
    assert findings(queue=rabbitmq.queue("stream")) == {"QUEUE_IS_STREAM": True}
    # RabbitMQ reports one difference at a time, arguments before the type.
    kept = {"x_max_length_bytes": 1_000_000, "x_max_age": "7D"}
    assert findings(queue=rabbitmq.queue("stream", **kept)) == {"QUEUE_IS_STREAM": True}
    bounded = {"x_max_length": 1_000, "x_message_ttl": 60_000, "x_overflow": "reject-publish"}
    assert findings(queue=rabbitmq.queue("classic", **bounded)) == {"QUEUE_CLASSIC": False, "QUEUE_DROPS": False}
    del bounded["x_message_ttl"]
    assert findings(queue=rabbitmq.queue("classic", **bounded)) == {"QUEUE_CLASSIC": False}
    for limit in ({"x_delivery_limit": 3}, {"x_max_length": 9}, {"x_expires": 60_000, "x_dead_letter_exchange": ""}):
        assert findings(queue=rabbitmq.queue(**limit)) == {"QUEUE_DROPS": False}
    assert findings(queue=rabbitmq.queue(x_delivery_limit=3, x_dead_letter_exchange="", x_overflow="drop-head")) == {}
    assert findings(password="wrong") == {"RABBITMQ_CREDENTIALS": True}
    assert findings(url=rabbitmq.url + "other-host") == {"RABBITMQ_PERMISSION": True}
    assert findings(url="amqp://127.0.0.1:9/") == {"RABBITMQ_UNREACHABLE": True}
    with pytest.raises(UsageError, match="There is no queue"):
        delivered.receive(delivered.endpoint("rabbitmq", **{**good, "queue": "nowhere"}))
    with pytest.raises(Refused):
        connect(parse({**good, "password": "wrong"}))
    with pytest.raises(Unreachable):
        connect(parse({**good, "url": "amqp://127.0.0.1:9/"}))


@pytest.mark.matrix
def test_the_server_listens_on_the_loopback_alone_and_leaves_nothing(tmp_path: Path) -> None:
    broker = brokers.start("rabbitmq", tmp_path / "r", dies_with_parent=True)
    processes = [psutil.Process(broker.pid), *psutil.Process(broker.pid).children(recursive=True)]
    listening = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::1"}
    broker.stop()
    gone, alive = psutil.wait_procs(processes, 10)
    assert len(gone) >= 2
    assert alive == []

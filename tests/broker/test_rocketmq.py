"""RocketMQ through the receiver: `delivered receive` as users run it, killed; the servers killed; bad input."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from tests.broker.receive_help import POINTS, all_that_comes, each_once, entered, finish, numbered, receive
from tests.broker.send_help import writer
from tests.support.servers import Rocketmq

import delivered
from delivered.connectors.log import CONNECTOR as LOG
from delivered.connectors.rocketmq import RocketmqOptions
from delivered.connectors.rocketmq.queue import RocketmqQueue, RocketmqReceiver
from delivered.model.errors import Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Ok
from delivered.patterns.inbox import ddl
from delivered.pipeline.registry import find_sink
from delivered_lab import brokers
from delivered_lab.brokers import rocketmq as rocketmq_server
from delivered_lab.supervisor import hits
from delivered_lab.verify import applications

parse = RocketmqOptions.parse

MESSAGES = 8
COUNT = 600
IDLE = "6"
"""Longer than a killed receiver's messages take to be redelivered: 2 s invisible, then up to 3 s."""


def given(rocketmq: Rocketmq, topic: str, group: str, **options: str) -> dict[str, str]:
    return {"endpoints": rocketmq.url, "topic": topic, "group": group, "log": "/x", **options}


def made_file(folder: Path, rocketmq: Rocketmq, topic: str, group: str, **options: Any) -> Path:
    source = given(rocketmq, topic, group, log=str(folder / "log"), invisibleSeconds="2")
    text = {
        "pipeline": "orders",
        "guarantee": "exactly_once",
        "checkpoint": str(folder / "checkpoint"),
        "source": {"format": "rocketmq", **source, "receiveMessagesMax": 100, "receiveLingerMs": 20, **options},
        "sinks": [{"format": "sqlite", "path": str(folder / "out.db"), "table": "orders"}],
    }
    file = folder / "orders.yaml"
    file.write_text(json.dumps(text))
    return file


def rows(log: Path) -> list[dict[str, Any]]:
    driver = (source := LOG.source({"path": str(log), "includeHeaders": "true"})).driver()
    return [r for p in driver.slices(*driver.batch()) for b in source.read(p) for r in b.to_pylist()]


QUICK = ("receive.ack:before",)
"""The test of ordered groups kills before an append."""


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=() if p in QUICK else pytest.mark.matrix) for p in POINTS if p != "receive.take:before"],
)
def test_killed_at_a_point_and_started_again(rocketmq: Rocketmq, tmp_path: Path, point: str) -> None:
    topic, group = rocketmq.topic(), rocketmq.group()
    rocketmq.send(topic, numbered(COUNT))
    file = made_file(tmp_path, rocketmq, topic, group)
    dies = receive(file, crash=f"{point}#3!kill")
    dies.communicate(timeout=60)
    assert dies.returncode == -signal.SIGKILL
    assert len(hits(tmp_path / "hits")) == 1
    said = finish(receive(file, "--idle-seconds", IDLE))
    assert entered(tmp_path / "log") == each_once(COUNT)
    assert rocketmq.rest(topic, group) == []
    assert said["repeated"] > 0 or point not in ("receive.persist:after", "receive.ack:before")


@pytest.mark.matrix
def test_an_ordered_group_stays_in_order_over_a_kill_and_repeats(rocketmq: Rocketmq, tmp_path: Path) -> None:
    """Three message groups, one message in four sent twice; in the log each group is in order, each message once."""
    topic, group = rocketmq.topic("FIFO", queues=2), rocketmq.group(ordered=True)
    for of in ("a", "b", "c"):
        messages = [(f"{of}{n}", b"%s %d" % (of.encode(), n)) for n in range(100)]
        rocketmq.send(topic, [m for n, m in enumerate(messages) for _ in range(2 if n % 4 == 0 else 1)], of)
    file = made_file(tmp_path, rocketmq, topic, group)
    dies = receive(file, crash="receive.persist:before#2!kill")
    dies.communicate(timeout=60)
    assert dies.returncode == -signal.SIGKILL
    finish(receive(file, "--idle-seconds", "9"))  # a long poll is not woken by an ordered message's reappearance
    found = rows(tmp_path / "log")
    for of in (b"a", b"b", b"c"):
        assert [r["value"] for r in found if r["key"] == of] == [b"%s %d" % (of, n) for n in range(100)]


@pytest.mark.parametrize("kind", ["NORMAL", pytest.param("FIFO", marks=pytest.mark.matrix)])
def test_what_is_held_for_long_is_hidden_for_longer(rocketmq: Rocketmq, kind: str) -> None:
    """An append takes more than twice the invisible time: no other receiver gets the messages, and they can be
    acknowledged. If the machine stalls, renewals are late; then the time is too short for it, and is doubled."""
    assert any(_hidden_for_longer(rocketmq, kind, invisible_s) for invisible_s in (2, 4, 8, 16))


def _hidden_for_longer(rocketmq: Rocketmq, kind: str, invisible_s: int) -> bool:
    """False: the receiver counted a late renewal, so redelivery proves nothing."""
    topic, group = rocketmq.topic(kind), rocketmq.group(ordered=kind == "FIFO")
    rocketmq.send(topic, numbered(20), "one" if kind == "FIFO" else "")
    options = parse(given(rocketmq, topic, group, invisibleSeconds=str(invisible_s)))
    holder, other = RocketmqReceiver(options), RocketmqReceiver(options)
    handles: list[Any] = []
    deadline = time.monotonic() + 60
    while len(handles) < 20:
        assert time.monotonic() < deadline
        handles += holder.receive(20 - len(handles), 0.1).handles
    came_to_other, late = 0, False
    until = time.monotonic() + 2.2 * invisible_s
    while time.monotonic() < until and not late:
        holder.receive(0, 0.1)
        came_to_other += len(other.receive(20, 0.1))
        late = any(held.until < time.monotonic() for held in handles)
    acknowledged = holder.acknowledge(handles)
    holder.close()
    until = time.monotonic() + invisible_s + 2
    while time.monotonic() < until and not late:
        came_to_other += len(other.receive(20, 0.1))
    other.close()
    if not late:
        assert (came_to_other, acknowledged) == (0, Ok(20))
    return not late


@pytest.mark.matrix  # conformance/test_queues.py: what was held comes again
def test_what_arrives_when_a_receiver_has_just_ended_is_not_forgotten(rocketmq: Rocketmq) -> None:
    """Long polls outlive their receiver at the broker for seconds: messages are delivered to nobody."""
    topic, group = rocketmq.topic(), rocketmq.group()
    options = parse(given(rocketmq, topic, group, invisibleSeconds="3"))
    missing: set[str] = set()
    for n in range(20):
        receiver = RocketmqReceiver(options)
        _take(receiver, missing, 0.15)
        receiver.close()
        later = [f"{n}-{k}" for k in range(3)]
        rocketmq.send(topic, [(i, b"x") for i in later])
        missing.update(later)
    receiver = RocketmqReceiver(options)
    deadline = time.monotonic() + 60
    while missing and time.monotonic() < deadline:
        _take(receiver, missing, 0.5)
    receiver.close()
    assert missing == set()


@pytest.mark.matrix
def test_brokers_that_forget_are_told_of_and_waited_for(
    new_rocketmq: Callable[..., Rocketmq], caplog: pytest.LogCaptureFixture
) -> None:
    rocketmq = new_rocketmq(popConsumerKVServiceEnable="false")
    topic, group = rocketmq.topic(), rocketmq.group()
    receiver = RocketmqReceiver(parse(given(rocketmq, topic, group)))
    missing: set[str] = set()
    deadline = time.monotonic() + 30
    for n in itertools.count():  # the first of eight queues looks like the other way of noting
        assert time.monotonic() < deadline
        if any("can forget messages" in r.getMessage() for r in caplog.records):
            break
        rocketmq.send(topic, [(f"{n}", b"x")])
        missing.add(f"{n}")
        while missing and time.monotonic() < deadline:
            _take(receiver, missing, 0.1)
    _take(receiver, missing, 0.1)
    polls = [p for p in receiver._polls if p is not None]
    receiver.close()
    assert polls
    assert not any(p.cancelled() for p in polls), "what it would have brought, the broker may forget"


def _take(receiver: RocketmqReceiver, missing: set[str], wait_s: float) -> None:
    found = receiver.receive(32, wait_s)
    missing.difference_update(found.ids)
    if found.handles:
        receiver.acknowledge(found.handles)


def test_no_more_than_the_prefetch_is_held(rocketmq: Rocketmq) -> None:
    topic, group = rocketmq.topic(), rocketmq.group()
    rocketmq.send(topic, numbered(100))
    receiver = RocketmqReceiver(parse(given(rocketmq, topic, group, prefetch="20")))
    handles = all_that_comes(receiver, 20)
    assert receiver.acknowledge(handles[:5]) == Ok(5)
    all_that_comes(receiver, 5)
    receiver.close()


def test_brokers_take_turns(rocketmq: Rocketmq) -> None:
    """One that always has messages does not keep another one's waiting; two topics stand for two brokers."""
    busy, group = rocketmq.topic(), rocketmq.group()
    quiet = rocketmq.topic()
    rocketmq.send(busy, numbered(600))
    rocketmq.send(quiet, [("id", b"quiet")])
    receiver = RocketmqReceiver(parse(given(rocketmq, busy, group, prefetch="32")))  # one poll at a time
    other = RocketmqReceiver(parse(given(rocketmq, quiet, group)))
    receiver._sources |= {"quiet": next(iter(other._sources.values()))}
    receiver._heartbeat_at = float("inf")  # which would look up the brokers again
    other.close()
    values: list[bytes | None] = []
    deadline = time.monotonic() + 60
    while b"quiet" not in values and time.monotonic() < deadline:
        found = receiver.receive(100, 5)
        values += found.values
        receiver.acknowledge(found.handles)
    receiver.close()
    assert b"quiet" in values and len(values) < 300


def test_queues_that_become_readable_are_received(rocketmq: Rocketmq, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a broker that was away at the start, or that the topic was added to."""
    monkeypatch.setattr("delivered.connectors.rocketmq.queue._HEARTBEAT_S", 1.0)
    topic, group = rocketmq.topic(), rocketmq.group()
    rocketmq.send(topic, numbered(1))
    receiver = RocketmqReceiver(parse(given(rocketmq, topic, group)))
    readable, receiver._sources = receiver._sources, {}
    deadline = time.monotonic() + 30
    while not (found := receiver.receive(10, 1)).values and time.monotonic() < deadline:
        pass
    assert found.values == [b"message 0"] and list(receiver._sources) == list(readable)
    receiver.acknowledge(found.handles)
    receiver.close()


def test_columns_of_a_message_that_the_library_sent(rocketmq: Rocketmq, tmp_path: Path) -> None:
    topic, group = rocketmq.topic("FIFO"), rocketmq.group(ordered=True)
    plain, tagged = rocketmq.topic(), rocketmq.group()
    from rocketmq import Message

    sent = []
    for to, message_group in ((topic, "customer 7"), (plain, "")):
        message = Message()
        message.topic, message.body, message.tag, message.keys = to, "é\0".encode(), "paid", "order-1"
        message.add_property("colour", "blue")
        if message_group:
            message.message_group = message_group
        sent.append(rocketmq.producer(to).send(message).message_id)
    for name, to, of in (("fifo", topic, group), ("plain", plain, tagged)):
        options = given(rocketmq, to, of, log=str(tmp_path / name), filter="paid || refunded")
        delivered.receive(delivered.endpoint("rocketmq", **options), idle_s=1)
    (fifo,), (row,) = rows(tmp_path / "fifo"), rows(tmp_path / "plain")
    assert (fifo["key"], fifo["value"], row["key"]) == (b"customer 7", "é\0".encode(), b"order-1")
    assert abs(fifo["timestamp"].timestamp() - time.time()) < 120
    assert {h["key"]: h["value"].decode() for h in fifo["headers"]} == {
        "delivered.id": sent[0],
        "colour": "blue",
        "rocketmq.message_id": sent[0],
        "rocketmq.tag": "paid",
        "rocketmq.keys": "order-1",
        "rocketmq.message_group": "customer 7",
        "rocketmq.topic": topic,
    }
    assert [h["value"] for h in row["headers"] if h["key"] == "delivered.id"] == [sent[1].encode()]
    again = given(rocketmq, plain, tagged, log=str(tmp_path / "by-key"), idFrom="keys")
    for _ in range(2):
        message = Message()
        message.topic, message.body, message.keys = plain, b"twice", "order-2"
        rocketmq.producer(plain).send(message)
    delivered.receive(delivered.endpoint("rocketmq", **again), idle_s=1)
    assert entered(tmp_path / "by-key") == Counter([b"twice"])


def test_a_message_that_is_too_large_is_quarantined(rocketmq: Rocketmq, tmp_path: Path) -> None:
    topic, group = rocketmq.topic(), rocketmq.group()
    rocketmq.send(topic, [("a", b"1"), ("b", b"333333"), ("c", b"3")])
    options = given(rocketmq, topic, group, log=str(tmp_path / "log"), messageBytesMax="5", badMessages="quarantine")
    delivered.receive(delivered.endpoint("rocketmq", **options), idle_s=1)
    assert entered(tmp_path / "log") == Counter([b"1", b"3"])
    assert entered(tmp_path / "log.bad") == Counter([b"333333"])


def test_nothing_listens_but_on_the_loopback(rocketmq: Rocketmq) -> None:
    server = psutil.Process(rocketmq.broker.pid)
    assert len(server.children(recursive=True)) == 2
    mine = [c.laddr for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {f"{ip}:{port}" for ip, port in mine} == set(rocketmq.broker.listeners.values())
    assert {a.rpartition(":")[0] for a in rocketmq.broker.listeners.values()} == {"127.0.0.1"}
    # The servers' sockets are not in this machine's lists: 8080 and 10912 are the two ports that nobody can bind.
    assert not [a for a in listening() if a.endswith((":8080", ":10912"))]
    inside = Path(f"/proc/{server.pid}/net/tcp").read_text()
    assert " 00000000:1F90 " in inside and " 00000000:2AA0 " in inside, "else the namespace is not needed"


@pytest.mark.matrix
def test_the_servers_are_killed_and_come_back(new_rocketmq: Callable[..., Rocketmq], tmp_path: Path) -> None:
    """And nothing is left of the killed ones."""
    rocketmq = new_rocketmq()
    topic, group = rocketmq.topic(), rocketmq.group()
    rocketmq.send(topic, numbered(COUNT))
    file = made_file(tmp_path, rocketmq, topic, group, receiveMessagesMax=50)
    server = psutil.Process(rocketmq.broker.pid)
    servers = [server, *server.children(recursive=True)]
    assert len(servers) == 3
    process = receive(file)
    while not (tmp_path / "log" / "_delta_log" / "00000000000000000003.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    rocketmq.broker.kill()
    assert psutil.wait_procs(servers, 10)[1] == []
    rocketmq.broker.restart()
    deadline = time.monotonic() + 60
    while entered(tmp_path / "log") != each_once(COUNT):
        assert time.monotonic() < deadline, process.poll() and process.communicate()
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert finish(process)["reconnected"] >= 1


def listening() -> set[str]:
    """Listening ports of this machine, of all users."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, state = (line.split()[i] for i in (1, 3))
        if state == "0A":
            host, port = address.split(":")
            found.add(f"{socket.inet_ntoa(bytes.fromhex(host)[::-1])}:{int(port, 16)}")
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        address, state = (line.split()[i] for i in (1, 3))
        if state == "0A":
            found.add(f"[{address.split(':')[0]}]:{int(address.split(':')[1], 16)}")
    return found


def test_bad_input_is_told_clearly(rocketmq: Rocketmq, tmp_path: Path) -> None:
    topic, fifo, group = rocketmq.topic(), rocketmq.topic("FIFO"), rocketmq.group()

    def findings(**other: str) -> dict[str, bool]:
        options = {**given(rocketmq, topic, group), **other}
        return {f.code: f.refuses for f in RocketmqQueue(parse(options)).preflight()}

    assert findings() == {}
    assert findings(topic="nowhere") == {"TOPIC_MISSING": True}
    assert findings(group="nobody") == {"GROUP_MISSING": True}
    assert findings(topic=fifo) == {"GROUP_NOT_ORDERED": False}
    assert findings(topic=fifo, group=rocketmq.group(ordered=True)) == {}
    assert findings(endpoints="127.0.0.1:9") == {"ROCKETMQ_UNREACHABLE": True}
    with pytest.raises(UsageError, match="does not exist"):
        delivered.receive(delivered.endpoint("rocketmq", **given(rocketmq, topic, "nobody", log=str(tmp_path / "l"))))
    with pytest.raises(Unreachable):
        RocketmqReceiver(parse({**given(rocketmq, topic, group), "endpoints": "127.0.0.1:9"}))


def test_importing_the_client_writes_nothing_below_the_home(tmp_path: Path) -> None:
    code = "from delivered.connectors.rocketmq.client import library; library()"
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_where_no_namespace_can_be_had_the_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "import sys; sys.exit('unshare: Operation not permitted')"
    monkeypatch.setattr("delivered_lab.brokers.enclosed._OURSELVES", [sys.executable, "-c", broken])
    with pytest.raises(delivered.DeliveredError, match="not permitted"):
        brokers.start("rocketmq", tmp_path / "r")


def test_a_topic_that_cannot_be_made_is_an_error(rocketmq: Rocketmq) -> None:
    with pytest.raises(delivered.DeliveredError, match="RocketMQ at"):
        rocketmq_server.make_topic(rocketmq.broker.listeners["BROKER"], "a b", "NORMAL")


@pytest.mark.matrix
def test_a_consumer_with_an_inbox_has_each_effect_once_though_messages_repeat_and_it_dies(
    rocketmq: Rocketmq, tmp_path: Path
) -> None:
    """The recipe `at_least_once` and an inbox: a sink sends its batch twice; its ids are those of the rows."""
    topic, database = rocketmq.topic(queues=1), str(tmp_path / "shop.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute(ddl("sqlite"))
        connection.execute("CREATE TABLE effects (n INTEGER, message VARCHAR(64))")
        connection.commit()
    batch = pa.record_batch({"value": [b'{"n": %d}' % n for n in range(MESSAGES)], "offset": range(MESSAGES)})
    options = {
        "endpoints": rocketmq.url,
        "topic": topic,
        "ledger": str(tmp_path / "l.db"),
        "messageIdColumns": "offset",
    }
    for number in range(2):
        task = writer(find_sink("rocketmq", options), batch=number)
        task.stage(batch)
        task.prepare(Fingerprint())
    spec = {
        "role": "consumer", "dialect": "sqlite", "url": database, "inbox": "inbox", "effects": "effects",
        "broker": "rocketmq", "address": rocketmq.url, "queue": topic, "group": rocketmq.group(), "variant": "",
    }  # fmt: skip
    for point, n in (("in_late", 1), ("after", 4)):
        assert applications.run_process({**spec, "point": point, "n": n})[0] == -9
    code, repeats = applications.run_process({**spec, "point": "", "n": -1})
    assert (code, int(repeats) >= 1) == (0, True)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        found = Counter(m for (m,) in connection.execute("SELECT message FROM effects"))
    assert found == Counter(map(str, range(MESSAGES)))

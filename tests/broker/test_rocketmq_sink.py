"""RocketMQ as a sink: what arrives after a kill, under its two guarantees; refusals."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from tests.broker.send_help import POINTS, ROWS, exactly_once_is_refused, killed_and_started_again, rows, writer
from tests.support.rocketmq import taken
from tests.support.servers import Rocketmq

from delivered.connectors.rocketmq import RocketmqOptions
from delivered.connectors.rocketmq.queue import RocketmqReceiver
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Promise
from delivered.pipeline.registry import find_sink

parse = RocketmqOptions.parse


def sink(folder: Path, rocketmq: Rocketmq, topic: str, **options: str) -> Any:
    ledger = str(folder / "ledger.db")
    return find_sink("rocketmq", {"endpoints": rocketmq.url, "topic": topic, "ledger": ledger, **options})


@pytest.mark.matrix  # as test_rabbitmq_sink.py; conformance/test_message_ids.py
def test_all_rows_arrive_with_ids_that_a_replay_repeats(rocketmq: Rocketmq, tmp_path: Path) -> None:
    topic = rocketmq.topic()
    made = sink(tmp_path, rocketmq, topic)
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    for _ in range(2):
        task = writer(made)
        task.stage(rows(700))
        task.stage(rows(300, 700))
        assert task.prepare(Fingerprint()) == Promise()
    found = taken(rocketmq, topic, least=1_000)
    assert Counter(v for _, _, v in found) == Counter({b"row %d" % n: 2 for n in range(1_000)})
    assert len({i for i, _, _ in found}) == 1_000
    assert {v for i, _, v in found if i == "p.s.i.0.0.17"} == {b"row 17"}


@pytest.mark.matrix  # test_rocketmq_transactions.py kills a sender, test_rabbitmq_sink.py one without transactions
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_killed_and_started_again(rocketmq: Rocketmq, tmp_path: Path, guarantee: str, point: str) -> None:
    topic = rocketmq.topic()
    options = {"format": "rocketmq", "endpoints": rocketmq.url, "topic": topic}
    least = ROWS if guarantee == "at_least_once" else 0

    def values() -> list[bytes]:
        return [value for _, _, value in taken(rocketmq, topic, least=least)]

    killed_and_started_again(tmp_path, options, guarantee, point, values)


def test_exactly_once_is_refused_with_a_way_out(tmp_path: Path) -> None:
    exactly_once_is_refused(tmp_path, "rocketmq", endpoints="x:1", topic="t")


def test_message_groups_stay_in_order(rocketmq: Rocketmq, tmp_path: Path) -> None:
    topic = rocketmq.topic("FIFO", queues=4)
    made = sink(tmp_path, rocketmq, topic, messageType="fifo")
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    batch = pa.record_batch(
        {"value": [b"%d" % n for n in range(200)], "message_group": [f"group {n % 5}" for n in range(200)]}
    )
    made.check_schema(batch.schema)
    task = writer(made)
    task.stage(batch)
    assert task.prepare(Fingerprint()) == Promise()
    found = taken(rocketmq, topic, ordered=True, least=200)
    assert len(found) == 200
    for group in range(5):
        mine = [int(v) for _, key, v in found if key == b"group %d" % group]
        assert mine == list(range(group, 200, 5))


def test_messages_are_delivered_when_they_should_be(rocketmq: Rocketmq, tmp_path: Path) -> None:
    topic = rocketmq.topic("DELAY")
    made = sink(tmp_path, rocketmq, topic, messageType="delay")
    now = time.time()
    times = pa.array([int((now + s) * 1e6) for s in (-60, 0, 5)], pa.timestamp("us", "UTC"))
    batch = pa.record_batch({"value": [b"past", b"now", b"later"], "delivery_timestamp": times})
    made.check_schema(batch.schema)
    task = writer(made)
    task.stage(batch)
    assert task.prepare(Fingerprint()) == Promise()
    group = rocketmq.group()
    receiver = RocketmqReceiver(parse({"endpoints": rocketmq.url, "topic": topic, "group": group, "log": "/x"}))
    came: dict[bytes, float] = {}
    while len(came) < 3:
        assert time.time() < now + 60
        for value in receiver.receive(10, 0.2).values:
            came[value] = time.time() - now
    receiver.close()
    assert came[b"later"] >= 5
    assert came[b"past"] < came[b"later"]


def test_values_of_all_kinds_arrive(rocketmq: Rocketmq, tmp_path: Path) -> None:
    topic = rocketmq.topic()
    made = sink(tmp_path, rocketmq, topic)
    values = [b"\x00\xff\n\x00", "é世".encode(), os.urandom(1_500_000)]
    batch = pa.record_batch(
        {
            "value": pa.array(values, pa.binary()),
            "key": ["a:b", None, "é"],
            "message_id": ["m:é 0", "m:1", None],
            "tag": ["t", None, None],
        }
    )
    made.check_schema(batch.schema)
    task = writer(made)
    task.stage(batch)
    assert task.prepare(Fingerprint()) == Promise()
    found = sorted(taken(rocketmq, topic, least=len(values)), key=lambda f: values.index(f[2]))
    assert found == [
        ("m:é 0", b"a:b", values[0]),
        ("m:1", None, values[1]),
        ("p.s.i.0.0.2", "é".encode(), values[2]),
    ]


def test_bad_input_is_told_clearly(rocketmq: Rocketmq, tmp_path: Path) -> None:
    topic, fifo = rocketmq.topic(), rocketmq.topic("FIFO")

    def findings(topic: str, **options: str) -> dict[str, bool]:
        made = sink(tmp_path, rocketmq, topic, **options)
        return {f.code: f.refuses for f in made.preflight(Guarantee.AT_LEAST_ONCE)}

    assert findings(topic) == {}
    assert findings("nowhere") == {"TOPIC_MISSING": True}
    assert findings(fifo) == {"TOPIC_TYPE": True}
    assert findings(topic, messageType="delay") == {"TOPIC_TYPE": True}
    assert findings(topic, endpoints="127.0.0.1:9") == {"ROCKETMQ_UNREACHABLE": True}
    task = writer(sink(tmp_path, rocketmq, topic))
    with pytest.raises(BadRecord, match=r"VALUE_TOO_LONG.*'value' has 5000000 bytes.*at most 4194304"):
        task.stage(pa.record_batch({"value": [b"x" * 5_000_000]}))
    task.abort()


@pytest.mark.matrix
def test_servers_that_die_leave_it_unknown(new_rocketmq: Callable[..., Rocketmq], tmp_path: Path) -> None:
    rocketmq = new_rocketmq()
    made = sink(tmp_path, rocketmq, rocketmq.topic())
    sure, once = writer(made), writer(made, Guarantee.AT_MOST_ONCE)
    for task in (sure, once):
        task.stage(rows(100))
    for process in psutil.Process(rocketmq.broker.pid).children(recursive=True):
        os.kill(process.pid, signal.SIGSTOP)
    for task in (sure, once):
        task.stage(rows(100, 100))
    rocketmq.broker.kill()
    with pytest.raises(OutcomeUnknown, match="not confirmed"):
        sure.prepare(Fingerprint())
    assert 0 < once.prepare(Fingerprint()).given_up["unconfirmed"] <= 200
    for task in (sure, once):
        task.abort()

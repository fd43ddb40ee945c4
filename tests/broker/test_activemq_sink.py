"""ActiveMQ as a sink: what arrives after a kill, under its two guarantees; refusals."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.receive_help import drained
from tests.broker.send_help import POINTS, ROWS, exactly_once_is_refused, killed_and_started_again, rows, writer
from tests.support.servers import Activemq

from delivered.connectors.activemq import DUPLICATE_ID, ActivemqOptions
from delivered.connectors.activemq.queue import ActivemqReceiver
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, OutcomeUnknown, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Promise
from delivered.pipeline.registry import find_sink

parse = ActivemqOptions.parse


def sink(folder: Path, url: str, queue: str, **options: str) -> Any:
    ledger = str(folder / "ledger.db")
    return find_sink("activemq", {"url": url, "queue": queue, "ledger": ledger, **options})


def taken(activemq: Activemq, queue: str, id_header: str = DUPLICATE_ID) -> list[tuple[str | None, bytes]]:
    """All messages in the queue."""
    options = {"url": activemq.url, "queue": queue, "log": "/x", "idHeader": id_header}
    receiver = ActivemqReceiver(parse(options))
    return [pair for batch in drained(receiver) for pair in zip(batch.ids, batch.values, strict=True)]


@pytest.mark.matrix  # as test_rabbitmq_sink.py; conformance/test_message_ids.py
def test_all_rows_arrive_with_ids_that_a_replay_repeats(activemq: Activemq, tmp_path: Path) -> None:
    queue = activemq.queue()
    made = sink(tmp_path, activemq.url, queue, idHeader="id")
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    for _ in range(2):
        task = writer(made)
        task.stage(rows(2_500))
        task.stage(rows(1_500, 2_500))
        assert task.prepare(Fingerprint()) == Promise()
    found = taken(activemq, queue, "id")
    assert Counter(v for _, v in found) == Counter({b"row %d" % n: 2 for n in range(ROWS)})
    assert len({i for i, _ in found}) == ROWS
    assert len({v for i, v in found if i == "p.s.i.0.0.17"}) == 1


@pytest.mark.matrix
def test_the_broker_drops_a_repeat_within_its_cache_and_not_beyond(
    new_activemq: Callable[..., Activemq], tmp_path: Path
) -> None:
    """What the plan says of `_AMQ_DUPL_ID`, and why it is a limit and no guarantee (P22)."""
    activemq = new_activemq(IDCacheSize="100")
    queue = activemq.queue()
    made = sink(tmp_path, activemq.url, queue)

    def send(count: int, batch: int) -> None:
        task = writer(made, batch=batch)
        task.stage(rows(count, 1_000 * batch))
        task.prepare(Fingerprint())

    send(80, 0)
    activemq.broker.kill()
    activemq.broker.restart()
    send(80, 0)
    assert Counter(v for _, v in taken(activemq, queue)) == Counter(b"row %d" % n for n in range(80))
    send(80, 1)
    send(80, 0)
    again = Counter(v for _, v in taken(activemq, queue))
    assert again == Counter([b"row %d" % n for n in range(1_000, 1_080)] + [b"row %d" % n for n in range(80)])


@pytest.mark.matrix  # test_rabbitmq_sink.py and test_pulsar_sink.py kill such a sender, test_activemq.py a receiver
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_killed_and_started_again(activemq: Activemq, tmp_path: Path, guarantee: str, point: str) -> None:
    queue = activemq.queue()
    sink = {
        "format": "activemq",
        "url": activemq.url,
        "queue": queue,
        "idHeader": "id",
    }  # the broker does not deduplicate by it
    killed_and_started_again(tmp_path, sink, guarantee, point, lambda: (v for _, v in taken(activemq, queue)))


def test_exactly_once_is_refused_with_a_way_out(tmp_path: Path) -> None:
    exactly_once_is_refused(tmp_path, "activemq", url="stomp://x/", queue="q")


def test_a_queue_that_is_not_there_and_not_made_is_an_error(activemq: Activemq, tmp_path: Path) -> None:
    activemq.ask(
        "broker", "addAddressSettings", "nobody", json.dumps({"autoCreateQueues": False, "autoCreateAddresses": False})
    )
    task = writer(sink(tmp_path, activemq.url, "nobody"))
    with pytest.raises(UsageError, match="The queue 'nobody' does not exist"):
        task.stage(rows(10))
        task.prepare(Fingerprint())
    task.abort()
    (finding,) = sink(tmp_path, activemq.url, "nobody").preflight(Guarantee.AT_LEAST_ONCE)
    assert (finding.code, finding.refuses) == ("QUEUE_MISSING", True)


def test_a_queue_that_is_full_refuses_or_drops_and_both_are_told(activemq: Activemq, tmp_path: Path) -> None:
    full = activemq.queue(addressFullMessagePolicy="FAIL", maxSizeBytes=20_000, pageSizeBytes=10_000)

    def refusal() -> str:
        task = writer(sink(tmp_path, activemq.url, full))
        with pytest.raises(DeliveredError) as raised:
            task.stage(rows(1_000))
            task.prepare(Fingerprint())
        task.abort()
        return str(raised.value)

    # The broker closes the connection behind its answer, which is lost if more is sent meanwhile.
    assert any("is full" in refusal() for _ in range(5))
    drops = sink(
        tmp_path,
        activemq.url,
        activemq.queue(addressFullMessagePolicy="DROP", maxSizeBytes=20_000, pageSizeBytes=10_000),
    )
    (finding,) = drops.preflight(Guarantee.AT_LEAST_ONCE)
    assert (finding.code, finding.refuses) == ("QUEUE_DROPS", True)


def test_values_of_all_kinds_arrive_as_bytes(activemq: Activemq, tmp_path: Path) -> None:
    queue = activemq.queue()
    made = sink(tmp_path, activemq.url, queue, keyHeader="k", idHeader="id")
    values = [b"", None, b"\x00\xff\n\x00", "é世".encode(), os.urandom(1_500_000)]
    batch = pa.record_batch(
        {
            "value": pa.array(values, pa.binary()),
            "key": ["a:b", None, "é\n", "", "x"],
            "message_id": [f"m:{n}" for n in range(5)],
        }
    )
    made.check_schema(batch.schema)
    task = writer(made)
    task.stage(batch)
    assert task.prepare(Fingerprint()) == Promise()
    receiver = ActivemqReceiver(
        parse({"url": activemq.url, "queue": queue, "log": "/x", "idHeader": "id", "keyHeader": "k"})
    )
    found: list[tuple[Any, ...]] = []
    while len(found) < 5:
        batch = receiver.receive(10, 2.0)
        assert len(batch)
        found += zip(batch.ids, batch.keys, batch.values, strict=True)
    receiver.close()
    keys = [b"a:b", None, "é\n".encode(), b"", b"x"]
    assert found == [(f"m:{n}", keys[n], values[n] or b"") for n in range(5)]


def test_rows_with_an_empty_id_are_not_one_message(activemq: Activemq, tmp_path: Path) -> None:
    queue = activemq.queue()
    task = writer(sink(tmp_path, activemq.url, queue))
    task.stage(pa.record_batch({"value": [b"a", b"b"], "message_id": ["", ""]}))
    assert task.prepare(Fingerprint()) == Promise()
    assert activemq.kept(queue) == 2


def test_a_broker_that_dies_leaves_it_unknown(new_activemq: Callable[..., Activemq], tmp_path: Path) -> None:
    activemq = new_activemq()
    queue = activemq.queue()
    made = sink(tmp_path, activemq.url, queue)
    sure, once = writer(made), writer(made, Guarantee.AT_MOST_ONCE)
    for task in (sure, once):
        task.stage(rows(100))
    os.kill(activemq.broker.pid, signal.SIGSTOP)
    for task in (sure, once):
        task.stage(rows(100, 100))
    activemq.broker.kill()
    with pytest.raises(OutcomeUnknown, match="not confirmed"):
        sure.prepare(Fingerprint())
    assert 0 < once.prepare(Fingerprint()).given_up["unconfirmed"] <= 200
    for task in (sure, once):
        task.abort()

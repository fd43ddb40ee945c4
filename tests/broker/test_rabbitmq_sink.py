"""RabbitMQ as a sink: what arrives after a kill, under its two guarantees; refusals."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.broker.receive_help import drained
from tests.broker.send_help import POINTS, ROWS, exactly_once_is_refused, killed_and_started_again, rows, writer
from tests.broker.sink_help import wait_for
from tests.support.servers import Rabbitmq
from tests.support.sweeps import sweep

from delivered.connectors.rabbitmq import RabbitmqOptions
from delivered.connectors.rabbitmq import queue as sink_module
from delivered.connectors.rabbitmq.queue import RabbitmqReceiver
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Promise
from delivered.pipeline.registry import find_sink

parse = RabbitmqOptions.parse


def sink(folder: Path, url: str, queue: str, **options: str) -> Any:
    ledger = str(folder / "ledger.db")
    return find_sink("rabbitmq", {"url": url, "routingKey": queue, "ledger": ledger, **options})


def taken(rabbitmq: Rabbitmq, queue: str) -> list[tuple[str | None, bytes]]:
    """All messages in the queue."""
    receiver = RabbitmqReceiver(parse({"url": rabbitmq.url, "queue": queue, "log": "/x"}))
    return [pair for batch in drained(receiver) for pair in zip(batch.ids, batch.values, strict=True)]


def test_all_rows_arrive_confirmed_with_ids_that_a_replay_repeats(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    queue = rabbitmq.queue()
    made = sink(tmp_path, rabbitmq.url, queue)
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    for _ in range(2):
        task = writer(made)
        task.stage(rows(2_500))
        task.stage(rows(1_500, 2_500))
        assert task.prepare(Fingerprint()) == Promise()
    found = taken(rabbitmq, queue)
    assert Counter(v for _, v in found) == Counter({b"row %d" % n: 2 for n in range(ROWS)})
    assert len({i for i, _ in found}) == ROWS
    assert len({v for i, v in found if i == "p.s.i.0.0.17"}) == 1


def stored(rabbitmq: Rabbitmq, stream: str) -> Counter[bytes]:
    """What a stream has, up to a message that is sent behind it."""
    found = Counter[bytes]()
    with contextlib.closing(rabbitmq.connect()) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1_000)
        channel.basic_publish("", stream, b"the end")
        for method, _, body in channel.consume(stream, arguments={"x-stream-offset": "first"}):
            if body == b"the end":
                return found
            found[body] += 1
            channel.basic_ack(method.delivery_tag)
    raise AssertionError("the server ended the consumer")


@pytest.mark.parametrize(
    ("point", "guarantee"),
    sweep(
        product(POINTS, ("at_least_once", "at_most_once")),
        # test_pulsar_sink.py kills an at_most_once sender of messages.
        lambda *of: of == ("write.flush:after", "at_least_once"),
    ),
)
def test_killed_and_started_again(rabbitmq: Rabbitmq, tmp_path: Path, guarantee: str, point: str) -> None:
    queue = rabbitmq.queue()
    sink = {"format": "rabbitmq", "url": rabbitmq.url, "routingKey": queue}
    killed_and_started_again(tmp_path, sink, guarantee, point, lambda: (v for _, v in taken(rabbitmq, queue)))


def test_exactly_once_is_refused_with_a_way_out(tmp_path: Path) -> None:
    exactly_once_is_refused(tmp_path, "rabbitmq", url="amqp://x/", routingKey="q")


@pytest.fixture
def few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "ROUTE_PATIENCE_S", 2.0)


@pytest.mark.usefixtures("few_seconds")
def test_a_message_that_no_queue_takes_is_an_error(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    task = writer(sink(tmp_path, rabbitmq.url, "nobody"))
    with pytest.raises(BadRecord, match="were routed to no queue"):
        task.stage(rows(10))
        task.prepare(Fingerprint())
    task.abort()
    (finding,) = sink(tmp_path, rabbitmq.url, "nobody").preflight(Guarantee.AT_LEAST_ONCE)
    assert (finding.code, finding.refuses) == ("QUEUE_MISSING", True)


def reached_no_queue(task: Any) -> None:
    """Wait until rows that were staged came back."""
    wait_for(lambda: task._publisher is not None and task._publisher._returned)


def test_messages_that_no_queue_took_arrive_once_when_one_does(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    """As a stream behind an exchange, for half a second after its server started."""
    for guarantee in (Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE):
        queue = f"late-{guarantee}"
        task = writer(sink(tmp_path, rabbitmq.url, queue), guarantee)
        with ThreadPoolExecutor() as threads:
            staged = threads.submit(task.stage, rows(ROWS))
            reached_no_queue(task)
            with contextlib.closing(rabbitmq.connect()) as connection:
                connection.channel().queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
            staged.result()
        assert task.prepare(Fingerprint()) == Promise()
        assert Counter(v for _, v in taken(rabbitmq, queue)) == Counter({b"row %d" % n: 1 for n in range(ROWS)})


@pytest.mark.matrix  # the test above routes late, without a server of its own
def test_a_stream_gets_what_is_sent_right_after_its_server_started(
    new_rabbitmq: Callable[[], Rabbitmq], tmp_path: Path
) -> None:
    rabbitmq = new_rabbitmq()
    stream = rabbitmq.queue("stream")
    with contextlib.closing(rabbitmq.connect()) as connection:
        connection.channel().exchange_declare("x", "fanout", durable=True)
        connection.channel().queue_bind(stream, "x")
    options = {"url": rabbitmq.url, "exchange": "x", "ledger": str(tmp_path / "ledger.db")}
    keyed = rows(ROWS).append_column("key", pa.array([b"k"] * ROWS))

    def send() -> Promise:
        task = writer(find_sink("rabbitmq", options), Guarantee.AT_MOST_ONCE)
        while task._publisher is None:
            with contextlib.suppress(Unreachable):
                task._publisher = task._connect()
        task.stage(keyed)
        return cast("Promise", task.prepare(Fingerprint()))

    rabbitmq.broker.stop()
    with ThreadPoolExecutor() as threads:
        sent = threads.submit(send)
        rabbitmq.broker.restart()
        assert sent.result() == Promise()
    assert stored(rabbitmq, stream) == Counter({b"row %d" % n: 1 for n in range(ROWS)})


@pytest.mark.matrix  # test_a_broker_that_dies_leaves_it_unknown
def test_messages_that_no_queue_took_are_given_up_with_the_server(
    new_rabbitmq: Callable[[], Rabbitmq], tmp_path: Path
) -> None:
    rabbitmq = new_rabbitmq()
    sure, once = (
        writer(sink(tmp_path, rabbitmq.url, "nobody"), g) for g in (Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE)
    )
    for task in (sure, once):
        task.stage(rows(100))
        reached_no_queue(task)
    rabbitmq.broker.kill()
    with pytest.raises(OutcomeUnknown, match="100 messages were sent but not confirmed"):
        sure.prepare(Fingerprint())
    assert once.prepare(Fingerprint()).given_up == {"unconfirmed": 100}
    for task in (sure, once):
        task.abort()


def test_a_queue_that_is_full_refuses_and_the_task_says_so(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    queue = rabbitmq.queue("classic", **{"x-max-length": 5, "x-overflow": "reject-publish"})
    task = writer(sink(tmp_path, rabbitmq.url, queue))
    with pytest.raises(DeliveredError, match="rejected"):
        task.stage(rows(100))
        task.prepare(Fingerprint())
    task.abort()


def test_a_broker_that_dies_leaves_it_unknown(new_rabbitmq: Callable[[], Rabbitmq], tmp_path: Path) -> None:
    rabbitmq = new_rabbitmq()
    queue = rabbitmq.queue()
    made = sink(tmp_path, rabbitmq.url, queue)
    sure, once = writer(made), writer(made, Guarantee.AT_MOST_ONCE)
    for task in (sure, once):
        task.stage(rows(100))
    os.kill(rabbitmq.broker.pid, signal.SIGSTOP)
    for task in (sure, once):
        task.stage(rows(100, 100))
    rabbitmq.broker.kill()
    with pytest.raises(OutcomeUnknown, match="not confirmed"):
        sure.prepare(Fingerprint())
    assert 0 < once.prepare(Fingerprint()).given_up["unconfirmed"] <= 200
    for task in (sure, once):
        task.abort()

"""RabbitMQ as a sink: what arrives after a kill, under the two guarantees it can give; what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import Rabbitmq

import delivered
from delivered.connectors.log import append
from delivered.connectors.rabbitmq.options import parse
from delivered.connectors.rabbitmq.receiver import RabbitmqReceiver
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.pipeline.registry import find_sink
from delivered.plan import Plan, Refusal
from delivered.testing.supervisor import run

ROWS = 4_000
SCHEMA = pa.schema([("value", pa.binary())])


def rows(count: int, first: int = 0) -> pa.RecordBatch:
    return pa.record_batch([pa.array([b"row %d" % n for n in range(first, first + count)])], schema=SCHEMA)


def sink(folder: Path, url: str, queue: str, **options: str) -> Any:
    ledger = str(folder / "ledger.db")
    return find_sink("rabbitmq", {"url": url, "routingKey": queue, "ledger": ledger, **options})


def writer(made: Any, guarantee: Guarantee = Guarantee.AT_LEAST_ONCE, batch: int = 0) -> Any:
    return made.shard_writer(Work(Scope("p", "s", "i"), batch, 0), guarantee, SCHEMA)


def taken(rabbitmq: Rabbitmq, queue: str) -> list[tuple[str | None, bytes]]:
    """All that is in the queue."""
    receiver = RabbitmqReceiver(parse({"url": rabbitmq.url, "queue": queue, "log": "/x"}))
    found: list[tuple[str | None, bytes]] = []
    while len(bunch := receiver.receive(10_000, 1.0)):
        found += zip(bunch.ids, bunch.values, strict=True)
        receiver.acknowledge(bunch.handles)
    receiver.close()
    return found


def test_all_rows_arrive_confirmed_with_ids_that_a_replay_repeats(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    queue = rabbitmq.queue()
    made = sink(tmp_path, rabbitmq.url, queue)
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    for _ in range(2):
        task = writer(made)
        task.stage(rows(2_500))
        task.stage(rows(1_500, 2_500))
        assert task.prepare(Fingerprint()) == {}
    found = taken(rabbitmq, queue)
    assert Counter(v for _, v in found) == Counter({b"row %d" % n: 2 for n in range(ROWS)})
    assert len({i for i, _ in found}) == ROWS
    assert len({v for i, v in found if i == "p.s.i.0.0.17"}) == 1


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
@pytest.mark.parametrize("point", ["write.send:after", "write.flush:after", "commit.record:before", "log:before"])
def test_killed_and_started_again(rabbitmq: Rabbitmq, tmp_path: Path, guarantee: str, point: str) -> None:
    queue = rabbitmq.queue()
    append(str(tmp_path / "log"), pa.Table.from_batches([rows(ROWS)]))
    file = tmp_path / "p.yaml"
    pipeline = {
        "pipeline": "p",
        "guarantee": guarantee,
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {"format": "log", "path": str(tmp_path / "log"), "maxOffsetsPerTrigger": 1_000},
        "transform": {"select": ["value"]},
        "sinks": [
            {"format": "rabbitmq", "url": rabbitmq.url, "routingKey": queue, "ledger": str(tmp_path / "ledger.db")}
        ],
    }
    file.write_text(json.dumps(pipeline))
    command = [sys.executable, "-m", "delivered.verify.loop", str(file)]
    done = run(command, f"{point}@batch=1", tmp_path / "hits", timeout_s=50)
    assert (done.exit_code, done.runs, len(done.kills)) == (0, 2, 1)
    found = Counter(v for _, v in taken(rabbitmq, queue))
    if guarantee == "at_least_once":
        assert set(found) == {b"row %d" % n for n in range(ROWS)}
        # Before the flush, what was staged may have left or not.
        twice = {"log:before": {1}, "write.send:after": {1, 2}}.get(point, {2})
        assert max(found.values()) in twice
    else:
        assert max(found.values()) == 1
        told = subprocess.run(
            [sys.executable, "-m", "delivered.verify.loop", str(file), "--accounts"], capture_output=True, check=True
        )
        accounts = json.loads(told.stdout)
        assert ROWS - len(found) <= accounts["given_up"] <= 1_000
        assert (accounts["given_up"] == 0) == (point == "log:before")


def test_exactly_once_is_refused_with_a_way_out(tmp_path: Path) -> None:
    def plan(guarantee: str) -> Plan | Refusal:
        return delivered.Pipeline(
            name="p",
            guarantee=guarantee,
            checkpoint="/nowhere",
            source=delivered.log("/nowhere/log"),
            sinks=[delivered.endpoint("rabbitmq", url="amqp://x/", routingKey="q", ledger=str(tmp_path / "l.db"))],
        ).plan(offline=True)

    refused = plan("exactly_once")
    assert isinstance(refused, Refusal)
    assert "DELIVERED_SINK_CANNOT_COMMIT" in str(refused)
    assert "at_least_once" in str(refused)
    for guarantee in ("at_least_once", "at_most_once"):
        assert f"p: {guarantee} by" in str(plan(guarantee))


def test_a_message_that_no_queue_takes_is_an_error(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    task = writer(sink(tmp_path, rabbitmq.url, "nobody"))
    with pytest.raises(BadRecord, match="reached no queue"):
        task.stage(rows(10))
        task.prepare(Fingerprint())
    task.abort()
    (finding,) = sink(tmp_path, rabbitmq.url, "nobody").preflight(Guarantee.AT_LEAST_ONCE)
    assert (finding.code, finding.refuses) == ("QUEUE_MISSING", True)


def test_a_queue_that_is_full_refuses_and_the_task_says_so(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    queue = rabbitmq.queue("classic", **{"x-max-length": 5, "x-overflow": "reject-publish"})
    task = writer(sink(tmp_path, rabbitmq.url, queue))
    with pytest.raises(DeliveredError, match="refused"):
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
    assert 0 < once.prepare(Fingerprint())["given_up"] <= 200
    for task in (sure, once):
        task.abort()

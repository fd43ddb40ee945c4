"""ActiveMQ as a sink: what arrives after a kill, under the two guarantees it can give; what is refused."""

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
from tests.conftest import Activemq

import delivered
from delivered.connectors.activemq.options import DUPLICATE_ID, parse
from delivered.connectors.activemq.receiver import ActivemqReceiver
from delivered.connectors.log import append
from delivered.model.errors import DeliveredError, OutcomeUnknown, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.pipeline.registry import find_sink
from delivered.plan import Plan, Refusal
from delivered.testing.supervisor import run

ROWS = 4_000
QUICK = {("at_least_once", "write.flush:after"), ("at_most_once", "write.send:after")}
SCHEMA = pa.schema([("value", pa.binary())])


def rows(count: int, first: int = 0) -> pa.RecordBatch:
    return pa.record_batch([pa.array([b"row %d" % n for n in range(first, first + count)])], schema=SCHEMA)


def sink(folder: Path, url: str, queue: str, **options: str) -> Any:
    ledger = str(folder / "ledger.db")
    return find_sink("activemq", {"url": url, "queue": queue, "ledger": ledger, **options})


def writer(made: Any, guarantee: Guarantee = Guarantee.AT_LEAST_ONCE, batch: int = 0) -> Any:
    return made.shard_writer(Work(Scope("p", "s", "i"), batch, 0), guarantee, SCHEMA)


def taken(activemq: Activemq, queue: str, id_header: str = DUPLICATE_ID) -> list[tuple[str | None, bytes]]:
    """All that is in the queue."""
    options = {"url": activemq.url, "queue": queue, "log": "/x", "idHeader": id_header}
    receiver = ActivemqReceiver(parse(options))
    found: list[tuple[str | None, bytes]] = []
    while len(bunch := receiver.receive(10_000, 1.0)):
        found += zip(bunch.ids, bunch.values, strict=True)
        receiver.acknowledge(bunch.handles)
    receiver.close()
    return found


def test_all_rows_arrive_with_ids_that_a_replay_repeats(activemq: Activemq, tmp_path: Path) -> None:
    queue = activemq.queue()
    made = sink(tmp_path, activemq.url, queue, idHeader="id")
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    for _ in range(2):
        task = writer(made)
        task.stage(rows(2_500))
        task.stage(rows(1_500, 2_500))
        assert task.prepare(Fingerprint()) == {}
    found = taken(activemq, queue, "id")
    assert Counter(v for _, v in found) == Counter({b"row %d" % n: 2 for n in range(ROWS)})
    assert len({i for i, _ in found}) == ROWS
    assert len({v for i, v in found if i == "p.s.i.0.0.17"}) == 1


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


@pytest.mark.parametrize(
    ("guarantee", "point"),
    [
        pytest.param(g, p, marks=() if (g, p) in QUICK else pytest.mark.matrix)
        for g in ("at_least_once", "at_most_once")
        for p in ("write.send:after", "write.flush:after", "commit.record:before", "log:before")
    ],
)
def test_killed_and_started_again(activemq: Activemq, tmp_path: Path, guarantee: str, point: str) -> None:
    queue = activemq.queue()
    append(str(tmp_path / "log"), pa.Table.from_batches([rows(ROWS)]))
    file = tmp_path / "p.yaml"
    pipeline = {
        "pipeline": "p",
        "guarantee": guarantee,
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {"format": "log", "path": str(tmp_path / "log"), "maxOffsetsPerTrigger": 1_000},
        "transform": {"select": ["value"]},
        "sinks": [
            {
                "format": "activemq",
                "url": activemq.url,
                "queue": queue,
                "ledger": str(tmp_path / "ledger.db"),
                "idHeader": "id",  # by another one the broker drops nothing
            }
        ],
    }
    file.write_text(json.dumps(pipeline))
    command = [sys.executable, "-m", "delivered.verify.loop", str(file)]
    done = run(command, f"{point}@batch=1", tmp_path / "hits", timeout_s=50)
    assert (done.exit_code, done.runs, len(done.kills)) == (0, 2, 1)
    found = Counter(v for _, v in taken(activemq, queue))
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
            sinks=[delivered.endpoint("activemq", url="stomp://x/", queue="q", ledger=str(tmp_path / "l.db"))],
        ).plan(offline=True)

    refused = plan("exactly_once")
    assert isinstance(refused, Refusal)
    assert "DELIVERED_SINK_CANNOT_COMMIT" in str(refused)
    assert "at_least_once" in str(refused)
    for guarantee in ("at_least_once", "at_most_once"):
        assert f"p: {guarantee} by" in str(plan(guarantee))


def test_a_queue_that_is_not_there_and_not_made_is_an_error(activemq: Activemq, tmp_path: Path) -> None:
    activemq.ask(
        "broker", "addAddressSettings", "nobody", json.dumps({"autoCreateQueues": False, "autoCreateAddresses": False})
    )
    task = writer(sink(tmp_path, activemq.url, "nobody"))
    with pytest.raises(UsageError, match="There is no queue 'nobody'"):
        task.stage(rows(10))
        task.prepare(Fingerprint())
    task.abort()
    (finding,) = sink(tmp_path, activemq.url, "nobody").preflight(Guarantee.AT_LEAST_ONCE)
    assert (finding.code, finding.refuses) == ("QUEUE_MISSING", True)


def test_a_queue_that_is_full_refuses_or_drops_and_both_are_told(activemq: Activemq, tmp_path: Path) -> None:
    full = activemq.queue(addressFullMessagePolicy="FAIL", maxSizeBytes=20_000, pageSizeBytes=10_000)
    task = writer(sink(tmp_path, activemq.url, full))
    with pytest.raises(DeliveredError, match="is full"):
        task.stage(rows(1_000))
        task.prepare(Fingerprint())
    task.abort()
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
    assert task.prepare(Fingerprint()) == {}
    receiver = ActivemqReceiver(
        parse({"url": activemq.url, "queue": queue, "log": "/x", "idHeader": "id", "keyHeader": "k"})
    )
    found: list[tuple[Any, ...]] = []
    while len(found) < 5:
        bunch = receiver.receive(10, 2.0)
        assert len(bunch)
        found += zip(bunch.ids, bunch.keys, bunch.values, strict=True)
    receiver.close()
    keys = [b"a:b", None, "é\n".encode(), b"", b"x"]
    assert found == [(f"m:{n}", keys[n], values[n] or b"") for n in range(5)]


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
    assert 0 < once.prepare(Fingerprint())["given_up"] <= 200
    for task in (sure, once):
        task.abort()

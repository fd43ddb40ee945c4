"""Pulsar as a sink: what arrives after a kill, under its two guarantees; refusals."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest
from tests.broker.send_help import ROWS, SCHEMA, killed_and_started_again, rows, writer
from tests.support.pulsar import ids, sink, taken
from tests.support.scans import scanned
from tests.support.servers import Pulsar
from tests.support.sweeps import sweep

from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, OutcomeUnknown, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.patience import serving_query
from delivered.model.work import Promise
from delivered.source import HEADERS
from delivered_lab.verify.proxy import Command, Fired, NetworkFault, PulsarProxy, Rule
from delivered_lab.verify.services import wait_for


@pytest.mark.parametrize("partitions", [0, 3])
def test_all_rows_arrive_with_ids_that_a_replay_repeats(pulsar: Pulsar, tmp_path: Path, partitions: int) -> None:
    topic = pulsar.topic(partitions)
    made = sink(tmp_path, pulsar, topic)
    assert [f for g in Guarantee for f in made.preflight(g)] == []
    for _ in range(2):
        task = writer(made)
        task.stage(rows(2_500))
        task.stage(rows(1_500, 2_500))
        assert task.prepare(Fingerprint()) == Promise()
    found = taken(pulsar, topic)
    assert Counter(r["value"] for r in found) == Counter({b"row %d" % n: 2 for n in range(ROWS)})
    assert len(set(ids(found))) == ROWS
    assert {r["value"] for r, i in zip(found, ids(found), strict=True) if i == "p.s.i.0.0.17"} == {b"row 17"}
    assert {r["partition"] for r in found} == set(range(max(1, partitions)))


def test_columns_become_what_a_message_has(pulsar: Pulsar, tmp_path: Path) -> None:
    topic, at = pulsar.topic(4), datetime.fromtimestamp(1_700_000_000.5, UTC)
    batch = pa.record_batch(
        [
            pa.array(["hello", "", None, "hello"]),
            pa.array([b"a", b"", None, b"d"]),
            pa.array([[{"key": "h", "value": b"x"}], None, [], None], HEADERS.type),
            pa.array([at, None, None, None], pa.timestamp("us", tz="UTC")),
        ],
        names=["key", "value", "headers", "event_time"],
    )
    made = sink(tmp_path, pulsar, topic)
    made.check_schema(batch.schema)
    task = writer(made)
    task.stage(batch)
    task.prepare(Fingerprint())
    found = {r["value"]: r for r in taken(pulsar, topic)}
    assert set(found) == {b"a", b"", None, b"d"}
    assert [found[v]["key"] for v in (b"a", b"", None, b"d")] == [b"hello", None, None, b"hello"]
    assert found[b"a"]["partition"] == found[b"d"]["partition"] == 99162322 % 4, "not where Java's client puts the key"
    assert [h for h in found[b"a"]["headers"] if h["key"] == "h"] == [{"key": "h", "value": b"x"}]
    assert found[b"a"]["native"]["event_time"] == at
    table = pa.Table.from_batches(scanned(made)).select(["key", "value"])
    seen, sent = (Counter(map(str, t.to_pylist())) for t in (table, made.records(batch)))
    assert seen == sent
    for wrong in (
        pa.schema([("key", pa.binary())]),
        pa.schema([("value", pa.int64())]),
        SCHEMA.append(pa.field("x", pa.int8())),
    ):
        with pytest.raises(UsageError):
            made.check_schema(wrong)


@pytest.mark.parametrize(
    ("point", "guarantee"),
    sweep(
        product(
            ("write.flush:after", "log:before", "write.send:after", "commit.record:before"),
            ("at_least_once", "at_most_once"),
        ),
        lambda point, guarantee: (point, guarantee) == ("write.flush:after", "at_most_once"),
    ),
)
def test_killed_and_started_again(pulsar: Pulsar, tmp_path: Path, guarantee: str, point: str) -> None:
    topic = pulsar.topic()
    sink = {"format": "pulsar", **pulsar.options, "topic": topic}
    killed_and_started_again(tmp_path, sink, guarantee, point, lambda: (r["value"] for r in taken(pulsar, topic)))


def test_a_topic_that_is_missing_or_takes_no_such_message_is_an_error(pulsar: Pulsar, tmp_path: Path) -> None:
    (finding,) = sink(tmp_path, pulsar, "nobody").preflight(Guarantee.AT_LEAST_ONCE)
    assert (finding.code, finding.refuses) == ("TOPIC_MISSING", True)
    topic, long = pulsar.topic(), bytes(6 << 20)
    task = writer(sink(tmp_path, pulsar, topic))
    with pytest.raises(BadRecord, match=r"RECORD_TOO_LARGE.*chunking"):
        task.stage(pa.record_batch([pa.array([b"a", long, b"b"])], schema=SCHEMA))
        task.prepare(Fingerprint())
    task.abort()
    task = writer(sink(tmp_path, pulsar, topic, messageBytesMax=str(10 << 20)))  # above the broker's limit
    with pytest.raises(BadRecord, match=r"RECORD_TOO_LARGE.*messageBytesMax"):
        task.stage(pa.record_batch([pa.array([b"a", long, b"b"])], schema=SCHEMA))
        task.prepare(Fingerprint())
    task.abort()
    task = writer(sink(tmp_path, pulsar, topic, chunking="true"))
    task.stage(pa.record_batch([pa.array([long])], schema=SCHEMA))
    assert task.prepare(Fingerprint()) == Promise()
    assert taken(pulsar, topic)[-1]["value"] == long
    task = writer(sink(tmp_path, pulsar, topic))
    with pytest.raises(BadRecord, match="UTF-8"):
        task.stage(pa.record_batch([pa.array([b"\xff"]), pa.array([b"v"])], names=["key", "value"]))
    task.abort()


def test_a_namespace_without_deduplication_is_refused_for_at_most_once(pulsar: Pulsar, tmp_path: Path) -> None:
    made = sink(tmp_path, pulsar, pulsar.topic(2, namespace=pulsar.namespace(deduplication=False)))
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    (finding,) = made.preflight(Guarantee.AT_MOST_ONCE)
    assert (finding.code, finding.refuses, finding.only) == ("DEDUPLICATION_OFF", True, Guarantee.AT_MOST_ONCE)
    assert "set-deduplication" in (finding.next_step or "")


@pytest.mark.parametrize("deduplicates", [True, False])
def test_acknowledgements_that_are_lost(pulsar: Pulsar, tmp_path: Path, deduplicates: bool) -> None:
    """Of the second of three batches. Sent again, it is dropped if the broker deduplicates; else at_least_once has it
    twice, and at_most_once does not send it again, and counts it as given up."""
    fired: list[Fired] = []
    proxy = PulsarProxy(pulsar.broker.url.removeprefix("pulsar://"), fired.append)
    for guarantee in (Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE):
        topic = pulsar.topic(namespace=pulsar.namespace(deduplication=deduplicates))
        task = writer(sink(tmp_path, pulsar, topic, url=f"pulsar://{proxy.bootstrap}"), guarantee)
        task.stage(rows(1_000))
        wait_for(lambda: len(taken(pulsar, topic)) == 1_000, 60, "a batch is stored")  # noqa: B023 - called at once
        proxy.add(Rule(Command.SEND, NetworkFault.LOSE_REPLY, within="delivered"))
        task.stage(rows(2_000, 1_000))
        given_up = task.prepare(Fingerprint()).given_up.get("unconfirmed", 0)
        found = Counter(r["value"] for r in taken(pulsar, topic))
        assert len(found) >= 3_000 - given_up
        twice = sum(times - 1 for times in found.values())
        if deduplicates:
            assert (given_up, twice) == (0, 0)
        elif guarantee is Guarantee.AT_LEAST_ONCE:
            assert (given_up, twice) in ((0, 1_000), (0, 2_000))
        else:
            assert (given_up, twice) in ((1_000, 0), (2_000, 0))
    proxy.close()
    assert [f.rule for f in fired] == ["lose_reply:send of delivered"] * 2


@pytest.mark.matrix
def test_a_broker_killed_under_a_task(
    new_pulsar: Callable[..., Pulsar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: the client sends again what was not acknowledged; the broker's deduplication drops what it has already. A
    broker that stays away leaves it unknown."""
    pulsar = new_pulsar()
    topic = pulsar.topic()
    made = sink(tmp_path, pulsar, topic)
    task = writer(made, Guarantee.AT_MOST_ONCE)
    again: threading.Timer | None = None
    with serving_query():
        for n in range(40):
            task.stage(rows(1_000, 1_000 * n))
            if n == 20:
                pulsar.broker.kill()
                again = threading.Timer(0.1, pulsar.broker.restart)
                again.start()
        assert task.prepare(Fingerprint()) == Promise()
    assert again is not None
    again.join()
    assert Counter(r["value"] for r in taken(pulsar, topic)) == Counter(b"row %d" % n for n in range(40_000))

    monkeypatch.setattr("delivered.connectors.pulsar.publisher.REQUEST_TIMEOUT_S", 5.0)
    sure, once = writer(made), writer(made, Guarantee.AT_MOST_ONCE)
    for task in (sure, once):
        task.stage(rows(100))
    os.kill(pulsar.broker.pid, signal.SIGSTOP)
    for task in (sure, once):
        task.stage(rows(100, 100))
    pulsar.broker.kill()
    with pytest.raises(OutcomeUnknown, match="did not acknowledge"):
        sure.prepare(Fingerprint())
    assert 0 < once.prepare(Fingerprint()).given_up["unconfirmed"] <= 200
    for task in (sure, once):
        task.abort()

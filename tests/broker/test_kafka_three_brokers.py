"""What a cluster of three brokers survives, a running pipeline survives: nothing lost or doubled, no query ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.broker.cluster_help import running
from tests.broker.sink_help import EXACT, FIRST, SCHEMA, Rig, decision, rows, wait_for
from tests.support.three_brokers import NODES, ThreeBrokers

from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import Transaction, listed
from delivered.connectors.kafka.topics import STATE_PARTITION, ledger_topic
from delivered.model.errors import LedgerBehind
from delivered.model.fingerprint import Fingerprint
from delivered.model.patience import in_query
from delivered.model.work import Ok, Prepared


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeBrokers]:
    # So a leader that was killed always has an old high watermark, instead of one that is up to five seconds old.
    forgetful = {"replica.high.watermark.checkpoint.interval.ms": "3600000"}
    cluster = ThreeBrokers(tmp_path_factory.mktemp("three"), **forgetful)
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(started: ThreeBrokers) -> Iterator[ThreeBrokers]:
    yield started
    started.repair()


@pytest.fixture
def rig(cluster: ThreeBrokers) -> Rig:
    return Rig(cluster, cluster.topic([1, 2, 3], [2, 3, 1], [3, 1, 2]))


def ledger_of(rig: Rig) -> str:
    return ledger_topic(rig.scope, None)


@pytest.mark.matrix
def test_a_rolling_restart_ends_no_query(cluster: ThreeBrokers, rig: Rig) -> None:
    with running(rig):
        cluster.roll()


@pytest.mark.matrix
@pytest.mark.parametrize("round_", range(3))
def test_brokers_restart_before_their_replicas_are_in_sync(cluster: ThreeBrokers, rig: Rig, round_: int) -> None:
    """Fewer replicas than min.insync.replicas are in sync at times: writes wait."""
    with running(rig) as driver:
        for node in NODES[round_:] + NODES[:round_]:
            cluster.roll(wait=False, nodes=[node])
            driver.wait_for(1)


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["data", "ledger", "coordinator"])
def test_a_killed_broker_ends_no_query(cluster: ThreeBrokers, rig: Rig, what: str) -> None:
    """Each broker in turn that leads the partition, or coordinates the first shard's transactions."""
    with running(rig) as driver:
        for _ in range(3):
            node = leading(cluster, rig, what)
            cluster.broker(node).kill()
            driver.wait_for(3)
            cluster.broker(node).restart()
            cluster.wait_in_sync()


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["data", "ledger", "coordinator"])
def test_a_broker_that_answers_from_before_its_pause_ends_no_query(cluster: ThreeBrokers, rig: Rig, what: str) -> None:
    with running(rig) as driver:
        node = leading(cluster, rig, what)
        with cluster.paused(node):
            driver.wait_for(2)  # the others took over
        driver.wait_for(2)
        cluster.wait_in_sync()


@pytest.mark.matrix
def test_moved_leaders_and_replicas_end_no_query(cluster: ThreeBrokers, rig: Rig) -> None:
    with running(rig) as driver:
        topics = [(rig.topic, 0), (ledger_of(rig), STATE_PARTITION), ("__transaction_state", 0)]
        for turn in range(6):
            order = NODES[turn % 3 :] + NODES[: turn % 3]
            for topic, partition in topics:
                cluster.reassign(topic, partition, order if turn % 2 else order[:2])
                cluster.elect(topic, partition)
            driver.wait_for(1)
        for topic, partition in topics:
            cluster.reassign(topic, partition, NODES)


@pytest.mark.matrix
def test_a_ledger_that_lost_its_end_stops_the_pipeline(cluster: ThreeBrokers, rig: Rig) -> None:
    """An unclean election: a replica that was away while batches were decided becomes the leader."""
    unsafe = {"cleanup.policy": "compact", "unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    topic = ledger_of(rig)
    cluster.topic(*[[1, 2]] * 8, name=topic, config=unsafe)
    context = rig.context()
    for batch in range(2):
        rig.run(context, batch, first=batch == 0)
    cluster.broker(2).kill()
    for batch in range(2, 4):
        rig.run(context, batch)
    cluster.broker(1).kill()
    cluster.broker(2).restart()
    cluster.wait_until(lambda: cluster.leader(topic, STATE_PARTITION) == 2)
    with pytest.raises(LedgerBehind, match="newest decided batch is 1"):
        rig.plan(rig.context("second"), 4)


def leading(cluster: ThreeBrokers, rig: Rig, what: str) -> int:
    match what:
        case "data":
            return cluster.leader(rig.topic)
        case "ledger":
            return cluster.leader(ledger_of(rig), STATE_PARTITION)
    return cluster.coordinator(next(iter(ids_of(cluster, rig))))


def ids_of(cluster: ThreeBrokers, rig: Rig) -> list[str]:
    """Transactional ids of the pipeline's shards."""
    prefix = f"delivered.{rig.pipeline}."
    return sorted(listed(cluster.wire, lambda name: name.startswith(prefix), [], time.monotonic() + 60))


def stage(rig: Rig, batch: int, values: list[bytes | None]) -> Prepared:
    """A shard of one batch, prepared."""
    work = rig.work(batch)
    writer = rig.sink.writer(work, EXACT, SCHEMA)
    writer.stage(rows(values))
    return Prepared.of(work, Fingerprint(), writer.prepare(Fingerprint()))


def test_a_leader_that_does_not_know_the_end_hides_neither_decision_nor_marker(cluster: ThreeBrokers, rig: Rig) -> None:
    """After a power cut, it reports the high watermark of before until its followers have fetched."""
    in_query()
    ledger = rig.ledger()
    ledger.claim(FIRST)
    for batch in range(3):
        assert ledger.decide(decision(rig.scope, batch)) == Ok(None)
    staged = stage(rig, 0, [b"x"])
    assert rig.committer().commit(rig.work(0), staged) == Ok(None)
    for node in NODES:
        cluster.broker(node).kill()
    with ThreadPoolExecutor(5) as pool:
        looked = pool.submit(lambda: rig.ledger().look())
        committed = pool.submit(lambda: rig.committer().was_committed(rig.work(0), staged))
        for node in NODES:
            pool.submit(cluster.broker(node).restart)
        last = looked.result().last
        assert last is not None and last.batch == 2
        assert committed.result()


@pytest.mark.matrix  # test_kafka_two_phase.py aborts orphans in `make test`
@pytest.mark.parametrize("ahead", [False, True])
def test_orphans_of_a_dead_coordinator_are_aborted_by_its_successor(
    cluster: ThreeBrokers, rig: Rig, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Right after its death the cluster still lists the broker, and later it does not.

    Args:
        ahead: the broker that is asked who is in the cluster knows already, and the one that names coordinators not.
    """
    rig.ledger().claim(FIRST)
    orphan = Transaction.of(stage(rig, 0, [b"orphan"]))
    committer = rig.committer()
    assert len(committer.open_transactions()) == 1
    dead, nodes = cluster.coordinator(orphan.transactional_id), Wire.nodes
    cluster.broker(dead).kill()
    if ahead:
        monkeypatch.setattr(Wire, "nodes", lambda wire: [n for n in nodes(wire) if n != dead])
    assert committer.abort_orphans(()) == Ok(1)
    assert committer.open_transactions() == []
    assert rig.visible() == []


def test_a_former_coordinator_s_rejection_does_not_count(cluster: ThreeBrokers, rig: Rig) -> None:
    """It is paused while a successor hands out a newer epoch, and answers before it learns of the successor."""
    rig.ledger().claim(FIRST)
    committer = rig.committer()
    first = stage(rig, 0, [b"first"])
    assert committer.commit(rig.work(0), first) == Ok(None)
    held = Transaction.of(first)
    former = committer._wire.coordinators[held.transactional_id]
    outcomes = list[object]()
    with cluster.paused(former):
        cluster.wait_until(lambda: cluster.coordinator(held.transactional_id) != former)
        second = stage(replace(rig, kafka=cluster.without(former)), 2, [b"second"])
        assert Transaction.of(second).transactional_id == held.transactional_id
        committing = threading.Thread(target=lambda: outcomes.append(committer.commit(rig.work(2), second)))
        committing.start()
        wait_for(lambda: former in committer._wire._channels and committer._wire._channels[former]._in_flight)
    committing.join()
    assert outcomes == [Ok(None)]
    assert rig.visible() == [b"first", b"second"]


def test_a_ledger_is_as_durable_as_the_records(cluster: ThreeBrokers, rig: Rig) -> None:
    rig.ledger().claim(FIRST)
    topic = ledger_of(rig)
    found = cluster.wire.topic(topic)
    assert {len(p.replica_nodes) for p in found.partitions} == {3}
    settings = cluster.settings(topic)
    assert settings["min.insync.replicas"] == "2"
    assert settings["unclean.leader.election.enable"] == "false"
    assert settings["cleanup.policy"] == "compact"
    assert rig.sink.check_ledger(rig.scope) == []


def test_the_plan_names_what_a_ledger_of_before_lacks(cluster: ThreeBrokers, rig: Rig) -> None:
    weak = {"cleanup.policy": "delete", "unclean.leader.election.enable": "true"}
    cluster.topic(*[[1]] * 7, name=ledger_of(rig), config=weak)
    codes = [(f.code, f.refuses) for f in rig.sink.check_ledger(rig.scope)]
    assert codes == [
        ("LEDGER_PARTITIONS", True),
        ("LEDGER_CLEANUP", False),
        ("LEDGER_UNCLEAN", False),
        ("FEW_COPIES", False),
    ]
    other = Rig(cluster, rig.topic)
    cluster.topic(
        *[[1, 2, 3]] * 8, name=ledger_of(other), config={"cleanup.policy": "compact", "min.insync.replicas": "1"}
    )
    assert [f.code for f in other.sink.check_ledger(other.scope)] == ["FEW_COPIES_ACKNOWLEDGED"]

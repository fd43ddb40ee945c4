"""Leaders that move between the brokers of a cluster while a range is read and while a transaction is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.broker.sink_help import EXACT, SCHEMA, Rig, rows
from tests.broker.source_help import produce, source
from tests.support.servers import KafkaCluster
from tests.support.sweeps import KAFKA_CLIENTS

from delivered.contract.source import Slice
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Ok, Owner, Prepared, Promise

RECORDS = 30_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    started = KafkaCluster(tmp_path_factory.mktemp("cluster"))
    yield started
    started.stop()


def lose_leader(cluster: KafkaCluster, topic: str) -> None:
    """Kill broker 2, which leads a partition, and wait until another broker leads it."""
    cluster.broker(2).kill()
    cluster.wait_for(topic, lambda p: p.leader not in (-1, 2))


def move_leader_back(cluster: KafkaCluster, topic: str) -> None:
    """Broker 2 returns, and leads again; the leader of the meantime rejects requests."""
    cluster.broker(2).restart()
    cluster.wait_for(topic, lambda p: len(p.isrs) == len(p.replicas))
    cluster.elect_preferred(topic, 0)
    cluster.wait_for(topic, lambda p: p.id != 0 or p.leader == 2)


@pytest.mark.matrix
@pytest.mark.parametrize("client", KAFKA_CLIENTS)
def test_a_range_is_read_once_while_its_leader_moves(cluster: KafkaCluster, client: str) -> None:
    topic = cluster.topic([2, 1])
    produce(cluster, topic, (b"%08d" % i + bytes(992) for i in range(RECORDS)))
    seen: list[int] = []
    moves = [(0, lose_leader), (RECORDS // 2, move_leader_back)]
    for batch in source(cluster, subscribe=topic, client=client).read(Slice((topic, 0, 0, RECORDS))):
        seen += batch.column("offset").to_pylist()
        if moves and len(seen) > moves[0][0]:
            moves.pop(0)[1](cluster, topic)
    assert seen == list(range(RECORDS))
    assert not moves, "the range was read before its leader moved"


@pytest.mark.matrix  # test_kafka_three_brokers.py moves leaders and coordinators in `make test`
@pytest.mark.parametrize("client", KAFKA_CLIENTS)
@pytest.mark.parametrize("guarantee", [EXACT, Guarantee.AT_LEAST_ONCE])
def test_a_shard_is_written_once_while_a_leader_moves(cluster: KafkaCluster, guarantee: Guarantee, client: str) -> None:
    """A coordinator and the ledger's leaders may move with it. Sequences keep the weaker guarantee exact here, too."""
    rig = Rig(cluster, cluster.topic([2, 1], [1, 2]), options={"client": client, "compression": "lz4"})
    values = [b"%08d" % i + bytes(992) for i in range(RECORDS)]
    work = rig.work(0)
    if guarantee is EXACT:
        rig.ledger().claim(Owner("me"))
    writer = rig.sink.writer(work, guarantee, SCHEMA)
    third = RECORDS // 3
    writer.stage(rows(values[:third]))
    lose_leader(cluster, rig.topic)
    writer.stage(rows(values[third : 2 * third]))
    move_leader_back(cluster, rig.topic)
    writer.stage(rows(values[2 * third :]))
    promise: Promise = writer.prepare(Fingerprint())
    if guarantee is EXACT:
        assert rig.visible() == []
        assert rig.committer().commit(work, Prepared.of(work, Fingerprint(), promise)) == Ok(None)
    assert rig.visible() == values

"""Two brokers that share sixteen transaction coordinators: lookups lead to the one that serves; one is killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker.outage_help import goes_on
from tests.broker.send_help import rows, writer
from tests.support.pulsar import FULL, native, sink
from tests.support.pulsar_transactions import Open, soon
from tests.support.two_pulsars import COORDINATORS, TwoPulsars, serving

from delivered.clients.pulsar.connection import Cluster, Settings
from delivered.clients.pulsar.producer import Message
from delivered.clients.pulsar.transactions import COORDINATORS as TOPIC
from delivered.clients.pulsar.transactions import Coordinators
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.patience import serving_query
from delivered.model.work import Ok, Promise

PARTITIONS = 8


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoPulsars]:
    made = TwoPulsars(tmp_path_factory.mktemp("cluster") / "pulsar")
    yield made
    made.end()


@pytest.mark.matrix
def test_each_transaction_goes_to_its_coordinator_and_each_partition_to_its_broker(two: TwoPulsars) -> None:
    """Whichever broker is asked first, and whoever ends the transactions."""
    topic = two.topic(PARTITIONS)
    two.spread()
    parts = [f"{FULL}{topic}-partition-{n}" for n in range(PARTITIONS)]
    for addresses in (two.addresses, two.addresses[::-1]):
        at = Cluster(Settings(addresses))
        for asked in (parts, [f"{TOPIC}-partition-{n}" for n in range(COORDINATORS)]):
            assert len(set(serving(at, asked, soon()).values())) == 2
        opened = [Open(at, *parts, coordinator=number) for number in range(COORDINATORS)]
        assert [one.id.most for one in opened] == [*range(COORDINATORS)]
        for number, one in enumerate(opened):
            one.send(Message(b"%d" % number))
            one.close()
        other = Coordinators(Cluster(Settings(addresses[::-1])))
        ended = other.end_all([one.id for one in opened], commit=True, deadline=soon())
        assert ended == [Ok(None)] * len(opened)
    expected = Counter({b"%d" % number: 2 for number in range(COORDINATORS)})
    assert {tuple(sorted(Counter(m.data() for m in native(two, p)).items())) for p in parts} == {
        tuple(sorted(expected.items()))
    }


@pytest.mark.matrix
@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_a_task_goes_on_at_the_other_broker(two: TwoPulsars, tmp_path: Path, guarantee: Guarantee) -> None:
    """Without a transaction: what was not acknowledged is sent again there, and dropped if it is stored."""
    topic = two.topic(PARTITIONS)
    two.spread()
    with serving_query():
        task = writer(sink(tmp_path, two, topic), guarantee)
        for n in range(20):
            task.stage(rows(1_000, 1_000 * n))
            if n == 10:
                two.kill_broker(0)
        given = task.prepare(Fingerprint())
    two.start_broker(0)
    assert given == Promise()
    found = Counter(m.data() for n in range(PARTITIONS) for m in native(two, f"{topic}-partition-{n}"))
    assert found == Counter(b"row %d" % n for n in range(20_000))


@pytest.mark.matrix
def test_a_broker_is_killed_at_steps_of_a_batch(two: TwoPulsars, tmp_path: Path) -> None:
    """Its coordinators and topics move to the other one, which ends what was opened at it."""

    def killed(go_on: Callable[[], None]) -> None:
        two.kill_broker(0)
        go_on()
        time.sleep(8)  # the other one takes over when the killed one's session has expired
        two.start_broker(0)
        two.spread()

    goes_on(
        two,
        tmp_path,
        killed,
        ["write.stage:after", "write.prepare:after", "commit.decide:after", "commit.apply:before"],
        ["recover.apply:before"],
    )

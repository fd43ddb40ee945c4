"""Logs that lose their end, and grow past the position of a reader (P29)."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.broker.source_help import cut_log, positions, produce, source
from tests.support.three_brokers import ThreeBrokers

from delivered.checkpoint.sidecar import METADATA_FILE, PlainDriver, stream_driver
from delivered.contract.source import Offsets, Source, SourceDriver
from delivered.engine.transform import ArrowTransform, Direct, pack_slice
from delivered.model.errors import InvariantBroken

OLD = [b"old %d" % i for i in range(1_000)]
NEW = [b"new %d" % i for i in range(1_000)]
CUT = 700


class Read:
    """A stream that has read 1,000 records of a topic, some of which the topic then loses.

    Attributes:
        running: the driver, as it was before.
        start, end: of its first batch.
    """

    _numbers = itertools.count()

    def __init__(self, kafka: Any, folder: Path, topic: str | None = None, client: str = "auto") -> None:
        """A topic that exists holds the first records."""
        self.kafka, self.topic, self.client = kafka, topic or kafka.topic(1), client
        self.checkpoint = str(folder / f"checkpoint{next(self._numbers)}")
        if topic is None:
            produce(kafka, self.topic, OLD[:CUT])
        produce(kafka, self.topic, OLD[CUT:])
        self.running: PlainDriver = self.driver()
        self.start = self.running.initial()
        self.end = self.running.latest(self.start, None)
        assert self.read(self.source(), self.running, self.start, self.end) == OLD
        self.landmarks = self.running.landmarks(self.end)

    def source(self, **options: Any) -> Source:
        options = {"startingOffsets": "earliest", "client": self.client, **options}
        return source(self.kafka, options, subscribe=self.topic)

    def driver(self, **options: Any) -> PlainDriver:
        """As a new start of the query has it."""
        driver = stream_driver(self.source(**options), self.checkpoint)
        assert isinstance(driver, PlainDriver)
        return driver

    @staticmethod
    def read(src: Source, driver: SourceDriver, start: Offsets, end: Offsets) -> list[bytes | None]:
        return [v for s in driver.slices(start, end) for b in src.read(s) for v in b.column("value").to_pylist()]

    @staticmethod
    def read_directly(src: Source, driver: SourceDriver, start: Offsets, end: Offsets) -> list[bytes | None]:
        """As tasks do whose records never become rows: only slices pass through Spark."""
        direct = Direct(src, ArrowTransform(("value",)))
        rows = direct.rows(pack_slice(s) for s in driver.slices(start, end))
        return [v for b in rows for v in b.good.column("value").to_pylist()]


@pytest.fixture
def cut(mortal_kafka: Any, tmp_path: Path) -> Iterator[list[Read]]:
    kafka = mortal_kafka
    read = [Read(kafka, tmp_path) for _ in range(4)]
    read.insert(3, Read(kafka, tmp_path, client="librdkafka"))
    kafka.broker.kill()
    for one in read:
        cut_log(kafka, one.topic, CUT)
    kafka.broker.restart()
    for one in read[:-1]:
        produce(kafka, one.topic, NEW)
    produce(kafka, read[-1].topic, NEW[: len(OLD) - CUT])
    yield read
    for one in read:
        one.running.close()


def test_a_log_that_lost_its_end_and_grew_past_the_position(cut: list[Read]) -> None:
    """300 records are lost in Kafka; those which have their offsets now would never be read."""
    stopped, replayed, lax, librdkafka, equal = cut
    lost = rf"DATA_LOST.*{{}}-0 lost its end: at offset {CUT}.* 300 offsets {CUT} to 999 .*failOnDataLoss"
    # At each start, in the query that runs, and in one that reads its last batch again.
    for one, driver in (
        (stopped, stopped.driver()),
        (stopped, stopped.driver()),
        (stopped, stopped.running),
        (librdkafka, librdkafka.driver()),
        (librdkafka, librdkafka.running),
    ):
        with closing(driver), pytest.raises(InvariantBroken, match=lost.format(one.topic)):
            driver.latest(one.end, None)
    with closing(librdkafka.driver()) as driver, pytest.raises(InvariantBroken, match=lost.format(librdkafka.topic)):
        librdkafka.read_directly(librdkafka.source(), driver, librdkafka.start, librdkafka.end)
    with closing(replayed.driver()) as driver, pytest.raises(InvariantBroken, match=lost.format(replayed.topic)):
        driver.slices(replayed.start, replayed.end)
    # Without epochs, the record batch before the position shows it.
    with closing(stopped.source().driver()) as driver, pytest.raises(InvariantBroken, match=r"DATA_LOST.*offset 1000"):
        driver.check_landmarks(stopped.end, stopped.landmarks)
    # With failOnDataLoss=false, every new record is read once, and then all is well.
    options = {"failOnDataLoss": False}
    with closing(lax.driver(**options)) as driver:
        end = driver.latest(lax.end, None)
        assert lax.read(lax.source(**options), driver, lax.end, end) == NEW
    with closing(lax.driver()) as driver:
        assert driver.latest(end, None) == end == {lax.topic: {"0": CUT + len(NEW)}}
    with closing(librdkafka.driver(**options)) as driver:
        end = driver.latest(librdkafka.end, None)
        assert librdkafka.read_directly(librdkafka.source(**options), driver, librdkafka.end, end) == NEW
    # A batch that was not delivered is read again from what is left of it, and the next one goes on there.
    with closing(replayed.driver(**options)) as driver:
        src = replayed.source(**options)
        assert replayed.read(src, driver, replayed.start, replayed.end) == OLD[:CUT]
        end = driver.latest(replayed.end, None)
        assert replayed.read(src, driver, replayed.end, end) == NEW
    # The new log ends exactly at the position.
    found: list[bytes | None] = []
    at = equal.end
    with closing(equal.driver(**options)) as driver:
        while (end := driver.latest(at, None)) != at:
            found += equal.read(equal.source(**options), driver, at, end)
            at = end
    assert found == NEW[: len(OLD) - CUT]


def test_checkpoints_without_epochs_are_read_on_from(kafka: Any, tmp_path: Path) -> None:
    """They have them from the first batch on."""
    read = Read(kafka, tmp_path)
    read.running.close()
    sidecar = Path(read.checkpoint) / METADATA_FILE
    record = json.loads(sidecar.read_text())
    for entry in record["entries"]:
        del entry["metadata"]["#epochs"]
    sidecar.write_text(json.dumps(record))
    produce(kafka, read.topic, NEW[:1])
    with closing(read.driver()) as driver:
        end = driver.latest(read.end, None)
        assert read.read(read.source(), driver, read.end, end) == NEW[:1]
    newest = json.loads(sidecar.read_text())["entries"][-1]
    assert newest["offsets"] == positions(end)
    assert newest["metadata"]["#epochs"] == {read.topic: {"0": 0}}


def test_compaction_is_no_other_history(kafka: Any, tmp_path: Path) -> None:
    """It drops records of the batch before the position, and keeps the batch."""
    topic = kafka.topic(1, cleanup_policy="compact", segment_ms=100, min_cleanable_dirty_ratio=0.01)
    keys = [{"key": b"k%d" % (i % 10), "value": b"v"} for i in range(20)]
    produce(kafka, topic, keys)
    src = source(kafka, subscribe=topic, startingOffsets="earliest")
    with closing(stream_driver(src, str(tmp_path))) as driver:
        assert isinstance(driver, PlainDriver)
        start = driver.initial()
        end = driver.latest(start, None)
        known = driver.landmarks(end)
        deadline = time.monotonic() + 120
        while len(Read.read(src, driver, start, end)) >= 20:
            assert time.monotonic() < deadline, "nothing is compacted"
            produce(kafka, topic, keys)
        driver.check_landmarks(end, known)


@pytest.mark.matrix
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_restored_broker_with_the_same_epochs(new_kafka: Callable[..., Any], tmp_path: Path, restarts: int) -> None:
    """Its leader epochs go on from those of the copy, so that one that was read is there again, with other records."""
    kafka = new_kafka()
    data = kafka.broker.folder / "data"
    topic = kafka.topic(1)
    produce(kafka, topic, OLD[:CUT])
    kafka.broker.stop()
    shutil.copytree(data, tmp_path / "copy")
    kafka.broker.restart()
    read = Read(kafka, tmp_path, topic)
    read.running.close()
    kafka.broker.kill()
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "copy", data)
    kafka.broker.restart()
    for _ in range(restarts):
        kafka.broker.kill()
        kafka.broker.restart()
    produce(kafka, topic, NEW)
    with closing(read.driver()) as driver:
        if restarts == 0:
            assert driver.latest(read.end, None) == {topic: {"0": CUT + len(NEW)}}, "epochs show it: no test"
        with pytest.raises(InvariantBroken, match="DATA_LOST"):
            driver.latest(read.end, None)
            driver.check_landmarks(read.end, read.landmarks)


@pytest.mark.matrix
def test_an_unclean_election_and_a_clean_one(tmp_path: Path) -> None:
    """A leader that had lost 300 records takes over; in another topic, one that has all of them does."""
    cluster = ThreeBrokers(tmp_path / "three")
    config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    weak, strong = (cluster.topic(replicas, config=config) for replicas in ([1, 2], [1, 3]))
    produce(cluster, weak, OLD[:CUT])
    produce(cluster, strong, OLD[:CUT])
    cluster.broker(2).kill()
    cluster.wait_until(lambda: in_sync(cluster, weak) == [1], "broker 2 out of the way")
    lost, kept = Read(cluster, tmp_path, weak), Read(cluster, tmp_path, strong)
    cluster.broker(1).kill()
    cluster.broker(2).restart()

    cluster.wait_until(lambda: cluster.leader(weak) == 2, "an unclean election")
    assert cluster.leader(strong) == 3
    there = cluster.without(1)
    for topic in (weak, strong):
        produce(there, topic, NEW)
    for driver in (lost.running, lost.driver()):
        with closing(driver), pytest.raises(InvariantBroken, match=rf"DATA_LOST.*at offset {CUT}.*300 offsets"):
            driver.latest(lost.end, None)
    for driver in (kept.running, kept.driver()):
        with closing(driver):
            end = driver.latest(kept.end, None)
            assert end == {strong: {"0": 2_000}}
            driver.check_landmarks(kept.end, kept.landmarks)
    options = {"failOnDataLoss": False}
    with closing(lost.driver(**options)) as driver:
        end = driver.latest(lost.end, None)
        assert lost.read(lost.source(**options), driver, lost.end, end) == NEW
    cluster.stop()


def in_sync(cluster: ThreeBrokers, topic: str) -> list[int]:
    [partition] = cluster.wire.topic(topic).partitions
    return list(partition.isr_nodes)

"""What only the reader of whole record batches has to get right: `client=arrow`, against a real broker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer
from tests.broker import source_help
from tests.broker.source_help import Transactions, limit_clients, produce, read_all, source, values
from tests.kafka_tools import read_committed

from delivered.clients.kafka.channel import Channel
from delivered.clients.kafka.consumer import Fetcher
from delivered.clients.kafka.record_batch import CorruptBatch
from delivered.connectors.kafka import reader
from delivered.contract.source import Slice
from delivered.model.errors import UsageError
from delivered_lab.verify.proxy import KafkaProxy

TEXT = b"a value that the network damages"


@pytest.fixture(autouse=True)
def _arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(source_help.DEFAULTS, "client", "arrow")


@contextmanager
def damaging(kafka: Any, times: int) -> Iterator[SimpleNamespace]:
    """A network that changes a bit of `TEXT` in this many responses; TCP does not see it."""
    left = [times]

    class Damaging(KafkaProxy):
        def answered(self, reply: bytes, session: Any) -> Any:
            reply, rule = super().answered(reply, session)
            if TEXT in reply and left[0]:
                left[0] -= 1
                reply = reply.replace(TEXT, TEXT[:-1] + bytes([TEXT[-1] ^ 1]))
            return reply, rule

    proxy = Damaging(kafka.bootstrap)
    try:
        yield SimpleNamespace(bootstrap=proxy.bootstrap, left=left)
    finally:
        proxy.close()


def between(kafka: Any, topic: str, low: int, high: int) -> list[bytes | None]:
    piece = source(kafka, subscribe=topic).read(Slice((topic, 0, low, high)))
    return [v for batch in piece for v in batch["value"].to_pylist()]


def test_a_batch_damaged_on_its_way_is_fetched_again(kafka: Any) -> None:
    topic = kafka.topic(1)
    for value in (b"before", TEXT, b"after"):  # a batch each
        produce(kafka, topic, [value])
    with damaging(kafka, 1) as network:
        assert values(read_all(source(network, subscribe=topic))) == [b"before", TEXT, b"after"]
        assert network.left == [0]


def test_a_batch_that_stays_damaged_is_an_error_with_its_place(kafka: Any) -> None:
    topic = kafka.topic(1)
    for value in (b"before", TEXT):
        produce(kafka, topic, [value])
    with damaging(kafka, 100) as network, pytest.raises(CorruptBatch, match=rf"{topic}-0 at offset 1 .*CRC"):
        read_all(source(network, subscribe=topic))


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression(kafka: Any, compression: str) -> None:
    topic = kafka.topic(1)
    sent = [os.urandom(50) + b"x" * (i % 500) for i in range(2_000)]
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "compression.type": compression, "linger.ms": 5})
    for i, value in enumerate(sent):
        producer.produce(topic, value, key=b"%d" % i)
    assert producer.flush(30) == 0
    got = read_all(source(kafka, subscribe=topic))
    assert values(got) == sent
    assert got.column("key").to_pylist() == [b"%d" % i for i in range(len(sent))]
    assert between(kafka, topic, 700, 703) == sent[700:703]


def test_a_range_of_control_records_alone_ends(kafka: Any) -> None:
    topic = kafka.topic(1)
    writer = Transactions(kafka, f"{topic}-w")
    writer.write(topic, [b"kept"], commit=True)  # offset 0, marker 1
    writer.write(topic, [b"dropped"], commit=False)  # offset 2, marker 3
    writer.write(topic, [b"last"], commit=True)  # offset 4, marker 5
    for low, high, found in ((1, 2, []), (3, 4, []), (1, 4, []), (5, 6, []), (1, 6, [b"last"])):
        assert between(kafka, topic, low, high) == found, (low, high)


def test_a_batch_larger_than_a_fetch(kafka: Any) -> None:
    topic = kafka.topic(1, max_message_bytes=3_000_000)
    big = [os.urandom(1 << 20) for _ in range(3)]
    produce(kafka, topic, [b"small", *big, b"small"])
    small = {"kafka.max.partition.fetch.bytes": "1000"}
    assert values(read_all(source(kafka, small, subscribe=topic))) == [b"small", *big, b"small"]


@pytest.mark.matrix
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_memory_is_bounded_by_one_batch_however_well_it_compresses(kafka: Any, compression: str) -> None:
    """320 MB in a few fetches' worth of bytes: batches of 32 MB, of which a task gets a part at a time."""
    topic = kafka.topic(1)
    size = {"message.max.bytes": 40_000_000, "batch.size": 40_000_000, "linger.ms": 1_000}
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "compression.type": compression, **size})
    for _ in range(10):
        for _ in range(3_200):
            producer.produce(topic, bytes(10_000))
        assert producer.flush(60) == 0
    me, rows, largest, most = psutil.Process(), 0, 0, 0
    base = me.memory_info().rss
    for batch in source(kafka, subscribe=topic).read(Slice((topic, 0, 0, 32_000))):
        rows, largest = rows + batch.num_rows, max(largest, batch.nbytes)
        most = max(most, me.memory_info().rss - base)
    assert rows == 32_000
    assert largest < 8 << 20, f"{largest >> 20} MB in one RecordBatch"
    assert most < 128 << 20, f"{most >> 20} MB more than before"


@pytest.mark.matrix
def test_a_client_above_its_quota_reads_on_after_the_pause(new_kafka: Callable[..., Any]) -> None:
    """Above its quota a client gets a response without partitions, and is not read from for a while."""
    kafka = new_kafka()
    topic = kafka.topic(1)
    produce(kafka, topic, (b"%08d" % i + os.urandom(992) for i in range(4_500)))
    limit_clients(kafka, "consumer_byte_rate", 300_000)
    src = source(kafka, {"kafka.max.partition.fetch.bytes": "500000"}, subscribe=topic)
    with reader.warm_consumer(src.options) as consumer:  # type: ignore[attr-defined]
        consumer.assign((topic, 0), 0)
        found: list[int] = []
        throttled = ended = 0
        while len(found) < 4_500:
            fetched = consumer.fetch(4_500, 1.0)
            ended += fetched.end_of_log
            throttled += consumer._not_before_s > time.monotonic()  # type: ignore[attr-defined]
            found += [] if fetched.batch is None else fetched.batch["offset"].to_pylist()
    assert found == list(range(4_500))
    assert throttled
    assert ended == 0, "a response without partitions is no end of the log"


def test_gaps_of_a_compacted_topic(kafka: Any) -> None:
    """A range that begins, ends or lies in a gap gives what is left in it, and terminates."""
    how = {"cleanup_policy": "compact", "segment_ms": 100, "min_cleanable_dirty_ratio": 0.01}
    topic = kafka.topic(1, **how, max_compaction_lag_ms=100)
    keyed = [{"key": b"%d" % (i % 10), "value": b"%d" % i} for i in range(400)]
    produce(kafka, topic, keyed)
    deadline = time.monotonic() + 60
    while len(left := read_committed(kafka.bootstrap, topic)) > 30:
        assert time.monotonic() < deadline, "nothing was compacted"
        produce(kafka, topic, [{"key": b"more", "value": b"x"}])  # a segment is rolled when something is appended
    present = {m.offset(): m.value() for m in left if (m.offset() or 0) < 400}
    assert set(present) == set(range(390, 400))
    for low, high in ((0, 400), (0, 390), (10, 20), (100, 391), (395, 400)):
        expected = [v for o, v in sorted(present.items()) if low <= (o or 0) < high]
        assert between(kafka, topic, low, high) == expected, (low, high)


def test_brokers_before_kafka_2_7_are_read_through_librdkafka(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = kafka.topic(1)
    produce(kafka, topic, [b"old"])
    told = Channel._read_versions

    def older(channel: Channel, deadline: float) -> None:
        told(channel, deadline)
        channel.versions.api_versions[1] = (4, 11)

    monkeypatch.setattr(Channel, "_read_versions", older)
    monkeypatch.setitem(source_help.DEFAULTS, "kafka.client.id", "old")  # no idle client of another test
    with pytest.raises(UsageError, match=r"KAFKA_TOO_OLD.*client=librdkafka"):
        between(kafka, topic, 0, 1)
    monkeypatch.setitem(source_help.DEFAULTS, "client", "auto")
    assert between(kafka, topic, 0, 1) == [b"old"]


def test_records_are_read_by_the_fetcher_by_default(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise this file tests librdkafka."""
    monkeypatch.delitem(source_help.DEFAULTS, "client")
    with reader.warm_consumer(source(kafka, subscribe="any").options) as consumer:  # type: ignore[attr-defined]
        assert isinstance(consumer, Fetcher)

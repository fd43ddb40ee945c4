"""Record batches against a real broker: Java and librdkafka read what we write, and we read what they write."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.kafka_tools import read_committed, wait_for_markers
from tests.support.servers import Kafka

from delivered.clients.kafka import record_batch as rb
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.record_batch import COMPRESSIONS
from delivered.machine import java_home
from delivered.source import HEADERS
from delivered_lab.brokers.kafka import fetch

pytestmark = pytest.mark.skipif(not rb.available(), reason="no compiler here")

FETCH_BYTES = 32 << 20


class Record(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    ms: int


NOISE = np.random.default_rng(1)


def some_rows(n: int, base_ms: int) -> list[Record]:
    """Nulls, empty values, headers, times out of order; records that compress and records that do not; more than the
    64 KiB of a block."""
    found = []
    for i in range(n):
        key = None if i % 7 == 0 else b"" if i % 7 == 1 else b"%08d" % i
        value = None if i % 11 == 0 else b"" if i % 11 == 1 else b"%d " % i * 100 if i % 2 else NOISE.bytes(300)
        headers: list[tuple[str, bytes | None]] = [("trace", b"%d" % i), ("\u00fc", None), ("trace", b"")]
        found.append(Record(i, key, value, tuple(headers[: i % 4]), base_ms + (i * 37) % 1000))
    return found


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def java() -> Iterator[Any]:
    """A JVM with Kafka's own client: `java.jvm.org.apache.kafka...`."""
    import pyspark
    from py4j.java_gateway import JavaGateway

    home, jars = java_home(), Path(pyspark.__file__).parent / "jars"
    classes = f"{fetch(lambda _: None)}/*"
    gateway = JavaGateway.launch_gateway(
        jarpath=str(next(jars.glob("py4j-*.jar"))),
        classpath=classes,
        die_on_exit=True,
        java_path=str(home / "bin" / "java"),
        javaopts=["-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"],
    )
    yield gateway
    gateway.shutdown()


def _java_settings(java: Any, kafka: Kafka, **settings: Any) -> Any:
    names = {"bootstrap.servers": kafka.bootstrap} | {k.replace("_", "."): v for k, v in settings.items()}
    found = java.jvm.java.util.Properties()
    for name, value in names.items():
        found.setProperty(name, str(value))
    return found


def read_by_java(java: Any, kafka: Kafka, topic: str, n: int, **settings: Any) -> list[Record]:
    bytes_of = "org.apache.kafka.common.serialization.ByteArrayDeserializer"
    consumer = java.jvm.org.apache.kafka.clients.consumer.KafkaConsumer(
        _java_settings(java, kafka, key_deserializer=bytes_of, value_deserializer=bytes_of, **settings)
    )
    try:
        partition = java.jvm.org.apache.kafka.common.TopicPartition(topic, 0)
        partitions = java.jvm.java.util.Collections.singletonList(partition)
        consumer.assign(partitions)
        consumer.seekToBeginning(partitions)
        found: list[Record] = []
        deadline = time.monotonic() + 60
        while len(found) < n and time.monotonic() < deadline:
            polled = consumer.poll(java.jvm.java.time.Duration.ofMillis(500)).iterator()
            while polled.hasNext():
                r = polled.next()
                headers = tuple((h.key(), h.value()) for h in r.headers().toArray())
                found.append(Record(r.offset(), r.key(), r.value(), headers, r.timestamp()))
        return found
    finally:
        consumer.close()


def write_by_java(java: Any, kafka: Kafka, topic: str, rows: Sequence[Record], how: str) -> None:
    bytes_of = "org.apache.kafka.common.serialization.ByteArraySerializer"
    settings = {"compression_type": how, "batch_size": 200_000, "linger_ms": 1000}
    producer = java.jvm.org.apache.kafka.clients.producer.KafkaProducer(
        _java_settings(java, kafka, key_serializer=bytes_of, value_serializer=bytes_of, **settings)
    )
    try:
        for r in rows:
            record = java.jvm.org.apache.kafka.clients.producer.ProducerRecord(topic, 0, r.ms, r.key, r.value)
            for name, value in r.headers:
                record.headers().add(name, value)
            producer.send(record)
    finally:
        producer.close()  # sends what is left


def write_by_librdkafka(kafka: Kafka, topic: str, rows: Sequence[Record], how: str) -> None:
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "compression.type": how, "linger.ms": 1000, "batch.size": 200_000}
    )
    for r in rows:
        producer.produce(topic, r.value, r.key, 0, timestamp=r.ms, headers=list(r.headers))
    assert producer.flush(60) == 0


def read_by_librdkafka(kafka: Kafka, topic: str, isolation: str = "read_committed") -> list[tuple[Record, int]]:
    """Records, and the types of their timestamps."""
    found = []
    for m in read_committed(kafka.bootstrap, topic, isolation):
        kind, ms = m.timestamp()
        headers = tuple((k, v) for k, v in m.headers() or ())
        found.append((Record(m.offset(), m.key(), m.value(), headers, ms), kind - 1))  # its 0: no timestamp
    return found


# -- ours --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wire(kafka: Kafka) -> Iterator[Wire]:
    made = Wire({"bootstrap.servers": kafka.bootstrap})
    yield made
    made.close()


def write_by_us(wire: Wire, topic: str, rows: Sequence[Record], how: str) -> int:
    """One request with one batch. Returns the base offset that the broker gave it."""
    from kafka.protocol.producer.produce import ProduceRequest

    Topic = ProduceRequest.TopicProduceData  # noqa: N806 - a class
    listed = [[{"key": k, "value": v} for k, v in r.headers] or None for r in rows]
    (batch,) = rb.encode(
        pa.array([r.key for r in rows], pa.binary()),
        pa.array([r.value for r in rows], pa.binary()),
        pa.array(listed, HEADERS.type),
        timestamps=np.array([r.ms for r in rows], np.int64),
        compression=how,
        bytes_max=1_000_000,
    )
    data = [Topic.PartitionProduceData(index=0, records=bytes(batch.data))]
    request = ProduceRequest(
        transactional_id=None,
        acks=-1,
        timeout_ms=30_000,
        topic_data=[Topic(name=topic, partition_data=data)],
        max_version=9,
    )
    answer = wire.patiently(lambda: wire.ask(request, wire.leader(topic, 0)))
    (part,) = answer.responses[0].partition_responses
    assert part.error_code == 0, (part.error_code, part.error_message)
    return int(part.base_offset)


def fetched(wire: Wire, topic: str, start: int = 0) -> Any:
    from kafka.protocol.consumer.fetch import FetchRequest

    Topic = FetchRequest.FetchTopic  # noqa: N806 - a class
    part = Topic.FetchPartition(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=start,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=FETCH_BYTES,
    )
    request = FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=FETCH_BYTES,
        isolation_level=1,
        session_id=0,
        session_epoch=-1,
        topics=[Topic(topic=topic, partitions=[part])],
        forgotten_topics_data=[],
        rack_id="",
        max_version=11,
    )
    (found,) = wire.patiently(lambda: wire.ask(request, wire.leader(topic, 0))).responses[0].partitions
    assert found.error_code == 0
    return found


def read_by_us(wire: Wire, topic: str) -> tuple[list[tuple[Record, int]], int, set[int]]:
    """Records with the types of their timestamps, the next offset, and the compressions of the batches."""
    found, position, codecs = [], 0, set()
    while True:
        part = fetched(wire, topic, position)
        if not part.records:
            return found, position, codecs
        aborted = [(t.producer_id, t.first_offset) for t in part.aborted_transactions or ()]
        read = rb.decode(bytes(part.records), (topic, 0), position, aborted=aborted, headers=True)
        codecs |= set((read._batches["attributes"] & 7).tolist())
        for batch in read:
            us = batch["timestamp"].cast(pa.int64()).to_pylist()
            for row, at in zip(batch.drop_columns(["timestamp"]).to_pylist(), us, strict=True):
                headers = tuple((h["key"], h["value"]) for h in row["headers"] or ())
                found.append(
                    (Record(row["offset"], row["key"], row["value"], headers, at // 1000), row["timestampType"])
                )
        assert read.position > position
        position = read.position


Write = Callable[[Any, Kafka, str, Sequence[Record], str], None]
WRITERS: dict[str, Write] = {
    "java": write_by_java,
    "librdkafka": lambda _, *arguments: write_by_librdkafka(*arguments),
}


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_java_and_librdkafka_read_what_we_write(kafka: Kafka, wire: Wire, java: Any, how: str) -> None:
    """The broker takes batches apart as well before it accepts them."""
    topic, rows = kafka.topic(1), some_rows(400, 1_700_000_000_000)
    assert write_by_us(wire, topic, rows, how) == 0
    assert write_by_us(wire, topic, rows[:1], how) == 400
    wanted = [*rows, rows[0]._replace(offset=400)]
    assert [r for r, _ in read_by_librdkafka(kafka, topic)] == wanted
    assert read_by_java(java, kafka, topic, len(wanted), check_crcs=True) == wanted
    ours, position, codecs = read_by_us(wire, topic)
    assert [r for r, _ in ours] == wanted
    assert position == 401
    assert COMPRESSIONS.index(how) in codecs


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("how", COMPRESSIONS)
def test_we_read_what_java_and_librdkafka_write(kafka: Kafka, wire: Wire, java: Any, writer: str, how: str) -> None:
    topic, rows = kafka.topic(1), some_rows(400, 1_700_000_000_000)
    WRITERS[writer](java, kafka, topic, rows, how)
    ours, position, codecs = read_by_us(wire, topic)
    assert ours == read_by_librdkafka(kafka, topic)
    assert [r for r, _ in ours] == rows
    assert position == 400
    # A batch that compression does not make smaller is sent as it is.
    assert COMPRESSIONS.index(how) in codecs <= {0, COMPRESSIONS.index(how)}


def test_append_time_is_that_of_the_broker(kafka: Kafka, wire: Wire) -> None:
    topic = kafka.topic(1, message_timestamp_type="LogAppendTime")
    write_by_us(wire, topic, some_rows(20, 1_000), "lz4")
    ours, _, _ = read_by_us(wire, topic)
    assert ours == read_by_librdkafka(kafka, topic)
    assert {kind for _, kind in ours} == {1}


def test_aborted_transactions_are_left_out_as_librdkafka_leaves_them_out(kafka: Kafka, wire: Wire) -> None:
    topic = kafka.topic(1)
    settings = {"bootstrap.servers": kafka.bootstrap, "linger.ms": 0}
    producers = [Producer({**settings, "transactional.id": f"{topic}-{i}"}) for i in range(3)]
    for p in producers:
        p.init_transactions(30)
    plain = Producer(settings)
    number = itertools.count()
    for outcomes in itertools.product((True, False), repeat=3):  # of transactions side by side
        for p in producers:
            p.begin_transaction()
        for _ in range(2):
            for p in (*producers, plain):
                p.produce(topic, b"%d" % next(number), partition=0)
                assert p.flush(30) == 0
        for p, commit in zip(producers, outcomes, strict=True):
            (p.commit_transaction if commit else p.abort_transaction)(30)
    wait_for_markers(kafka.bootstrap)
    ours, position, _ = read_by_us(wire, topic)
    assert ours == read_by_librdkafka(kafka, topic)
    assert len(ours) == 8 * 2 + 4 * 3 * 2  # half of the transactions
    assert position == fetched(wire, topic).last_stable_offset == 8 * 8 + 8 * 3


def test_a_compacted_topic_has_gaps(kafka: Kafka) -> None:
    """Also batches that lost their records, and tombstones with the time at which they may go."""
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    topic = kafka.topic(
        1, cleanup_policy="compact", segment_ms=100, min_cleanable_dirty_ratio=0.01, max_compaction_lag_ms=100
    )
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True, "compression.type": "lz4"})

    def write(rounds: Sequence[int]) -> None:
        for i in rounds:
            for key in range(10):
                if key <= i % 10:
                    value = None if (i, key) == (30, 5) else b"%d" % i
                    producer.produce(topic, value, b"%d" % key, 0)
            assert producer.flush(30) == 0

    write(range(40))
    written = fetched(wire, topic).high_watermark
    deadline = time.monotonic() + 60
    while len(read_by_us(wire, topic)[0]) > 30:
        assert time.monotonic() < deadline, "nothing was compacted"
        write([0])  # a segment is rolled when something is appended
        time.sleep(0.2)
    # Nothing is written any more, but the cleaner may pass between two reads.
    for _ in range(20):
        before = read_by_us(wire, topic)
        theirs = read_by_librdkafka(kafka, topic)
        if read_by_us(wire, topic) == before:
            break
    ours, position, _ = before
    assert ours == theirs
    offsets = [r.offset for r, _ in ours]
    assert len(offsets) <= 30 < written <= position
    assert position == fetched(wire, topic).high_watermark
    wire.close()


def test_the_middle_of_a_batch(kafka: Kafka, wire: Wire) -> None:
    """A fetch returns whole batches, from the one that holds the offset."""
    topic, rows = kafka.topic(1), some_rows(50, 1_700_000_000_000)
    write_by_us(wire, topic, rows, "zstd")
    records = bytes(fetched(wire, topic, 20).records)
    (batch,) = rb.decode(records, (topic, 0), 20, 30, aborted=())
    assert batch["offset"].to_pylist() == list(range(20, 30))
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "middle"})
    consumer.assign([TopicPartition(topic, 0, 20)])
    assert [m.value() for m in consumer.consume(10, 30)] == batch["value"].to_pylist()
    consumer.close()

"""The Kafka source against a real broker: every option, every kind of record."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewTopic
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.broker import source_help
from tests.broker.source_help import Transactions, positions, produce, read_all, read_range, source, values
from tests.kafka_tools import read_committed
from tests.support.sweeps import KAFKA_CLIENTS

import delivered
from delivered.checkpoint.sidecar import METADATA_FILE, stream_driver
from delivered.connectors.kafka import reader
from delivered.contract.source import Slice, Source
from delivered.model.errors import BadRecord, InvariantBroken, UsageError
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.spec import Reading
from delivered.spark.readers import StreamReader


@pytest.fixture(params=KAFKA_CLIENTS, autouse=True)
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(source_help.DEFAULTS, "client", request.param)
    return str(request.param)


def test_columns_are_those_of_sparks_own_source(kafka: Any) -> None:
    topic = kafka.topic(2)
    now = int(time.time() * 1000)
    produce(kafka, topic, [{"key": b"k", "value": b"v", "timestamp": 1_700_000_000_123, "partition": 1}])
    got = read_all(source(kafka, subscribe=topic))
    assert got.schema == source(kafka, subscribe=topic).schema()
    assert [(f.name, str(f.type)) for f in got.schema] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int32"),
        ("offset", "int64"),
        ("timestamp", "timestamp[us, tz=UTC]"),
        ("timestampType", "int32"),
    ]
    row = got.to_pylist()[0]
    assert (row["key"], row["value"], row["topic"], row["partition"], row["offset"]) == (b"k", b"v", topic, 1, 0)
    assert row["timestamp"].timestamp() == 1_700_000_000.123
    assert row["timestampType"] == 0
    stamped = kafka.topic(1, message_timestamp_type="LogAppendTime")
    produce(kafka, stamped, [{"value": b"v", "timestamp": 5}])
    row = read_all(source(kafka, subscribe=stamped)).to_pylist()[0]
    assert row["timestampType"] == 1
    assert row["timestamp"].timestamp() * 1000 >= now


def test_a_time_beyond_what_spark_can_hold_is_refused(kafka: Any) -> None:
    """A producer wrote nanoseconds: int64 microseconds would wrap around to the year -99483."""
    topic = kafka.topic(1, message_timestamp_after_max_ms=2**63 - 1, message_timestamp_before_max_ms=2**63 - 1)
    last = (2**63 - 1) // 1000
    stamps = [1_712_345_678_123_456_789, last + 1, last, 1_712_345_678_123]
    produce(kafka, topic, [{"key": b"k", "value": b"v", "timestamp": t} for t in stamps])
    src = source(kafka, subscribe=topic)
    with pytest.raises(BadRecord, match=rf"TIMESTAMP_OUT_OF_RANGE.*{topic}-0 at offset 0 "):
        read_all(src)
    with closing(src.driver()) as driver:
        (piece,) = driver.slices(*driver.batch())
    found = list(src.read_rows(piece))
    times = pa.concat_arrays([rows.good.column("timestamp") for rows in found]).cast(pa.int64()).to_pylist()
    assert times == [last * 1000, 1_712_345_678_123_000]
    letters = [letter for rows in found for letter in rows.rejected]
    assert [(x.topic, x.partition, x.offset, x.record["key"]) for x in letters] == [(topic, 0, n, b"k") for n in (0, 1)]
    written = src.decoded(pa.RecordBatch.from_pylist([dict(x.record) for x in letters], schema=src.raw_schema()))
    assert (written.good.num_rows, written.rejected) == (2, []), "they can be written again, without a time"


def test_null_empty_tombstone_and_headers_with_null(kafka: Any) -> None:
    topic = kafka.topic(1)
    records = [
        {"key": None, "value": b"only value"},
        {"key": b"only key", "value": None},
        {"key": None, "value": None},
        {"key": b"", "value": b""},
        {"key": "schlüssel".encode(), "value": b"h", "headers": [("a", b"1"), ("a", None), ("ü", b"")]},
        {"key": b"x", "value": b"y", "headers": []},
    ]
    produce(kafka, topic, records)
    src = source(kafka, subscribe=topic, includeHeaders=True)
    got = read_all(src)
    assert got.schema == src.schema()
    assert (
        str(got.schema.field("headers").type) == "list<element: struct<key: string, value: binary>>"
        or str(got.schema.field("headers").type) == "list<item: struct<key: string, value: binary>>"
    )
    rows = got.to_pylist()
    assert [(r["key"], r["value"]) for r in rows] == [(r["key"], r["value"]) for r in records]
    assert [r["headers"] for r in rows] == [
        None,
        None,
        None,
        None,
        [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "ü", "value": b""}],
        None,
    ]


def test_records_are_those_of_another_client_and_a_slice_twice_is_equal(kafka: Any) -> None:
    topic = kafka.topic(3, retention_ms=-1)  # their timestamps are years old
    for p in range(3):
        produce(
            kafka,
            topic,
            [
                {
                    "key": None if i % 7 == 0 else os.urandom(i % 19),
                    "value": None if i % 11 == 0 else os.urandom(i * 37 % 4001),
                    "timestamp": 1_600_000_000_000 + i * 977,
                    "headers": [("n", str(i).encode())] if i % 5 == 0 else None,
                }
                for i in range(2000)
            ],
            partition=p,
        )
    once, twice = (read_all(source(kafka, subscribe=topic, includeHeaders=True, minPartitions=7)) for _ in range(2))
    assert once.num_rows == 6000
    assert once.combine_chunks().equals(twice.combine_chunks())
    assert once.column("offset").to_pylist() == [*range(2000)] * 3
    once.validate(full=True)
    told = once.set_column(5, "timestamp", once.column("timestamp").cast(pa.int64())).to_pylist()
    for ours, theirs in zip(told, sorted(read_committed(kafka.bootstrap, topic), key=_place), strict=True):
        assert (ours["partition"], ours["offset"]) == _place(theirs)
        assert (ours["key"], ours["value"]) == (theirs.key(), theirs.value())
        assert (ours["timestampType"] + 1, ours["timestamp"] // 1000) == theirs.timestamp()
        assert [(h["key"], h["value"]) for h in ours["headers"] or ()] == (theirs.headers() or [])


def _place(message: Any) -> tuple[int, int]:
    return message.partition(), message.offset()


def test_records_of_one_megabyte(kafka: Any) -> None:
    topic = kafka.topic(1, max_message_bytes=3_000_000)
    big = [os.urandom(1 << 20) for _ in range(40)]
    produce(kafka, topic, [b"small", *big, b"small"])
    got = read_all(source(kafka, subscribe=topic))
    assert values(got) == [b"small", *big, b"small"]


def test_p14_aborted_records_and_markers_are_no_loss_and_no_end(kafka: Any) -> None:
    """P14: records are counted; offsets are not subtracted. A range that ends in a gap ends."""
    topic = kafka.topic(1)
    writer = Transactions(kafka, f"{topic}-w")
    writer.write(topic, [b"a0", b"a1"], commit=True)  # offsets 0 1, marker 2
    writer.write(topic, [b"x"] * 5, commit=False)  # offsets 3 to 7, marker 8
    writer.write(topic, [b"b0"], commit=True)  # offset 9, marker 10
    writer.write(topic, [b"y"] * 3, commit=False)  # offsets 11 to 13, marker 14
    src = source(kafka, subscribe=topic)
    driver = src.driver()
    started = time.monotonic()
    start, end = driver.batch()
    assert positions(end) == {topic: {"0": 15}}
    assert values(read_range(src, driver, start, end)) == [b"a0", b"a1", b"b0"]
    # Every range, wherever it begins and ends, gives exactly its records, and terminates.
    present = {0: b"a0", 1: b"a1", 9: b"b0"}
    for low in range(15):
        for high in range(low, 16):
            got = list(src.read(Slice((topic, 0, low, high))))
            found = {o: v for b in got for o, v in zip(b["offset"].to_pylist(), b["value"].to_pylist(), strict=True)}
            assert found == {o: v for o, v in present.items() if low <= o < high}, (low, high)
    assert time.monotonic() - started < 60
    raw = source(kafka, {"kafka.isolation.level": "read_uncommitted"}, subscribe=topic)
    assert len(values(read_all(raw))) == 11
    driver.close()


def test_since_when_records_wait(kafka: Any) -> None:
    """An aborted record is not waited for; partitions without a waiting record are absent."""
    topic = kafka.topic(3)
    Transactions(kafka, f"{topic}-w").write(topic, [b"never"], commit=False)
    produce(kafka, topic, [{"value": v, "timestamp": 1_700_000_000_123} for v in (b"a", b"b")])
    produce(kafka, topic, [b"c"], partition=1)
    with closing(source(kafka, subscribe=topic).driver()) as driver:
        newest, start = driver.newest(), {topic: {"0": 0, "1": 1, "2": 0}}
        assert newest is not None
        assert driver.waiting_since(start, newest) == {f"{topic}/0": 1_700_000_000_123}


def test_open_transactions_are_not_waited_for(kafka: Any) -> None:
    topic = kafka.topic(1)
    produce(kafka, topic, [b"before"])
    writer = Transactions(kafka, f"{topic}-w")
    writer.open(topic, [b"undecided"])
    produce(kafka, topic, [b"behind it"])
    driver = source(kafka, subscribe=topic).driver()
    assert positions(driver.batch()[1]) == {topic: {"0": 1}}
    driver.close()
    assert values(read_all(source(kafka, subscribe=topic))) == [b"before"]
    raw = source(kafka, {"kafka.isolation.level": "read_uncommitted"}, subscribe=topic)
    assert values(read_all(raw)) == [b"before", b"undecided", b"behind it"]
    writer.end(commit=False)
    assert values(read_all(source(kafka, subscribe=topic))) == [b"before", b"behind it"]


def test_p17_an_empty_range_reads_nothing(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P17: not even a consumer is made."""
    topic = kafka.topic(2)
    produce(kafka, topic, [b"v"], partition=1)

    def refuse(*_: object) -> None:
        raise AssertionError("a consumer was made")

    src = source(kafka, subscribe=topic)
    driver = src.driver()
    start, end = driver.batch()
    assert driver.slices(end, end) == []
    assert [p.data for p in driver.slices(start, end)] == [(topic, 1, 0, 1)]
    monkeypatch.setattr(reader, "_consumer", refuse)
    reader._idle.clear()
    assert list(src.read(Slice((topic, 1, 1, 1)))) == []
    with pytest.raises(AssertionError, match="a consumer was made"):
        list(src.read(Slice((topic, 1, 0, 1))))
    driver.close()


def test_p26_memory_of_a_read_does_not_grow_with_the_range(kafka: Any) -> None:
    """P26: 480 MB pass through; a hundredth of it may stay."""
    topic = kafka.topic(1, max_message_bytes=3_000_000, segment_bytes=100_000_000)
    produce(kafka, topic, (bytes(400_000) for _ in range(300)))
    produce(kafka, topic, (bytes(1000) for _ in range(360_000)))
    src = source(kafka, subscribe=topic)
    driver = src.driver()
    piece = driver.slices(*driver.batch())[0]
    me, most, rows, largest = psutil.Process(), 0, 0, 0
    for batch in src.read(Slice((topic, 0, 0, 200))):  # warm up
        rows += batch.num_rows
    base, rows = me.memory_info().rss, 0
    for batch in src.read(piece):
        rows += batch.num_rows
        largest = max(largest, batch.nbytes)
        most = max(most, me.memory_info().rss - base)
    assert rows == 360_300
    assert largest < 64 << 20
    assert most < 160 << 20, f"{most >> 20} MB more than before"
    driver.close()


def test_starting_and_ending_offsets(kafka: Any) -> None:
    topic = kafka.topic(2)
    produce(kafka, topic, [b"0a", b"0b", b"0c"], partition=0)
    produce(kafka, topic, [b"1a", b"1b"], partition=1)

    def read(**options: Any) -> list[bytes | None]:
        return values(read_all(source(kafka, options, subscribe=topic)))

    everything = [b"0a", b"0b", b"0c", b"1a", b"1b"]
    assert read() == everything
    assert read(startingOffsets="earliest", endingOffsets="latest") == everything
    assert read(startingOffsets=json.dumps({topic: {"0": 1, "1": -2}})) == [b"0b", b"0c", b"1a", b"1b"]
    assert read(endingOffsets=json.dumps({topic: {"0": 1, "1": -1}})) == [b"0a", b"1a", b"1b"]
    with pytest.raises(UsageError, match=r"startingOffsets.*latest.*batch"):
        read(startingOffsets="latest")
    with pytest.raises(UsageError, match=r"startingOffsets.*latest.*batch"):
        read(startingOffsets=json.dumps({topic: {"0": -1, "1": 0}}))
    with pytest.raises(UsageError, match=r"endingOffsets.*earliest"):
        read(endingOffsets="earliest")
    with pytest.raises(UsageError, match=rf"startingOffsets.*does not name {topic}-1"):
        read(startingOffsets=json.dumps({topic: {"0": 1}}))
    with pytest.raises(UsageError, match=rf"names {topic}-7"):
        read(startingOffsets=json.dumps({topic: {"0": 1, "1": 0, "7": 0}}))
    with pytest.raises(UsageError, match=r"OFFSET_OUT_OF_RANGE.*offset 9 .*offsets 0 to 3"):
        read(startingOffsets=json.dumps({topic: {"0": 9, "1": 0}}))
    with pytest.raises(UsageError, match=r"from offset 2 to 1"):
        read(startingOffsets=json.dumps({topic: {"0": 2, "1": 0}}), endingOffsets=json.dumps({topic: {"0": 1, "1": 1}}))


def test_by_timestamp(kafka: Any) -> None:
    topic = kafka.topic(2)
    for p in range(2):
        produce(kafka, topic, [{"value": f"{p}{t}".encode(), "timestamp": t * 1000} for t in (1, 2, 3)], partition=p)

    def read(**options: Any) -> list[bytes | None]:
        return values(read_all(source(kafka, options, subscribe=topic)))

    assert read(startingTimestamp=2000) == [b"02", b"03", b"12", b"13"]
    assert read(startingTimestamp=1001, endingTimestamp=3000) == [b"02", b"12"]
    each = json.dumps({topic: {"0": 3000, "1": 1500}})
    assert read(startingOffsetsByTimestamp=each) == [b"03", b"12", b"13"]
    assert read(endingOffsetsByTimestamp=each) == [b"01", b"02", b"11"]
    assert read(endingTimestamp=9999) == [b"01", b"02", b"03", b"11", b"12", b"13"]
    # A global time takes precedence over times per partition, and these over offsets.
    assert read(startingTimestamp=3000, startingOffsetsByTimestamp=each, startingOffsets="earliest") == [b"03", b"13"]
    with pytest.raises(UsageError, match=r"no record at or after 9999 ms.*startingOffsetsByTimestampStrategy"):
        read(startingTimestamp=9999)
    assert read(startingTimestamp=9999, startingOffsetsByTimestampStrategy="latest") == []


def test_assign_and_pattern(kafka: Any) -> None:
    stem = kafka.topic(2)
    other = kafka.topic(1, f"{stem}-other")
    produce(kafka, stem, [b"0"], partition=0)
    produce(kafka, stem, [b"1"], partition=1)
    produce(kafka, other, [b"2"])
    assert values(read_all(source(kafka, assign=json.dumps({stem: [1], other: [0]})))) == [b"1", b"2"]
    assert values(read_all(source(kafka, subscribePattern=f"^{stem}($|-)"))) == [b"0", b"1", b"2"]
    assert values(read_all(source(kafka, subscribePattern=f"{stem[1:]}-oth"))) == [b"2"]  # partial, as Spark's own
    assert values(read_all(source(kafka, subscribePattern=f"^{stem}$"))) == [b"0", b"1"]
    assert values(read_all(source(kafka, subscribePattern="no-such-topic-.*"))) == []
    assert values(read_all(source(kafka, subscribe=f"{other}, {stem}"))) == [b"0", b"1", b"2"]
    with pytest.raises(UsageError, match=f"PARTITION_UNKNOWN.*'{stem}'.* has no partition 5"):
        read_all(source(kafka, assign=json.dumps({stem: [5]})))


def test_stream_limits_and_frozen_end(kafka: Any) -> None:
    topic = kafka.topic(2)
    produce(kafka, topic, [b"%d" % i for i in range(90)], partition=0)
    produce(kafka, topic, [b"%d" % i for i in range(10)], partition=1)
    src = source(kafka, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=50)
    assert src.rows_per_batch_max == 50
    driver = src.driver()
    at = driver.initial()
    assert positions(at) == {topic: {"0": 0, "1": 0}}
    driver.freeze()
    produce(kafka, topic, [b"later"] * 100, partition=1)
    first = driver.latest(at, 50)
    assert positions(first) == {topic: {"0": 45, "1": 5}}
    second = driver.latest(first, 50)
    assert positions(second) == {topic: {"0": 90, "1": 10}}
    assert driver.latest(second, 50) == second
    newest = driver.newest()
    assert newest is not None
    assert positions(newest) == {topic: {"0": 90, "1": 110}}
    fresh = src.driver()
    assert positions(fresh.latest(second, None)) == {topic: {"0": 90, "1": 110}}
    # A later process splits the batch the same way.
    pieces = [Slice((topic, 0, 0, 45), f"{topic}-0"), Slice((topic, 1, 0, 5), f"{topic}-1")]
    assert fresh.slices(at, first) == driver.slices(at, first) == pieces
    for d in (driver, fresh):
        d.close()
        d.close()


def test_a_batch_waits_for_so_many_offsets(kafka: Any) -> None:
    """As in Spark's own connector: the first batch does not wait, later ones wait for enough records or a timeout."""
    topic = kafka.topic(1)
    produce(kafka, topic, [b"a"])
    given = {"subscribe": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 3}
    patient = source(kafka, given, maxTriggerDelay="1h", maxRecordsPerPartition=2).driver()
    at = patient.latest(patient.initial(), None)
    assert positions(at) == {topic: {"0": 1}}
    produce(kafka, topic, [b"b", b"c"])
    assert patient.latest(at, None) is at
    produce(kafka, topic, [b"d"])
    end = patient.latest(at, None)
    assert positions(end) == {topic: {"0": 4}}
    assert [p.data[2:] for p in patient.slices(at, end)] == [(1, 2), (2, 4)]
    produce(kafka, topic, [b"e"])
    assert patient.latest(end, None) is end
    patient.freeze()
    assert positions(patient.latest(end, None)) == {topic: {"0": 5}}, "available-now leaves nothing"
    hasty = source(kafka, given, maxTriggerDelay="0s").driver()
    assert positions(hasty.latest(at, None)) == {topic: {"0": 5}}
    produce(kafka, topic, [b"f"])
    assert positions(hasty.latest(end, None)) == {topic: {"0": 6}}, "the time was up"
    for d in (patient, hasty):
        d.close()


def test_a_stream_starts_at_the_latest_by_default_and_refuses_an_end(kafka: Any) -> None:
    topic = kafka.topic(1)
    produce(kafka, topic, [b"old"])
    driver = source(kafka, subscribe=topic).driver()
    assert positions(driver.initial()) == {topic: {"0": 1}}
    driver.close()
    driver = source(kafka, subscribe=topic, endingOffsets="latest").driver()
    with pytest.raises(UsageError, match=r"endingOffsets.*batch"):
        driver.initial()
    driver.close()


def test_a_plan_refuses_a_start_that_does_not_fit(kafka: Any, tmp_path: Path) -> None:
    topic, late = kafka.topic(2), int(time.time() * 1000) + 3_600_000
    offsets, times = (json.dumps({topic: each}) for each in ({"0": 0}, {"0": late, "1": late}))
    for option, value, code in (
        ("startingOffsets", offsets, "OPTION_VALUE.*-1"),
        ("startingOffsetsByTimestamp", times, "no record at or after"),
        ("endingOffsets", "latest", "OPTION_CONFLICT"),
    ):
        pipeline = delivered.Pipeline(
            name="starts",
            guarantee="exactly_once",
            checkpoint=tmp_path / "checkpoint",
            source=Endpoint("kafka", {"kafka.bootstrap.servers": kafka.bootstrap, "subscribe": topic, option: value}),
            sinks=[delivered.sqlite(tmp_path / "out.db", table="t")],
        )
        with pytest.raises(UsageError, match=code):
            pipeline.plan()


def test_a_start_that_was_written_down_is_the_same_later(kafka: Any) -> None:
    topic = kafka.topic(1)
    produce(kafka, topic, [b"old"])
    driver = source(kafka, subscribe=topic, startingOffsets="latest").driver()
    at = driver.initial()
    produce(kafka, topic, [b"new"])
    kept = source(kafka, subscribe=topic, startingOffsets=json.dumps(at), startingTimestamp=0)
    later = kept.driver()
    assert later.initial() == at
    assert values(read_range(kept, later, at, later.latest(at, None))) == [b"new"]
    kafka.topic(1, f"{topic}-late")  # it did not exist when the stream began
    wider = source(kafka, subscribePattern=f"{topic}.*", startingOffsets=json.dumps(at)).driver()
    assert wider.initial() == at
    wider.close()
    nothing = source(kafka, subscribePattern="no-such-topic-.*").driver()
    none_yet = nothing.initial()
    assert source(kafka, subscribePattern="x", startingOffsets=json.dumps(none_yet)).driver().initial() == none_yet
    for d in (driver, later, nothing):
        d.close()


def test_new_partitions_and_topics_start_at_their_earliest(kafka: Any) -> None:
    from confluent_kafka.admin import NewPartitions

    stem = kafka.topic(1)
    src = source(kafka, subscribePattern=f"^{stem}($|-)")
    driver = src.driver()
    at = driver.initial()
    produce(kafka, stem, [b"a"])
    kafka.admin().create_partitions([NewPartitions(stem, 2)])[stem].result(120)
    late = kafka.topic(1, f"{stem}-late")
    produce(kafka, late, [b"c0", b"c1"])
    deadline = time.monotonic() + 120
    while True:  # until the broker reports the partition
        try:
            produce(kafka, stem, [b"b"], partition=1)
            break
        except Exception:
            assert time.monotonic() < deadline
    end = driver.latest(at, None)
    assert positions(end) == {stem: {"0": 1, "1": 1}, late: {"0": 2}}
    assert values(read_range(src, driver, at, end)) == [b"a", b"b", b"c0", b"c1"]
    # The offsets include where a new partition began: the same slices without querying Kafka.
    again = source(kafka, subscribePattern=f"^{stem}($|-)").driver()
    assert again.slices(at, json.loads(json.dumps(end))) == driver.slices(at, end)
    assert driver.latest(end, None) == end
    # A range of several batches, as an audit reads it, includes where new partitions began.
    produce(kafka, stem, [b"b1"], partition=1)
    assert values(read_range(src, driver, at, driver.latest(end, None))) == [b"a", b"b", b"b1", b"c0", b"c1"]
    for d in (driver, again):
        d.close()


def test_min_partitions_cuts_slices(kafka: Any) -> None:
    topic = kafka.topic(2)
    produce(kafka, topic, [b"%d" % i for i in range(100)], partition=0)
    produce(kafka, topic, [b"x"] * 10, partition=1)
    src = source(kafka, subscribe=topic, minPartitions=6)
    driver = src.driver()
    start, end = driver.batch()
    pieces = driver.slices(start, end)
    assert len(pieces) == 6
    assert values(read_range(src, driver, start, end)) == [b"%d" % i for i in range(100)] + [b"x"] * 10
    driver.close()


def test_p23_a_group_is_told_the_progress(kafka: Any) -> None:
    """P23: tools see how far the pipeline is."""
    topic, group = kafka.topic(2), "told"
    produce(kafka, topic, [b"a", b"b"], partition=1)
    src = source(kafka, subscribe=topic, startingOffsets="earliest", commitOffsetsToGroup=group)
    assert src.preflight() == []
    driver = src.driver()

    def told() -> list[int]:
        watcher = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
        try:
            return [
                p.offset for p in watcher.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)], timeout=60)
            ]
        finally:
            watcher.close()

    end = driver.latest(driver.initial(), None)
    assert told() == [-1001, -1001]
    driver.acknowledge(end)
    assert told() == [0, 2]
    driver.acknowledge(end)
    produce(kafka, topic, [b"c"], partition=0)
    driver.acknowledge(driver.latest(end, None))
    assert told() == [1, 2]
    driver.close()
    silent = source(kafka, subscribe=topic, startingOffsets="earliest").driver()
    silent.acknowledge(end)
    silent.close()
    assert told() == [1, 2]


def test_a_group_that_consumers_use_is_refused(kafka: Any) -> None:
    topic, group = kafka.topic(1), "taken"
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    consumer.subscribe([topic])
    try:
        deadline = time.monotonic() + 120
        while not consumer.assignment():
            consumer.poll(0.1)
            assert time.monotonic() < deadline
        findings = source(kafka, subscribe=topic, commitOffsetsToGroup=group).preflight()
        assert [(f.code, f.refuses) for f in findings] == [("GROUP_IN_USE", True)]
    finally:
        consumer.close()


def test_consumers_stay_warm_and_leave_nothing_behind(kafka: Any) -> None:
    topic = kafka.topic(2)
    produce(kafka, topic, [b"%d" % i for i in range(1000)], partition=0)
    produce(kafka, topic, [b"other"] * 10, partition=1)
    src = source(kafka, subscribe=topic)
    list(src.read(Slice((topic, 0, 0, 10))))
    before = reader._idle._idle[-1][1]
    assert [v for b in src.read(Slice((topic, 1, 0, 3))) for v in b["value"].to_pylist()] == [b"other"] * 3
    assert [v for b in src.read(Slice((topic, 0, 5, 7))) for v in b["value"].to_pylist()] == [b"5", b"6"]
    assert reader._idle._idle[-1][1] is before
    # Abandoning a read closes its consumer.
    reading = src.read(Slice((topic, 0, 0, 1000)))
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert before not in [c for _, c in reader._idle._idle]
    assert [v for b in src.read(Slice((topic, 0, 998, 1000))) for v in b["value"].to_pylist()] == [b"998", b"999"]


def test_missing_and_impossible_topics_are_one_clear_error(kafka: Any) -> None:
    def failing(**options: Any) -> Source:
        return source(kafka, options)

    for action in (lambda s: s.driver().initial(), read_all):
        with pytest.raises(UsageError, match=r"TOPIC_MISSING.*'no-such-topic'"):
            action(failing(subscribe="no-such-topic"))
        with pytest.raises(UsageError, match=r"TOPIC_(INVALID|MISSING).*'größe'"):
            action(failing(subscribe="größe"))
    assert [(f.code, f.refuses) for f in failing(subscribe="no-such-topic").preflight()] == [("TOPIC_MISSING", True)]


def test_sources_travel_to_tasks(kafka: Any) -> None:
    topic = kafka.topic(1)
    produce(kafka, topic, [b"v"])
    src = source(kafka, subscribe=topic)
    driver = src.driver()
    piece = driver.slices(*driver.batch())[0]
    copy, sent = pickle.loads(pickle.dumps((src, piece)))
    assert values(pa.Table.from_batches(copy.read(sent))) == [b"v"]
    driver.close()


def test_offsets_that_kafka_deleted(kafka: Any) -> None:
    """Retention overtakes the reader: stop with an error, or continue after the gap."""
    topic = kafka.topic(1)
    produce(kafka, topic, [b"%d" % i for i in range(10)])
    kafka.admin().delete_records([TopicPartition(topic, 0, 6)])
    deadline = time.monotonic() + 120
    while positions(source(kafka, subscribe=topic).driver().batch()[0]) != {topic: {"0": 6}}:
        assert time.monotonic() < deadline
    strict = source(kafka, subscribe=topic)
    with pytest.raises(InvariantBroken, match=rf"DATA_LOST.*Offsets 2 to 5 of {topic}-0.*failOnDataLoss"):
        list(strict.read(Slice((topic, 0, 2, 10))))
    with pytest.raises(InvariantBroken, match=r"Offsets 2 to 4 of"):
        list(strict.read(Slice((topic, 0, 2, 5))))
    lax = source(kafka, subscribe=topic, failOnDataLoss=False)
    assert [v for b in lax.read(Slice((topic, 0, 2, 10))) for v in b["value"].to_pylist()] == [b"6", b"7", b"8", b"9"]
    assert list(lax.read(Slice((topic, 0, 2, 5)))) == []
    assert any("failOnDataLoss" in a for a in lax.capability().assumes)
    assert not any("failOnDataLoss" in a for a in strict.capability().assumes)


def _recreated(kafka: Any, make: Callable[..., Any]) -> tuple[str, Any]:
    topic = kafka.topic(1)
    produce(kafka, topic, [b"old"] * 3)
    driver = source(kafka, subscribe=topic, startingOffsets="earliest").driver()
    at = driver.latest(driver.initial(), None)
    driver.close()
    _delete(kafka, topic)
    make(topic)
    return topic, at


def test_topic_deleted_and_made_again_with_more_records(kafka: Any) -> None:
    """Offsets alone would not show it."""

    def make(topic: str) -> None:
        kafka.topic(1, topic)
        produce(kafka, topic, [b"new"] * 5)

    topic, at = _recreated(kafka, make)
    driver = source(kafka, subscribe=topic).driver()
    with pytest.raises(InvariantBroken, match=r"DATA_LOST.*deleted and recreated"):
        driver.latest(at, None)
    driver.close()
    # A batch planned by an earlier process is not read from the new topic either.
    driver = source(kafka, subscribe=topic).driver()
    with pytest.raises(InvariantBroken, match=r"DATA_LOST.*deleted and recreated"):
        driver.slices(at, at)
    driver.close()
    lax = source(kafka, subscribe=topic, failOnDataLoss=False)
    driver = lax.driver()
    end = driver.latest(at, None)
    assert values(read_range(lax, driver, at, end)) == [b"new"] * 5
    assert driver.latest(end, None) == {k: v for k, v in end.items() if k != "#from"} or driver.latest(end, None) == end
    driver.close()


def test_topic_deleted(kafka: Any) -> None:
    topic, at = _recreated(kafka, lambda topic: None)
    driver = source(kafka, subscribePattern=f"^{topic}$").driver()
    with pytest.raises(InvariantBroken, match=r"DATA_LOST.*no longer exists"):
        driver.latest(at, None)
    driver.close()
    driver = source(kafka, subscribePattern=f"^{topic}$", failOnDataLoss=False).driver()
    assert positions(driver.latest(at, None)) == {}
    driver.close()


def test_a_slice_of_a_topic_that_is_gone_ends(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_STALL_LOOK_S", 0.5)
    monkeypatch.setattr(reader, "RESTART_CONFIRM_S", 1.0)
    topic, _ = _recreated(kafka, lambda topic: None)
    with pytest.raises(InvariantBroken, match=r"DATA_LOST"):
        list(source(kafka, subscribe=topic).read(Slice((topic, 0, 0, 3))))
    assert list(source(kafka, subscribe=topic, failOnDataLoss=False).read(Slice((topic, 0, 0, 3)))) == []


@pytest.mark.parametrize("question", ["initial", "latest"])
def test_a_topic_deleted_between_two_questions_is_a_lost_one(
    kafka: Any, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """The topics of a pattern were listed, and one is not there any more when its end is asked for."""
    kept, deleted = kafka.topic(1), kafka.topic(1)
    driver = source(kafka, subscribePattern=f"^({kept}|{deleted})$", failOnDataLoss=False).driver()
    start = driver.initial() if question == "latest" else None
    client = driver._client
    listed = client.partitions

    def partitions() -> Any:
        answer = listed()
        if any(t == deleted for t, _ in answer[0]):
            kafka.admin().delete_topics([deleted])[deleted].result(60)
            while deleted in kafka.admin().list_topics(timeout=60).topics:
                time.sleep(0.01)
        return answer

    monkeypatch.setattr(client, "partitions", partitions)
    found = driver.initial() if start is None else driver.latest(start, None)
    assert set(positions(found)) == {kept}
    driver.close()


@pytest.mark.checkpoint("a topic that was removed from `subscribe`, there again", "refused", "`TOPIC_RETURNED`")
def test_a_topic_that_was_removed_and_returns_is_not_read_again(kafka: Any, tmp_path: Path) -> None:
    """Regression: with failOnDataLoss false, which a removal needs, it was read from its beginning."""
    kept, removed = kafka.topic(1), kafka.topic(1)
    for topic in (kept, removed):
        produce(kafka, topic, ["a", "b"])

    def read(topics: str, start: dict[str, Any] | None = None) -> dict[str, Any]:
        """The end of a start's first batch, which Spark logs."""
        options = {"subscribe": topics, "startingOffsets": "earliest", "failOnDataLoss": False}
        stream = StreamReader(source(kafka, options), Reading(str(tmp_path)))
        first = stream.initialOffset() if start is None else start
        end = stream.latestOffset(first, ReadAllAvailable())
        stream.stop()
        return end

    both = read(f"{kept},{removed}")
    one = read(kept, both)
    assert (removed in both, removed in one) == (True, False)
    assert read(kept, one) == one
    with pytest.raises(InvariantBroken, match=rf"TOPIC_RETURNED.*{removed}-0 .*stood at 2.*delivered twice") as caught:
        read(f"{kept},{removed}", one)
    (tmp_path / "delivered" / "removed-topics.json").unlink()
    assert str(tmp_path / "delivered" / "removed-topics.json") in (caught.value.next_step or "")
    assert read(f"{kept},{removed}", one)[removed] == {"0": 2}
    read(kept, both)
    kafka.admin().delete_topics([removed])[removed].result(60)
    kafka.admin().create_topics([NewTopic(removed, 1, 1)])[removed].result(60)
    assert read(f"{kept},{removed}", one)[removed] == {"0": 0}, "another topic"


def test_a_stream_knows_its_topic_again_while_sparks_log_holds_plain_offsets(kafka: Any, tmp_path: Path) -> None:
    """During one run, and between two runs, which only the checkpoint's sidecar can detect."""
    topic = kafka.topic(1)
    produce(kafka, topic, [b"old"] * 3)
    src = source(kafka, subscribe=topic, startingOffsets="earliest")
    kept, running = stream_driver(src, str(tmp_path)), stream_driver(src, None)
    assert kept.initial() == running.initial() == {topic: {"0": 0}}
    at = kept.latest({topic: {"0": 0}}, None)
    assert at == running.latest({topic: {"0": 0}}, None) == {topic: {"0": 3}}
    assert kept.newest() == at
    kept.close()
    _make_again(kafka, topic)
    produce(kafka, topic, [b"new"] * 5)
    stopped = stream_driver(src, str(tmp_path))
    for driver in (stopped, running):
        with pytest.raises(InvariantBroken, match=r"DATA_LOST.*deleted and recreated"):
            driver.latest(at, None)
        driver.close()
    again = pytest.raises(InvariantBroken, match=r"DATA_LOST.*deleted and recreated")
    with closing(stream_driver(src, str(tmp_path))) as replays, again:
        replays.slices({topic: {"0": 0}}, at)
    # As an earlier version logged it.
    ids = json.loads((tmp_path / METADATA_FILE).read_text())["entries"][0]["metadata"]
    with closing(stream_driver(src, None)) as old, pytest.raises(InvariantBroken, match="deleted and recreated"):
        old.latest({**at, **ids}, None)
    # Neither sidecar nor memory: as in Spark's own connector.
    with closing(stream_driver(src, None)) as nothing:
        assert nothing.latest(at, None) == {topic: {"0": 5}}


def test_a_topic_made_again_that_ends_where_the_former_stood_is_read(kafka: Any, tmp_path: Path) -> None:
    """Spark runs no batch between equal offsets. A crash before Spark logs the end changes nothing."""
    topic = kafka.topic(1)
    produce(kafka, topic, [b"old"] * 3)
    src = source(kafka, subscribe=topic, startingOffsets="earliest", failOnDataLoss=False)
    with closing(stream_driver(src, str(tmp_path))) as driver:
        at = driver.latest(driver.initial(), None)
    _make_again(kafka, topic)
    produce(kafka, topic, [b"n0", b"n1", b"n2"])
    read: list[bytes | None] = []
    with closing(stream_driver(src, str(tmp_path))) as died:
        assert died.latest(at, None) == {topic: {"0": 2}}
    while True:
        with closing(stream_driver(src, str(tmp_path))) as driver:
            end = driver.latest(at, None)
            if end == at:
                break
            pieces = driver.slices(at, end)
        with closing(stream_driver(src, str(tmp_path))) as again:
            assert again.slices(at, end) == pieces
        read += [v for p in pieces for b in src.read(p) for v in b.column("value").to_pylist()]
        at = end
    assert read == [b"n0", b"n1", b"n2"]


def test_offsets_of_sparks_own_connector_are_gone_on_from(kafka: Any, caplog: pytest.LogCaptureFixture) -> None:
    topic = kafka.topic(2)
    produce(kafka, topic, [b"a", b"b"])
    produce(kafka, topic, [b"c"], partition=1)
    src = source(kafka, subscribe=topic)
    with closing(stream_driver(src, None)) as driver:
        pieces = driver.slices({topic: {"0": 1}}, {topic: {"0": 2, "1": 1}})
        assert [p.data for p in pieces] == [(topic, 0, 1, 2), (topic, 1, 0, 1)], (
            "a new partition begins at its earliest"
        )
        with pytest.raises(InvariantBroken, match="went back from offset 2 to 1"):
            driver.slices({topic: {"0": 2, "1": 1}}, {topic: {"0": 1, "1": 1}})
    lax = source(kafka, subscribe=topic, failOnDataLoss=False)
    with closing(stream_driver(lax, None)) as driver:
        assert driver.slices({topic: {"0": 2, "1": 1}}, {topic: {"0": 1, "1": 1}}) == []


def _make_again(kafka: Any, topic: str) -> None:
    _delete(kafka, topic)
    kafka.topic(1, topic)


def _delete(kafka: Any, topic: str) -> None:
    kafka.admin().delete_topics([topic])[topic].result(120)
    deadline = time.monotonic() + 120
    while topic in kafka.admin().list_topics(timeout=60).topics:
        assert time.monotonic() < deadline

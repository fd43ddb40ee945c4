"""RabbitMQ streams as a source: repeated reads, gaps, the end of a stream, retention, kills."""

from __future__ import annotations

import json
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.replayed_help import values_over_a_kill
from tests.support.servers import Rabbitmq

from delivered.connectors.rabbitmq import stream as stream_reader
from delivered.connectors.rabbitmq.stream import CONNECTOR
from delivered.contract.source import Offsets, Source
from delivered.model.errors import InvariantBroken, UsageError

SMALL = {"x_max_length_bytes": 400_000, "x_stream_max_segment_size_bytes": 100_000}
"""A segment holds about ten messages of `BIG` bytes, the stream about forty."""
BIG = 10_000


def source(rabbitmq: Rabbitmq, streams: str, **options: Any) -> Source:
    given = {"url": rabbitmq.url, "streams": streams, **options}
    return CONNECTOR.source({k.lower(): str(v) for k, v in given.items()})  # lower case, as PySpark passes them


def numbered(count: int, first: int = 0, size: int = 0) -> list[tuple[str, bytes]]:
    return [(f"id{n}", b"row %d" % n + b" " * size) for n in range(first, first + count)]


def read(src: Source, start: Offsets, end: Offsets) -> pa.Table:
    batches = [b for piece in src.driver().slices(start, end) for b in src.read(piece)]
    return pa.Table.from_batches(batches, schema=src.schema())


def numbers(table: pa.Table) -> list[int]:
    return [int(v.split()[1]) for v in table.column("value").to_pylist()]


def batches(src: Source, limit: int | None, start: Offsets) -> list[tuple[Offsets, Offsets]]:
    """The current content, split into batches as by Spark."""
    driver, at, found = src.driver(), start, []
    while (end := driver.latest(at, limit)) != at:
        found.append((at, end))
        at = end
    return found


def test_columns_are_kafkas(rabbitmq: Rabbitmq) -> None:
    stream = rabbitmq.queue("stream")
    rabbitmq.send(stream, numbered(2))
    src = source(rabbitmq, stream, includeHeaders="true")
    assert pickle.loads(pickle.dumps(src)) == src
    assert src.preflight() == []
    assert src.capability().replayable
    first, second = read(src, *src.driver().batch()).to_pylist()
    headers = first.pop("headers")
    assert {"key": "amqp.message_id", "value": b"id0"} in headers
    assert {"key": "s", "value": b"text"} in headers
    assert "x-stream-offset" not in {h["key"] for h in headers}
    assert first == {
        "key": stream.encode(), "value": b"row 0", "topic": stream, "partition": 0, "offset": 0, "timestamp": None,
        "timestampType": 0,
    }  # fmt: skip
    assert second["offset"] == 1


def test_the_same_range_gives_the_same_rows_over_gaps_and_the_limit_cuts_it(rabbitmq: Rabbitmq) -> None:
    """RabbitMQ reserves an offset at each new segment: a batch may end there, and the next one begin."""
    stream = rabbitmq.queue("stream", x_stream_max_segment_size_bytes=100_000)
    for n in range(0, 100, 5):
        rabbitmq.send(stream, numbered(5, n, BIG))
    src = source(rabbitmq, stream)
    driver = src.driver()
    start, end = driver.batch()
    whole = read(src, start, end)
    assert numbers(whole) == list(range(100))
    assert read(src, start, end).equals(whole)
    assert end[stream] > 100 + 3, "there are gaps, else this shows nothing"
    late = {stream: end[stream] - 40}
    rest = numbers(read(src, late, end))
    assert len(rest) < 40, "there are gaps, else this shows nothing"
    for limit, begin, expected in ((1, late, rest), (7, start, list(range(100)))):
        cut = batches(src, limit, begin)
        assert all(e[stream] - s[stream] <= limit for s, e in cut)
        assert [n for s, e in cut for n in numbers(read(src, s, e))] == expected


@pytest.mark.matrix  # the next test has an end within the last chunk
def test_the_end_is_known_when_a_sender_was_told_that_its_messages_are_in(rabbitmq: Rabbitmq) -> None:
    """In bursts of any size: an end within the last chunk would make available-now miss messages."""
    stream, sent = rabbitmq.queue("stream"), 0
    src = source(rabbitmq, stream)
    assert src.driver().newest() == {stream: 0}
    chosen = random.Random(7)
    for _ in range(25):
        count = chosen.choice([1, 2, 30, 800, 3_000])
        rabbitmq.send(stream, numbered(count, sent))
        sent += count
        assert src.driver().newest() == {stream: sent}
    assert numbers(read(src, {stream: sent - 100}, {stream: sent})) == list(range(sent - 100, sent))


def test_the_end_is_behind_all_of_a_large_last_chunk(rabbitmq: Rabbitmq) -> None:
    """A transaction fills few chunks of some megabytes; a client first receives a part of one."""
    stream, count = rabbitmq.queue("stream"), 400
    connection = rabbitmq.connect()
    channel = connection.channel()
    channel.tx_select()
    driver = source(rabbitmq, stream).driver()
    for round_ in range(3):
        for _ in range(count):
            channel.basic_publish("", stream, b"x" * 20_000)
        channel.tx_commit()
        wanted = {stream: count * (round_ + 1)}
        deadline = time.monotonic() + 120
        while driver.newest() != wanted:
            assert time.monotonic() < deadline, driver.newest()
        assert [driver.newest() for _ in range(5)] == [wanted] * 5
    connection.close()


def test_streams_that_are_named_later_and_available_now(rabbitmq: Rabbitmq) -> None:
    one, two = rabbitmq.queue("stream"), rabbitmq.queue("stream", **SMALL)
    rabbitmq.send(one, numbered(10))
    start = source(rabbitmq, one, startingOffsets="earliest").driver().initial()
    assert start == {one: 0}
    assert source(rabbitmq, one).driver().initial() == {one: 10}
    for n in range(0, 200, 5):
        rabbitmq.send(two, numbered(5, n, BIG))
    src = source(rabbitmq, f"{one},{two}", startingOffsets=json.dumps({one: 4, two: 5_000}))
    driver = src.driver()
    assert driver.initial() == {one: 4, two: 5_000}
    driver.freeze()
    rabbitmq.send(one, numbered(10, 10))
    after = driver.latest(start, None)
    assert after[one] == 10
    assert after[two] > 0, "its start is noted, and read by the next batch"
    last = driver.latest(after, None)
    found = numbers(read(src, after, last))
    assert found == list(range(found[0], 200))
    assert driver.latest(last, None) == last


def test_what_retention_took_stops_the_query(rabbitmq: Rabbitmq) -> None:
    stream = rabbitmq.queue("stream", **SMALL)
    rabbitmq.send(stream, numbered(5, 0, BIG))
    src = source(rabbitmq, stream)
    start, _ = src.driver().batch()
    for n in range(5, 200, 5):
        rabbitmq.send(stream, numbered(5, n, BIG))
    end = src.driver().latest(start, None)
    deadline = time.monotonic() + 60
    while source(rabbitmq, stream).driver().batch()[0][stream] == 0:
        assert time.monotonic() < deadline, "retention takes nothing"
        time.sleep(0.1)
    with pytest.raises(InvariantBroken, match="DATA_LOST"):
        read(src, start, end)
    kept = numbers(read(source(rabbitmq, stream, failOnDataLoss="false"), start, end))
    assert kept == list(range(kept[0], 200))
    assert kept[0] > 0


def test_a_stream_made_anew_stops_the_query(rabbitmq: Rabbitmq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "_SILENCE_S", 0.2)
    stream = rabbitmq.queue("stream")
    rabbitmq.send(stream, numbered(50))
    src = source(rabbitmq, stream)
    start, end = src.driver().batch()
    connection = rabbitmq.connect()
    connection.channel().queue_delete(stream)
    with pytest.raises(UsageError, match="QUEUE_MISSING"):
        src.driver().latest(end, None)
    connection.channel().queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    connection.close()
    rabbitmq.send(stream, numbered(20))
    with pytest.raises(InvariantBroken, match="DATA_LOST"):
        src.driver().latest(end, None)
    with pytest.raises(InvariantBroken, match="DATA_LOST"):
        read(src, start, end)


def test_a_stream_made_anew_that_grew_past_the_position_stops_the_query(rabbitmq: Rabbitmq) -> None:
    """P29: offsets alone do not show it; the message before the position does."""
    stream = rabbitmq.queue("stream")
    rabbitmq.send(stream, numbered(50))
    src = source(rabbitmq, stream)
    _, end = src.driver().batch()
    known = src.driver().landmarks(end)
    assert known.keys() == {stream}
    rabbitmq.send(stream, numbered(10, 50))
    src.driver().check_landmarks(end, known)
    connection = rabbitmq.connect()
    connection.channel().queue_delete(stream)
    connection.channel().queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    connection.close()
    rabbitmq.send(stream, numbered(80, 100))
    driver = src.driver()
    assert driver.latest(end, None) == {stream: 80}
    with pytest.raises(InvariantBroken, match=rf"DATA_LOST.*{stream}.*offset 50.*failOnDataLoss"):
        driver.check_landmarks(end, known)
    source(rabbitmq, stream, failOnDataLoss="false").driver().check_landmarks(end, known)


@pytest.mark.matrix
def test_a_server_killed_in_the_middle_of_a_slice(
    new_rabbitmq: Callable[[], Rabbitmq], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams are reported missing until the server has recovered them."""
    monkeypatch.setattr(stream_reader, "SOURCE_BATCH_RECORDS_MAX", 1_000)
    rabbitmq = new_rabbitmq()
    stream = rabbitmq.queue("stream")
    rabbitmq.send(stream, numbered(6_000))
    src = source(rabbitmq, stream, prefetch=500)
    start, end = src.driver().batch()
    [piece] = src.driver().slices(start, end)
    found: list[int] = []
    restart = threading.Thread(target=rabbitmq.broker.restart)
    for batch in src.read(piece):
        found += numbers(pa.Table.from_batches([batch]))
        if restart.ident is None:
            rabbitmq.broker.kill()
            restart.start()
    restart.join()
    assert found == list(range(6_000))
    assert src.driver().newest() == end


@pytest.mark.parametrize(
    "point",
    ["commit.decide:before", pytest.param("commit.decide:after", marks=pytest.mark.matrix)],
)
def test_a_pipeline_killed_and_started_again_has_every_message_once(
    rabbitmq: Rabbitmq, tmp_path: Path, point: str
) -> None:
    """F6: two streams to SQLite, exactly_once."""
    streams = [rabbitmq.queue("stream"), rabbitmq.queue("stream")]
    for n, stream in enumerate(streams):
        rabbitmq.send(stream, numbered(2_000, 2_000 * n))
    source = {"format": "rabbitmq_stream", "url": rabbitmq.url, "streams": ",".join(streams)}
    found = values_over_a_kill(tmp_path, source, point)
    assert found == Counter(body for _, body in numbered(4_000))


def test_bad_input_is_told_clearly(rabbitmq: Rabbitmq) -> None:
    def findings(streams: str, **other: str) -> dict[str, bool]:
        return {f.code: f.refuses for f in source(rabbitmq, streams, **other).preflight()}

    stream = rabbitmq.queue("stream", x_max_length_bytes=1_000_000)
    assert findings(stream) == {}
    assert findings(rabbitmq.queue("stream", x_max_age="7D", x_stream_max_segment_size_bytes=1_000_000)) == {}
    assert findings("nowhere") == {"QUEUE_MISSING": True}
    assert findings(f"{stream},{rabbitmq.queue()}") == {"QUEUE_NOT_STREAM": True}
    assert findings(rabbitmq.queue("classic")) == {"QUEUE_NOT_STREAM": True}
    assert findings(stream, password="wrong") == {"RABBITMQ_CREDENTIALS": True}
    assert findings(stream, url="amqp://127.0.0.1:9/") == {"RABBITMQ_UNREACHABLE": True}
    for options in ({"startingOffsets": "soon"}, {"startingOffsets": '{"x": -1}'}, {"prefetch": "0"}, {"streams": ","}):
        with pytest.raises(UsageError, match="OPTION_VALUE"):
            source(rabbitmq, **{"streams": stream, **options})
    with pytest.raises(UsageError, match="must have each of"):
        source(rabbitmq, stream, startingOffsets='{"other": 1}').driver().initial()

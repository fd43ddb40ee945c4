"""Rows that a message broker does not accept are bad rows, which name column, length and limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivered.connectors.activemq import ActivemqOptions, ActivemqSinkOptions
from delivered.connectors.activemq.queue import ActivemqReceiver, ActivemqWriter
from delivered.connectors.kafka.sink import invalid_rows
from delivered.connectors.rabbitmq import RabbitmqSinkOptions
from delivered.connectors.rabbitmq.client import explained
from delivered.connectors.rabbitmq.queue import RabbitmqWriter
from delivered.connectors.rocketmq import RocketmqSinkOptions
from delivered.connectors.rocketmq.sink import RocketmqWriter
from delivered.model.errors import BadRecord
from delivered.model.identity import Scope, Work
from delivered.model.rows import BYTES_MAX
from delivered.pipeline.registry import find_sink
from delivered.source import HEADERS

WORK = Work(Scope("p", "s", "i"), 0, 0)
RABBITMQ = {"url": "amqp://h:1", "exchange": "x", "ledger": "/nowhere/l.db"}
ACTIVEMQ = {"url": "stomp://h:1", "queue": "q", "idHeader": "id", "keyHeader": "key", "ledger": "/nowhere/l.db"}
ROCKETMQ = {"endpoints": "h:1", "topic": "t", "messageType": "fifo", "ledger": "/nowhere/l.db"}
WRITERS: dict[str, Callable[[], Any]] = {
    "rabbitmq": lambda: RabbitmqWriter(RabbitmqSinkOptions.parse(RABBITMQ), WORK, gives_up=False),
    "activemq": lambda: ActivemqWriter(ActivemqSinkOptions.parse(ACTIVEMQ), WORK, gives_up=False),
    "rocketmq": lambda: RocketmqWriter(RocketmqSinkOptions.parse(ROCKETMQ), WORK, gives_up=False),
}
GOOD = {"key": "k", "value": "v", "message_id": "m", "tag": "t", "message_group": "g"}
LIMITS = [(s, c, n) for s, columns in BYTES_MAX.items() for c, n in columns.items() if n < 1 << 20]


def row(system: str, **columns: str) -> pa.RecordBatch:
    return pa.record_batch({n: [v] for n, v in {**GOOD, **columns}.items() if n in BYTES_MAX[system]})


@pytest.mark.parametrize(("system", "column", "limit"), LIMITS)
def test_a_value_that_is_too_long_is_a_bad_row(system: str, column: str, limit: int) -> None:
    writer = WRITERS[system]()
    assert len(writer._messages(row(system, **{column: "x" * limit}))) == 1
    for text in ("x" * (limit + 1), "é" * (limit // 2 + 1)):
        length = len(text.encode())
        said = rf"column '{column}' has {length} bytes; {system} accepts at most {limit}"
        with pytest.raises(BadRecord, match=said):
            writer._messages(row(system, **{column: text}))


@pytest.mark.parametrize(
    ("kind", "words", "limit"),
    [
        ("normal", {"message_id": "i", "key": "k" * 16_380, "tag": "ttt"}, None),
        ("normal", {"message_id": "i", "key": "k" * 16_380, "tag": "tttt"}, "'key' has 16380 bytes.*16385.*16384"),
        ("normal", {"key": "k" * 16_129, "tag": ""}, None),
        ("normal", {"key": "k" * 16_130, "tag": ""}, "'key' has 16130 bytes.*16385.*16384"),
        ("normal", {"message_id": "i" * 16_001, "key": None, "tag": ""}, "'message_id' has 16001.*32002.*32000"),
        ("normal", {"message_id": "i i" * 5_400, "key": None, "tag": "t"}, None),  # no such id is among the keys
        ("transaction", {"message_id": "é" * 5_333, "key": "k", "tag": "t"}, None),
        ("transaction", {"message_id": "é" * 5_333, "key": "k", "tag": "ttt"}, "'message_id' has 10666.*32002.*32000"),
        ("transaction", {"message_id": "i", "key": "k", "tag": "t" * 31_997}, "'tag' has 31997.*32001.*32000"),
    ],
)
def test_words_of_rocketmq_have_a_limit_together(kind: str, words: dict[str, str | None], limit: str | None) -> None:
    more = {"nameServers": "h:1"} if kind == "transaction" else {}
    options = RocketmqSinkOptions.parse({**ROCKETMQ, "messageType": kind, **more})
    writer = RocketmqWriter(options, WORK, gives_up=False)
    rows = pa.record_batch({"value": [b"v"], **{n: pa.array([v], pa.string()) for n, v in words.items()}})
    if limit is None:
        assert len(writer._messages(rows)) == 1
    else:
        with pytest.raises(BadRecord, match=limit):
            writer._messages(rows)


def test_an_id_of_our_own_has_room_everywhere() -> None:
    """Each dot of a name takes three bytes in it."""
    ids = set()
    for pipeline in ("a." * 32, "b." * 32):
        writer = RabbitmqWriter(
            RabbitmqSinkOptions.parse(RABBITMQ),
            Work(Scope(pipeline, "." * 64, "i" * 36), 10**12, 9_999),
            gives_up=False,
        )
        writer._rows = 10**15
        ids |= {
            m.properties.message_id for m in writer._messages(pa.record_batch({"value": [b"v"] * 2, "key": ["k"] * 2}))
        }
    assert len(ids) == 4
    assert max(map(len, ids)) <= 255


@pytest.mark.parametrize("column", ["key", "message_id"])
def test_a_zero_byte_does_not_end_a_stomp_frame(column: str) -> None:
    with pytest.raises(BadRecord, match=f"in column '{column}'; STOMP's headers cannot hold a zero byte"):
        WRITERS["activemq"]()._messages(row("activemq", **{column: "a\0b"}))


def test_a_long_routing_key_in_the_options_is_refused_at_the_start() -> None:
    sink = find_sink("rabbitmq", {**RABBITMQ, "routingKey": "k" * 256})
    with pytest.raises(Exception, match="option 'routingKey' has 256 bytes; RabbitMQ accepts at most 255"):
        sink.check_schema(pa.schema([("value", pa.binary())]))


def test_a_message_that_rabbitmq_calls_too_large_is_a_bad_record() -> None:
    import pika

    error = pika.exceptions.ChannelClosedByBroker(
        406, "PRECONDITION_FAILED - message size 4194304 is larger than configured max size 1048576"
    )
    found = explained(error, RabbitmqSinkOptions.parse(RABBITMQ))
    assert isinstance(found, BadRecord)
    assert "4194304 is larger than configured max size 1048576" in str(found)


def test_headers_count_towards_the_size_of_a_kafka_record() -> None:
    headers = [[{"key": "h", "value": b"x" * 1_000}], None, [], [{"key": "h" * 995, "value": None}]]
    # A length below 64 takes one byte, a longer one two.
    rows = pa.record_batch({"value": [b"v"] * 4, "headers": pa.array(headers, HEADERS.type)})
    assert invalid_rows(rows, "t", 1_005) is None
    reasons = invalid_rows(rows, "t", 1_004)
    assert reasons is not None
    why = "1005 bytes in 'key', 'value' and 'headers'; the limit (kafka.message.max.bytes) is 1004 for them"
    assert reasons.to_pylist() == [why, None, None, None]


class Frame:
    def __init__(self, headers: dict[str, str], body: bytes) -> None:
        self.headers, self.body = headers, body


NAMES = st.sampled_from(["id", "key", "timestamp", "ack", "message-id", "n"]) | st.text(max_size=5)


@given(st.lists(st.dictionaries(NAMES, st.text(max_size=30) | st.just("a\ufffd")), max_size=3), st.binary(max_size=20))
def test_any_headers_of_an_activemq_message_are_taken(given_: list[dict[str, str]], body: bytes) -> None:
    receiver = ActivemqReceiver.__new__(ActivemqReceiver)
    options = {"url": "stomp://h:1", "queue": "q", "idHeader": "id", "keyHeader": "key", "log": "/x"}
    receiver._options, receiver._number, receiver._handle = ActivemqOptions.parse(options), 1, "ack"
    batch = receiver._message_batch([Frame({**h, "ack": "1"}, body) for h in given_])
    assert len(batch) == len(given_)
    assert all(i is None or "\ufffd" not in i for i in batch.ids)
    pa.array(batch.times_us, pa.timestamp("us"))

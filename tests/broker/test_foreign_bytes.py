"""What a sender of another language may put where text is usual: bytes, odd tables, numbers without a meaning."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka import KafkaProducer
from tests.broker.receive_help import finish, pipeline_file, receive
from tests.broker.source_help import read_all as kafka_rows
from tests.broker.source_help import source as kafka_source
from tests.support.amqp import Encoded, nested, table, text
from tests.support.pulsar import read_all, source
from tests.support.servers import Activemq, Pulsar, Rabbitmq

import delivered
from delivered.connectors.log import CONNECTOR as LOG
from delivered.connectors.log.produce import LogJournal
from delivered.connectors.rabbitmq import RabbitmqOptions
from delivered.connectors.rabbitmq.queue import RabbitmqReceiver
from delivered.connectors.rabbitmq.stream import CONNECTOR as STREAM
from delivered.contract.source import MessageBatch
from delivered.model.errors import BadRecord
from delivered.model.work import Ok

HALF = b"d" + struct.pack(">d", 2.5)
LATE = b"T" + struct.pack(">Q", 2**63)
ODD: list[tuple[bytes, dict[str, Any], bytes]] = [
    (b"caf\xe9", {"message_id": b"key"}, b"routing key"),
    (b"q", {"message_id": b"\xff" * 16}, b"message id"),
    (b"q", {"message_id": b"\xff" * 15 + b"\xfe"}, b"another message id"),
    (b"q", {"message_id": b"correlation", "correlation_id": b"\xff\x00\x11", "app_id": b"\xe9"}, b"correlation id"),
    (b"q", {"message_id": b"named", "headers": table([(b"caf\xe9", text(b"latin"))])}, b"header's name"),
    (
        b"q",
        {"message_id": b"nested", "headers": table([(b"outer", b"F" + table([(b"\xe9", text(b"\xff"))]))])},
        b"nested table",
    ),
    (b"q", {"message_id": b"numbers", "headers": table([(b"h", HALF), (b"t", LATE)])}, b"numbers"),
    (b"q", {"message_id": b"deep", "headers": table([(b"d", nested(text(b"x"), 2_000))])}, b"deep table"),
    (b"q", {"message_id": b"own", "headers": table([(b"delivered.id", text(b"other"))])}, b"our own header"),
    (b"q", {"message_id": b"time", "timestamp": 2**64 - 1}, b"late time"),
]


def send(
    rabbitmq: Rabbitmq, exchange: str, queue: str | None, odd: Sequence[tuple[bytes, dict[str, Any], bytes]]
) -> None:
    """Queue None: each to the routing key that it names."""
    with closing(rabbitmq.connect()) as connection:
        channel = connection.channel()
        for n, (key, properties, body) in enumerate(odd, 1):
            if n == len(odd):
                channel.confirm_delivery()
            channel.basic_publish(exchange, key if queue is None else queue, body, Encoded(**properties))


def bound(rabbitmq: Rabbitmq, kind: str = "quorum") -> tuple[str, str]:
    """A fanout exchange, and a queue that gets its messages."""
    queue = rabbitmq.queue(kind)
    with closing(rabbitmq.connect()) as connection:
        channel = connection.channel()
        channel.exchange_declare(f"x{queue}", "fanout", durable=True)
        channel.queue_bind(queue, f"x{queue}")
    return f"x{queue}", queue


def entries(log: Path) -> list[dict[str, Any]]:
    source = LOG.source({"path": str(log), "includeHeaders": "true"})
    driver = source.driver()
    rows = [r for p in driver.slices(*driver.batch()) for b in source.read(p) for r in plain(b)]
    driver.close()
    return rows


def plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows with a dictionary of headers, without times."""
    names = [n for n in batch.schema.names if n != "timestamp"]
    return [
        {**r, "headers": {h["key"]: h["value"] for h in reversed(r["headers"] or ())}}
        for r in batch.select(names).to_pylist()
    ]


@pytest.mark.matrix
def test_bytes_in_every_field_of_a_rabbitmq_message_are_kept(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    exchange, queue = bound(rabbitmq)
    send(rabbitmq, exchange, None, ODD)
    file = pipeline_file(tmp_path, "rabbitmq", rabbitmq.url, queue)
    said = finish(receive(file, "--idle-seconds", "1.5"))
    assert (said["entered"], said["acknowledged"], said["quarantined"]) == (len(ODD), len(ODD), 0)
    assert rabbitmq.left(queue) == 0
    rows = {r["value"]: r for r in entries(tmp_path / "log")}
    assert sorted(rows) == sorted(body for _, _, body in ODD)
    for key, properties, body in ODD:
        assert (rows[body]["key"], rows[body]["headers"]["delivered.id"]) == (key, properties["message_id"])
    found = {body: r["headers"] for body, r in rows.items()}
    assert found[b"correlation id"]["amqp.correlation_id"] == b"\xff\x00\x11"
    assert found[b"correlation id"]["amqp.app_id"] == b"\xe9"
    assert found[b"header's name"]["b'caf\\xe9'"] == b"latin"
    assert json.loads(found[b"nested table"]["outer"]) == {"b'\\xe9'": {"base64": "/w=="}}
    assert (found[b"numbers"]["h"], found[b"numbers"]["t"]) == (b"2.5", str(2**63).encode())
    assert found[b"deep table"]["d"] == nested(text(b"x"), 2_000)[5:], "the table as it was sent"
    # Another receiver opens the log, and recognises all of them.
    send(rabbitmq, exchange, None, ODD)
    said = finish(receive(file, "--idle-seconds", "1.5"))
    assert (said["entered"], said["repeated"]) == (0, len(ODD))


def test_bytes_in_every_field_of_a_stream_are_kept(rabbitmq: Rabbitmq) -> None:
    exchange, queue = bound(rabbitmq, "stream")
    spoofs = (b"q", {"message_id": b"s", "headers": table([(b"x-stream-offset", text(b"junk"))])}, b"offset")
    send(rabbitmq, exchange, None, [*ODD, spoofs])
    origin = STREAM.source(
        {"url": rabbitmq.url, "streams": queue, "includeHeaders": "true", "startingOffsets": "earliest"}
    )
    driver = origin.driver()
    start, end = driver.batch()
    rows = {r["value"]: r for p in driver.slices(start, end) for b in origin.read(p) for r in plain(b)}
    assert sorted(rows) == sorted(body for _, _, body in [*ODD, spoofs])
    for key, properties, body in ODD:
        assert (rows[body]["key"], rows[body]["headers"]["amqp.message_id"]) == (key, properties["message_id"])
    assert rows[b"header's name"]["headers"]["b'caf\\xe9'"] == b"latin"
    assert driver.landmarks(end) == origin.driver().landmarks(end)
    driver.close()


def test_a_sender_cannot_set_the_id_that_the_log_keeps(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    """With messageId=none: a header of our own name must not make another message a repeat."""
    queue = rabbitmq.queue()
    send(rabbitmq, "", queue, [(b"", {"headers": table([(b"delivered.id", text(b"x"))])}, b"no id")])
    options = RabbitmqOptions.parse(
        {"url": rabbitmq.url, "queue": queue, "log": str(tmp_path / "log"), "messageId": "none"}
    )

    def take(count: int) -> None:
        journal, found = LogJournal(str(tmp_path / "log"), {}, 1_000), MessageBatch()
        with closing(RabbitmqReceiver(options)) as receiver:
            while len(found) < count:
                found.extend(receiver.receive(10, 5.0))
            assert isinstance(journal.append(found), Ok)
            receiver.acknowledge(found.handles)
        journal.close()

    take(1)
    send(rabbitmq, "", queue, [(b"", {"message_id": b"x"}, b"id x")])
    take(1)
    assert [r["value"] for r in entries(tmp_path / "log")] == [b"no id", b"id x"]


def test_ids_that_activemq_changed_are_not_taken_for_each_other(activemq: Activemq, tmp_path: Path) -> None:
    """The broker puts U+FFFD in place of bytes that are not UTF-8, so two ids become one."""
    queue = activemq.queue()
    client, frames = activemq.connect()
    for message_id, body in ((b"\xff", b"1"), (b"\xfe", b"2"), (b"caf\xc3\xa9", b"3")):
        head = b"SEND\ndestination:%s\ndestination-type:ANYCAST\npersistent:true\nreceipt:r\n" % queue.encode()
        own = b"id:%s\nn\xe9:x\xe9\nack:mine\nmessage-id:mine\nredelivered:perhaps\ntimestamp:%s\n" % (
            message_id,
            b"9" * 15,
        )
        client.transport.send(head + own + b"content-length:1\n\n" + body + b"\0")
    assert {frames.get(timeout=60)[0] for _ in range(3)} == {"receipt"}
    client.disconnect()
    options = {"url": activemq.url, "queue": queue, "idHeader": "id", "log": str(tmp_path / "log")}
    endpoint = delivered.endpoint("activemq", **options, badMessages="quarantine")
    delivered.receive(endpoint, idle_s=1)
    assert activemq.left(queue) == 0
    assert [r["value"] for r in entries(tmp_path / "log")] == [b"3"]
    bad = entries(tmp_path / "log.bad")
    assert sorted(r["value"] for r in bad) == [b"1", b"2"]
    assert {r["headers"]["delivered.reason"] for r in bad} == {
        b"its producer set no message id, or none of text, so it could not be recognised if redelivered"
    }


def test_bytes_in_the_fields_of_a_pulsar_message_are_kept(pulsar: Pulsar) -> None:
    import _pulsar

    topic = pulsar.topic()
    producer = pulsar.client().create_producer(topic)
    for key, value, named in (
        (b"caf\xe9", b"key", {}),
        ("k", b"property", {b"n\xe9": b"v"}),
        ("k", b"last", {"a": "b"}),
    ):
        made = _pulsar.MessageBuilder()
        made.content(value)
        made.partition_key(key)
        for name, content in named.items():
            made.property(name, content)
        producer._producer.send(made.build())
    rows = {r["value"]: r for r in plain(read_all(source(pulsar, topic, includeHeaders="true")))}
    assert [rows[v]["key"] for v in (b"key", b"property", b"last")] == [b"caf\xe9", b"k", b"k"]
    assert (rows[b"key"]["headers"], rows[b"last"]["headers"]) == ({}, {"a": b"b"})
    assert rows[b"property"]["headers"] == {"pulsar.unreadable": b"its properties are not UTF-8, first b'n\\xe9'"}


def test_a_kafka_header_named_in_latin_1_is_kept_or_refused_by_name(kafka: Any) -> None:
    topic = kafka.topic(1)

    class Latin(str):
        def encode(self, *_: Any) -> bytes:
            return b"caf\xe9"

    with closing(KafkaProducer(bootstrap_servers=kafka.bootstrap)) as producer:
        producer.send(topic, b"value", headers=[(Latin("name"), b"v")]).get(60)
    options = {"subscribe": topic, "startingOffsets": "earliest", "includeHeaders": "true"}
    rows = kafka_rows(kafka_source(kafka, **options, client="arrow"))
    assert rows.column("headers").to_pylist() == [[{"key": "b'caf\\xe9'", "value": b"v"}]]
    with pytest.raises(BadRecord, match=r"offset 0 has a header named b'caf\\xe9', which"):
        kafka_rows(kafka_source(kafka, **options, client="librdkafka"))

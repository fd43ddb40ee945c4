"""What a sender of another language may put where text is usual: bytes, odd tables, numbers without a meaning."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.broker.receive_help import finish, pipeline_file, receive
from tests.support.amqp import Encoded, nested, table, text
from tests.support.servers import Rabbitmq

from delivered.connectors.log import CONNECTOR as LOG
from delivered.connectors.log.journal import LogJournal
from delivered.connectors.rabbitmq.options import RabbitmqOptions
from delivered.connectors.rabbitmq.receiver import RabbitmqReceiver
from delivered.connectors.rabbitmq.stream import CONNECTOR as STREAM
from delivered.contract.queue import MessageBatch
from delivered.model.outcome import Ok

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
    source = STREAM.source(
        {"url": rabbitmq.url, "streams": queue, "includeHeaders": "true", "startingOffsets": "earliest"}
    )
    driver = source.driver()
    start, end = driver.batch()
    rows = {r["value"]: r for p in driver.slices(start, end) for b in source.read(p) for r in plain(b)}
    assert sorted(rows) == sorted(body for _, _, body in [*ODD, spoofs])
    for key, properties, body in ODD:
        assert (rows[body]["key"], rows[body]["headers"]["amqp.message_id"]) == (key, properties["message_id"])
    assert rows[b"header's name"]["headers"]["b'caf\\xe9'"] == b"latin"
    assert driver.landmarks(end) == source.driver().landmarks(end)
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

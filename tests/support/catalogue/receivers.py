"""Paths out of queues, streams and the log: messages sent by their own clients, through a receiver if there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path as Folder
from typing import Any

import pyarrow as pa
import pytest
from docs.value_types import NO_VALUE
from tests.support.amqp import Encoded, table, text
from tests.support.catalogue.run import BAD_ROW, EXACT, Cells
from tests.support.catalogue.values import BY_NAME, canonical

import delivered
from delivered.connectors.log import CONNECTOR as LOG
from delivered.connectors.log.produce import append
from delivered.contract.source import Source
from delivered.pipeline.registry import find_source

PARTS = ("value", "key", "id", "header", "name")
"""Of a message; header: the value of one, name: of one."""
Message = Mapping[str, bytes]
"""Part -> what the sender sets; others are x."""
Given = dict[int, Message]
Row = Mapping[str, Any]


def _given(parts: Iterable[str]) -> tuple[Given, dict[int, tuple[str, str]]]:
    """Messages by number, which is in the value or else in the key; and what each tries."""
    given, tried = {}, {}
    for part in parts:
        for label, array in (BY_NAME["string"].values | BY_NAME["binary"].values).items():
            value = canonical(array)[0]
            if value is not None:
                n = len(given)
                number = b"#%d" % n
                rest = {"id": b"i%d" % n, "key": number, "header": b"x", "name": b"h"}
                given[n] = {**rest, "value": number, part: value}
                tried[n] = part, label
    return given, tried


def _cells(parts: Iterable[str], through: Callable[[Given], tuple[set[int], list[Row], list[Row]]]) -> Cells:
    """Args: through: messages -> those that the client could send; rows of the log, and of its quarantine."""
    given, tried = _given(parts)
    sent, rows, bad = through(given)
    there, refused = _numbered(rows), _numbered(bad)
    cells: Cells = {}
    for n, (part, label) in tried.items():
        cells.setdefault(part, {})[label] = _outcome(given[n][part], part, n in sent, there.get(n), n in refused)
    return cells


def _numbered(rows: list[Row]) -> dict[int, Row]:
    found = {}
    for row in rows:
        [number, *_] = [p for p in (row["value"], row["key"]) if p is not None and p[:1] == b"#" and p[1:].isdigit()]
        found[int(number[1:])] = row
    return found


def _outcome(sent: bytes, part: str, was_sent: bool, row: Row | None, refused: bool) -> str:
    if not was_sent:
        return NO_VALUE
    if row is None:
        return BAD_ROW if refused else "lost"
    if part == "name":
        name = sent.decode(errors="replace")
        written = repr(sent) if name.encode() != sent or sent.startswith((b"b'", b'b"')) else name
        return EXACT if written in row["headers"] else f"{list(row['headers'])!r:.100} without {written!r:.100}"
    seen = row["headers"].get("h") if part == "header" else row[part]
    return EXACT if seen == sent else f"{seen!r:.100} instead of {sent!r:.100}"


def _rows(source: Source) -> list[Row]:
    with contextlib.closing(source.driver()) as driver:
        pieces = driver.slices(*driver.batch())
        found = [row for p in pieces for b in source.read(p) for row in b.to_pylist()]
    return [_plain(row) for row in found]


def _plain(row: Mapping[str, Any]) -> Row:
    headers = {h["key"]: h["value"] for h in reversed(row["headers"] or ())}
    return {**row, "headers": headers, "id": headers.get("delivered.id", headers.get("amqp.message_id"))}


def _logged(path: Folder) -> list[Row]:
    return _rows(LOG.source({"path": str(path), "includeHeaders": "true"})) if path.exists() else []


def _received(folder: Folder, system: str, **options: str) -> tuple[list[Row], list[Row]]:
    endpoint = delivered.endpoint(system, **options, log=str(folder / "log"), badMessages="quarantine")
    delivered.receive(endpoint, idle_s=2)
    return _logged(folder / "log"), _logged(folder / "log.bad")


def _publish(rabbitmq: Any, exchange: str, given: Given) -> set[int]:
    """Short strings have 255 bytes."""
    sent = set()
    with contextlib.closing(rabbitmq.connect()) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for n, message in given.items():
            if max(len(message[p]) for p in ("key", "id", "name")) > 255:
                continue
            headers = table([(message["name"], text(message["header"]))])
            properties = Encoded(message_id=message["id"], headers=headers)
            channel.basic_publish(exchange, message["key"], message["value"], properties)
            sent.add(n)
    return sent


def _bound(rabbitmq: Any, kind: str) -> tuple[str, str]:
    queue = rabbitmq.queue(kind)
    with contextlib.closing(rabbitmq.connect()) as connection:
        channel = connection.channel()
        channel.exchange_declare(f"x{queue}", "fanout", durable=True)
        channel.queue_bind(queue, f"x{queue}")
    return f"x{queue}", queue


def rabbitmq(request: pytest.FixtureRequest) -> Cells:
    server: Any = request.getfixturevalue("rabbitmq")
    folder: Folder = request.getfixturevalue("tmp_path")

    def through(given: Given) -> tuple[set[int], list[Row], list[Row]]:
        exchange, queue = _bound(server, "classic")
        sent = _publish(server, exchange, given)
        return sent, *_received(folder, "rabbitmq", url=server.url, queue=queue)

    return _cells(PARTS, through)


def rabbitmq_stream(request: pytest.FixtureRequest) -> Cells:
    server: Any = request.getfixturevalue("rabbitmq")

    def through(given: Given) -> tuple[set[int], list[Row], list[Row]]:
        exchange, queue = _bound(server, "stream")
        sent = _publish(server, exchange, given)
        options = {"url": server.url, "streams": queue, "includeHeaders": "true", "startingOffsets": "earliest"}
        return sent, _rows(find_source("rabbitmq_stream", options)), []

    return _cells(PARTS, through)


_ESCAPED = {b"\\": rb"\\", b"\r": rb"\r", b"\n": rb"\n", b":": rb"\c"}
"""By STOMP 1.2."""


def _escaped(value: bytes) -> bytes:
    return b"".join(_ESCAPED.get(bytes([c]), bytes([c])) for c in value)


def activemq(request: pytest.FixtureRequest) -> Cells:
    server: Any = request.getfixturevalue("activemq")
    folder: Folder = request.getfixturevalue("tmp_path")

    def through(given: Given) -> tuple[set[int], list[Row], list[Row]]:
        queue, client, frames = server.queue(), *server.connect()
        sent = set()
        for n, message in given.items():
            texts = [message[p] for p in ("id", "key", "header", "name")]
            # Headers are UTF-8 and have a name; a frame ends with a zero byte.
            if not message["name"] or any(b"\0" in t or not _is_text(t) for t in texts):
                continue
            named = {b"id": message["id"], b"mykey": message["key"], message["name"]: message["header"]}
            head = b"SEND\ndestination:%s\ndestination-type:ANYCAST\npersistent:true\nreceipt:r\n" % queue.encode()
            own = b"".join(_escaped(k) + b":" + _escaped(v) + b"\n" for k, v in named.items())
            length = b"content-length:%d\n\n" % len(message["value"])
            client.transport.send(head + own + length + message["value"] + b"\0")
            if frames.get(timeout=60)[0] == "receipt":
                sent.add(n)
        client.disconnect()
        options = {"url": server.url, "queue": queue, "idHeader": "id", "keyHeader": "mykey"}
        return sent, *_received(folder, "activemq", **options)

    return _cells(PARTS, through)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def pulsar(request: pytest.FixtureRequest) -> Cells:
    server: Any = request.getfixturevalue("pulsar")

    def through(given: Given) -> tuple[set[int], list[Row], list[Row]]:
        import _pulsar

        topic, sent = server.topic(), set()
        producer = server.client().create_producer(topic)
        for n, message in given.items():
            # Pulsar's own client cannot read other properties, and reads a missing key as an empty one.
            if not message["key"] or not (_is_text(message["name"]) and _is_text(message["header"])):
                continue
            made = _pulsar.MessageBuilder()
            made.content(message["value"])
            made.partition_key(message["key"])
            made.property(message["name"], message["header"])
            producer._producer.send(made.build())
            sent.add(n)
        producer.close()
        options = {**server.options, "topics": topic, "includeHeaders": "true", "startingOffsets": "earliest"}
        return sent, _rows(find_source("pulsar", options)), []

    return _cells(("value", "key", "header", "name"), through)


def rocketmq(request: pytest.FixtureRequest) -> Cells:
    server: Any = request.getfixturevalue("rocketmq")
    folder: Folder = request.getfixturevalue("tmp_path")

    def through(given: Given) -> tuple[set[int], list[Row], list[Row]]:
        topic, group, other = server.topic(), server.group(), server.group()
        sent = {n for n, message in given.items() if _sent_by_grpc(server, topic, message)}
        kept = {}
        for message in server.rest(topic, other):  # what the client itself reads
            keys = " ".join(k for k in message.keys if k != message.message_id)
            kept[message.message_id] = keys, message.properties, bytes(message.body)
        for n in list(sent):
            m = {p: v.decode() for p, v in given[n].items() if p != "value"}
            if kept.get(m["id"]) != (m["key"], {m["name"]: m["header"]}, given[n]["value"]):
                sent.discard(n)
        return sent, *_received(folder, "rocketmq", endpoints=server.url, topic=topic, group=group)

    return _cells(PARTS, through)


def _sent_by_grpc(server: Any, topic: str, message: Message) -> bool:
    from rocketmq.grpc_protocol import Encoding, MessageType, SendMessageRequest

    if not message["key"]:  # keys are joined with blanks: an empty one is none
        return False
    request = SendMessageRequest()
    made = request.messages.add(body=message["value"])
    system, producer = made.system_properties, server.producer(topic)
    try:
        made.topic.name, system.message_id = topic, message["id"].decode()
        system.keys.append(message["key"].decode())
        made.user_properties[message["name"].decode()] = message["header"].decode()
    except UnicodeDecodeError:
        return False
    system.message_type, system.body_encoding = MessageType.NORMAL, Encoding.IDENTITY
    system.born_host = "here"
    system.born_timestamp.GetCurrentTime()
    endpoints = server.configuration().rpc_endpoints
    answer = producer.rpc_client.send_message_async(endpoints, request, producer.sign(), timeout=10).result()
    return bool(answer.status.message == "OK")


def log(request: pytest.FixtureRequest) -> Cells:
    folder: Folder = request.getfixturevalue("tmp_path")

    def through(given: Given) -> tuple[set[int], list[Row], list[Row]]:
        sent = {n for n, m in given.items() if _is_text(m["name"])}  # names are text
        rows = [given[n] for n in sorted(sent)]
        headers = [[(m["name"].decode(), m["header"]), ("delivered.id", m["id"])] for m in rows]
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        columns = {p: pa.array([m[p] for m in rows], pa.binary()) for p in ("key", "value")}
        append(str(folder / "log"), pa.table({**columns, "headers": pa.array(headers, kind)}))
        return sent, _logged(folder / "log"), []

    return _cells(PARTS, through)


RECEIVERS = {make.__name__: make for make in (rabbitmq, rabbitmq_stream, activemq, pulsar, rocketmq, log)}

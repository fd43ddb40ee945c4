"""Lengths that brokers accept, at real ones: a message at the limit is read back by the system's own client; one above
it is a dead letter with column, length and limit, and stops nobody."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.servers import Activemq, Kafka, Pulsar, Rabbitmq, Rocketmq
from tests.support.sinks import Rig

from delivered.engine import Sinks
from delivered.model.capability import Guarantee
from delivered.model.rows import OnBadRow
from delivered.pipeline.registry import find_sink
from delivered.source import HEADERS

Row = dict[str, Any]
Bad = Mapping[str, Sequence[str]]
"""By a row's name: parts of its reason."""
_names = itertools.count()
_TYPES = {"value": pa.binary(), "headers": HEADERS.type}


def write(system: str, folder: Path, rows: Sequence[Row], **options: str) -> dict[str, str]:
    """Write rows with dead letters. Value of each dead letter -> its reason."""
    ledger = {} if system == "kafka" else {"ledger": str(folder / "ledger.db")}
    letters = folder / f"letters{next(_names)}.db"
    made = Sinks.of(
        [("rows", find_sink(system, {**options, **ledger}), None)],
        OnBadRow.DEAD_LETTER,
        ("letters", find_sink("sqlite", {"path": str(letters), "table": "letters"})),
    )
    rig = Rig(made)  # type: ignore[arg-type]
    names = {name: None for row in rows for name in row}
    columns = {n: pa.array([r.get(n) for r in rows], _TYPES.get(n, pa.string())) for n in names}
    rig.run_rows(0, [pa.record_batch(columns)], rig.context(guarantee=Guarantee.AT_LEAST_ONCE))
    with closing(sqlite3.connect(letters)) as connection:
        found = connection.execute("SELECT record, reason FROM letters").fetchall()
    return {name_of(json.loads(record)["value"]): reason for record, reason in found}


def name_of(value: str | bytes) -> str:
    """The first word of a message's value, which names it."""
    return (value.decode() if isinstance(value, bytes) else value).partition(" ")[0]


def check(rows: dict[str, Row], bad: Bad, refused: dict[str, str], seen: dict[str, Row]) -> None:
    """
    Args:
        rows: by name; those in `bad` are refused, with these parts in the reason.
        seen: what the system's client read.
    """
    assert set(refused) == set(bad), refused
    for name, parts in bad.items():
        assert all(part in refused[name] for part in parts), refused[name]
    assert set(seen) == set(rows) - set(bad)
    for name, row in seen.items():
        assert row == {k: rows[name].get(k) for k in row}, name


def named(rows: dict[str, Row]) -> dict[str, Row]:
    return {name: {"value": name.encode(), **row} for name, row in rows.items()}


def filled(name: str, size: int) -> bytes:
    return name.encode() + b" " + b"x" * (size - len(name) - 1)


SHORT = named(
    {
        "key": {"key": "k" * 255},
        "key,wide": {"key": "k" + "é" * 127},
        "key,over": {"key": "k" * 256},
        "key,wide,over": {"key": "é" * 128},
        "id": {"message_id": "i" * 255},
        "id,wide": {"message_id": "i" + "\U0001f600" * 63 + "é"},
        "id,over": {"message_id": "i" * 256},
        "id,wide,over": {"message_id": "\U0001f600" * 64},
    }
)


def rabbitmq_messages(rabbitmq: Rabbitmq, queue: str, count: int, kind: str = "") -> dict[str, Row]:
    seen, first = {}, {"x-stream-offset": "first"} if kind == "stream" else None
    with closing(rabbitmq.connect()) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=100)
        taken = channel.consume(queue, arguments=first, inactivity_timeout=60)
        for _ in range(count):
            method, properties, body = next(taken)
            seen[name_of(body)] = {"value": body, "key": method.routing_key, "message_id": properties.message_id}
    return seen


def rabbitmq_limits(rabbitmq: Rabbitmq, kind: str, folder: Path, rows: dict[str, Row], bad: Bad) -> None:
    queue = rabbitmq.queue(kind)
    with closing(rabbitmq.connect()) as connection:
        connection.channel().exchange_declare(f"x{queue}", "fanout", durable=True)
        connection.channel().queue_bind(queue, f"x{queue}")
    refused = write("rabbitmq", folder, list(rows.values()), url=rabbitmq.url, exchange=f"x{queue}")
    seen = rabbitmq_messages(rabbitmq, queue, len(rows) - len(bad), kind)
    for name, row in seen.items():
        if "message_id" not in rows[name]:
            del row["message_id"]
    rows = {name: {"key": "", **row} for name, row in rows.items()}
    check(rows, bad, refused, seen)


@pytest.mark.parametrize("kind", ["quorum", pytest.param("classic", marks=pytest.mark.matrix), "stream"])
def test_short_strings_of_rabbitmq(rabbitmq: Rabbitmq, tmp_path: Path, kind: str) -> None:
    bad = {
        name: (f"'{'key' if 'key' in name else 'message_id'}'", "256 bytes", "at most 255")
        for name in SHORT
        if name.endswith("over")
    }
    rabbitmq_limits(rabbitmq, kind, tmp_path, SHORT, bad)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["quorum", "classic", "stream"])
def test_the_size_that_rabbitmq_is_configured_for(
    new_rabbitmq: Callable[..., Rabbitmq], tmp_path: Path, kind: str
) -> None:
    limit = 100_000
    rows = named(
        {
            "small": {"value": b"small"},
            "at": {"value": filled("at", limit)},
            "over": {"value": filled("over", limit + 1)},
            "far": {"value": filled("far", 3 * limit)},
        }
    )
    said = {n: ("'value'", f"{s} bytes", f"at most {limit}") for n, s in (("over", limit + 1), ("far", 3 * limit))}
    rabbitmq_limits(new_rabbitmq(max_message_size=str(limit)), kind, tmp_path, rows, said)


@pytest.mark.matrix
def test_names_with_dots_leave_room_for_the_id_of_a_message(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    """Each dot takes three bytes of a generated id, which is a short string too."""
    queue = rabbitmq.queue("classic")
    made = find_sink("rabbitmq", {"url": rabbitmq.url, "routingKey": queue, "ledger": str(tmp_path / "l.db")})
    for pipeline in ("a." * 32, "b." * 32):
        Rig(made, pipeline, "." * 64).run_rows(
            0,
            [pa.record_batch({"value": [pipeline[:1].encode() + b"%d" % n for n in range(3)]})],
            Rig(made, pipeline, "." * 64).context(guarantee=Guarantee.AT_LEAST_ONCE),
        )
    seen = rabbitmq_messages(rabbitmq, queue, 6)
    assert len({row["message_id"] for row in seen.values()}) == len(seen) == 6


def test_headers_of_activemq(activemq: Activemq, tmp_path: Path) -> None:
    """With values that Artemis stores with their headers, and with one that it stores apart, as a large message."""
    long, queue = 10_000, activemq.queue()
    rows = named(
        {
            "both": {"key": "k" * long, "message_id": "i" * long},
            "wide": {"key": "é" * (long // 2), "message_id": "\U0001f600" * (long // 4)},
            "escaped": {"key": ":" * long, "message_id": "\n" * long},
            "large": {"key": "k" * long, "message_id": "j" * long, "value": filled("large", 400_000)},
            "key,over": {"key": "é" * (long // 2) + "k"},
            "id,over": {"message_id": "i" * (long + 1)},
        }
    )
    where = {"url": activemq.url, "queue": queue, "idHeader": "myid", "keyHeader": "mykey"}
    refused = write("activemq", tmp_path, list(rows.values()), **where)
    seen = {}
    connection, frames = activemq.connect()
    connection.subscribe(queue, "s", headers={"subscription-type": "ANYCAST"})
    for _ in range(4):
        kind, frame = frames.get(timeout=120)
        assert kind == "message", frame
        seen[name_of(frame.body)] = {"value": frame.body, "key": frame.headers["mykey"]}
        seen[name_of(frame.body)]["message_id"] = frame.headers["myid"]
    connection.disconnect()
    over = {n: (f"'{c}'", f"{long + 1} bytes", f"at most {long}") for n, c in OVER.items()}
    check(rows, over, refused, seen)


OVER = {"key,over": "key", "id,over": "message_id"}


def rocketmq_limits(rocketmq: Rocketmq, folder: Path, kind: str, rows: dict[str, Row], bad: Bad) -> None:
    topic, group = rocketmq.topic(kind.upper()), rocketmq.group(kind == "fifo")
    options = {"endpoints": rocketmq.url, "topic": topic, "messageType": kind}
    if kind == "transaction":
        options["nameServers"] = rocketmq.transactions(topic, folder)["nameServers"]
    refused = write("rocketmq", folder, list(rows.values()), **options)
    seen = {}
    for message in rocketmq.rest(topic, group):
        name = name_of(bytes(message.body))
        keys = [k for k in message.keys if k != message.message_id]
        found = {"value": bytes(message.body), "key": keys[0] if keys else None, "tag": message.tag or None}
        found |= {"message_id": message.message_id, "message_group": message.message_group or None}
        seen[name] = {k: v for k, v in found.items() if k != "message_id" or k in rows[name]}
    check(rows, bad, refused, seen)


PROXY, BROKER = 16 << 10, 32_000


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["normal", "fifo"])
def test_words_of_rocketmq(rocketmq: Rocketmq, tmp_path: Path, kind: str) -> None:
    half = (BROKER - PROXY) // 2
    rows = {
        "key": {"message_id": "1", "key": "k" * (PROXY - 1)},
        "key,over": {"message_id": "2", "key": "k" * PROXY},
        "key,own": {"key": "é" * ((PROXY - 256) // 2)},
        "key,own,over": {"key": "k" * (PROXY - 254)},
        "tag": {"message_id": "3", "tag": "é" * (PROXY // 2 - 1)},
        "tag,over": {"message_id": "4", "tag": "é" * (PROXY // 2)},
        "id": {"message_id": "i" * (BROKER // 2 - 64)},
        "id,over": {"message_id": "j" * (BROKER // 2 + 1)},
        "all": {"message_id": "a" * half, "key": "k" * 4_000, "tag": "t" * (PROXY - half - 4_100)},
        "all,over": {"message_id": "b" * half, "key": "k" * 4_000, "tag": "t" * (PROXY - half - 3_999)},
    }
    bad = {
        "key,over": ("'key'", f"{PROXY} bytes", f"at most {PROXY}"),
        "key,own,over": ("'key'", f"{PROXY - 254} bytes", f"at most {PROXY}"),
        "tag,over": ("'tag'", f"{PROXY} bytes", f"at most {PROXY}"),
        "id,over": ("'message_id'", f"{BROKER // 2 + 1} bytes", f"at most {BROKER}"),
        "all,over": (f"at most {PROXY}",),
    }
    if kind == "fifo":
        rows = {name: {"message_group": "g", **row} for name, row in rows.items()}
        rows |= {"group": {"message_group": "g" + "é" * 31}, "group,over": {"message_group": "é" * 32}}
        bad["group,over"] = ("'message_group'", "64 bytes", "at most 63")
    rocketmq_limits(rocketmq, tmp_path, kind, named(rows), bad)


@pytest.mark.matrix
def test_words_of_half_messages(rocketmq: Rocketmq, tmp_path: Path) -> None:
    """They go to a broker, not to a proxy, and hold the id once more."""
    rows = {
        "key": {"message_id": "1", "key": "k" * (BROKER - 3)},
        "key,over": {"message_id": "2", "key": "k" * (BROKER - 2)},
        "id": {"message_id": "i" * (BROKER // 3)},
        "id,over": {"message_id": "j" * (BROKER // 3 + 1)},
        "tag": {"message_id": "3", "tag": "é" * (BROKER // 2 - 2)},
        "tag,over": {"message_id": "4", "tag": "é" * (BROKER // 2 - 1)},
    }
    bad = {n: (f"'{c}'", f"at most {BROKER}") for n, c in {**OVER, "id,over": "message_id", "tag,over": "tag"}.items()}
    rocketmq_limits(rocketmq, tmp_path, "transaction", named(rows), bad)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["normal", "transaction"])
def test_the_size_of_rocketmq(rocketmq: Rocketmq, tmp_path: Path, kind: str) -> None:
    limit = 4 << 20
    rows = named({"at": {"value": filled("at", limit)}, "over": {"value": filled("over", limit + 1)}})
    said = {"over": ("'value'", f"{limit + 1} bytes", f"at most {limit}")}
    rocketmq_limits(rocketmq, tmp_path, kind, rows, said)


@pytest.mark.matrix
@pytest.mark.parametrize("limit", [100_000, 6 << 20])
def test_the_size_that_rocketmq_is_configured_for(
    new_rocketmq: Callable[..., Rocketmq], tmp_path: Path, limit: int
) -> None:
    sizes = {"maxMessageSize": str(limit), "proxy.maxMessageSize": str(limit)}
    rows = named({"at": {"value": filled("at", limit)}, "over": {"value": filled("over", limit + 1)}})
    said = {"over": ("'value'", f"{limit + 1} bytes", f"at most {limit}")}
    rocketmq_limits(new_rocketmq(**sizes), tmp_path, "normal", rows, said)


def headers(count: int, name: int, value: int) -> list[dict[str, Any]]:
    return [{"key": str(i).rjust(name, "0"), "value": b"v" * value} for i in range(count)]


KAFKA = 1_048_588 - 128
"""kafka.message.max.bytes, without what a record and its batch need for themselves."""


def kafka_records(kafka: Kafka, topic: str) -> list[Any]:
    from kafka import KafkaConsumer, TopicPartition

    partition, found = TopicPartition(topic, 0), []
    with closing(KafkaConsumer(bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest")) as consumer:
        consumer.assign([partition])
        (end,) = consumer.end_offsets([partition]).values()
        while consumer.position(partition) < end:
            for records in consumer.poll(1_000).values():
                found += records
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("client", ["arrow", "librdkafka"])
def test_records_of_kafka(kafka: Kafka, tmp_path: Path, client: str) -> None:
    of_id = len("delivered.id") + 1
    many = KAFKA // 10
    rows = named(
        {
            "value": {"value": filled("value", KAFKA)},
            "value,over": {"value": filled("value,over", KAFKA + 1)},
            "key": {"key": "é" * ((KAFKA - 3) // 2)},
            "key,over": {"key": "k" * (KAFKA - 7)},
            "header": {"headers": headers(1, 8, KAFKA - 6 - 9 - 3)},
            "header,over": {"headers": headers(1, 8, KAFKA - 11 - 9 - 3 + 1)},
            "name": {"headers": headers(1, KAFKA - 4 - 3 - 1, 0)},
            "name,over": {"headers": headers(1, KAFKA - 9 - 3 - 1 + 1, 0)},
            "headers": {"headers": headers(many - 1, 6, 2)},
            "headers,over": {"headers": headers(many, 6, 2)},
            "id": {"message_id": "i" * (KAFKA - 2 - of_id - 3)},
            "id,over": {"message_id": "i" * (KAFKA - 7 - of_id - 2)},
            "topic": {"topic": kafka.topic(1, name="t" * 248 + client[0])},
            "topic,over": {"topic": "t" * 250},
        }
    )
    topic = kafka.topic(1)
    rows = {name: {"topic": topic, **row} for name, row in rows.items()}
    options = {"kafka.bootstrap.servers": kafka.bootstrap, "client": client}
    refused = write("kafka", tmp_path, list(rows.values()), **options)
    bad: dict[str, Sequence[str]] = {
        n: (f"{KAFKA + 1} bytes", f"is {KAFKA} for them", f"'{c}'") for n, c in KAFKA_OVER.items()
    }
    bad["headers,over"] = (f"{10 * many + 12} bytes", f"is {KAFKA} for them")
    bad["topic,over"] = ("not a valid topic name",)
    seen = {}
    for place in (topic, rows["topic"]["topic"]):
        for record in kafka_records(kafka, place):
            row = {"value": record.value, "topic": place, "key": record.key and record.key.decode()}
            row["headers"] = [{"key": k, "value": v} for k, v in record.headers if k != "delivered.id"] or None
            row["message_id"] = next((v.decode() for k, v in record.headers if k == "delivered.id"), None)
            seen[name_of(record.value)] = row
    check(rows, bad, refused, seen)


KAFKA_OVER = {
    "value,over": "value",
    "key,over": "key",
    "header,over": "headers",
    "name,over": "headers",
    "id,over": "message_id",
}


PULSAR = (5 << 20) - (10 << 10)
"""messageBytesMax."""
_ID = 18
"""A property `delivered.id` without a value."""


def pulsar_messages(pulsar: Pulsar, topic: str) -> dict[str, Row]:
    import pulsar as library

    reader, seen = pulsar.client().create_reader(topic, library.MessageId.earliest), {}
    with closing(reader):
        while reader.has_message_available():
            message = reader.read_next(60_000)
            properties = message.properties()
            row = {"value": message.data(), "key": message.partition_key() or None}
            row["message_id"] = properties.pop("delivered.id")
            row["headers"] = [{"key": k, "value": v.encode()} for k, v in sorted(properties.items())] or None
            seen[name_of(row["value"])] = row
    return seen


def pulsar_limits(pulsar: Pulsar, folder: Path, rows: dict[str, Row], bad: Bad, **options: str) -> None:
    topic = pulsar.topic()
    refused = write("pulsar", folder, list(rows.values()), **pulsar.options, topic=topic, **options)
    seen = pulsar_messages(pulsar, topic)
    for name, row in seen.items():
        if "message_id" not in rows[name]:
            del row["message_id"]
    check(rows, bad, refused, seen)


@pytest.mark.matrix
def test_messages_of_pulsar(pulsar: Pulsar, tmp_path: Path) -> None:
    """Brokers close the connection at a message whose key or properties are too long, and the client sends it again."""
    many = (PULSAR - 100) // 14
    rows = named(
        {
            "value": {"value": filled("value", PULSAR - _ID)},
            "value,over": {"value": filled("value,over", PULSAR - _ID + 1)},
            "key": {"key": "é" * ((PULSAR - _ID - 4) // 4)},
            "key,over": {"key": "k" * ((PULSAR - _ID) // 2)},
            "header": {"headers": headers(1, 1, PULSAR - _ID - 6 - 13)},
            "header,over": {"headers": headers(1, 1, PULSAR - _ID)},
            "name": {"headers": headers(1, PULSAR - _ID - 4 - 12, 0)},
            "name,over": {"headers": headers(1, PULSAR - _ID, 0)},
            "headers": {"headers": headers(many, 6, 2)},
            "headers,over": {"headers": headers(many + 20, 6, 2)},
            "id": {"message_id": "i" * (PULSAR - _ID - 10)},
            "id,over": {"message_id": "i" * PULSAR},
        }
    )
    bad = {
        n: (f"most of them in '{n.partition(',')[0]}'", f"the limit is {PULSAR}") for n in ("value,over", "key,over")
    }
    bad |= {
        n: ("most of them in 'headers'", f"the limit is {PULSAR}") for n in rows if n.endswith("over") and n not in bad
    }
    pulsar_limits(pulsar, tmp_path, rows, bad)


def test_a_batch_of_pulsar_has_room_for_keys_and_headers(pulsar: Pulsar, tmp_path: Path) -> None:
    """The client counts the values alone."""
    rows = {f"{n:04}": {"key": "k" * 3_000, "headers": headers(1, 1, 4_000)} for n in range(1_500)}
    pulsar_limits(pulsar, tmp_path, named(rows), {})


def test_chunked_messages_of_pulsar(pulsar: Pulsar, tmp_path: Path) -> None:
    """Each chunk has the key and the properties."""
    rows = named(
        {
            "value": {"value": filled("value", 11 << 20), "key": "k" * 100_000},
            "key": {"key": "k" * (PULSAR - _ID)},
            "key,over": {"key": "k" * (PULSAR - _ID + 1)},
            "header": {"headers": headers(1, 1, PULSAR - _ID - 13)},
            "header,over": {"headers": headers(1, 1, PULSAR - _ID)},
        }
    )
    bad = {n: (f"most of them in '{c}'", f"the limit is {PULSAR}") for n, c in CHUNKED_OVER.items()}
    pulsar_limits(pulsar, tmp_path, rows, bad, chunking="true")


CHUNKED_OVER = {"key,over": "key", "header,over": "headers"}

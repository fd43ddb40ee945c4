"""Paths into queues and topics, each part of a message, read by their own clients."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from tests.support.catalogue.run import Path, Read, Row

from delivered.contract.sink import Sink
from delivered.model.capability import Guarantee
from delivered.pipeline.registry import find_sink

_names = itertools.count()
_GENERATED = re.compile(r"p\d+\.sink\.")
Seen = list[tuple[str | None, str | bytes | None, bytes | None]]
"""(message id, key, body) of each message."""
Made = tuple[dict[str, str], Callable[[], Seen]]


def _path(
    request: pytest.FixtureRequest, system: str, column: str, make: Callable[[Any], Made], nothing: bytes | None = None
) -> Path:
    """
    Args:
        column: value, key or message_id; another one has the number of the row. Or header (the value of one), name (of
            one), which `make` reads as the key.
        make: of the system's server: options of a sink on a fresh target, but for its ledger, and what takes the
            messages from there.
        nothing: what null becomes.
    """
    server, folder = request.getfixturevalue(system), request.getfixturevalue("tmp_path")

    def sink(_: pa.Schema) -> tuple[Sink, Read]:
        options, take = make(server)

        def read(_: pa.Schema) -> list[Row]:
            rows = []
            for message_id, key, body in take():
                parts = {"message_id": message_id, "key": key, "value": body, "header": key, "name": key}
                seen = None if column == "message_id" and _GENERATED.match(str(message_id)) else parts[column]
                number = body if column != "value" else str(message_id)
                rows.append({"id": int(number), column: seen.encode() if isinstance(seen, str) else seen})
            return rows

        return find_sink(system, {**options, "ledger": str(folder / f"{next(_names)}.db")}), read

    def rows(ids: pa.Array, values: pa.Array) -> pa.RecordBatch:
        texts = ids.cast(pa.string())
        number = "message_id" if column == "value" else "value"
        if column in ("header", "name"):
            fixed = pa.array(["h"] * len(values))
            pair = (fixed, values) if column == "header" else (values, fixed.cast(pa.binary()))
            entries = pa.StructArray.from_arrays(pair, names=["key", "value"])
            headers = pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), entries)
            return pa.RecordBatch.from_arrays([headers, texts], names=["headers", number])
        return pa.RecordBatch.from_arrays([values, texts], names=[column, number])

    place = "header" if column in ("header", "name") else column
    return Path(sink, rows, column, place, guarantee=Guarantee.AT_LEAST_ONCE, nothing=nothing)


def rabbitmq(request: pytest.FixtureRequest, column: str) -> Path:
    def make(server: Any) -> Made:
        queue = server.queue("classic")
        connection = server.connect()
        channel = connection.channel()
        channel.exchange_declare(f"x{queue}", "fanout")
        channel.queue_bind(queue, f"x{queue}")

        def take() -> Seen:
            found: Seen = []
            while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
                found.append((got[1].message_id, got[0].routing_key, got[2]))
            connection.close()
            return found

        route = {} if column == "key" else {"routingKey": queue}
        return {"url": server.url, "exchange": f"x{queue}", **route}, take

    return _path(request, "rabbitmq", column, make, b"" if column != "message_id" else None)


def activemq(request: pytest.FixtureRequest, column: str) -> Path:
    def make(server: Any) -> Made:
        queue = server.queue()

        def take() -> Seen:
            count, found = server.kept(queue), []
            connection, frames = server.connect()
            connection.subscribe(queue, "s", headers={"subscription-type": "ANYCAST"})
            while len(found) < count:
                kind, frame = frames.get(timeout=120)
                assert kind == "message", frame
                found.append((frame.headers.get("myid"), frame.headers.get("mykey"), frame.body))
            connection.disconnect()
            return found

        return {"url": server.url, "queue": queue, "idHeader": "myid", "keyHeader": "mykey"}, take

    return _path(request, "activemq", column, make, b"" if column == "value" else None)


def pulsar(request: pytest.FixtureRequest, column: str) -> Path:
    def make(server: Any) -> Made:
        import pulsar as library

        topic = server.topic()

        def take() -> Seen:
            reader = server.client().create_reader(topic, library.MessageId.earliest)
            found: Seen = []
            while reader.has_message_available():
                message = reader.read_next(60_000)
                body = None if message.has_null_value() else message.data()
                properties = message.properties()
                message_id = properties.pop("delivered.id", None)
                of_header = next(iter(properties.values() if column == "header" else properties), None)
                part = of_header if column in ("header", "name") else message.partition_key()
                found.append((message_id, part, body))
            reader.close()
            return found

        return {**server.options, "topic": topic}, take

    return _path(request, "pulsar", column, make, b"" if column in ("key", "header") else None)


def rocketmq(request: pytest.FixtureRequest, column: str) -> Path:
    def make(server: Any) -> Made:
        topic, group = server.topic(), server.group()

        def take() -> Seen:
            found = []
            for message in server.rest(topic, group):
                keys = [k for k in message.keys if k != message.message_id]
                found.append((message.message_id, keys[0] if keys else None, bytes(message.body)))
            return found

        return {"endpoints": server.url, "topic": topic}, take

    return _path(request, "rocketmq", column, make, b"" if column == "value" else None)

"""Paths into Kafka: each part of a record, and values with a schema. Read by confluent-kafka and the formats' own
libraries."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.support.catalogue.run import Path, Read, Row

from delivered.contract.sink import Sink
from delivered.pipeline.registry import find_sink


def consumed(bootstrap: str, topic: str) -> list[Any]:
    """All committed records."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "catalogue", "isolation.level": "read_committed",
         "enable.partition.eof": True, "enable.auto.commit": False}
    )  # fmt: skip
    parts = consumer.list_topics(topic).topics[topic].partitions
    consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in parts])
    found, ended = [], 0
    while ended < len(parts):
        message = consumer.poll(60)
        assert message is not None, "no answer"
        if message.error():
            ended += 1
        else:
            found.append(message)
    consumer.close()
    return found


def part(request: pytest.FixtureRequest, column: str, client: str = "arrow") -> Path:
    """One part of a record: key, value, header (its value), name (of a header)."""
    kafka: Any = request.getfixturevalue("kafka")

    def make(_: pa.Schema) -> tuple[Sink, Read]:
        topic = kafka.topic(1)

        def read(_: pa.Schema) -> list[Row]:
            if column == "name":
                return _names(kafka.bootstrap, topic)
            rows = []
            for m in consumed(kafka.bootstrap, topic):
                header = (m.headers() or [(None, None)])[0][1] if column == "header" else None
                given = {"key": m.key(), "value": m.value(), "header": header}
                rows.append({"id": int(m.value() if column == "key" else m.key()), column: given[column]})
            return rows

        return find_sink("kafka", {"kafka.bootstrap.servers": kafka.bootstrap, "topic": topic, "client": client}), read

    place = "header" if column in ("header", "name") else column

    def rows(ids: pa.Array, values: pa.Array) -> pa.RecordBatch:
        texts = ids.cast(pa.string())
        if column == "key":
            return pa.RecordBatch.from_arrays([values, texts], names=["key", "value"])
        if column == "value":
            return pa.RecordBatch.from_arrays([texts, values], names=["key", "value"])
        fixed = pa.array(["h"] * len(values))
        pair = (fixed, values) if column == "header" else (values, fixed.cast(pa.binary()))
        entries = pa.StructArray.from_arrays(pair, names=["key", "value"])
        headers = pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), entries)
        return pa.RecordBatch.from_arrays([texts, texts, headers], names=["key", "value", "headers"])

    return Path(make, rows, column, place)


def _names(bootstrap: str, topic: str) -> list[Row]:
    """Names of headers, by another client: confluent-kafka crashes at a name that is not UTF-8."""
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
    place = TopicPartition(topic, 0)
    consumer.assign([place])
    consumer.seek_to_beginning(place)
    end, found = consumer.end_offsets([place])[place], []
    while consumer.position(place) < end:
        for records in consumer.poll(60_000).values():
            found += [{"id": int(r.key), "name": r.headers[0][0].encode()} for r in records]
    consumer.close()
    return found

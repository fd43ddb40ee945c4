"""A record batch that decompresses to more than the source allows: an error, a record left out, or a dead letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import Producer

from delivered.clients.kafka.record_batch import BatchTooLarge
from delivered.connectors.kafka import SourceOptions
from delivered.connectors.kafka.source import KafkaSource
from delivered.contract.source import Slice


def test_a_bomb_is_an_error_or_a_dead_letter_and_spares_its_neighbours(kafka: Any) -> None:
    topic = kafka.topic(1)
    settings = {"bootstrap.servers": kafka.bootstrap, "compression.type": "zstd", "message.max.bytes": 20_000_000}

    def send(values: Sequence[bytes]) -> None:
        producer = Producer(settings)
        for value in values:
            producer.produce(topic, value)
        assert producer.flush(60) == 0

    for values in ([b"a", b"b"], [bytes(8 << 20)], [b"c"]):
        send(values)
    given = {"kafka.bootstrap.servers": kafka.bootstrap, "subscribe": topic}
    source = KafkaSource(SourceOptions.parse({**given, "maxRecordBatchBytes": "1048576"}))
    piece, seen = Slice((topic, 0, 0, 4)), list[bytes]()
    with pytest.raises(BatchTooLarge, match=r"KAFKA_BATCH_TOO_LARGE.* at offset 2 .* of zstd, and more than 1048576"):
        for batch in source.read(piece):
            seen += batch.column("value").to_pylist()
    assert seen == [b"a", b"b"]
    rows, letters = list[bytes](), list[Any]()
    for found in source.read_rows(piece):
        assert found.good.schema.equals(source.schema())
        letters += found.rejected
        rows += found.good.column("value").to_pylist()
    assert rows == [b"a", b"b", b"c"]
    (letter,) = letters
    assert (letter.topic, letter.partition, letter.offset) == (topic, 0, 2) and len(letter.record["value"]) < 2_000
    larger = KafkaSource(SourceOptions.parse({**given, "maxRecordBatchBytes": "20000000"}))
    assert sum(b.num_rows for b in larger.read(piece)) == 4

"""The Kafka source in a query of Spark's: what its group is told and when, and topics that are made anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from tests.kafka_tools import produce

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def read(spark: SparkSession, kafka: Any, topic: str, **options: Any) -> DataFrame:
    return (
        spark.readStream.format("delivered_kafka").options(**options)
        .option("kafka.bootstrap.servers", kafka.bootstrap).option("subscribe", topic)
        .option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 2).load()
    )  # fmt: skip


def numbers(start: int, end: int) -> list[tuple[bytes | None, bytes | None]]:
    return [(None, b"%d" % i) for i in range(start, end)]


def told(kafka: Any, group: str, topic: str) -> int:
    """A group's committed offset, read by an independent client; -1001: none."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    deadline = time.monotonic() + 60
    try:
        while True:
            try:
                return int(consumer.committed([TopicPartition(topic, 0)], timeout=60)[0].offset)
            except KafkaException as error:  # a broker's first group: its coordinator is not there yet
                if error.args[0].code() != KafkaError.NOT_COORDINATOR or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
    finally:
        consumer.close()


def until(fact: Callable[[], bool], query: StreamingQuery) -> None:
    deadline = time.monotonic() + 120
    while not fact():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_group_is_told_when_spark_has_logged_a_batch(spark: SparkSession, kafka: Any, tmp_path: Path) -> None:
    topic, group = kafka.topic(1), "told"
    produce(kafka.bootstrap, topic, numbers(0, 6))
    seen: list[int] = []

    def each(frame: DataFrame, batch: int) -> None:
        frame.collect()
        # Whatever was told, Spark has logged: never this batch.
        seen.append(told(kafka, group, topic))
        if batch == 4:
            raise RuntimeError("no more")

    writer = read(spark, kafka, topic, commitOffsetsToGroup=group).writeStream.foreachBatch(each)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination(120)
    assert told(kafka, group, topic) == 6
    assert all(offset <= 2 * batch for batch, offset in enumerate(seen))
    assert seen[1:] == [2, 4]

    query = writer.trigger(processingTime="0 seconds").start()
    produce(kafka.bootstrap, topic, numbers(6, 8))
    until(lambda: told(kafka, group, topic) == 8, query)  # idle: no batch follows
    produce(kafka.bootstrap, topic, numbers(8, 10))
    try:
        query.awaitTermination(120)
    except Exception as error:
        assert "no more" in str(error)
    assert not query.isActive
    assert told(kafka, group, topic) == 8  # batch 4 was never logged


@pytest.mark.matrix
def test_a_topic_made_anew_in_an_available_now_run_is_noticed(spark: SparkSession, kafka: Any, tmp_path: Path) -> None:
    topic = kafka.topic(1)
    produce(kafka.bootstrap, topic, numbers(0, 6))
    seen: list[bytes] = []

    def each(frame: DataFrame, batch: int) -> None:
        seen.extend(bytes(row.value) for row in frame.collect())
        if batch == 0:
            kafka.admin().delete_topics([topic])[topic].result(120)
            deadline = time.monotonic() + 120
            while topic in kafka.admin().list_topics(timeout=60).topics:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            kafka.topic(1, name=topic)
            produce(kafka.bootstrap, topic, numbers(100, 106))

    writer = read(spark, kafka, topic).writeStream.foreachBatch(each)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    said = ""
    try:
        query.awaitTermination(120)
    except Exception as error:
        said = str(error)
    assert "DELIVERED_DATA_LOST" in said and "deleted and recreated" in said
    assert seen == [b"0", b"1"]

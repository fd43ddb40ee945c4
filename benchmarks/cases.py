"""What is compared. Every case copies the same topic into a fresh one, from query start to query end."""

from __future__ import annotations

from dataclasses import dataclass, field

SPARK_KAFKA_JARS = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", "3.9.1"),
    ("org.apache.commons", "commons-pool2", "2.12.0"),
)
"""Spark's own Kafka connector: Maven's group, artifact, version. The rest of what it needs ships with Spark 4.3."""


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        source, sink: formats of readStream and writeStream.
        guarantee: for sinks of ours.
        rows_per_batch: `maxOffsetsPerTrigger`; None: the whole topic in one batch.
        jars: whether Spark's own Kafka connector must be on the session.
    """

    name: str
    source: str
    sink: str
    guarantee: str | None = None
    rows_per_batch: int | None = 3_000_000
    jars: bool = False
    options: dict[str, str] = field(default_factory=dict)


THROUGHPUT = (
    Case("spark own, at least once", "kafka", "kafka", jars=True),
    Case("delivered, at_least_once", "delivered_kafka", "delivered_kafka", "at_least_once"),
    Case("delivered, exactly_once", "delivered_kafka", "delivered_kafka", "exactly_once"),
    Case("delivered, at_most_once", "delivered_kafka", "delivered_kafka", "at_most_once"),
)

MEMORY = (
    Case("memory, batches of 1 million", "delivered_kafka", "delivered_kafka", "exactly_once", 1_000_000),
    Case("memory, one batch of all", "delivered_kafka", "delivered_kafka", "exactly_once", None),
)

LATENCY = (
    Case("one record, spark own", "kafka", "kafka", jars=True),
    Case("one record, at_least_once", "delivered_kafka", "delivered_kafka", "at_least_once"),
    Case("one record, exactly_once", "delivered_kafka", "delivered_kafka", "exactly_once"),
)

RATIOS = (
    ("exactly_once / at_least_once, both ours", "delivered, exactly_once", "delivered, at_least_once"),
    ("exactly_once / Spark's own at least once", "delivered, exactly_once", "spark own, at least once"),
    ("at_least_once / Spark's own at least once", "delivered, at_least_once", "spark own, at least once"),
)

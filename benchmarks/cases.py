"""What is compared. Every case copies the same topic into a fresh one, from query start to query end."""

from __future__ import annotations

from dataclasses import dataclass


def _connector(scala: str, spark: str, tokens: str, kafka: str, pool: str) -> tuple[tuple[str, str, str], ...]:
    """Spark's own Kafka connector: Maven's group, artifact, version. The rest of what it needs ships with Spark."""
    return (
        ("org.apache.spark", f"spark-sql-kafka-0-10_{scala}", spark),
        ("org.apache.spark", f"spark-token-provider-kafka-0-10_{scala}", tokens),
        ("org.apache.kafka", "kafka-clients", kafka),
        ("org.apache.commons", "commons-pool2", pool),
    )


SPARK_KAFKA_JARS = _connector("2.13", "4.2.0", "4.0.0", "3.9.1", "2.12.0")
"""For Spark 4.2 and later."""
EARLIER_KAFKA_JARS = {
    "3.5": _connector("2.12", "3.5.7", "3.5.7", "3.4.1", "2.11.1"),
    "4.0": _connector("2.13", "4.0.1", "4.0.0", "3.9.1", "2.12.0"),
    "4.1": _connector("2.13", "4.1.1", "4.1.1", "3.9.1", "2.12.0"),
}
"""By version of Spark, which the connector must match."""


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        source, sink: formats of readStream and writeStream.
        guarantee: for sinks of ours.
        rows_per_batch: `maxOffsetsPerTrigger`; None: the whole topic in one batch.
        jars: whether Spark's own Kafka connector must be on the session.
        direct: by `delivered.Pipeline` with an Arrow transform: records do not pass through the JVM.
        partitions: each a run of `repartition(n)` before the sink; none: one run without.
    """

    name: str
    source: str
    sink: str
    guarantee: str | None = None
    rows_per_batch: int | None = 3_000_000
    jars: bool = False
    direct: bool = False
    partitions: tuple[int, ...] = ()


SPARK_OWN = "Spark's own, at least once"
FLINK = "flink"
FLINK_EXACTLY, FLINK_AT_LEAST = "flink, exactly once", "flink, at least once"
OURS = "delivered_kafka"

THROUGHPUT = (
    Case(SPARK_OWN, "kafka", "kafka", jars=True),
    Case("at_least_once", OURS, OURS, "at_least_once"),
    Case("exactly_once", OURS, OURS, "exactly_once"),
    Case("exactly_once from Spark's own source", "kafka", OURS, "exactly_once", jars=True),
    Case(FLINK_AT_LEAST, FLINK, FLINK, "at_least_once"),
    Case(FLINK_EXACTLY, FLINK, FLINK, "exactly_once"),
    Case("at_most_once, direct", OURS, OURS, "at_most_once", direct=True),
    Case("at_least_once, direct", OURS, OURS, "at_least_once", direct=True),
    Case("exactly_once, direct", OURS, OURS, "exactly_once", direct=True),
)

SHARDS_ROWS = 40_000
"""Of a batch of the cases with `partitions`."""
SHARDS_BATCHES = 5
"""Of each of their runs. The first is left out: in the first run of a session, workers and connections start in it."""
SHARDS = tuple(
    Case(f"shards, {name}", "kafka", sink, guarantee, SHARDS_ROWS, jars=True, partitions=(1, 32, 200))
    for name, sink, guarantee in (
        ("Spark's own", "kafka", None),
        *((guarantee, OURS, guarantee) for guarantee in ("at_most_once", "at_least_once", "exactly_once")),
    )
)
"""All with Spark's own source, so that only their sinks differ."""

MEMORY = (
    Case("memory, batches of 1 million", OURS, OURS, "exactly_once", 1_000_000),
    Case("memory, one batch of all", OURS, OURS, "exactly_once", None),
    Case("memory, direct, batches of 1 million", OURS, OURS, "exactly_once", 1_000_000, direct=True),
    Case("memory, direct, one batch of all", OURS, OURS, "exactly_once", None, direct=True),
)

LATENCY = (
    Case("one record, Spark's own", "kafka", "kafka", jars=True),
    Case("one record, at_least_once", OURS, OURS, "at_least_once"),
    Case("one record, exactly_once", OURS, OURS, "exactly_once"),
    Case("one record, exactly_once, direct", OURS, OURS, "exactly_once", direct=True),
)

RATIOS = (
    ("exactly_once / at_least_once", "exactly_once", "at_least_once"),
    ("exactly_once / at_least_once, direct", "exactly_once, direct", "at_least_once, direct"),
    ("exactly_once / Spark's own at least once", "exactly_once", SPARK_OWN),
    ("exactly_once from Spark's own source / Spark's own", "exactly_once from Spark's own source", SPARK_OWN),
    ("exactly_once, direct / Spark's own at least once", "exactly_once, direct", SPARK_OWN),
    ("at_most_once, direct / at_least_once, direct", "at_most_once, direct", "at_least_once, direct"),
    ("exactly_once, direct / Flink, exactly once", "exactly_once, direct", FLINK_EXACTLY),
    ("exactly_once / Flink, exactly once", "exactly_once", FLINK_EXACTLY),
    ("at_least_once, direct / Flink, at least once", "at_least_once, direct", FLINK_AT_LEAST),
)

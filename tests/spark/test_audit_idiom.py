"""README from top to bottom: the bare idiom, then the `Pipeline` on its checkpoint; no audit accuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import delivered
from delivered.audit.evidence import Counts, Verdict
from delivered.checkpoint import sidecar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SQL = "SELECT key, value FROM source WHERE value IS NOT NULL"


def produce(bootstrap: str, topic: str, first: int, count: int) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for i in range(first, first + count):
        producer.produce(topic, key=f"k{i % 9}", value=json.dumps({"id": i}))
    assert producer.flush(30) == 0


def start_idiom(spark: SparkSession, bootstrap: str, source: str, sink: str, checkpoint: str, name: str) -> Any:
    """README's first snippet; nothing says where the source starts."""
    delivered.register(spark)
    stream = spark.readStream.format("delivered_kafka").option("kafka.bootstrap.servers", bootstrap)
    return (
        stream.option("subscribe", source).load().selectExpr("key", "value")
        .writeStream.format("delivered_kafka").option("guarantee", "exactly_once")
        .option("kafka.bootstrap.servers", bootstrap).option("topic", sink)
        .option("checkpointLocation", checkpoint).queryName(name).start()
    )  # fmt: skip


@pytest.mark.matrix
def test_the_idiom_then_a_pipeline_on_its_checkpoint(spark: SparkSession, kafka: Any, tmp_path: Path) -> None:
    source, sink, checkpoint = kafka.topic(2), kafka.topic(2), str(tmp_path / "checkpoint")
    name = f"orders-{source}"
    produce(kafka.bootstrap, source, -20, 20)
    query = start_idiom(spark, kafka.bootstrap, source, sink, checkpoint, name)
    query.processAllAvailable()
    for first in (0, 150):
        produce(kafka.bootstrap, source, first, 150)
        query.processAllAvailable()
    query.stop()
    began = sidecar.read_first(checkpoint)
    assert began is not None
    assert sum(began[source].values()) == 20

    pipeline = delivered.Pipeline(
        name=name, guarantee="exactly_once", checkpoint=checkpoint, transform=SQL,
        source=delivered.kafka(kafka.bootstrap, subscribe=source), sinks=[delivered.kafka(kafka.bootstrap, topic=sink)],
    )  # fmt: skip
    report = pipeline.audit(spark)
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(300, 300)), str(report)

    query = pipeline.start(spark)
    produce(kafka.bootstrap, source, 300, 100)
    query.processAllAvailable()
    assert pipeline.stop(query)
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    file = tmp_path / "orders.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "pipeline": name,
                "guarantee": "exactly_once",
                "checkpoint": checkpoint,
                "source": {"format": "kafka", **servers, "subscribe": source},
                "transform": {"sql": SQL},
                "sinks": [{"format": "kafka", **servers, "topic": sink}],
            }
        )
    )
    new = delivered.Pipeline.from_file(file).audit(spark)
    assert (new.verdict, new.counts) == (Verdict.HELD, Counts(100, 100)), str(new)
    report = delivered.Pipeline.from_file(file).audit(spark, full=True)
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(400, 400)), str(report)
    assert json.loads(report.range_from)[source] == began[source]

    # Written by a release that queried the source again: later than the checkpoint's last batch.
    kept = Path(checkpoint) / sidecar.FIRST_FILE
    kept.write_text(json.dumps({"offsets": {source: {"0": 9_999, "1": 9_999}}}))
    report = pipeline.audit(spark, full=True)
    assert report.verdict is Verdict.UNKNOWN
    assert "ends before it starts" in report.unknowns[0]
    # The start of batch 0 is unknown, and is not the current "earliest".
    kept.unlink()
    pipeline.sources["source"] = pipeline.sources["source"].with_options(startingOffsets="earliest")
    report = pipeline.audit(spark, full=True)
    assert (report.verdict, report.counts.lost) == (Verdict.UNKNOWN, 20)
    assert "does not record where batch 0 started" in report.unknowns[0]
    # A start on a checkpoint with batches stores nothing.
    query = pipeline.start(spark)
    query.processAllAvailable()
    assert pipeline.stop(query)
    assert sidecar.read_first(checkpoint) is None

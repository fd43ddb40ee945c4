"""Spark's own figures of a query, as metrics: what `delivered run --metrics-port` serves beside the status."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.log_to_sqlite import produce, rows, until

import delivered
from delivered.checkpoint.history import states
from delivered.operate.asking import status
from delivered.operate.metrics import serving
from delivered.operate.page import Frame, flow_of, pipeline_page
from delivered.spark.listener import QueryMetrics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_query_is_counted_and_its_batches_are_timed(spark: SparkSession, tmp_path: Path) -> None:
    import urllib.request

    produce(tmp_path / "in", 0, 20)
    pipeline = delivered.Pipeline(
        name="counted", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint", trigger="available_now",
        source=delivered.log(str(tmp_path / "in")), sinks=[delivered.sqlite(str(tmp_path / "out.db"), "orders")],
        transform="SELECT key, value FROM source",
    )  # fmt: skip
    queries = QueryMetrics({pipeline.name: pipeline.checkpoint})
    spark.streams.addListener(queries)
    try:
        with serving(lambda: [status(pipeline)], 0, more=[queries]) as port:

            def scraped() -> str:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                    return str(answer.read().decode())

            pipeline.start(spark).awaitTermination(120)
            until(lambda: 'delivered_query_input_rows_total{query="counted"} 20.0' in scraped())
            found = scraped()
    finally:
        spark.streams.removeListener(queries)
    assert rows(tmp_path) == 20
    assert 'delivered_query_output_rows_total{query="counted"} 20.0' in found, "Spark's own count is -1"
    assert 'delivered_query_failed_total{query="counted"} 0.0' in found
    assert 'delivered_records_total{guarantee="exactly_once",pipeline="counted",sink="orders"} 20.0' in found
    took = status(pipeline)
    assert took.totals.batches == 1 and took.visible
    assert took.last is not None and all(took.last.seconds[step] > 0 for step in ("plan", "stage", "decide"))


@pytest.mark.matrix
def test_the_page_shows_watermark_and_state(spark: SparkSession, tmp_path: Path) -> None:
    produce(tmp_path / "in", 0, 20)
    pipeline = delivered.Pipeline(
        name="stateful", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint", trigger="1 second",
        source=delivered.log(str(tmp_path / "in")),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "orders", ifNotExists="true")],
        transform=lambda source: source.withWatermark("timestamp", "1 minute").dropDuplicates(["value", "timestamp"]),
    )  # fmt: skip
    query = pipeline.start(spark)
    try:
        until(lambda: bool(states(pipeline.checkpoint)))
        produce(tmp_path / "in", 20, 20)
        until(lambda: sum(states(pipeline.checkpoint)[-1].rows.values()) >= 40)
    finally:
        query.stop()
    (operator,) = states(pipeline.checkpoint)[-1].rows
    assert "dedup" in operator.lower()
    page = pipeline_page(status(pipeline), flow_of(pipeline), frame=Frame())
    assert "Watermark of the newest batch" in page and operator in page and "Rows of state, by operator" in page

"""Pulsar's schemas through Spark: a query keeps the columns that it was built with, whatever is registered later."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.pulsar_schemas import V0, V1, send

import delivered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Pulsar


@pytest.mark.matrix
def test_a_schema_that_evolves_between_load_and_start(pulsar: Pulsar, spark: SparkSession, tmp_path: Path) -> None:
    delivered.register(spark)
    topic = pulsar.topic()
    send(pulsar, topic, V0, [{"id": 1, "name": "a"}])
    options = {**pulsar.options, "topics": topic, "schema": "topic", "startingOffsets": "earliest"}
    frame = spark.readStream.format("delivered_pulsar").options(**options).load().selectExpr("offset", "value.*")
    send(pulsar, topic, V1, [{"id": 2, "name": "b", "paid": True}])
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def run(taken: object) -> None:
        query = taken.writeStream.format("parquet").option("checkpointLocation", checkpoint)  # type: ignore[attr-defined]
        query.trigger(availableNow=True).start(out).awaitTermination()

    run(frame)
    found = spark.read.parquet(out).orderBy("offset")
    assert found.columns == ["offset", "id", "name"]
    assert [tuple(r)[1:] for r in found.collect()] == [(1, "a"), (2, "b")]
    now = spark.read.format("delivered_pulsar").options(**options).load().selectExpr("value.*")
    assert [tuple(r) for r in now.orderBy("id").collect()] == [(1, "a", None), (2, "b", True)]

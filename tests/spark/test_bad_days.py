"""Bad days of a pipeline through Spark: a source that vanishes, a state store that cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.kafka_tools import produce
from tests.spark.life import WAIT_S, Life, once, rows

import delivered
from delivered.model.errors import DeliveredError
from delivered.model.translate import translated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from tests.support.servers import Kafka

COUNTS = "SELECT CAST(key AS STRING) AS k, count(*) AS n FROM source GROUP BY k"
RUNNING = "0 seconds"
checkpoint = pytest.mark.checkpoint


def ended(query: StreamingQuery) -> DeliveredError:
    """The error that ends a running query."""
    with pytest.raises(Exception, match="DELIVERED_") as caught:
        query.awaitTermination(WAIT_S)
        pytest.fail("it still runs")
    found = translated(caught.value)
    assert found is not None
    assert found.next_step
    return found


def until(query: StreamingQuery, database: Path, records: int) -> None:
    query.processAllAvailable()
    assert once(rows(database), records)


@pytest.mark.matrix  # the next test has a topic that vanishes
@checkpoint("the source's log, removed or recreated", "refused", "`LOG_MISSING`, `DATA_LOST`")
def test_a_log_that_vanishes(spark: SparkSession, tmp_path: Path) -> None:
    """In mid-run, and between two runs; put back, it goes on."""
    database = tmp_path / "out.db"
    life = Life(spark, tmp_path, delivered.sqlite(str(database), "rows"))
    life.produce()
    query = life.pipeline(trigger=RUNNING).start(spark)
    until(query, database, 20)
    (tmp_path / "in").rename(tmp_path / "away")
    assert ended(query).code == "DELIVERED_LOG_MISSING"
    with pytest.raises(DeliveredError, match=r"LOG_MISSING.*restore"):
        life.pipeline().start(spark)
    # Made anew, with more records than were read.
    life.records = 1_000
    for _ in range(4):
        life.produce()
    shutil.move(tmp_path / "in", tmp_path / "other")
    (tmp_path / "away").rename(tmp_path / "in")
    life.records = 20
    life.start()
    shutil.move(tmp_path / "in", tmp_path / "away")
    shutil.move(tmp_path / "other", tmp_path / "in")
    with pytest.raises(Exception, match=r"DATA_LOST.*deleted and recreated"):
        life.pipeline().start(spark).awaitTermination(WAIT_S)
    assert once(rows(database), 40)


@checkpoint("the source's topic, deleted", "refused", "`TOPIC_MISSING`; a running query stops")
def test_a_topic_that_vanishes(kafka: Kafka, spark: SparkSession, tmp_path: Path) -> None:
    """In mid-run, and between two runs."""
    database, topic = tmp_path / "out.db", kafka.topic(1)
    source = delivered.kafka(kafka.bootstrap, subscribe=topic, startingOffsets="earliest")

    def start(**changes: Any) -> StreamingQuery:
        return delivered.Pipeline(
            name="vanishes", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint", source=source,
            sinks=[delivered.sqlite(str(database), "rows")], transform="SELECT CAST(value AS STRING) AS v FROM source",
            **changes,
        ).start(spark)  # fmt: skip

    produce(kafka.bootstrap, topic, ((None, str(i).encode()) for i in range(20)))
    query = start(trigger=RUNNING)
    until(query, database, 20)
    kafka.admin().delete_topics([topic])[topic].result(30)
    error = ended(query)
    assert error.code in ("DELIVERED_DATA_LOST", "DELIVERED_TOPIC_MISSING")
    assert topic in str(error)
    with pytest.raises(DeliveredError, match=f"DELIVERED_TOPIC_MISSING.*{topic}"):
        start(trigger="available_now")
    assert once(rows(database), 20)


def test_state_that_cannot_be_read(spark: SparkSession, tmp_path: Path) -> None:
    """It is named, nothing is lost, and with its file put back the totals are exact."""
    database = tmp_path / "out.db"
    life = Life(spark, tmp_path, delivered.sqlite(str(database), "rows"), COUNTS, output_mode="update")
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    try:
        life.start()
        newest = max((tmp_path / "checkpoint" / "state" / "0" / "0").glob("*.delta"), key=lambda f: int(f.stem))
        newest.rename(tmp_path / "kept")
        life.produce()
        error = unread(life)
        assert "operator 0, partition 0 (state/0/0 of the checkpoint)" in str(error)
        assert sorted(rows(database, columns="k, n")) == [(f"k{i}", 5) for i in range(4)]
        (tmp_path / "kept").rename(newest)
        life.start()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    assert sorted(rows(database, columns="k, n")) == [(f"k{i}", 15) for i in range(4)]


def unread(life: Life) -> DeliveredError:
    with pytest.raises(Exception, match=r"CANNOT_LOAD_STATE_STORE|STATE_UNREADABLE") as caught:
        life.pipeline().start(life.spark).awaitTermination(WAIT_S)
    found = translated(caught.value)
    assert found is not None
    assert found.code == "DELIVERED_STATE_UNREADABLE"
    return found

"""A batch that runs again has the same shards: on other cores, with other settings, under adaptive execution."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tests.kafka_tools import read_committed
from tests.support.halted import killed

import delivered
from delivered.model.identity import Scope
from delivered.model.work import Ok
from delivered.spark.settings import with_setting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.support.servers import Kafka

APP = Path(__file__).parent / "apps" / "run_file.py"
ROWS = 2_000
SHARDS = 20
SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
COALESCED_MIN = "spark.sql.adaptive.coalescePartitions.minPartitionSize"
"""Small, so that few rows make as many partitions as there are cores."""
SCHEMA = "spark.sql.streaming.schemaInference"


@pytest.fixture
def adaptive(spark: SparkSession) -> Iterator[SparkSession]:
    """Spark's defaults, and a number of shuffle partitions that adaptive execution would coalesce."""
    with with_setting(spark, SHUFFLE_PARTITIONS, str(SHARDS)), with_setting(spark, SCHEMA, "true"):
        assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
        yield spark


def files(folder: Path) -> str:
    folder.mkdir()
    for part in range(4):
        ids = pa.array(range(part, ROWS, 4), pa.int64())
        pq.write_table(pa.table({"id": ids}), folder / f"{part}.parquet")
    return str(folder)


def shards(database: Path, pipeline: str, incarnation: str | None = None) -> int:
    """Of the newest decision."""
    sink = delivered.sqlite(str(database), "ids").sink()
    state = sink.store(Scope(pipeline, sink.name, incarnation or "new")).peek()
    last = state.last or state.earlier[0]
    return len({p.shard for p in last.participants})


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.readStream.schema("id bigint").parquet(files(folder / "in"))


def idiom(spark: SparkSession, folder: Path) -> None:
    writer = stream(spark, folder).repartition("id").writeStream.format("delivered_sqlite")
    writer = writer.option("path", str(folder / "out.db")).option("table", "ids").option("guarantee", "exactly_once")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).option("pipeline", "p")
    writer.trigger(availableNow=True).start().awaitTermination()


def pipeline(spark: SparkSession, folder: Path) -> None:
    made = delivered.Pipeline(
        name="p", guarantee="exactly_once", checkpoint=str(folder / "checkpoint"), trigger="available_now",
        source=delivered.endpoint("spark:parquet", path=files(folder / "in")),
        transform=lambda rows: rows.repartition("id"), sinks=[delivered.sqlite(str(folder / "out.db"), "ids")],
    )  # fmt: skip
    made.start(spark).awaitTermination()


def own_foreach_batch(spark: SparkSession, folder: Path) -> None:
    def write(frame: DataFrame, batch: int) -> None:
        sink = delivered.sqlite(str(folder / "out.db"), "ids")
        delivered.write_batch(frame, batch, sink=sink, guarantee="exactly_once", pipeline="p")

    writer = stream(spark, folder).repartition("id").writeStream.foreachBatch(write)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    writer.start().awaitTermination()


def shuffle_in_foreach_batch(spark: SparkSession, folder: Path) -> None:
    def write(frame: DataFrame, batch: int) -> None:
        sink = delivered.sqlite(str(folder / "out.db"), "ids")
        delivered.write_batch(frame.repartition("id"), batch, sink=sink, guarantee="exactly_once", pipeline="p")

    writer = stream(spark, folder).writeStream.foreachBatch(write).trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()


def run(spark: SparkSession, folder: Path) -> None:
    writer = spark.read.parquet(files(folder / "in")).repartition("id").write.format("delivered_sqlite").mode("append")
    writer = writer.option("path", str(folder / "out.db")).option("table", "ids").option("guarantee", "exactly_once")
    writer.option("pipeline", "p").option("runId", "monday").save()


@pytest.mark.parametrize("write", [idiom, pipeline, own_foreach_batch, shuffle_in_foreach_batch, run])
def test_adaptive_execution_changes_no_shards(
    adaptive: SparkSession, tmp_path: Path, write: Callable[[Any, Path], None]
) -> None:
    delivered.register(adaptive)
    write(adaptive, tmp_path)
    assert shards(tmp_path / "out.db", "p") == SHARDS


@pytest.mark.matrix
@pytest.mark.checkpoint(
    "cores and `spark.sql.shuffle.partitions`, over an unfinished batch",
    "continues",
    "the batch runs again with the shards that it had",
)
@pytest.mark.parametrize("sql", ["SELECT /*+ REPARTITION(value) */ * FROM source", "SELECT * FROM source"])
def test_a_decided_batch_whose_transactions_expired_is_written_again_on_other_cores(
    kafka: Kafka, spark: SparkSession, tmp_path: Path, sql: str
) -> None:
    """On six cores and with 20 shuffle partitions before, on two cores and with 8 now; with a shuffle and without:
    the shards are the same, and so are their rows."""
    topic = kafka.topic(2)
    (tmp_path / "in").mkdir()
    for part in range(3):
        values = pa.array([b"%d" % n for n in range(part, ROWS, 3)], pa.binary())
        pq.write_table(pa.table({"value": values}), tmp_path / "in" / f"{part}.parquet")
    definition = {
        "pipeline": topic,
        "guarantee": "exactly_once",
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {"format": "spark:parquet", "path": str(tmp_path / "in")},
        "transform": {"sql": sql},
        "sinks": [{"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "topic": topic}],
        "trigger": "available_now",
        "master": "local[6]",
        "spark": {
            SHUFFLE_PARTITIONS: str(SHARDS),
            SCHEMA: "true",
            COALESCED_MIN: "1b",
            "spark.sql.files.openCostInBytes": "1",
        },
    }
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(definition))
    killed([sys.executable, str(APP), str(file)], "commit.decide:after@batch=0", tmp_path)
    whole = delivered.Pipeline.from_file(file)
    (endpoint,) = whole.sinks
    with closing(endpoint.sink().committer(Scope(topic, endpoint.sink().name, "any"))) as committer:
        open_ = [t.transactional_id for t in committer.open_transactions()]
        assert open_, "its transactions are prepared"
        for transactional_id in open_:
            assert isinstance(committer.end_by_id(transactional_id, commit=False), Ok)
    assert read_committed(kafka.bootstrap, topic) == []
    kept = tmp_path / "checkpoint" / "delivered" / "shards.json"
    with ExitStack() as held:
        for name, value in {SHUFFLE_PARTITIONS: "8", SCHEMA: "true", COALESCED_MIN: "1b"}.items():
            held.enter_context(with_setting(spark, name, value))
        try:
            whole.start(spark).awaitTermination()
        finally:
            for name in json.loads(kept.read_text())["settings"] if kept.exists() else ():
                spark.conf.unset(name)
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, topic)) == Counter(b"%d" % n for n in range(ROWS))

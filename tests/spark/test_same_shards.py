"""A batch that runs again has the same shards: on other cores, with other settings, under adaptive execution."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.sql.functions import col
from tests.kafka_tools import read_committed
from tests.spark.apps import divided
from tests.support.halted import killed
from tests.support.sweeps import sweep

import delivered
from delivered.model.identity import Scope
from delivered.model.work import Ok
from delivered.spark.settings import with_setting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.support.servers import Kafka

    from delivered.pipeline.endpoint import Endpoint

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


def save(frame: DataFrame, folder: Path) -> None:
    writer = frame.write.format("delivered_sqlite").mode("append").option("guarantee", "exactly_once")
    writer = writer.option("path", str(folder / "out.db")).option("table", "ids")
    writer.option("pipeline", "p").option("runId", "monday").save()


def run(spark: SparkSession, folder: Path) -> None:
    save(spark.read.parquet(files(folder / "in")).repartition("id"), folder)


def run_of_a_join(spark: SparkSession, folder: Path) -> None:
    """Adaptive execution broadcasts the smaller side and reads the other one where it was written, with coalescing off,
    too: 3 tasks of 6 partitions each."""
    rows = spark.createDataFrame(spark.sparkContext.parallelize([(n,) for n in range(ROWS)], 3), "id bigint")
    save(rows.join(rows.selectExpr("id AS k"), rows["id"] == col("k")).select("id"), folder)


@pytest.mark.parametrize(
    "write",
    sweep(
        [idiom, pipeline, own_foreach_batch, shuffle_in_foreach_batch, run, run_of_a_join],
        lambda write: write in (idiom, pipeline, shuffle_in_foreach_batch, run_of_a_join),
    ),
)
def test_adaptive_execution_changes_no_shards(
    adaptive: SparkSession, tmp_path: Path, write: Callable[[Any, Path], None]
) -> None:
    delivered.register(adaptive)
    write(adaptive, tmp_path)
    assert shards(tmp_path / "out.db", "p") == SHARDS


def test_settings_that_threads_hold_at_once(adaptive: SparkSession) -> None:
    """Regression: the second of two write_batch in threads ran adaptively once the first ended, and left that off."""
    name = "spark.sql.adaptive.enabled"
    first, second, other = (ExitStack() for _ in range(3))
    for held in (first, second):
        held.enter_context(with_setting(adaptive, name, "false"))
    first.close()
    assert adaptive.conf.get(name) == "false"
    other.enter_context(with_setting(adaptive, name, "true"))
    second.close()
    assert adaptive.conf.get(name) == "true"
    other.close()
    assert adaptive.conf.get(name) == "true"
    with with_setting(adaptive, SCHEMA, "true"), with_setting(adaptive, SCHEMA, "false"):
        assert adaptive.conf.get(SCHEMA) == "false"
    assert adaptive.conf.get(SCHEMA) == "true"


def expire(endpoint: Endpoint, topic: str) -> None:
    """As if the broker had ended the prepared transactions of a decided batch, after their time-out."""
    with closing(endpoint.sink().committer(Scope(topic, endpoint.sink().name, "any"))) as committer:
        open_ = [t.transactional_id for t in committer.open_transactions()]
        assert open_, "its transactions are prepared"
        for transactional_id in open_:
            assert isinstance(committer.end_by_id(transactional_id, commit=False), Ok)


def values(folder: Path) -> str:
    folder.mkdir()
    for part in range(3):
        rows = pa.array([b"%d" % n for n in range(part, ROWS, 3)], pa.binary())
        pq.write_table(pa.table({"value": rows}), folder / f"{part}.parquet")
    return str(folder)


@contextmanager
def settings(spark: SparkSession, checkpoint: Path, **others: str) -> Iterator[None]:
    """Those of a start in a session that later tests use, too: without those that the start keeps."""
    kept = checkpoint / "delivered" / "shards.json"
    with ExitStack() as held:
        for name, value in {COALESCED_MIN: "1b", SCHEMA: "true", **others}.items():
            held.enter_context(with_setting(spark, name, value))
        try:
            yield
        finally:
            for name in json.loads(kept.read_text())["settings"] if kept.exists() else ():
                spark.conf.unset(name)


EXPECTED = Counter(b"%d" % n for n in range(ROWS))


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
    definition = {
        "pipeline": topic,
        "guarantee": "exactly_once",
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {"format": "spark:parquet", "path": values(tmp_path / "in")},
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
    pipeline = delivered.Pipeline.from_file(file)
    expire(pipeline.sinks[0], topic)
    assert read_committed(kafka.bootstrap, topic) == []
    with settings(spark, tmp_path / "checkpoint", **{SHUFFLE_PARTITIONS: "8"}):
        pipeline.start(spark).awaitTermination()
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, topic)) == EXPECTED


@pytest.mark.matrix
@pytest.mark.parametrize("by", list(divided.WAYS))
def test_a_query_of_the_spark_api_is_divided_as_before_on_other_cores(
    kafka: Kafka, spark: SparkSession, tmp_path: Path, by: str
) -> None:
    """As above, on six cores before and on two now."""
    topic, checkpoint = kafka.topic(2), str(tmp_path / "checkpoint")
    given = Namespace(
        by=by, input=values(tmp_path / "in"), bootstrap=kafka.bootstrap, topic=topic, checkpoint=checkpoint, cores=6
    )
    command = [sys.executable, "-m", divided.__name__, *(f"--{name}={value}" for name, value in vars(given).items())]
    killed(command, "commit.decide:after@batch=0", tmp_path)
    expire(delivered.kafka(kafka.bootstrap, topic=topic), topic)
    assert read_committed(kafka.bootstrap, topic) == []
    with settings(spark, tmp_path / "checkpoint", **divided.SHUFFLED):
        divided.WAYS[by](spark, given)
    assert Counter(m.value() for m in read_committed(kafka.bootstrap, topic)) == EXPECTED

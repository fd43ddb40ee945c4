"""One checkpoint, two connectors: this one and Spark's own Kafka source continue from each other's offsets."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from benchmarks.cases import SPARK_KAFKA_JARS
from pyspark.errors import StreamingQueryException
from tests.broker.source_help import cut_log
from tests.kafka_tools import produce, read_committed

import delivered
from delivered.checkpoint.sidecar import METADATA_FILE
from delivered_lab.brokers.servers import fetch_jars
from delivered_lab.supervisor import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 500
WAIT_S = 120.0

_TURNS = """
import pathlib, subprocess, sys
turn = pathlib.Path(sys.argv[1])
n = len(turn.read_text()) if turn.exists() else 0
turn.write_text("x" * (n + 1))
sys.exit(subprocess.run([sys.executable, "-m", "delivered.cli.main", "run", sys.argv[2 + min(n, 2)]]).returncode)
"""
"""Each run another pipeline file."""


def logged(checkpoint: Path) -> dict[int, dict[str, Any]]:
    """What Spark logged of its one source, by batch."""
    return {
        int(p.name): json.loads(p.read_text().splitlines()[2])
        for p in (checkpoint / "offsets").iterdir()
        if p.name.isdigit()
    }


@pytest.mark.matrix
def test_both_connectors_go_on_from_each_others_batches(kafka: Any, tmp_path: Path) -> None:
    """Ours dies after a decision, Spark's own goes on and dies after the next, ours finishes: each record once."""
    jars = fetch_jars("spark-kafka/4.2.0", SPARK_KAFKA_JARS, print, transitive=False)
    source, sink = kafka.topic(2), kafka.topic(2)
    produce(kafka.bootstrap, source, ((f"k{i % 7}".encode(), str(i).encode()) for i in range(ROWS)))
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    files = []
    for turn, kind in enumerate(("kafka", "spark:kafka", "kafka")):
        files.append(tmp_path / f"{turn}.yaml")
        files[-1].write_text(
            yaml.safe_dump(
                {
                    "pipeline": "both",
                    "guarantee": "exactly_once",
                    "checkpoint": str(tmp_path / "checkpoint"),
                    "source": {
                        "format": kind, **servers, "subscribe": source, "startingOffsets": "earliest",
                        "maxOffsetsPerTrigger": 100,
                    },
                    "transform": {"sql": "SELECT key, value FROM source"},
                    "sinks": [{"format": "kafka", **servers, "topic": sink}],
                    "trigger": "available_now",
                    "master": "local[2]",
                    "spark": {"spark.jars": ",".join(str(jar) for jar in sorted(jars.glob("*.jar")))},
                }
            )
        )  # fmt: skip
    command = [sys.executable, "-c", _TURNS, str(tmp_path / "turn"), *map(str, files)]
    crashes = "commit.decide:after@batch=1,commit.decide:after@batch=3"
    outcome = run(command, crashes, tmp_path / "hits", timeout_s=400, env=dict(os.environ))
    assert (outcome.exit_code, outcome.runs, len(outcome.kills)) == (0, 3, 2)
    found = sorted(int(m.value() or b"-1") for m in read_committed(kafka.bootstrap, sink))
    assert found == list(range(ROWS))
    log = logged(tmp_path / "checkpoint")
    assert all(set(offsets) == {source} for offsets in log.values()), log
    assert sum(log[max(log)][source].values()) == ROWS


def test_a_checkpoint_of_an_earlier_version_goes_on(kafka: Any, spark: SparkSession, tmp_path: Path) -> None:
    """Its offset log holds the topic's id among the offsets, and it has no sidecar for it."""
    source, checkpoint = kafka.topic(1), tmp_path / "checkpoint"
    made = delivered.Pipeline(
        name="old",
        guarantee="exactly_once",
        checkpoint=checkpoint,
        source=delivered.kafka(kafka.bootstrap, subscribe=source, startingOffsets="earliest"),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "orders")],
        transform="SELECT key, value FROM source",
        trigger="available_now",
        audit={"id": "value"},
    )
    produce(kafka.bootstrap, source, ((None, str(i).encode()) for i in range(10)))
    made.start(spark).awaitTermination(WAIT_S)
    assert logged(checkpoint) == {0: {source: {"0": 10}}}
    metadata = json.loads((checkpoint / METADATA_FILE).read_text())["entries"][0]["metadata"]
    assert set(metadata) == {"#topic ids", "#epochs"}
    (checkpoint / METADATA_FILE).unlink()
    newest = checkpoint / "offsets" / "0"
    old = json.dumps({source: {"0": 10}, "#topic ids": metadata["#topic ids"]})
    newest.write_text("\n".join([*newest.read_text().splitlines()[:2], old]))
    (checkpoint / "offsets" / ".0.crc").unlink()
    produce(kafka.bootstrap, source, ((None, str(i).encode()) for i in range(10, 25)))
    made.start(spark).awaitTermination(WAIT_S)
    assert logged(checkpoint)[1] == {source: {"0": 25}}
    report = made.audit(spark)
    assert (report.exit_code, report.counts.sent, report.counts.delivered) == (0, 25, 25)


@pytest.mark.checkpoint("the source's topic, recreated", "refused", "`DATA_LOST`: its offsets begin again")
def test_in_the_idiom_a_topic_made_again_between_two_runs_stops_the_query(
    kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    """`start()` passes the checkpoint to the source, which stores the topic's id there."""
    delivered.register(spark)
    source, sink = kafka.topic(1), kafka.topic(1)

    def run_once() -> None:
        (
            spark.readStream.format("delivered_kafka")
            .option("kafka.bootstrap.servers", kafka.bootstrap)
            .option("subscribe", source)
            .option("startingOffsets", "earliest")
            .load()
            .selectExpr("key", "value")
            .writeStream.format("delivered_kafka")
            .option("guarantee", "exactly_once")
            .option("kafka.bootstrap.servers", kafka.bootstrap)
            .option("topic", sink)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .queryName("idiom-remade")
            .trigger(availableNow=True)
            .start()
            .awaitTermination(WAIT_S)
        )

    def seen() -> list[int]:
        return sorted(int(m.value() or b"-1") for m in read_committed(kafka.bootstrap, sink))

    produce(kafka.bootstrap, source, ((None, str(i).encode()) for i in range(10)))
    run_once()
    produce(kafka.bootstrap, source, ((None, str(i).encode()) for i in range(10, 15)))
    run_once()
    assert seen() == list(range(15))
    assert all(set(offsets) == {source} for offsets in logged(tmp_path / "checkpoint").values())

    kafka.admin().delete_topics([source])[source].result(30)
    deadline = time.monotonic() + WAIT_S
    while source in kafka.admin().list_topics(timeout=30).topics:
        assert time.monotonic() < deadline
    kafka.topic(1, name=source)
    produce(kafka.bootstrap, source, ((None, str(i).encode()) for i in range(100, 140)))
    before = logged(tmp_path / "checkpoint")
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=f"DATA_LOST.*{source}-0 was deleted and recreated"):
            run_once()
        assert logged(tmp_path / "checkpoint") == before, "it is noticed before Spark logs a batch of it"
    assert seen() == list(range(15))


@pytest.mark.matrix
@pytest.mark.checkpoint(
    "the end of a source's partition, lost in Kafka",
    "refused",
    "`DATA_LOST`; `failOnDataLoss=false` continues from there",
)
def test_a_partition_that_lost_its_end_between_two_runs_stops_the_query(
    mortal_kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    """P29, in the idiom and in a pipeline of several sources: all new records are delivered, or none."""
    delivered.register(spark)
    kafka, table = mortal_kafka, str(tmp_path / "out.db")
    cut, whole = kafka.topic(1), kafka.topic(1)

    def idiom(lossy: bool) -> None:
        (
            spark.readStream.format("delivered_kafka")
            .option("kafka.bootstrap.servers", kafka.bootstrap)
            .option("subscribe", cut)
            .option("startingOffsets", "earliest")
            .option("failOnDataLoss", str(not lossy))
            .load()
            .selectExpr("CAST(value AS STRING) AS value")
            .writeStream.format("delivered_sqlite")
            .options(guarantee="exactly_once", path=table, table="idiom", pipeline="idiom")
            .option("checkpointLocation", str(tmp_path / "idiom"))
            .trigger(availableNow=True)
            .start()
            .awaitTermination(WAIT_S)
        )

    def several(lossy: bool) -> None:
        options = {"startingOffsets": "earliest", "failOnDataLoss": not lossy}
        delivered.Pipeline(
            name="several",
            guarantee="exactly_once",
            checkpoint=tmp_path / "several",
            sources={
                n: delivered.kafka(kafka.bootstrap, subscribe=t, **options) for n, t in (("a", cut), ("b", whole))
            },
            sinks=[delivered.sqlite(table, "several")],
            transform=" UNION ALL ".join(f"SELECT CAST(value AS STRING) AS value FROM {n}" for n in ("a", "b")),
            trigger="available_now",
        ).start(spark).awaitTermination(WAIT_S)

    def seen(name: str) -> list[str]:
        with closing(sqlite3.connect(table)) as database:
            return sorted(str(value) for (value,) in database.execute(f"SELECT value FROM {name}"))

    def send(topic: str, name: str, count: int) -> list[str]:
        values = [f"{name}{i}" for i in range(count)]
        produce(kafka.bootstrap, topic, ((None, value.encode()) for value in values))
        return values

    sent = send(cut, "old", 70) + send(cut, "lost", 30)
    other = send(whole, "other", 10)
    idiom(lossy=False)
    several(lossy=False)
    kafka.broker.kill()
    cut_log(kafka, cut, 70)
    kafka.broker.restart()
    new = send(cut, "new", 100)
    for _ in range(2):
        for run_once in (idiom, several):
            with pytest.raises(StreamingQueryException, match=rf"DATA_LOST.*{cut}-0 lost its end: at offset 70"):
                run_once(lossy=False)
    idiom(lossy=True)
    several(lossy=True)
    assert seen("idiom") == sorted(sent + new)
    assert seen("several") == sorted(sent + other + new)
    idiom(lossy=False)  # all is well again
    assert seen("idiom") == sorted(sent + new)


def test_a_checkpoint_of_sparks_own_connector_is_left_as_it_was_until_it_is_accepted(
    kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    source, checkpoint = kafka.topic(1), tmp_path / "checkpoint"
    produce(kafka.bootstrap, source, ((None, str(i).encode()) for i in range(20)))
    conf = {"batchWatermarkMs": 0, "batchTimestampMs": 1, "conf": {"spark.sql.shuffle.partitions": "2"}}
    for name, text in {
        "metadata": json.dumps({"id": str(uuid.uuid4())}),
        "offsets/0": f'v1\n{json.dumps(conf)}\n{{"{source}":{{"0":12}}}}',
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
        "sources/0/0": f'\0v1\n{{"{source}":{{"0":0}}}}',
    }.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(text)
    before = {p: p.read_bytes() for p in checkpoint.rglob("*") if p.is_file()}

    def made(**more: bool) -> delivered.Pipeline:
        return delivered.Pipeline(
            name=source, guarantee="exactly_once", checkpoint=checkpoint, trigger="available_now", **more,
            source=delivered.kafka(kafka.bootstrap, subscribe=source), transform="SELECT key, value FROM source",
            sinks=[delivered.sqlite(str(tmp_path / "out.db"), "orders")],
        )  # fmt: skip

    with pytest.raises(delivered.Refused, match="LEDGER_MISSING"):
        made().start(spark)
    assert {p: p.read_bytes() for p in checkpoint.rglob("*") if p.is_file()} == before
    made(missing_ledger=True).start(spark).awaitTermination(WAIT_S)
    with sqlite3.connect(tmp_path / "out.db") as connection:
        found = connection.execute("SELECT value FROM orders").fetchall()
    assert sorted(int(v) for (v,) in found) == list(range(12, 20))
    log = logged(checkpoint)
    assert log[max(log)] == {source: {"0": 20}}
    made().start(spark).awaitTermination(WAIT_S)

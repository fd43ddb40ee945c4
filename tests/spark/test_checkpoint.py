"""Changes between two starts on one checkpoint: each row of docs/checkpoint.md is a mark here."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from tests.kafka_tools import produce
from tests.spark.life import PLAIN, WAIT_S, Life, once, rows
from tests.support.halted import killed

import delivered
from delivered.audit.evidence import Verdict
from delivered.connectors.log import append
from delivered.model.work import RECORD_FORMAT
from delivered.planner import Refusal
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka

checkpoint = pytest.mark.checkpoint
APP = Path(__file__).parent / "apps" / "run_file.py"
SPARK_42 = "DELIVERED_SPARK_42"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
COUNTS = "SELECT CAST(key AS STRING) AS k, count(*) AS n FROM source GROUP BY k"


@pytest.mark.matrix  # the next test cuts the same files
@checkpoint(
    "a log file that a power failure cut off", "refused", "`CHECKPOINT_DAMAGED`, which says what to delete or restore"
)
def test_log_files_cut_off(spark: SparkSession, tmp_path: Path) -> None:
    """Spark renames them into place without fsync. With any file deleted as told, every record counts once."""
    database, folder = tmp_path / "out.db", tmp_path / "checkpoint"
    life = Life(spark, tmp_path, delivered.sqlite(str(database), "rows"))
    life.start()
    life.start()

    def cut(log: str, batch: int) -> list[Path]:
        file = folder / log / str(batch)
        file.write_bytes(file.read_bytes()[:-1] if file.exists() else b"")
        return [file, file.with_name(f".{batch}.crc")]

    for log, batch, told in (("commits", 1, "runs once more"), ("offsets", 3, "plans the batch again")):
        files = cut(log, batch)
        life.refused(rf"CHECKPOINT_DAMAGED.*{folder}/{log}/{batch}.*{told}")
        for file in files:
            file.unlink(missing_ok=True)
        life.start()
        assert once(rows(database), life.records)
    newest = max(int(p.name) for p in (folder / "offsets").iterdir() if p.name.isdigit())
    kept = (folder / "offsets" / str(newest)).read_bytes()
    cut("offsets", newest)
    life.refused("CHECKPOINT_DAMAGED.*is decided")
    (folder / "offsets" / str(newest)).write_bytes(kept)
    life.start()
    assert once(rows(database), life.records)


def test_log_files_cut_off_under_a_users_own_query(spark: SparkSession, tmp_path: Path) -> None:
    database, folder = tmp_path / "out.db", tmp_path / "checkpoint"
    life = Life(spark, tmp_path, delivered.sqlite(str(database), "rows"))

    def start() -> None:
        life.produce()
        given = spark.readStream.format("delivered_log").option("path", str(tmp_path / "in")).load()
        sink = given.selectExpr("CAST(value AS STRING) AS v").writeStream.format("delivered_sqlite").queryName("own")
        options = {"guarantee": "exactly_once", "path": str(database), "table": "rows", "ifNotExists": "true"}
        query = sink.options(**options, checkpointLocation=str(folder)).trigger(availableNow=True).start()
        query.awaitTermination(WAIT_S)

    start()
    start()
    for log, batch, told in (("commits", 1, "runs once more"), ("offsets", 3, "plans the batch again")):
        file = folder / log / str(batch)
        file.write_bytes(file.read_bytes()[:-1] if file.exists() else b"")
        with pytest.raises(delivered.Refused, match=rf"CHECKPOINT_DAMAGED.*{file}.*{told}"):
            start()
        file.unlink()
        file.with_name(f".{batch}.crc").unlink(missing_ok=True)
        start()
        assert once(rows(database), life.records)


@pytest.mark.matrix
@checkpoint("SQL of a stateless transform", "continues", "`plan` names the batch from which it runs")
@checkpoint("`maxOffsetsPerTrigger`", "continues", "from the next batch on")
@checkpoint("sink options that do not name the target", "continue", "tested with `ifNotExists`")
@checkpoint("the checkpoint's folder, moved", "continues", "name the pipeline: its default name comes from the folder")
@checkpoint(
    "a column, added or removed: SQL tables", "refused", "`COLUMN_MISSING`, `SCHEMA_CHANGED`; with `mergeSchema`: below"
)
@checkpoint("the sink's table, or its name", "refused", "`LEDGER_RENAMED` or `LEDGER_MISSING`: needs a new checkpoint")
@checkpoint("the pipeline's name", "refused", "`LEDGER_RENAMED` or `LEDGER_MISSING`")
@checkpoint("a copy of the checkpoint, run after the original continued", "refused", "`LEDGER_AHEAD`")
@checkpoint("a copy that runs first", "continues", "the original is refused then, `LEDGER_AHEAD`")
def test_a_stateless_query(spark: SparkSession, tmp_path: Path) -> None:
    database = tmp_path / "out.db"
    sink = delivered.sqlite(str(database), "rows")
    life = Life(spark, tmp_path, sink)
    life.start()
    where = PLAIN + " WHERE true"
    assert "batch" in str(life.pipeline(transform=where).plan())
    life.start(transform=where, source={"maxOffsetsPerTrigger": "7"})
    life.given["transform"] = where
    life.start(sinks=[delivered.sqlite(str(database), "rows", ifNotExists="false")])
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    life.given["checkpoint"] = tmp_path / "moved"
    life.start()
    assert once(rows(database), 80)

    produced = life.records
    for other in (f"{PLAIN[:-12]}, 1 AS more FROM source", "SELECT CAST(value AS STRING) AS v FROM source"):
        life.refused("(SCHEMA_CHANGED|COLUMN_MISSING)", transform=other)
    life.refused("LEDGER_(RENAMED|MISSING)", sinks=[delivered.sqlite(str(database), "other")])
    with pytest.raises(Exception, match=r"DELIVERED_LEDGER_(RENAMED|MISSING)"):
        delivered.Pipeline(
            name="another", guarantee="exactly_once", source=delivered.log(str(tmp_path / "in")),
            trigger="available_now", **life.given,
        ).start(spark).awaitTermination(WAIT_S)  # fmt: skip
    assert life.records > produced  # for the refused starts to deliver
    assert once(rows(database), 80)

    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    life.start()
    assert once(rows(database), life.records)
    life.refused("LEDGER_AHEAD", checkpoint=tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    life.start(checkpoint=tmp_path / "copy")
    life.refused("LEDGER_AHEAD")
    life.given["checkpoint"] = tmp_path / "copy"
    life.start()
    assert once(rows(database), life.records)
    assert life.pipeline().audit(spark).verdict is not Verdict.BROKEN


@checkpoint(
    "an earlier version of delivered, if the newer one changed what it stores",
    "refused",
    "`FORMAT_NEWER`, `LEDGER_NEWER`",
)
def test_back_to_an_earlier_version(spark: SparkSession, tmp_path: Path) -> None:
    """Each durable record, as a later version may write it; put back, the query goes on."""
    database, first = tmp_path / "out.db", tmp_path / "checkpoint" / "delivered" / "source-offsets.json"
    life = Life(spark, tmp_path, delivered.sqlite(str(database), "rows"))
    life.start()

    def change(statement: str) -> None:
        with closing(sqlite3.connect(database)) as connection, connection:
            assert connection.execute(statement).rowcount == 1

    later = "UPDATE _delivered_decision SET decision = json_set(decision, '$.format', {})"
    change(later.format(RECORD_FORMAT + 1))
    life.refused("FORMAT_NEWER")
    change(later.format(RECORD_FORMAT))
    change("INSERT INTO _delivered_migration VALUES (999, 0)")
    life.refused("LEDGER_NEWER")
    change("DELETE FROM _delivered_migration WHERE version = 999")
    kept = first.read_text()
    first.write_text(json.dumps({**json.loads(kept), "format": RECORD_FORMAT + 1}))
    life.refused("FORMAT_NEWER")
    assert once(rows(database), 20)
    first.write_text(kept)
    life.start()
    assert once(rows(database), life.records)


@pytest.mark.matrix  # test_state.py goes on with state, unit/test_audit_recompute.py recomputes it
@checkpoint("`spark.sql.shuffle.partitions`", "continues", "a query with state keeps the number that it started with")
@checkpoint("state repartitioned by Spark", "continues", "`repartition` logs a batch that no sink sees")
@checkpoint(
    "SQL of a transform with state", "Spark decides", "same operators and keys: it continues; else Spark refuses"
)
def test_a_query_with_state(spark: SparkSession, tmp_path: Path) -> None:
    database = tmp_path / "out.db"
    sink = delivered.sqlite(str(database), "rows")
    life = Life(spark, tmp_path, sink, COUNTS, output_mode="update")
    names = ("spark.sql.shuffle.partitions", "spark.sql.streaming.stateStore.providerClass")
    before = {n: spark.conf.get(n, None) for n in names}
    try:
        spark.conf.set(names[0], "2")
        spark.conf.set(names[1], ROCKSDB)
        life.start()
        spark.conf.set(names[0], "3")
        life.start(transform=COUNTS.replace("GROUP BY k", "WHERE key IS NOT NULL GROUP BY k"))
        manager = spark._streamingCheckpointManager
        for partitions in (4, 5):
            manager.repartition(str(tmp_path / "checkpoint"), partitions)
        life.given["transform"] = COUNTS.replace("GROUP BY k", "WHERE key IS NOT NULL GROUP BY k")
        life.start()
        life.start()
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)
    assert sorted(rows(database, columns="k, n")) == [(f"k{i}", life.records // 4) for i in range(4)]
    report = life.pipeline().audit(spark, recompute=True)
    assert not report.history.faults
    assert report.counts.sent == report.counts.delivered == 4

    # One batch less in the ledger than in the checkpoint is still detected.
    logged = tmp_path / "checkpoint"
    newest = max(int(p.name) for p in (logged / "offsets").glob("[0-9]*"))
    for folder in ("offsets", "commits"):
        shutil.copy(logged / folder / str(newest), logged / folder / str(newest + 1))
    text = (logged / "offsets" / str(newest + 1)).read_text()
    (logged / "offsets" / str(newest + 1)).write_text(text.replace('"batchTimestampMs":', '"batchTimestampMs":1'))
    life.refused("LEDGER_BEHIND")


@checkpoint("a source, added to or removed from a union below a query with state", "continues", "its state counts both")
@checkpoint(
    "a source, added by a join to a query with state", "refused", "by Spark, before a write; `plan` says how to go back"
)
@pytest.mark.matrix  # test_several_sources.py changes those of a query without state
def test_sources_of_a_query_with_state(spark: SparkSession, tmp_path: Path) -> None:
    def start(sql: str, *names: str) -> None:
        for name in ("orders", "payments"):
            keys = [f"k{i % 4}".encode() for i in range(20)]
            append(str(tmp_path / name), pa.table({"key": keys, "value": keys}))
        made(sql, *names).start(spark).awaitTermination(WAIT_S)

    def made(sql: str, *names: str) -> delivered.Pipeline:
        return delivered.Pipeline(
            name="shop", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint", output_mode="update",
            transform=f"SELECT k, count(*) AS n FROM ({sql}) GROUP BY k", trigger="available_now",
            sinks=[delivered.sqlite(str(tmp_path / "out.db"), "counts", ifNotExists=True)],
            sources={n: delivered.log(str(tmp_path / n)) for n in names},
        )  # fmt: skip

    def counted(n: int) -> bool:
        return sorted(rows(tmp_path / "out.db", "counts", "k, n")) == [(f"k{i}", n) for i in range(4)]

    one = "SELECT CAST(key AS STRING) AS k FROM orders"
    start(one, "orders")
    start(f"{one} UNION ALL SELECT CAST(key AS STRING) FROM payments", "orders", "payments")
    assert counted(5 + 5 + 10)
    start(one, "orders")
    assert counted(25)

    join = "SELECT CAST(o.key AS STRING) AS k FROM orders o JOIN refunds r ON o.key = r.key"
    append(str(tmp_path / "refunds"), pa.table({"key": [b"k1"], "value": [b""]}))
    with pytest.raises(Exception, match="STATEFUL_OPERATOR_NOT_MATCH"):
        start(join, "orders", "refunds")
    assert counted(25)
    refused = made(one, "orders").plan(spark)
    assert isinstance(refused, Refusal)
    assert refused.code == "SOURCES_UNFINISHED"
    named = re.findall(r"offsets/\S*\d+(?:\.crc)?", refused.way_out)
    assert len(named) == 2, refused.way_out
    for name in named:
        (tmp_path / "checkpoint" / name).unlink()
    start(one, "orders")
    assert counted(35)


@pytest.mark.matrix  # the next test for SQLite; unit/test_delta.py and unit/test_iceberg.py merge schemas
@checkpoint("a nullable column, added: Delta, Iceberg", "continues", "with `mergeSchema`; earlier rows are null there")
@checkpoint("a nullable column, removed: Delta, Iceberg", "continues", "new rows are null there")
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_columns_of_a_lake_table(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    lake = tmp_path / "lake"
    where = {"path": str(lake)} if kind == "delta" else {"table": "shop.rows", "warehouse": str(lake)}
    life = Life(spark, tmp_path, delivered.endpoint(kind, **where))
    life.start()
    more = "SELECT CAST(key AS STRING) AS k, CAST(value AS STRING) AS v, offset AS position FROM source"
    life.refused("COLUMN_MISSING", transform=more)
    life.given["sinks"] = [delivered.endpoint(kind, **where, mergeSchema="true")]
    life.start(transform=more)
    report = life.pipeline(transform=more).audit(spark)
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, [])
    life.start(transform="SELECT CAST(key AS STRING) AS k, CAST(value AS STRING) AS v FROM source WHERE true")
    if kind == "delta":
        found = DeltaTable(str(lake)).to_pyarrow_table()
    else:
        catalog = SqlCatalog("default", uri=f"sqlite:///{lake}/catalog.db", warehouse=f"file://{lake}")
        found = catalog.load_table("shop.rows").scan().to_arrow()
    assert once(found["v"].to_pylist(), life.records)
    assert found["position"].null_count == 40


def test_columns_of_sqlite(spark: SparkSession, tmp_path: Path) -> None:
    database = tmp_path / "out.db"
    life = Life(spark, tmp_path, delivered.sqlite(str(database), "rows"))
    life.start()
    more = "SELECT CAST(key AS STRING) AS k, CAST(value AS STRING) AS v, offset AS at FROM source"
    merging = {"transform": more, "sinks": [delivered.sqlite(str(database), "rows", mergeSchema="true")]}
    life.start(**merging)
    report = life.pipeline(**merging).audit(spark)
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, [])
    life.start()
    assert once(rows(database), life.records)
    added = {int(v): at for v, at in rows(database, columns="v, at")}
    assert [n for n, at in added.items() if at is not None] == list(range(20, 40))


@checkpoint("more partitions in the Kafka topic", "continues", "new partitions are read from their beginning")
@checkpoint("master and number of cores", "continues", "")
@pytest.mark.matrix
def test_more_partitions_and_another_master(kafka: Kafka, spark: SparkSession, tmp_path: Path) -> None:
    from confluent_kafka.admin import NewPartitions

    topic = kafka.topic(1)
    produce(kafka.bootstrap, topic, ((f"k{i}".encode(), str(i).encode()) for i in range(50)))
    file = tmp_path / "life.yaml"
    pipeline = {
        "pipeline": "life", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "subscribe": topic},
        "transform": {"sql": PLAIN}, "sinks": [{"format": "sqlite", "path": "out.db", "table": "rows"}],
        "master": "local[1]",
    }  # fmt: skip
    pipeline["source"]["startingOffsets"] = "earliest"  # type: ignore[index]
    file.write_text(yaml.safe_dump(pipeline))
    done = supervisor.run(
        [sys.executable, str(APP), str(file)], "commit.decide:after@batch=0", tmp_path / "hits", timeout_s=300
    )
    assert (done.exit_code, len(done.kills)) == (0, 1)
    kafka.admin().create_partitions([NewPartitions(topic, 4)])[topic].result(30)
    produce(kafka.bootstrap, topic, ((f"k{i}".encode(), str(i).encode()) for i in range(50, 150)))
    # local[2]; the JVM of the process that ended may live a moment longer
    delivered.Pipeline.from_file(file).start(spark, takeover=True).awaitTermination(WAIT_S)
    assert once(rows(tmp_path / "out.db"), 150)


@checkpoint("Spark 4.2 to 4.3", "continues", "with state, killed under 4.2 after a decision")
@pytest.mark.matrix
@pytest.mark.skipif(SPARK_42 not in os.environ, reason=f"{SPARK_42} names no folder with pyspark 4.2 in it")
def test_a_newer_spark(spark: SparkSession, tmp_path: Path) -> None:
    life = Life(spark, tmp_path, delivered.sqlite(str(tmp_path / "out.db"), "rows"), COUNTS)
    life.produce()
    life.produce()
    file = tmp_path / "life.yaml"
    pipeline = {
        "pipeline": "life", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "in", "maxOffsetsPerTrigger": 20}, "transform": {"sql": COUNTS},
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "rows"}], "output_mode": "update",
        "master": "local[2]",
    }  # fmt: skip
    file.write_text(yaml.safe_dump(pipeline))
    path = os.pathsep.join([os.environ[SPARK_42], *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path}
    env.pop("SPARK_HOME", None)
    killed([sys.executable, str(APP), str(file)], "commit.decide:after@batch=1", tmp_path, env)
    asked = [sys.executable, "-c", "import pyspark; print(pyspark.__version__)"]
    assert subprocess.run(asked, env=env, capture_output=True, text=True).stdout.startswith("4.2.")
    life.produce()
    delivered.Pipeline.from_file(file).start(spark).awaitTermination(WAIT_S)
    assert sorted(rows(tmp_path / "out.db", columns="k, n")) == [(f"k{i}", 15) for i in range(4)]

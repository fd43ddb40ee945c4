"""Running totals: output modes update and complete, killed at every point, against sums in plain Python."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable
from tests.kafka_tools import read_committed
from tests.support.halted import killed

import delivered
from delivered.connectors.log import append
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.engine.context import open_ledger
from delivered.model.identity import Scope
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.support.servers import Kafka


APP = Path(__file__).parent / "apps" / "run_file.py"
RECORDS, KEYS, PER_BATCH, WAIT_S = 700, 30, 100, 180.0
SQL = (
    "SELECT CAST(key AS STRING) AS k, count(*) AS n, sum(CAST(CAST(value AS STRING) AS BIGINT)) AS total "
    "FROM source GROUP BY k"
)
POINTS = (
    "recover.claim:after", "recover.check:after", "write.stage:after", "write.prepare:before", "write.prepare:after",
    "commit.decide:before", "commit.apply:before", "commit.apply:after", "commit.decide:after", "log:before",
)  # fmt: skip
EVERY_POINT = ",".join(
    f"{point}@batch={1 + i % 5}" if "recover" not in point else point for i, point in enumerate(POINTS)
)


def produce(folder: Path) -> None:
    keys = [f"k{i % KEYS}".encode() for i in range(RECORDS)]
    append(str(folder / "in"), pa.table({"key": keys, "value": [str(i).encode() for i in range(RECORDS)]}))


def totals(records: int = RECORDS) -> dict[str, tuple[int, int]]:
    """key -> (count, sum), of so many records."""
    keys = [f"k{k}" for k in range(min(KEYS, records))]
    return {k: (len(m), sum(m)) for k in keys for m in [range(int(k[1:]), records, KEYS)]}


def described(folder: Path, mode: str, sink: dict[str, Any]) -> Path:
    """The file of a pipeline that runs until the source is empty."""
    pipeline = {
        "pipeline": "totals", "guarantee": "exactly_once", "checkpoint": str(folder / "checkpoint"),
        "source": {"format": "log", "path": str(folder / "in"), "maxOffsetsPerTrigger": PER_BATCH},
        "transform": {"sql": SQL, "deterministic": True}, "sinks": [sink], "output_mode": mode,
        "trigger": "available_now", "master": "local[2]",
    }  # fmt: skip
    file = folder / "totals.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


def run(folder: Path, crash: str, mode: str, sink: dict[str, Any]) -> supervisor.Outcome:
    with (folder / "output").open("wb") as output:
        command = [sys.executable, str(APP), str(described(folder, mode, sink))]
        return supervisor.run(command, crash, folder / "hits", timeout_s=900, output=output)


def output(folder: Path) -> str:
    return (folder / "output").read_text()[-4000:]


def in_sqlite(folder: Path) -> list[tuple[str, int, int]]:
    with sqlite3.connect(folder / "out.db") as connection:
        return connection.execute("SELECT k, n, total FROM totals ORDER BY k").fetchall()


def decided(folder: Path) -> list[int]:
    sink = SQLITE.sink({"path": str(folder / "out.db"), "table": "totals"})
    query = json.loads((folder / "checkpoint" / "metadata").read_text())["id"]
    ledger = open_ledger(sink, Scope("totals", sink.name, query))
    try:
        return [d.batch for d in ledger.history()]
    finally:
        ledger.close()


@pytest.mark.matrix  # test_totals.py updates a table, and the next test replaces one
@pytest.mark.parametrize("mode", ["update", "complete"])
def test_totals_in_sqlite_are_exact(mode: str, tmp_path: Path) -> None:
    produce(tmp_path)
    done = run(tmp_path, EVERY_POINT, mode, {"format": "sqlite", "path": str(tmp_path / "out.db"), "table": "totals"})
    assert done.exit_code == 0, output(tmp_path)
    assert len(done.kills) == EVERY_POINT.count(",") + 1
    assert in_sqlite(tmp_path) == sorted((k, *v) for k, v in totals().items())
    assert decided(tmp_path) == list(range(RECORDS // PER_BATCH))


@pytest.mark.matrix
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_totals_in_delta_are_those_of_the_newest_batch(every: bool, spark: SparkSession, tmp_path: Path) -> None:
    produce(tmp_path)
    sink = {"format": "delta", "path": str(tmp_path / "table")}
    if every:
        done = run(tmp_path, EVERY_POINT, "complete", sink)
        assert done.exit_code == 0, output(tmp_path)
        assert len(done.kills) == EVERY_POINT.count(",") + 1
    else:
        file = described(tmp_path, "complete", sink)
        killed([sys.executable, str(APP), str(file)], "commit.decide:after@batch=1", tmp_path)
        assert delivered.Pipeline.from_file(file).start(spark).awaitTermination(WAIT_S)
    rows = DeltaTable(str(tmp_path / "table")).to_pyarrow_table().to_pylist()
    assert sorted((r["k"], r["n"], r["total"]) for r in rows) == sorted((k, *v) for k, v in totals().items())


@pytest.mark.matrix  # test_totals.py updates a table
@pytest.mark.parametrize("crash", ["commit.decide:after@batch=2,commit.apply:after@batch=4", EVERY_POINT])
def test_every_change_of_a_total_is_in_kafka_once(kafka: Kafka, crash: str, tmp_path: Path) -> None:
    produce(tmp_path)
    topic = kafka.topic(2)
    sink = {
        "format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "topic": topic,
        "select": ["k AS key", "concat_ws(',', n, total) AS value"],
    }  # fmt: skip
    done = run(tmp_path, crash, "update", sink)
    assert done.exit_code == 0, output(tmp_path)
    assert len(done.kills) == crash.count(",") + 1
    told = Counter(
        ((m.key() or b"").decode(), (m.value() or b"").decode()) for m in read_committed(kafka.bootstrap, topic)
    )
    changes = [totals(end).items() for end in range(PER_BATCH, RECORDS + 1, PER_BATCH)]
    assert told == Counter((k, f"{n},{total}") for batch in changes for k, (n, total) in batch)


@pytest.mark.matrix  # the next test runs a batch again
def test_an_own_foreach_batch_is_exact_after_a_kill(tmp_path: Path) -> None:
    """Two sinks in one call, killed between them, and after the decision of the second one."""
    produce(tmp_path)
    with (tmp_path / "output").open("wb") as said:
        command = [sys.executable, str(APP.with_name("own_foreach.py")), str(tmp_path)]
        crash = "commit.decide:after@batch=1,commit.decide:before#2@batch=2,log:before#2@batch=4"
        done = supervisor.run(command, crash, tmp_path / "hits", timeout_s=400, output=said)
    assert done.exit_code == 0, output(tmp_path)
    assert len(done.kills) == 3
    assert in_sqlite(tmp_path) == sorted((k, *v) for k, v in totals().items())
    with sqlite3.connect(tmp_path / "out.db") as connection:
        changes = Counter(connection.execute("SELECT k, n, total FROM changes"))
    ends = range(PER_BATCH, RECORDS + 1, PER_BATCH)
    assert changes == Counter((k, *v) for end in ends for k, v in totals(end).items())


def frame_of(spark: SparkSession, folder: Path) -> DataFrame:
    frame = spark.readStream.format("delivered_log").option("path", str(folder / "in")).load()
    return frame.selectExpr("CAST(key AS STRING) AS k", "CAST(CAST(value AS STRING) AS BIGINT) AS n")


def own(frame: DataFrame, folder: Path, write: Any) -> None:
    writer = frame.writeStream.outputMode("update").foreachBatch(write).trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination(WAIT_S)


def test_write_batch_knows_a_batch_that_runs_again(spark: SparkSession, tmp_path: Path) -> None:
    """P1: the last file of commits/ is gone. Rows that differ, as of a second call for one sink, are never skipped."""
    produce(tmp_path)
    sums = frame_of(spark, tmp_path).groupBy("k").agg({"n": "sum"}).withColumnRenamed("sum(n)", "total")
    sink = delivered.sqlite(str(tmp_path / "out.db"), "sums")

    def write(df: DataFrame, batch_id: int) -> None:
        delivered.write_batch(df, batch_id, sink=sink, guarantee="exactly_once", pipeline="own")

    def rows() -> list[Any]:
        with sqlite3.connect(tmp_path / "out.db") as connection:
            return sorted(connection.execute("SELECT * FROM sums"))

    own(sums, tmp_path, write)
    before = rows()
    assert before == sorted((k, total) for k, (_, total) in totals().items())
    for name in ("0", ".0.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    own(sums, tmp_path, write)
    assert rows() == before

    def twice(df: DataFrame, batch_id: int) -> None:
        write(df.where("k < 'k2'"), batch_id)
        write(df.where("k >= 'k2'"), batch_id)

    append(str(tmp_path / "in"), pa.table({"key": [b"k1", b"k9"], "value": [b"1", b"2"]}))
    with pytest.raises(Exception, match=r"DELIVERED_REPLAY_DIFFERS.*called write_batch twice.*a\.unionByName\(b\)"):
        own(sums, tmp_path, twice)
    with pytest.raises(delivered.UsageError, match="CHECKPOINT_MISSING"):
        write(spark.range(1).selectExpr("'a' AS k", "id AS total"), 0)


def test_a_batch_that_write_batch_was_not_called_for(spark: SparkSession, tmp_path: Path) -> None:
    """The function is told what it did, and can go on: it has no options, as a stream has."""
    produce(tmp_path)
    rows = frame_of(spark, tmp_path)

    def write(df: DataFrame, batch_id: int, **accepted: bool) -> None:
        sink = delivered.sqlite(str(tmp_path / "out.db"), "rows")
        delivered.write_batch(df, batch_id, sink=sink, guarantee="exactly_once", pipeline="own", **accepted)

    def next_batch(write: Any) -> None:
        append(str(tmp_path / "in"), pa.table({"key": [b"k"], "value": [b"1"]}))
        own(rows, tmp_path, write)

    own(rows, tmp_path, lambda *_: None)
    for code in ("MISSING", "BEHIND"):
        for _ in range(2):  # also the first call of a process says so
            with pytest.raises(Exception, match=rf"DELIVERED_LEDGER_{code}.*did not call write_batch") as error:
                next_batch(write)
            assert "missing_ledger=True" in str(error.value) and 'option("missingLedger"' not in str(error.value)
        next_batch(lambda df, n: write(df, n, missing_ledger=True))
        next_batch(write)
        next_batch(lambda *_: None)
    with sqlite3.connect(tmp_path / "out.db") as connection:
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (8,)

    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(Exception, match=r"DELIVERED_CHECKPOINT_NEW.*write_batch\(\.\.\., new_checkpoint=True\)"):
        own(rows, tmp_path, write)
    own(rows, tmp_path, lambda df, n: write(df, n, new_checkpoint=True))

    kept = {"path": str(tmp_path / "in"), "checkpointLocation": str(tmp_path / "checkpoint")}
    latest = spark.readStream.format("delivered_log").options(**kept, startingOffsets="latest").load()
    both = latest.union(spark.readStream.format("delivered_log").options(**kept).load())
    with pytest.raises(delivered.UsageError, match="SOURCE_CHECKPOINT"):
        own(both, tmp_path, write)


def test_the_spark_idiom_says_what_to_write_instead(spark: SparkSession, tmp_path: Path) -> None:
    produce(tmp_path)
    counts = frame_of(spark, tmp_path).groupBy("k").count()
    options = {"path": str(tmp_path / "out.db"), "table": "t", "guarantee": "exactly_once", "pipeline": "p"}
    for mode in ("update", "complete"):
        writer = counts.writeStream.format("delivered_sqlite").options(**options).outputMode(mode)
        with pytest.raises(Exception, match="DELIVERED_OUTPUT_MODE") as caught:
            writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        for part in (f'delivered.Pipeline(output_mode="{mode}"', f'outputMode("{mode}")', "delivered.write_batch(df"):
            assert part in str(caught.value)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("mode", "sql", "next_step"),
    [
        ("append", SQL, "set output_mode: update.*withWatermark"),
        ("complete", "SELECT key FROM source", "set output_mode: append or update"),
    ],
)
def test_a_mode_that_spark_refuses_for_a_query(
    spark: SparkSession, mode: str, sql: str, next_step: str, tmp_path: Path
) -> None:
    produce(tmp_path)
    pipeline = delivered.Pipeline(
        name="totals", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint", transform=sql, output_mode=mode,
        source=delivered.log(str(tmp_path / "in")), sinks=[delivered.sqlite(str(tmp_path / "out.db"), "totals")],
        trigger="available_now",
    )  # fmt: skip
    with pytest.raises(delivered.UsageError, match=rf"DELIVERED_OUTPUT_MODE\].*output mode: {mode}.*{next_step}"):
        pipeline.start(spark)


@pytest.mark.parametrize(
    ("sql", "keys", "code"),
    [
        ("SELECT nullif(CAST(key AS STRING), 'k3') AS k, count(*) AS n FROM source GROUP BY k", None, "KEY_NULL"),
        ("SELECT CAST(key AS STRING) AS k, offset % 7 AS m, count(*) AS n FROM source GROUP BY 1, 2", "k", "KEY_TWICE"),
    ],
)
def test_bad_rows_of_an_update_stop_it(
    spark: SparkSession, sql: str, keys: str | None, code: str, tmp_path: Path
) -> None:
    produce(tmp_path)
    more = {} if keys is None else {"mode": "upsert", "keyColumns": keys}
    pipeline = delivered.Pipeline(
        name="totals",
        guarantee="exactly_once",
        checkpoint=tmp_path / "checkpoint",
        source=delivered.log(str(tmp_path / "in")),
        transform=sql,
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "totals", **more)],
        output_mode="update",
        trigger="available_now",
    )
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "1")  # of two shards, the sink says it
    try:
        with pytest.raises(Exception, match=f"DELIVERED_{code}"):
            pipeline.start(spark).awaitTermination(WAIT_S)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    with sqlite3.connect(tmp_path / "out.db") as connection:
        assert connection.execute("SELECT count(*) FROM totals").fetchone() == (0,)

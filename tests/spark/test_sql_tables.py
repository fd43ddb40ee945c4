"""SQL tables over our formats, as far as Spark passes a table's options to a Python source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.spark.topics import read_values, send

import delivered
from delivered.connectors.log.produce import append
from delivered.spark.internals import READS_ONCE, VERSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def tables(spark: SparkSession) -> Iterator[list[str]]:
    """Names to drop at the end."""
    made: list[str] = []
    yield made
    for name in made:
        spark.sql(f"DROP TABLE IF EXISTS {name}")


def count(spark: SparkSession, query: str) -> int:
    return int(spark.sql(query).collect()[0][0])


def test_a_table_is_read_and_inserted_into(
    spark: SparkSession, kafka: Any, tables: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    servers = f"'kafka.bootstrap.servers' '{kafka.bootstrap}'"
    source, sink = kafka.topic(2), kafka.topic(2)
    send(kafka, source, range(10))
    tables += ["orders", "clean", "declared"]
    spark.sql(f"CREATE TABLE orders USING delivered_kafka OPTIONS ({servers}, subscribe '{source}')")
    spark.sql(
        f"CREATE TABLE clean USING delivered_kafka OPTIONS ({servers}, topic '{sink}', guarantee 'exactly_once', "
        "pipeline 'clean')"
    )
    assert spark.table("clean").columns == ["key", "value", "headers"]
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW latest AS SELECT * FROM orders")
    assert count(spark, "SELECT count(*) FROM orders") == 10

    # every statement resolves the table anew; a DataFrame that was planned stays what it was, but on Spark 4.0
    loaded = spark.read.format("delivered_kafka").option("kafka.bootstrap.servers", kafka.bootstrap)
    frame = loaded.option("subscribe", source).load()
    assert frame.count() == 10
    send(kafka, source, range(10, 13))
    assert count(spark, "SELECT count(*) FROM orders") == 13
    assert count(spark, "SELECT count(*) FROM latest") == 13
    assert frame.count() == (10 if READS_ONCE else 13)
    frame.explain()
    assert ("the offsets of this DataFrame are fixed at its first action" in capsys.readouterr().out) == READS_ONCE
    spark.range(3).explain()
    assert "offsets" not in capsys.readouterr().out

    # Spark 4.0 adds no column that a statement leaves out.
    rows = "(key, value) SELECT key, value" if VERSION >= (4, 1) else "(key, value, headers) SELECT key, value, NULL"
    insert = f"INSERT INTO clean WITH ('runId' = 'first') {rows} FROM orders"
    spark.sql(insert)
    spark.sql(insert)  # the same run, given twice
    assert sorted(read_values(kafka, sink)) == sorted(str(i).encode() for i in range(13))

    spark.sql(
        f"CREATE TABLE declared (key BINARY, value BINARY) USING delivered_kafka OPTIONS ({servers}, topic '{sink}')"
    )
    for statement, code in [
        (f"INSERT INTO clean {rows} FROM orders", "RUN_UNNAMED"),
        (f"INSERT OVERWRITE clean {rows} FROM orders", "OVERWRITE"),
        ("INSERT INTO orders SELECT * FROM orders", "TABLE_OPTIONS"),
        ("INSERT INTO declared SELECT key, value FROM orders", "TABLE_OPTIONS"),
        ("SELECT count(*) FROM declared", "TABLE_OPTIONS"),
        ("SELECT count(*) FROM clean", "TABLE_WRITE_ONLY"),
        (f"CREATE TABLE orders2 USING delivered_kafka OPTIONS ({servers}, subscrib 'x')", "OPTION_UNKNOWN"),
        (f"CREATE TABLE orders2 USING delivered_kafka OPTIONS ({servers}, 'kafka.sasl.password' 'x')", "TABLE_SECRET"),
    ]:
        with pytest.raises(Exception, match=rf"\[DELIVERED_{code}\]"):
            spark.sql(statement).collect()


@pytest.mark.parametrize("system", ["sqlite", "delta"])
def test_the_path_of_a_table_is_the_one_that_was_given(
    spark: SparkSession, tables: list[str], tmp_path: Path, system: str
) -> None:
    """Spark makes it a URI of the table's location, file:/..."""
    path, name = str(tmp_path / "of a table"), f"local_{system}"
    options = {"path": path, "guarantee": "exactly_once", "pipeline": "p"}
    if system == "sqlite":
        options["table"] = "t"
    frame = spark.range(3).write.format(f"delivered_{system}").options(**options).option("runId", "first")
    frame.mode("append").save()
    tables += [name]
    listed = ", ".join(f"'{k}' '{v}'" for k, v in options.items())
    spark.sql(f"CREATE TABLE {name} USING delivered_{system} OPTIONS ({listed})")
    assert spark.table(name).columns == ["id"]


def test_a_stream_reads_a_table_and_partitions_another(spark: SparkSession, tables: list[str], tmp_path: Path) -> None:
    """Spark passes neither the table's options to a source, nor `partitionBy` to a sink."""
    rows = {"key": [b"a", b"b"], "value": [b"1", b"2"]}
    append(str(tmp_path / "in"), pa.table(rows))
    tables += ["streamed"]
    spark.sql(f"CREATE TABLE streamed USING delivered_log OPTIONS (path '{tmp_path / 'in'}', startingOffsets 'latest')")
    frame = spark.readStream.table("streamed").selectExpr("CAST(key AS STRING) AS k", "CAST(value AS STRING) AS v")
    options = {"path": str(tmp_path / "out"), "guarantee": "exactly_once"}
    for partitioned in (True, False):
        writer = frame.writeStream.format("delivered_delta").options(**options).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.partitionBy("k").start() if partitioned else writer.start(partitionBy=["k"])
        query.awaitTermination(120)
        assert (tmp_path / "checkpoint/delivered/source-offsets.json").exists()  # the source knows the checkpoint
        append(str(tmp_path / "in"), pa.table(rows))
    table = DeltaTable(tmp_path / "out")
    assert (table.metadata().partition_columns, table.to_pyarrow_table().num_rows) == (["k"], 2)
    writer = frame.writeStream.format("delivered_sqlite").options(**options, table="t").partitionBy("k")
    with pytest.raises(delivered.UsageError, match=r"OPTION_UNKNOWN.*partitionby"):
        writer.option("checkpointLocation", str(tmp_path / "other")).start()

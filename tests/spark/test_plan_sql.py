"""Wrong SQL, and columns that a sink does not take, are told by the plan: no query starts."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

import delivered
from delivered.connectors.log.produce import append
from delivered.planner import Plan, Refusal


def test_sql_is_held_against_the_source(spark: SparkSession, tmp_path: Path) -> None:
    append(str(tmp_path / "in"), pa.table({"key": [b"k"], "value": [b"v"]}))

    def plan(sql: str, session: SparkSession | None = spark, **sink: str) -> Plan | Refusal:
        return delivered.Pipeline(
            name="orders",
            guarantee="exactly_once",
            checkpoint=tmp_path / "checkpoint",
            source=delivered.log(tmp_path / "in"),
            transform=sql,
            sinks=[delivered.sqlite(tmp_path / "out.db", table="orders", **sink)],
        ).plan(session)

    spark.range(3).createOrReplaceTempView("source")
    fine = plan("SELECT CAST(value AS STRING) AS id FROM source")
    assert isinstance(fine, Plan), fine
    assert fine.warnings == (), "sessions of delivered use local sockets"
    assert spark.table("source").count() == 3, "a view of the user's comes back"
    spark.catalog.dropTempView("source")

    unknown = plan("SELECT\n  valu AS id\nFROM source")
    assert isinstance(unknown, Refusal)
    assert unknown.code == "SQL_INVALID"
    assert "line 2" in unknown.reason
    assert "`valu`" in unknown.reason
    assert unknown.way_out.startswith("did you mean value")
    syntax = plan("SELEC value FROM source")
    assert isinstance(syntax, Refusal)
    assert (syntax.code, "line 1" in syntax.reason) == ("SQL_INVALID", True)
    assert "key, value" in syntax.way_out

    spark.udf.register("twice", lambda x: 2 * x, "int")
    assert isinstance(plan("SELECT twice(1) AS id FROM source"), Plan), "functions of the session are known"
    unasked = plan("SELECT twice(1) AS id FROM source", None)
    assert isinstance(unasked, Plan), "a start would use the session that is there"
    assert any("'twice'" in w for w in unasked.warnings), unasked.warnings
    changing = udf(lambda: "x", "string").asNondeterministic()
    spark.udf.register("token", changing)
    warned = plan("SELECT token() AS id FROM source")
    assert isinstance(warned, Plan)
    assert "registered as nondeterministic" in warned.warnings[0], warned.warnings
    known = plan("SELECT uuid() AS id FROM source")
    assert isinstance(known, Plan) and not any("registered" in w for w in known.warnings)
    column = plan("SELECT map('a', 1) AS id FROM source")
    assert isinstance(column, Refusal), "a column that the sink cannot take"
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        connection.execute("CREATE TABLE orders (other TEXT)")
    lacking = plan("SELECT CAST(value AS STRING) AS id FROM source")
    assert isinstance(lacking, Refusal), "a column that the table does not have"
    assert lacking.code == "COLUMN_MISSING"
    assert not (tmp_path / "checkpoint").exists()


def test_the_columns_of_every_sink_are_held_against_it(spark: SparkSession, tmp_path: Path) -> None:
    append(str(tmp_path / "in"), pa.table({"key": [b"k"], "value": [b"v"]}))

    def plan(second: list[str]) -> Plan | Refusal:
        return delivered.Pipeline(
            name="orders",
            guarantee="at_least_once",
            checkpoint=tmp_path / "checkpoint",
            source=delivered.log(tmp_path / "in"),
            transform="SELECT CAST(value AS STRING) AS id FROM source",
            sinks=[
                delivered.files(tmp_path / "rows", name="rows"),
                delivered.sqlite(tmp_path / "out.db", table="totals", name="totals", select=second),
            ],
        ).plan(spark)

    fine = plan(["id", "length(id) AS size"])
    assert isinstance(fine, Plan), fine
    column = plan(["map('a', id) AS sizes"])
    assert isinstance(column, Refusal), "a column that the second sink cannot take"
    assert "sizes" in column.reason
    unknown = plan(["idd"])
    assert isinstance(unknown, Refusal)
    assert (unknown.code, "idd" in unknown.reason) == ("SELECT_COLUMN", True)

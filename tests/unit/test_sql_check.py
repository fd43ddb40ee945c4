"""What the plan says of SQL and its columns without Spark: what is certain is refused, nothing else."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import delivered
from delivered.cli.main import app
from delivered.connectors.log.produce import append
from delivered.pipeline.sql import UNKNOWN, check_sql
from delivered.planner import Plan, Refusal

SOURCE = {
    "source": pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
        ]
    )
}


@pytest.mark.parametrize(
    ("sql", "what", "hint"),
    [
        ("SELEC value FROM source", "starts with 'SELEC'", "did you mean SELECT?"),
        ("SELECT value FORM source", "'value FORM source'", "did you mean FROM?"),
        ("SELECT value FROM source WHRE a = 1", "'source WHRE a'", "did you mean WHERE?"),
        ("SELECT upper(value FROM source", "'('", "close it"),
        ("SELECT value) FROM source", "')'", "remove it"),
        ("SELECT 'it FROM source", 'opens "\'"', "close it"),
        ("SELECT vale FROM source", "'vale'", "did you mean value?"),
        ("SELECT value FROM source\nWHERE source.topik = 'a'", "line 2, position 14", "did you mean topic?"),
        ("SELECT uper(value) AS v FROM source", "'uper'", "did you mean upper?"),
        ("SELECT value FROM sorce", "'sorce'", "did you mean source?"),
        ("-- nothing", "is empty", "write a query"),
        ("SELECT value, FROM source", "followed by 'FROM'", "remove the comma"),
        ("SELECT upper(topic, ) AS t FROM source", "followed by ')'", "remove the comma"),
        ("SELECT key, value", "reads no source", "add FROM"),
        ("INSERT INTO orders SELECT key FROM source", "starts with 'INSERT'", "write SELECT"),
        ("SELECT key FROM source; SELECT value FROM source", "continues after ';'", "keep one query"),
        ("SELECT key AS id 1.0D AS n FROM source", "'AS id 1.0D'", "add a comma"),
        ("SELECT key AS `id` upper(topic) AS n FROM source", "'AS id upper'", "add a comma"),
        ("SELECT value.id AS id FROM source", "'value.id'", "get_json_object(CAST(value AS STRING), '$.id')"),
        ("SELECT topic FROM source WHERE count(*) > 1 GROUP BY topic", "calls count in WHERE", "HAVING"),
        ("SELECT length(value) AS n FROM source WHERE n > 3", "'n' in WHERE", "repeat the expression"),
        ("SELECT upper(CAST(key AS STRNG)) AS k FROM source", "'STRNG'", "did you mean STRING?"),
        ("SELECT upper(key, value) AS k FROM source", "'upper'", "upper takes 1 argument, not 2"),
        ("SELECT\n  sha2(concat(key, value)) AS k\nFROM source", "3 of '  sha2(concat(", "takes 2 arguments, not 1"),
        ("SELECT coalesce() AS k FROM source", "'coalesce'", "1 or more arguments, not 0"),
        ("SELECT substr(key) AS k, substring_index(key) AS v FROM source", "'substring_index'", "takes 3"),
        ("SELECT key AS 'id' FROM source", "names a column 'id'", "`back quotes`"),
        ("SELECT key AS order-id FROM source", "'order-id'", "write `order-id`"),
        ("SELECT CAST(key STRING) AS k FROM source", "CAST without AS", "CAST(... AS STRING)"),
        ("SELECT CASE WHEN offset > 1 THEN key AS k FROM source", "CASE without END", "write END"),
        ("SELECT count(*) OVER w AS n FROM source WINDOW w AS (PARTITION BY topic)", "'OVER'", "GROUP BY"),
        ("SELECT key FROM source EXCEPT SELECT value FROM source", "'EXCEPT'", "the sink's table"),
        ("SELECT key FROM source OFFSET 3", "'OFFSET'", "the sink's table"),
        ("SELECT offset - value AS n FROM source", "calculates with 'value'", "CAST(CAST(value AS STRING)"),
        ("SELECT topic, sum(value) AS n FROM source GROUP BY topic", "calculates with 'value'", "CAST(CAST(value"),
    ],
)
def test_what_cannot_run_is_an_error(sql: str, what: str, hint: str) -> None:
    error = check_sql(sql, SOURCE, builtin=True).error
    assert error is not None
    assert error.code == "DELIVERED_SQL_INVALID"
    assert what in error.message
    assert hint in str(error.next_step)
    assert check_sql(sql, SOURCE, builtin=False).error is None, "another session may know more"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT FROM source",
        "SELECT key AS from, from FROM source",
        "SELECT 4 >>> 1 AS n FROM source",
        "SELECT nothing FROM source LATERAL VIEW explode(split(value, ',')) AS word",
        "SELECT value FROM parquet.`/rows`",
        "SHOW TABLES",
        "SELECT value FROM source GROUP topic",
        "SELECT value FROM source WHERE key IN (SELECT value FROM source)",
    ],
)
def test_what_only_spark_can_tell_is_a_doubt(sql: str) -> None:
    found = check_sql(sql, SOURCE, builtin=True)
    assert found.error is None
    assert found.doubt


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT value v FROM source s LIMIT 3",
        "SELECT CASE WHEN offset > 1 THEN 'AS' END AS `my-id`, CAST(CAST(key AS STRING) AS INT) - 1 AS n FROM source",
        "SELECT key FROM source UNION ALL SELECT value FROM source",
        "SELECT topic FROM source EXCEPT SELECT 'a' AS topic",
        "SELECT a.key FROM source a LEFT SEMI JOIN source b ON a.key = b.key",
        "select Key, `value` from SOURCE where Topic = 'FORM a b' -- it's",
        "SELECT transform(split(CAST(value AS STRING), ','), (x, i) -> concat(x, i)) AS words FROM source",
        "WITH a AS (SELECT value AS v FROM source) SELECT v FROM a WHERE v IS NOT NULL",
        "SELECT date_trunc('HOUR', timestamp) AS hour, extract(DAY FROM timestamp) AS day FROM source",
        "SELECT from_json(CAST(value AS STRING), 'a INT').a AS a, current_timestamp AS now FROM source",
        "SELECT uuid() AS id, random() AS r, chr(65) AS c FROM source",
        "SELECT trim(BOTH 'a' FROM topic) AS t, count(DISTINCT key, topic) AS n FROM source",
        "WITH upper(a, b) AS (SELECT key, value FROM source) SELECT a FROM upper",
        "SELECT sha2.a FROM source sha2(a, b, c, d, e)",
        "SELECT key.value FROM source key;",
        "SELECT n FROM (SELECT length(value) AS n FROM source) WHERE n > 3",
        "SELECT topic, count(*) AS n FROM source WHERE offset > 1 GROUP BY topic HAVING n > 1",
    ],
)
def test_what_spark_accepts_is_accepted(sql: str) -> None:
    found = check_sql(sql, SOURCE, builtin=True)
    assert (found.error, found.doubt) == (None, "")


def test_columns_have_the_types_that_are_certain() -> None:
    sql = (
        "SELECT *, Key AS id, CAST(value AS STRING) AS text, upper(topic) AS up, count(*) AS n FROM source GROUP BY ALL"
    )
    found = check_sql(sql, SOURCE, builtin=True)
    assert found.columns is not None
    assert found.columns.types[5:] == [pa.binary(), pa.string(), UNKNOWN, pa.int64()]
    assert found.aggregates
    joined = check_sql("SELECT a.key FROM source a JOIN source b ON a.key = b.key", SOURCE, builtin=True)
    assert (joined.columns, joined.aggregates) == (None, False)


def test_what_needs_a_watermark_is_told() -> None:
    outer = check_sql("SELECT a.key FROM source a LEFT JOIN source b ON a.key = b.key", SOURCE, builtin=True)
    assert (outer.error, outer.outer is not None) == (None, True)
    constant = "SELECT key FROM source LEFT JOIN (SELECT 'a' AS topic) AS known USING (topic)"
    assert check_sql(constant, SOURCE, builtin=True).outer is None
    assert check_sql("SELECT key FROM source UNION SELECT value FROM source", SOURCE, builtin=True).aggregates
    assert check_sql("SELECT 1 AS n FROM source HAVING count(*) > 1", SOURCE, builtin=True).aggregates


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "pyspark.sql", raising=False)  # with a session of other tests
    append(str(tmp_path / "in"), pa.table({"key": [b"k"], "value": [b"v"]}))
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER, text TEXT)")
    return tmp_path


def plan(folder: Path, sql: str | None, **more: object) -> Plan | Refusal:
    return delivered.Pipeline(
        name="orders",
        guarantee="exactly_once",
        checkpoint=folder / "checkpoint",
        source=delivered.log(folder / "in"),
        transform=sql,
        sinks=[delivered.sqlite(folder / "out.db", table="orders", **more)],
    ).plan()


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        (None, "COLUMN_MISSING"),
        ("SELECT CAST(key AS STRING) AS id FROM source", "COLUMN_TYPE"),
        ("SELECT length(key) AS id, upper(value) AS words FROM source", "COLUMN_MISSING"),
        ("SELECT length(key) AS id, upper(value) FROM source", "COLUMN_MISSING"),
        ("SELECT length(key) AS id, CAST(value AS STRING) FROM source", "COLUMN_MISSING"),
        ("SELECT 'a' AS id, CAST(value AS STRING) AS text FROM source", "COLUMN_TYPE"),
        ("SELECT vale AS id FROM source", "SQL_INVALID"),
        ("SELECT count(*) AS id FROM source", "OUTPUT_MODE"),
        ("SELECT DISTINCT length(key) AS id FROM source", "OUTPUT_MODE"),
        ("SELECT length(key) AS id FROM source ORDER BY key", "OUTPUT_MODE"),
        ("SELECT length(key) AS id, CAST(value AS STRING) AS text FROM source", None),
        ("SELECT length(key) AS id, upper(CAST(value AS STRING)) AS text FROM source", None),
    ],
)
def test_columns_are_held_against_the_table_without_spark(orders: Path, sql: str | None, code: str | None) -> None:
    answer = plan(orders, sql)
    assert (answer.code if isinstance(answer, Refusal) else None) == code, answer


def test_what_the_options_add_to_a_table_is_not_missing(orders: Path) -> None:
    assert isinstance(plan(orders, "SELECT length(key) AS id, CAST(value AS STRING) AS more FROM source"), Refusal)
    added = plan(orders, "SELECT length(key) AS id, CAST(value AS STRING) AS more FROM source", mergeSchema=True)
    assert isinstance(added, Plan), added
    picked = plan(orders, "SELECT length(key) AS id, value AS more FROM source", select=["id"])
    assert isinstance(picked, Plan), picked
    unknown = plan(orders, "SELECT length(key) AS id FROM source", select=["idd"])
    assert isinstance(unknown, Refusal)
    assert unknown.code == "SELECT_COLUMN"


def test_what_an_audit_cannot_read_is_a_warning(orders: Path) -> None:
    sql = "SELECT length(key) AS id, CAST(value AS STRING) AS text FROM source"
    for right in ({"id": "id"}, {"id": "concat(id, text)", "own": "id > 0"}, {"key": "text"}):
        answer = plan(orders, sql, audit=right)
        assert isinstance(answer, Plan) and answer.warnings == (), answer
    wrong = plan(orders, sql, audit={"id": "idd", "own": "true"})
    assert isinstance(wrong, Plan)
    (warning,) = wrong.warnings
    assert "id is 'idd'" in warning and warning.endswith("[DELIVERED_AUDIT_EXPRESSION]")


def test_the_command_asks_spark_only_in_doubt(orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivered.cli.run.quiet_spark", lambda *_: sys.exit(77))
    file = orders / "orders.yaml"
    file.write_text(
        f"pipeline: orders\nguarantee: exactly_once\ncheckpoint: {orders / 'checkpoint'}\n"
        f"source: {{format: log, path: {orders / 'in'}}}\n"
        "transform: {sql: SELECT vale AS id FROM source}\n"
        f"sinks: [{{format: sqlite, path: {orders / 'out.db'}, table: orders}}]\n"
    )
    wrong = CliRunner().invoke(app, ["plan", str(file)])
    assert wrong.exit_code == 2
    assert "did you mean value?" in wrong.output
    right = CliRunner().invoke(app, ["plan", str(file), "-s", "transform.sql=SELECT length(key) AS id FROM source"])
    assert right.exit_code == 0, right.output
    doubtful = "transform.sql=SELECT FROM source"
    assert CliRunner().invoke(app, ["plan", str(file), "-s", doubtful]).exit_code == 77

"""Pipelines over Spark's own sources on a Spark without data sources in Python: the same queries on any version."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.sweeps import sweep

import delivered
from delivered.spark import internals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 120.0
SQL = "SELECT k, count(*) AS n, sum(v) AS total FROM source GROUP BY k"


@pytest.fixture
def portable(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """A session as of Spark 3.5."""
    monkeypatch.setattr(internals, "PYTHON_SOURCES", False)
    return spark


def produce(folder: Path, number: int, values: range) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"k": f"k{v % 5}", "v": v}) for v in values]
    (folder / f"{number}.json").write_text("\n".join(lines))


def table(database: Path, name: str) -> list[Any]:
    with sqlite3.connect(database) as connection:
        return sorted(connection.execute(f"SELECT * FROM {name}"))


def definition(folder: Path, guarantee: str = "exactly_once", **more: Any) -> delivered.Pipeline:
    return delivered.Pipeline(
        name="p",
        guarantee=guarantee,
        checkpoint=folder / "checkpoint",
        source=delivered.endpoint("spark:json", path=str(folder / "in"), maxFilesPerTrigger="1"),
        trigger="available_now",
        conf={"spark.sql.streaming.schemaInference": "true"},
        **more,
    )


def run(pipeline: delivered.Pipeline, spark: SparkSession) -> None:
    spark.conf.set("spark.sql.streaming.schemaInference", "true")
    try:
        query = pipeline.start(spark)
        assert query.awaitTermination(WAIT_S) and query.exception() is None
    finally:
        spark.conf.unset("spark.sql.streaming.schemaInference")


def test_append_with_dead_letters(portable: SparkSession, tmp_path: Path) -> None:
    """A batch that was decided and not logged runs again; its rows are not written again."""
    pipeline = definition(
        tmp_path,
        transform=delivered.transform(
            "SELECT k, CASE WHEN v = 7 THEN NULL ELSE v END AS v FROM source", deterministic=True
        ),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "t", mode="upsert", keyColumns="v")],
        on_bad_row="dead_letter",
        dead_letter=delivered.sqlite(str(tmp_path / "out.db"), "dead"),
        guarantee="at_least_once",
    )
    for number in range(2):
        produce(tmp_path / "in", number, range(number * 10, number * 10 + 10))
    run(pipeline, portable)
    for name in ("1", ".1.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    produce(tmp_path / "in", 2, range(20, 30))
    run(pipeline, portable)
    found = sorted(table(tmp_path / "out.db", "t"), key=lambda row: row[1])
    assert found == [(f"k{v % 5}", v) for v in range(30) if v != 7]
    assert len(table(tmp_path / "out.db", "dead")) == 1


@pytest.mark.parametrize("mode", sweep(["update", "complete"], lambda mode: mode == "update"))
def test_totals(portable: SparkSession, tmp_path: Path, mode: str) -> None:
    for number in range(2):
        produce(tmp_path / "in", number, range(number * 10, number * 10 + 10))
    pipeline = definition(
        tmp_path, transform=SQL, sinks=[delivered.sqlite(str(tmp_path / "out.db"), "totals")], output_mode=mode
    )
    run(pipeline, portable)
    assert table(tmp_path / "out.db", "totals") == [(f"k{k}", 4, sum(range(k, 20, 5))) for k in range(5)]


def test_what_has_no_data_source_is_refused(portable: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(delivered.Refused, match=r"DELIVERED_SPARK_VERSION.*write_batch"):
        delivered.register(portable)
    for call in (
        lambda: portable.read.format("delivered_none").load(),
        lambda: portable.range(1).write.format("delivered_none").mode("append").save(),
        lambda: portable.sql("CREATE TABLE t USING delivered_none"),
    ):
        with pytest.raises(delivered.DeliveredError, match=r"DELIVERED_(SPARK_VERSION|FORMAT_UNKNOWN)"):
            call()

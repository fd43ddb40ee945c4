"""Joins, recomputed: of streams, and with a table that may change. The rest: tests/spark/test_recompute.py."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812

import delivered
from delivered.audit.evidence import Counts, Verdict
from delivered.connectors.log import append

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Shop:
    """Orders and payments, each with an event time in seconds as its value, joined by key."""

    def __init__(self, spark: SparkSession, folder: Path, transform: Any, *only: str) -> None:
        self.spark, self.folder = spark, folder
        sources = only or ("orders", "payments")
        read: Any = {n: delivered.log(str(folder / n), maxOffsetsPerTrigger=30) for n in sources}
        self.pipeline = delivered.Pipeline(
            name="shop",
            guarantee="exactly_once",
            checkpoint=folder / "checkpoint",
            **({"source": read[only[0]]} if only else {"sources": read}),
            transform=transform,
            sinks=[delivered.sqlite(str(folder / "out.db"), "paid")],
            trigger="available_now",
        )

    def run(self, **times: range) -> None:
        for source, seconds in times.items():
            keys = [f"{t}".encode() for t in seconds]
            append(str(self.folder / source), pa.table({"key": keys, "value": keys}))
        self.pipeline.start(self.spark).awaitTermination(120)

    def change(self, statement: str) -> None:
        with closing(sqlite3.connect(self.folder / "out.db")) as connection, connection:
            assert connection.execute(statement).rowcount == 1


pytestmark = pytest.mark.usefixtures("small_shuffles")
INNER = (
    "SELECT CAST(o.key AS STRING) AS id, CAST(p.value AS STRING) AS paid FROM orders o JOIN payments p ON o.key = p.key"
)


def outer(orders: DataFrame, payments: DataFrame) -> DataFrame:
    """Payments within ten seconds, or none."""

    def timed(frame: DataFrame, prefix: str) -> DataFrame:
        second = F.col("value").cast("string").cast("bigint")
        found = frame.select(F.col("key").cast("string").alias(f"{prefix}_id"), second.cast("timestamp").alias(prefix))
        return found.withWatermark(prefix, "5 seconds")

    fits = "o_id = p_id AND p >= o AND p <= o + INTERVAL 10 SECONDS"
    joined = timed(orders, "o").join(timed(payments, "p"), F.expr(fits), "leftOuter")
    return joined.select(F.col("o_id").alias("id"), F.unix_seconds("p").cast("string").alias("paid"))


@pytest.mark.recompute("inner join of streams, no watermark", "as one batch", "")
@pytest.mark.matrix
def test_an_inner_join_is_recomputed_in_one_batch(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path, INNER)
    shop.run(orders=range(100), payments=range(20, 60))
    shop.run(payments=range(60, 80))
    report = shop.pipeline.audit(spark, recompute=True)
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(60, 60)), str(report)
    assert any("as one batch" in note for note in report.notes)
    shop.change("DELETE FROM paid WHERE id = '70'")
    assert shop.pipeline.audit(spark, recompute=True).verdict is Verdict.BROKEN


@pytest.mark.recompute("other joins of streams", "in batches", "")
@pytest.mark.matrix
def test_an_outer_join_is_replayed(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path, outer)
    shop.run(orders=range(100), payments=range(20, 120))
    report = shop.pipeline.audit(spark, recompute=True)
    assert report.verdict is Verdict.HELD, str(report)
    assert any("in the ledger's" in note for note in report.notes)
    assert report.counts.sent == 99, "an order at the epoch is no newer than the first watermark, and dropped as late"
    shop.change("UPDATE paid SET paid = NULL WHERE id = '70'")
    report = shop.pipeline.audit(spark, recompute=True)
    assert (report.verdict, report.counts.lost, report.counts.unexpected) == (Verdict.BROKEN, 1, 1)


@pytest.mark.matrix
def test_an_idle_source_holds_the_watermark_after_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    """Spark forgets at a restart how far each source was: the replay, in one go, says that it may be wrong."""
    shop = Shop(spark, tmp_path, outer)
    shop.run(orders=range(30), payments=range(20, 120))
    report = shop.pipeline.audit(spark, recompute=True)
    assert report.verdict is Verdict.HELD, str(report)
    shop.run(orders=range(30, 90))
    shop.run(orders=range(10, 20))
    report = shop.pipeline.audit(spark, recompute=True)
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), str(report)
    assert any("a restart of the query changes it" in u for u in report.unknowns), report.unknowns


def with_prices(kind: str, path: Path) -> Any:
    """Orders with the price of their key, or none."""

    def priced(frame: DataFrame) -> DataFrame:
        orders = frame.select(F.col("key").cast("string").alias("id"))
        return orders.join(frame.sparkSession.read.parquet(str(path)), "id", kind)

    return priced


@pytest.mark.recompute(
    "join with a table",
    "inner: as one batch; others: in batches",
    "everything, if a row differs: the table may have changed",
)
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "rows", "way"), [("inner", 80, "as one batch"), ("left", 90, "in the ledger's 3 bat")]
)
def test_a_join_with_a_table_is_unknown_once_the_table_changed(
    spark: SparkSession, kind: str, rows: int, way: str, tmp_path: Path
) -> None:
    prices = {"id": [str(i) for i in range(80)], "paid": [str(i * 10) for i in range(80)]}
    (tmp_path / "prices").mkdir()
    pq.write_table(pa.table(prices), tmp_path / "prices" / "1.parquet")
    shop = Shop(spark, tmp_path, with_prices(kind, tmp_path / "prices"), "orders")
    shop.run(orders=range(90))
    report = shop.pipeline.audit(spark, recompute=True)
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(rows, rows)), str(report)
    assert any(way in note for note in report.notes), report.notes
    pq.write_table(pa.table({"id": ["85", "86"], "paid": ["850", "860"]}), tmp_path / "prices" / "2.parquet")
    report = shop.pipeline.audit(spark, recompute=True)
    assert (report.verdict, report.breaches, report.counts.lost) == (Verdict.UNKNOWN, [], 2), str(report)
    assert any("a table that is not a stream" in reason for reason in report.unknowns), report.unknowns


@pytest.mark.recompute("join with `VALUES` in the SQL", "in batches", "")
@pytest.mark.matrix
def test_a_join_with_values_in_the_sql_is_exact(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(spark, tmp_path, VALUES, "orders")
    shop.run(orders=range(10))
    report = shop.pipeline.audit(spark, recompute=True)
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(10, 10)), str(report)
    assert any("in the ledger's" in note for note in report.notes)
    shop.change("UPDATE paid SET paid = 'three' WHERE id = '2'")
    report = shop.pipeline.audit(spark, recompute=True)
    assert report.verdict is Verdict.BROKEN, str(report)


VALUES = """
SELECT CAST(o.key AS STRING) AS id, p.paid FROM source o
LEFT JOIN (VALUES ('1', 'one'), ('2', 'two')) AS p (id, paid) ON CAST(o.key AS STRING) = p.id
"""

"""`delivered.Pipeline` end to end over the embedded connectors: start, stop between batches, restart, audit."""

from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from tests.spark.log_to_sqlite import WAIT_S, produce, rows, until

import delivered
from delivered.checkpoint import sidecar
from delivered.spark.start import running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def pipeline(folder: Path, guarantee: str = "exactly_once", **settings: object) -> delivered.Pipeline:
    options = settings.pop("source_options", {})
    defaults: dict[str, object] = {
        "trigger": "available_now",
        "transform": delivered.arrow(select=["key", "value"]),
        "audit": {"id": "get_json_object(CAST(value AS STRING), '$.id')"},
    }
    return delivered.Pipeline(
        name="orders",
        guarantee=guarantee,
        checkpoint=folder / "checkpoint",
        source=delivered.log(str(folder / "in"), **options),  # type: ignore[arg-type]
        sinks=[delivered.sqlite(str(folder / "out.db"), "orders")],
        **{**defaults, **settings},  # type: ignore[arg-type]
    )


def upper(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(0, "key", pa.array([k.upper() for k in batch.column(0).to_pylist()], pa.binary()))


def as_frame(frame: DataFrame) -> DataFrame:
    return frame.select("key", "value")


@pytest.mark.parametrize(
    ("transform", "key"),
    [
        (delivered.arrow(upper, select=["key", "value"]), b"K0"),
        pytest.param(as_frame, b"k0", marks=pytest.mark.matrix),
        pytest.param(
            "SELECT upper(CAST(key AS STRING)) AS key, value FROM source", "K0", marks=pytest.mark.matrix
        ),  # as test_portable.py
        pytest.param(None, b"k0", marks=pytest.mark.matrix),
    ],
    ids=["arrow", "python", "sql", "none"],
)
def test_each_kind_of_transform_delivers_and_audits_clean(
    spark: SparkSession, tmp_path: Path, transform: object, key: object
) -> None:
    produce(tmp_path / "in", 0, 70)
    made = pipeline(tmp_path, transform=transform)
    made.start(spark).awaitTermination(WAIT_S)
    assert rows(tmp_path) == 70
    with sqlite3.connect(tmp_path / "out.db") as connection:
        assert connection.execute("SELECT min(key) FROM orders").fetchone() == (key,)
    report = made.audit(spark)
    assert (report.exit_code, report.counts.sent, report.counts.delivered) == (0, 70, 70)


def test_it_starts_from_any_thread(spark: SparkSession, tmp_path: Path) -> None:
    """Spark looks for a sink's format in the session that is active in the thread, and in a new thread none is."""
    produce(tmp_path / "in", 0, 10)
    made = pipeline(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        query = pool.submit(made.start, spark).result()
        assert pool.submit(query.awaitTermination, WAIT_S).result()
    assert rows(tmp_path) == 10


def test_latest_means_the_same_place_when_the_pipeline_is_started_again(spark: SparkSession, tmp_path: Path) -> None:
    """Spark asks a source anew where batch 0 begins, as long as batch 0 is not logged."""
    produce(tmp_path / "in", 0, 10)
    made = pipeline(tmp_path, source_options={"startingOffsets": "latest"})
    # A start that died before Spark logged anything.
    sidecar.keep_first(made.checkpoint, made.sources["source"].source().driver().initial)
    produce(tmp_path / "in", 10, 5)
    # Of the second start's own "latest" these five would be none.
    made.start(spark).awaitTermination(WAIT_S)
    assert rows(tmp_path) == 5


def test_stop_lets_the_running_batch_finish(spark: SparkSession, tmp_path: Path) -> None:
    produce(tmp_path / "in", 0, 400)

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows:
            time.sleep(0.5)
        return batch

    made = pipeline(
        tmp_path,
        transform=delivered.arrow(slow, select=["key", "value"]),
        trigger=None,
        source_options={"maxOffsetsPerTrigger": 20},
    )

    def logged(log: str) -> set[int]:
        return {int(p.name) for p in (tmp_path / "checkpoint" / log).iterdir() if p.name.isdigit()}

    query = made.start(spark)
    until(lambda: rows(tmp_path) >= 40)
    until(lambda: 20 * len(logged("offsets")) > rows(tmp_path))  # a batch runs that is not decided
    assert made.stop(query)
    assert logged("offsets") == logged("commits"), "every batch that began is logged"
    assert 40 <= rows(tmp_path) < 400, "and it stopped before the end"
    assert not list((tmp_path / "out.db.delivered").glob("**/*.arrow")), "nothing staged was left behind"


def test_a_restart_with_changed_code_stops_the_former_query_between_batches(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As a notebook's cell that runs again. Without `restart`, the second start is refused."""
    produce(tmp_path / "in", 0, 200)

    def tagged(tag: bytes) -> delivered.Transform:
        def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
            if batch.num_rows:
                time.sleep(0.4)
            return batch.set_column(0, "key", pa.array([tag] * batch.num_rows, pa.binary()))

        return delivered.arrow(slow, select=["key", "value"])

    def version(tag: bytes) -> delivered.Pipeline:
        return pipeline(
            tmp_path,
            transform=tagged(tag),
            trigger=None,
            source_options={"maxOffsetsPerTrigger": 20 if tag == b"a" else 40},
        )

    first = version(b"a").start(spark)
    until(lambda: rows(tmp_path) >= 20)
    with pytest.raises(delivered.UsageError, match="QUERY_RUNS"):
        version(b"b").start(spark)
    assert first.isActive
    made = version(b"b")
    second = made.start(spark, restart=True)
    assert not first.isActive and first.exception() is None
    second.processAllAvailable()
    assert made.stop(second)
    with sqlite3.connect(tmp_path / "out.db") as connection:
        found = connection.execute("SELECT key, count(*), count(DISTINCT value) FROM orders GROUP BY key").fetchall()
    assert sorted(key for key, *_ in found) == [b"a", b"b"]
    assert sum(n for _, n, _ in found) == sum(n for _, _, n in found) == 200
    found.sort()
    assert found[0][1] % 20 == 0, "whole batches of each version"
    assert not running(made), "a query that ended is forgotten"


def test_a_second_pipeline_of_the_same_name_on_a_new_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    produce(tmp_path / "in", 0, 10)
    pipeline(tmp_path).start(spark).awaitTermination(WAIT_S)
    made = pipeline(tmp_path)
    made.checkpoint = str(tmp_path / "another")
    with pytest.raises(delivered.Refused, match="CHECKPOINT_NEW"):
        made.start(spark)
    assert not (tmp_path / "another").exists()

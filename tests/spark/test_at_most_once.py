"""at_most_once on a cluster, in a session of the user's own: a stage that reruns. Speculative copies, exactly_once too.

Spark numbers attempts from 0 again when a stage reruns after lost shuffle files (P31)."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tenacity
from tests.spark.standalone import Standalone, kill_tree
from tests.support.halted import killed

import delivered
from delivered.connectors.sqlite import CONNECTOR
from delivered.crash import HIT_SUFFIX
from delivered.model.capability import Guarantee
from delivered.model.errors import Unreachable
from delivered.model.identity import Scope
from delivered.model.work import DriverAddress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APP = Path(__file__).parent / "apps" / "shuffled.py"
ROWS = 2_000
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
}


def _input(folder: Path) -> Path:
    """Rows in four files, so that each executor has map output."""
    folder.mkdir()
    for part in range(4):
        first = part * ROWS // 4
        ids = pa.array(range(first, first + ROWS // 4), pa.int64())
        pq.write_table(pa.table({"id": ids}), folder / f"{part}.parquet")
    return folder


def _arguments(folder: Path) -> list[str]:
    pairs = {"input": _input(folder / "in"), "database": folder / "ids.db", "checkpoint": folder / "checkpoint"}
    return [part for name, value in pairs.items() for part in (f"--{name}", str(value))]


def _counted(folder: Path) -> tuple[int, int]:
    """Rows of the table, and those that the ledger counts as given up; no row is there twice."""
    with sqlite3.connect(folder / "ids.db") as database:
        rows, ids = database.execute("SELECT count(*), count(DISTINCT id) FROM ids").fetchone()
    assert rows == ids, f"{rows - ids} rows twice"
    sink = CONNECTOR.sink({"path": str(folder / "ids.db"), "table": "ids"})
    incarnation = json.loads((folder / "checkpoint" / "metadata").read_text())["id"]
    last = sink.store(Scope("ids", sink.name, incarnation)).peek().last
    assert last is not None
    return rows, last.given_up.count


@pytest.mark.matrix
def test_executors_that_do_not_reach_the_driver_are_noticed_before_the_start(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded as started, so the next start gives nothing up."""
    elsewhere = DriverAddress("127.0.0.1", bind="127.0.0.2")  # the address that executors get is not where it listens
    with monkeypatch.context() as patch:
        patch.setattr(DriverAddress, "of", lambda _: elsewhere)
        delivered.register(spark)
        frame = spark.readStream.schema("id long").parquet(str(_input(tmp_path / "in")))
        writer = frame.writeStream.format("delivered_sqlite").option("guarantee", "at_most_once").queryName("ids")
        writer = writer.option("path", str(tmp_path / "ids.db")).option("table", "ids").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        with pytest.raises(Unreachable, match=r"GRANT_UNREACHABLE.*127\.0\.0\.1.*was not started.*bindAddress"):
            writer.start()
    delivered.register(spark)
    writer.start().awaitTermination()
    assert _counted(tmp_path) == (ROWS, 0)


@pytest.mark.matrix
def test_a_stage_that_reruns_after_lost_shuffle_files_sends_nothing_twice(tmp_path: Path) -> None:
    hits = tmp_path / "hits"
    hits.mkdir()
    env = {"DELIVERED_CRASH": "write.flush:after@batch=0", "DELIVERED_CRASH_DIR": str(hits)}

    @tenacity.retry(stop=tenacity.stop_after_delay(180), wait=tenacity.wait_fixed(0.1), reraise=True)
    def hit() -> dict[str, int]:
        assert driver.poll() is None, (tmp_path / "driver.log").read_text()[-4000:]
        found: dict[str, int] = json.loads(next(hits.glob(f"*{HIT_SUFFIX}"), Path("none")).read_text())
        return found

    with Standalone(tmp_path, sys.executable, env, several_hosts=True) as cluster:
        driver = cluster.submit(APP, *_arguments(tmp_path))
        try:
            kill_tree(cluster.worker_of(hit()["pid"]))
            assert driver.wait(240) == 0, (tmp_path / "driver.log").read_text()[-4000:]
        finally:
            if driver.poll() is None:
                kill_tree(driver)
    said = (tmp_path / "driver.log").read_text()
    assert "ResultStage 2" in said
    assert "FetchFailed" in said, "no shuffle file was lost"
    rows, given_up = _counted(tmp_path)
    assert ROWS - rows <= given_up < ROWS


@pytest.mark.matrix
@pytest.mark.parametrize("point", ["write.send:after@batch=0", "write.flush:after@batch=0"])
def test_a_batch_whose_driver_died_after_a_grant_is_given_up_in_full(tmp_path: Path, point: str) -> None:
    """Grants die with their driver. That the batch was started is durable: its shards are never granted again."""
    command = [sys.executable, str(APP), *_arguments(tmp_path)]
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    killed(command, point, tmp_path, env)
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        rows, given_up = _counted(tmp_path)
        assert (rows < ROWS, given_up) == (True, ROWS)


def _speculated(folder: Path, *given: str) -> None:
    """Spark starts a copy of a task while its first attempt, which has read rows, lives."""
    held = folder / "held"
    held.mkdir()
    with Standalone(folder, sys.executable, {}, several_hosts=True) as cluster:
        driver = cluster.submit(APP, *_arguments(folder), "--held", str(held), *given, conf=SPECULATION)
        try:
            assert driver.wait(240) == 0, (folder / "driver.log").read_text()[-4000:]
        finally:
            if driver.poll() is None:
                kill_tree(driver)
    assert (held / "second").exists(), "Spark started no second copy"


@pytest.mark.matrix
@pytest.mark.parametrize("guarantee", [Guarantee.AT_MOST_ONCE, Guarantee.EXACTLY_ONCE])
def test_a_speculative_copy_counts_nothing_twice(tmp_path: Path, guarantee: Guarantee) -> None:
    _speculated(tmp_path, "--guarantee", guarantee)
    assert _counted(tmp_path) == (ROWS, 0)


@pytest.mark.matrix
@pytest.mark.parametrize("guarantee", [Guarantee.AT_MOST_ONCE, Guarantee.EXACTLY_ONCE])
def test_a_speculative_copy_in_foreach_batch_counts_nothing_twice(tmp_path: Path, guarantee: Guarantee) -> None:
    _speculated(tmp_path, "--guarantee", guarantee, "--foreach")
    assert _counted(tmp_path) == (ROWS, 0)

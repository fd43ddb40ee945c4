"""State and rows of a batch are from the same run, even if it is killed after the decision.

Spark runs a decided batch again and keeps the state of that run, so the sink has to see that its rows are the delivered
ones. Each row tells the state before it and after it: whatever a key's state was, it must have been delivered.
"""

from __future__ import annotations

import sqlite3
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.spark.apps import stateful
from tests.support.halted import killed

from delivered.connectors.log import append
from delivered_lab import supervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APP = Path(__file__).parent / "apps" / "stateful.py"
RECORDS, KEYS, BATCHES = 600, 30, 6
AFTER_DECISION = ("commit.decide:after", "commit.apply:after", "log:before")
STORES = [("hdfs", 1), ("rocksdb", 1), ("rocksdb", 2)]
CODE = "DELIVERED_REPLAY_DIFFERS"


def fill(folder: Path) -> None:
    keys = [f"k{i % KEYS}".encode() for i in range(RECORDS)]
    append(str(folder / "in"), pa.table({"key": keys, "value": [str(i).encode() for i in range(RECORDS)]}))


def run(folder: Path, crash: str, *arguments: Any) -> tuple[supervisor.Outcome, str]:
    fill(folder)
    with (folder / "output").open("wb") as output:
        command = [sys.executable, str(APP), str(folder), *map(str, arguments)]
        done = supervisor.run(command, crash, folder / "hits", timeout_s=400, output=output)
    return done, (folder / "output").read_text()


def chains(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """key -> (before, now) of its rows, in the order of the batches."""
    found = defaultdict(list)
    with sqlite3.connect(folder / "out.db") as connection:
        for key, before, now in connection.execute("SELECT k, before, now FROM totals ORDER BY rowid"):
            found[key].append((before, now))
    return found


@pytest.mark.matrix  # test_totals.py is what of it stays in `make test`
@pytest.mark.parametrize(("store", "version"), STORES)
def test_sums_are_exact_after_every_kill(store: str, version: int, tmp_path: Path) -> None:
    points = ("write.prepare:after", *AFTER_DECISION)
    crash = ",".join(f"{point}@batch={number}" for number, point in enumerate(points, 1))
    done, said = run(tmp_path, crash, store, version)
    assert done.exit_code == 0, said[-4000:]
    assert len(done.kills) == len(points)
    expected: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for batch in range(BATCHES):
        for key in range(KEYS):
            numbers = [i for i in range(batch * 100, batch * 100 + 100) if i % KEYS == key]
            before = expected[f"k{key}"][-1][1] if expected[f"k{key}"] else ""
            expected[f"k{key}"].append((before, str(int(before or 0) + sum(numbers))))
    assert chains(tmp_path) == expected


def delivered_states(folder: Path, batches: int) -> None:
    """Every row goes on from a state that was delivered."""
    found = chains(folder)
    for key, chain in found.items():
        told = [now for _, now in chain]
        assert [before for before, _ in chain] == ["", *told[:-1]], f"{key}: its state was never delivered"
    assert {len(chain) for chain in found.values()} == {batches}


@pytest.mark.matrix
def test_a_decided_batch_with_state_that_differs_is_stopped_in_another_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The smallest of the sweep below."""
    fill(tmp_path)
    killed([sys.executable, str(APP), str(tmp_path), "rocksdb", "2", "uuid"], "commit.decide:after@batch=2", tmp_path)
    pipeline = stateful.pipeline(tmp_path, "rocksdb", changing=True)
    cloudpickle.register_pickle_by_value(stateful)
    before = {name: spark.conf.get(name, None) for name in stateful.settings("rocksdb", "2")}
    try:
        for name, value in stateful.settings("rocksdb", "2").items():
            spark.conf.set(name, value)
        with pytest.raises(Exception, match=rf"\[{CODE}\] Batch 2"):
            pipeline.start(spark).awaitTermination()
    finally:
        cloudpickle.unregister_pickle_by_value(stateful)
        for name, was in before.items():
            spark.conf.unset(name) if was is None else spark.conf.set(name, was)
    delivered_states(tmp_path, 3)


@pytest.mark.matrix
@pytest.mark.parametrize(("store", "version", "point"), [(*s, point) for s in STORES for point in AFTER_DECISION])
def test_a_batch_with_state_that_differs_when_run_again_stops(
    store: str, version: int, point: str, tmp_path: Path
) -> None:
    """Spark's state of the second run would hold values that nobody got. SQLite's commit.apply is a part of the
    transaction that decides: a batch that is killed there was not decided, and may have other rows."""
    done, said = run(tmp_path, f"{point}@batch=2", store, version, "uuid")
    assert len(done.kills) == 1
    stops = point != "commit.apply:after"
    assert (done.exit_code != 0) is stops, said[-4000:]
    assert (f"[{CODE}] Batch 2" in said) is stops, said[-4000:]
    delivered_states(tmp_path, 3 if stops else BATCHES)

"""State and rows of a batch are from the same run, even if it is killed after the decision.

Spark runs a decided batch again and keeps the state of that run, so the sink has to see that its rows are the delivered
ones. Each row tells the state before it and after it: whatever a key's state was, it must have been delivered.
"""

from __future__ import annotations

import sqlite3
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.sweeps import sweep

from delivered.connectors.log import append
from delivered.testing import supervisor

APP = Path(__file__).parent / "apps" / "stateful.py"
RECORDS, KEYS, BATCHES = 600, 30, 6
AFTER_DECISION = ("commit.decide:after", "commit.apply:after", "log:before")
STORES = [("hdfs", 1), ("rocksdb", 1), ("rocksdb", 2)]
CODE = "DELIVERED_REPLAY_DIFFERS"


def run(folder: Path, crash: str, *arguments: Any) -> tuple[supervisor.Outcome, str]:
    keys = [f"k{i % KEYS}".encode() for i in range(RECORDS)]
    append(str(folder / "in"), pa.table({"key": keys, "value": [str(i).encode() for i in range(RECORDS)]}))
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


@pytest.mark.parametrize(
    ("store", "version", "point"),
    sweep(
        [(*s, point) for s in STORES for point in AFTER_DECISION],
        lambda store, version, point: (store, version, point) == ("rocksdb", 2, "commit.decide:after"),
    ),
)
def test_a_batch_with_state_that_differs_when_run_again_stops(
    store: str, version: int, point: str, tmp_path: Path
) -> None:
    """Spark's state of the second run would hold values that nobody got. SQLite's commit.apply is a part of the
    transaction that decides: a batch that is killed there was not decided, and may have other rows."""
    done, said = run(tmp_path, f"{point}@batch=2", store, version, "uuid")
    for key, chain in chains(tmp_path).items():
        told = [now for _, now in chain]
        assert [before for before, _ in chain] == ["", *told[:-1]], f"{key}: its state was never delivered"
    assert len(done.kills) == 1
    stops = point != "commit.apply:after"
    assert (done.exit_code != 0) is stops, said[-4000:]
    assert (f"[{CODE}] Batch 2" in said) is stops, said[-4000:]
    assert {len(chain) for chain in chains(tmp_path).values()} == {3 if stops else BATCHES}

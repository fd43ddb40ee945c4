"""Processes that are really killed, at every crash point, under every guarantee: a log into a folder of Parquet files.

The judge looks from outside: at the records that were appended, and at the folder as another reader finds it. The runs
are those of the Delta sink.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from tests.crash.test_delta_crash import (
    TableWorld,
    fenced,
    test_killed_again_while_recovering,
    test_killed_between_the_shards_of_a_decision,
    test_killed_once_at_each_point,
    test_older_checkpoint_put_back_stops,
    test_p1_last_file_of_commits_deleted_changes_nothing,
    test_p2_new_checkpoint_is_refused_not_skipped,
    test_zombie_driver_is_fenced,
)
from tests.crash.test_sqlite_crash import log
from tests.support.zygote import Zygote

from delivered.connectors.files import CONNECTOR
from delivered.contract.sink import Sink

__all__ = [
    "log",
    "test_killed_again_while_recovering",
    "test_killed_between_the_shards_of_a_decision",
    "test_killed_once_at_each_point",
    "test_older_checkpoint_put_back_stops",
    "test_p1_last_file_of_commits_deleted_changes_nothing",
    "test_p2_new_checkpoint_is_refused_not_skipped",
    "test_zombie_driver_is_fenced",
]


class FilesWorld(TableWorld):
    format = "files"

    @property
    def sink(self) -> Sink:
        return CONNECTOR.sink({"path": str(self.table)})

    def rows(self) -> Counter[str]:
        if not any(self.table.glob("batch=*")):
            return Counter()
        return Counter(ds.dataset(str(self.table), partitioning="hive").to_table()["id"].to_pylist())

    def staged(self) -> list[Path]:
        return [p for p in self.table.glob("_delivered/p-*/s-*/staged/*/*") if p.is_file()]


@pytest.fixture
def world(log: Path, zygote: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> FilesWorld:
    zygote.load("files")
    return FilesWorld(log, tmp_path, getattr(request, "param", "exactly_once"), zygote)


def test_zombie_inside_its_decision_is_fenced(world: FilesWorld) -> None:
    """Stopped with a file in the folder that it was about to rename: that folder is gone when it goes on."""
    assert "FENCED" in fenced(world, "commit.apply:after")


def test_batch_folders_deleted_by_the_user_stay_delivered(world: FilesWorld) -> None:
    assert world.run("log:before@batch=2!kill") == -signal.SIGKILL
    for folder in world.table.glob("batch=*-0000000000"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    world.finish()
    assert [d.batch for d in world.decisions()] == [0, 1, 2]
    assert world.rows().total() == world.decisions()[-1].total.count - world.decisions()[0].total.count

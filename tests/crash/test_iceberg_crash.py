"""Processes that are really killed, at every crash point, under every guarantee: a log into an Iceberg table.

The judge looks from outside: at the records that were appended, and at the table as the client library reads it. The
runs are those of the Delta sink.
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
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
from tests.crash.test_sqlite_crash import BATCHES, log
from tests.support.zygote import Zygote

from delivered.connectors.iceberg import CONNECTOR
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


class IcebergWorld(TableWorld):
    format = "iceberg"

    @property
    def options(self) -> dict[str, str]:
        return {"warehouse": str(self.folder / "lake"), "table": "shop.events"}

    @property
    def sink(self) -> Sink:
        return CONNECTOR.sink(self.options)

    def open(self) -> Any:
        lake = self.folder / "lake"
        return SqlCatalog("default", uri=f"sqlite:///{lake}/catalog.db", warehouse=f"file://{lake}").load_table(
            "shop.events"
        )

    def rows(self) -> Counter[str]:
        if not (self.folder / "lake" / "catalog.db").exists():
            return Counter()
        return Counter(self.open().scan().to_arrow()["id"].to_pylist())

    def staged(self) -> list[Path]:
        """What lies with data files of batches, not of direct writers, and no snapshot names."""
        table = self.open()
        folder = Path(table.location().removeprefix("file://")) / "data" / "delivered"
        there = {p for p in folder.rglob("*") if p.is_file() and "direct" not in p.parts}
        named = {Path(task.file.file_path.removeprefix("file://")) for task in table.scan().plan_files()}
        return sorted(there - named)

    def strays(self) -> list[Path]:
        """Manifests of ours that nothing points to, but for those of direct writers."""
        table = self.open()
        folder = Path(table.location().removeprefix("file://")) / "metadata" / "delivered"
        there = {p for p in folder.rglob("*.avro") if "direct" not in p.parts}
        lists = {s.manifest_list for s in table.snapshots()}
        manifests = {m.manifest_path for s in table.snapshots() for m in s.manifests(table.io)}
        return sorted(there - {Path(name.removeprefix("file://")) for name in lists | manifests})

    def judge(self) -> tuple[int, int]:
        assert self.strays() == []
        return super().judge()


@pytest.fixture
def world(log: Path, zygote: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> IcebergWorld:
    zygote.load("iceberg")
    return IcebergWorld(log, tmp_path, getattr(request, "param", "exactly_once"), zygote)


def test_zombie_inside_its_decision_is_fenced(world: IcebergWorld) -> None:
    """Stopped between two shards whose files it looks at: those of the second were removed when it goes on."""
    assert "[DELIVERED_STAGED_FILE_GONE]" in fenced(world, "commit.apply:after")


def test_p3_the_last_batch_is_known_when_its_snapshot_expired(world: IcebergWorld) -> None:
    """P3: a replay recognised only within the retained snapshot history."""
    world.finish(1)
    table = world.open()
    with table.transaction() as change, change.update_snapshot().fast_append():
        pass  # a snapshot of somebody else is the table's newest now
    mine = [
        s.snapshot_id
        for s in table.snapshots()
        if s.summary and "delivered.decision" in s.summary.additional_properties
    ]
    assert len(mine) == BATCHES
    table.maintenance.expire_snapshots().by_ids(mine).commit()
    assert len(world.open().snapshots()) == 2  # that of somebody else, and the claim's
    (world.checkpoint / "commits" / str(BATCHES - 1)).unlink()
    before = world.rows()
    world.finish(1)
    assert world.rows() == before
    assert [d.batch for d in world.decisions()] == [BATCHES - 1]


def test_older_copy_of_the_lake_put_back_stops(world: IcebergWorld) -> None:
    assert world.run("log:after@batch=0!kill") == -signal.SIGKILL
    lake = world.folder / "lake"
    shutil.copytree(lake, world.folder / "copy")
    world.finish()
    shutil.rmtree(lake)
    (world.folder / "copy").rename(lake)
    (world.checkpoint / "commits" / str(BATCHES - 1)).unlink()
    assert world.run() == 3
    assert "[DELIVERED_LEDGER_BEHIND]" in world.errors[-1]

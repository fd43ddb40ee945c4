"""mode upsert into Iceberg: a process that dies at every point of one history, and a zombie that looked before.

The judge compares the table with what an undisturbed run made of it after as many batches as are decided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from tests.crash import test_delta_upsert_crash as delta
from tests.crash.test_delta_upsert_crash import (
    State,
    log,
    test_a_kill_at_every_point_leaves_a_state_that_was_decided,
    test_zombie_cannot_bring_an_old_state_back,
)
from tests.support.zygote import Zygote

from delivered.connectors.iceberg import CONNECTOR

__all__ = [
    "log",
    "test_a_kill_at_every_point_leaves_a_state_that_was_decided",
    "test_zombie_cannot_bring_an_old_state_back",
]


class World(delta.World):
    system = "iceberg"

    @property
    def options(self) -> dict[str, str]:
        return {"warehouse": str(self.folder / "lake"), "table": "shop.changes"}

    def sink(self) -> Any:
        return CONNECTOR.sink({**self.options, **self.write})

    def exists(self) -> bool:
        return (self.folder / "lake" / "catalog.db").exists()

    def open(self) -> Any:
        lake = self.folder / "lake"
        return SqlCatalog("default", uri=f"sqlite:///{lake}/catalog.db", warehouse=f"file://{lake}").load_table(
            "shop.changes"
        )

    def state(self, version: int | None = None) -> State:
        table = self.open()
        if version is None and table.current_snapshot() is None:
            return frozenset()
        rows = (table.scan() if version is None else table.scan(snapshot_id=version)).to_arrow().to_pylist()
        found = [(r["id"], r["version"], r["text"]) for r in rows]
        assert len({i for i, _, _ in found}) == len(found)
        return frozenset(found)

    def versions(self) -> list[int | None]:
        return [s.snapshot_id for s in self.open().snapshots()]

    def unnamed(self) -> list[Path]:
        """Files of ours that no snapshot ever named."""
        table = self.open()
        named = {
            Path(task.file.file_path.removeprefix("file://"))
            for s in table.snapshots()
            for task in table.scan(snapshot_id=s.snapshot_id).plan_files()
        }
        return sorted({p for p in (self.folder / "lake").rglob("data/delivered/**/*") if p.is_file()} - named)


@pytest.fixture(scope="module")
def states(log: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    return delta.undisturbed(World(log, tmp_path_factory.mktemp("undisturbed"), zygote))


@pytest.fixture
def world(log: Path, zygote: Zygote, tmp_path: Path) -> World:
    return World(log, tmp_path / "world", zygote)

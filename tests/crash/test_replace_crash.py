"""mode overwrite, and columns that are added (mergeSchema), in Delta and Iceberg: a process that dies at every point of
one history.

The judge compares the table with what an undisturbed run made of it after as many batches as are decided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.crash import test_delta_upsert_crash as delta
from tests.crash import test_iceberg_upsert_crash as iceberg
from tests.crash.test_delta_upsert_crash import (
    RECORDS,
    State,
    log,
    test_a_kill_at_every_point_leaves_a_state_that_was_decided,
    test_zombie_cannot_bring_an_old_state_back,
)
from tests.support.zygote import Zygote

__all__ = [
    "log",
    "test_a_kill_at_every_point_leaves_a_state_that_was_decided",
    "test_zombie_cannot_bring_an_old_state_back",
]

BATCHES = 3
KNOWN = pa.schema([("id", pa.string()), ("version", pa.int64())])
"""Columns of a table to which a pipeline adds its others."""


def as_state(table: Any) -> State:
    """Before the first batch of a pipeline that adds columns, the table has none of them."""
    rows = pa.table(table).to_pylist()
    found = frozenset((r["id"], r["version"], r.get("text")) for r in rows)
    assert len(found) == len(rows), "a row is there twice"
    return found


class DeltaWorld(delta.World):
    def made(self) -> None:
        DeltaTable.create(str(self.table), KNOWN)

    def state(self, version: int | None = None) -> State:
        return as_state(DeltaTable(str(self.table), version=version).to_pyarrow_table())


class IcebergWorld(iceberg.World):
    def made(self) -> None:
        from pyiceberg.catalog.sql import SqlCatalog

        lake = self.folder / "lake"
        lake.mkdir()
        catalog = SqlCatalog("default", uri=f"sqlite:///{lake}/catalog.db", warehouse=f"file://{lake}")
        catalog.create_namespace("shop")
        catalog.create_table("shop.changes", KNOWN)

    def state(self, version: int | None = None) -> State:
        table = self.open()
        if version is None and table.current_snapshot() is None:
            return frozenset()
        return as_state((table.scan() if version is None else table.scan(snapshot_id=version)).to_arrow())


WORLDS = {"delta": DeltaWorld, "iceberg": IcebergWorld}
MODES = {
    # By its first digit a change has a partition: some are replaced by the next batch, and some stay.
    ("iceberg", "overwrite"): {"mode": "overwrite", "partitionBy": "truncate(1, text)"},
    ("delta", "overwrite"): {"mode": "overwrite", "partitionBy": "gone"},
    ("iceberg", "mergeSchema"): {"mergeSchema": "true"},
    ("delta", "mergeSchema"): {"mergeSchema": "true"},
}


QUICK = {("iceberg", "overwrite"), ("delta", "mergeSchema")}


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=[] if k in QUICK else pytest.mark.matrix) for k in MODES],
    ids="-".join,
)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    system, mode = request.param
    return system, mode


def begun(kind: tuple[str, str], log: Path, folder: Path, zygote: Zygote) -> Any:
    system, mode = kind

    class Replacing(WORLDS[system]):  # type: ignore[misc]
        write = MODES[kind]

    world = Replacing(log, folder, zygote)
    if mode == "mergeSchema":
        world.made()
    return world


@pytest.fixture(scope="module")
def states(kind: tuple[str, str], log: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """Of the table after so many batches."""
    world = begun(kind, log, tmp_path_factory.mktemp("undisturbed"), zygote)
    assert world.run() == 0, world.error
    found: list[State] = [frozenset()]
    for version in world.versions():
        state = world.state(version)
        if state and state != found[-1]:
            found.append(state)
    assert len(found) == world.decided() + 1 == BATCHES + 1
    everything = frozenset.union(*found)
    assert {(v, t) for _, v, t in everything} == {(n, str(n)) for n in range(RECORDS)}
    if kind[1] == "mergeSchema":
        assert found[-1] == everything
    else:
        assert found[-1] < everything
        if kind[0] == "iceberg":
            assert found[-1] & found[-2], "some partitions stay"
    return found


@pytest.fixture
def world(kind: tuple[str, str], log: Path, zygote: Zygote, tmp_path: Path) -> Any:
    return begun(kind, log, tmp_path / "world", zygote)

"""Modes of Delta and Iceberg (upsert, overwrite, mergeSchema): a process killed at every point of one history, and a
zombie with a stale view.

The judge compares the table with an undisturbed run's after the same number of decided batches.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from tests.crash.killed import points
from tests.support.embedded_pipeline import PIPELINE
from tests.support.zygote import Zygote

from delivered.connectors import delta, iceberg
from delivered.connectors.log import append
from delivered.engine.context import open_ledger
from delivered.model.identity import Scope

RECORDS, KEYS, BATCHES = 1_000, 97, 3
State = frozenset[tuple[str, int, str | None]]
KNOWN = pa.schema([("id", pa.string()), ("version", pa.int64())])
"""Columns of a table before a pipeline adds more."""
UPSERT = {"mode": "upsert", "keyColumns": "id", "versionColumn": "version", "deleteColumn": "gone"}
MODES = {
    "delta-upsert": UPSERT,
    "iceberg-upsert": UPSERT,
    # A change's first digit is its partition: some are replaced by the next batch, some stay.
    "iceberg-overwrite": {"mode": "overwrite", "partitionBy": "truncate(1, text)"},
    "delta-overwrite": {"mode": "overwrite", "partitionBy": "gone"},
    "iceberg-mergeSchema": {"mergeSchema": "true"},
    "delta-mergeSchema": {"mergeSchema": "true"},
}
QUICK = {"delta-mergeSchema", "iceberg-upsert"}
"""Each table, and each of the modes that `make test` kills."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 changes of 97 keys, spread over two partitions."""
    path = tmp_path_factory.mktemp("log") / "changes"
    keys = [f"id-{(i * 31) % KEYS}".encode() for i in range(RECORDS)]
    append(str(path), pa.table({"key": keys, "value": [str(i).encode() for i in range(RECORDS)]}), partition_by=2)
    return path


class DeltaWorld:
    system = "delta"

    def __init__(self, log: Path, folder: Path, zygote: Zygote, write: dict[str, str]) -> None:
        self.log, self.folder, self.zygote, self.runs, self.error = log, folder, zygote, 0, ""
        self.write = write
        folder.mkdir(exist_ok=True)
        zygote.load(self.system)
        if "mergeSchema" in write:
            self.made()

    def made(self) -> None:
        """The table, without some of the columns."""
        DeltaTable.create(str(self.table), KNOWN)

    @property
    def table(self) -> Path:
        return self.folder / "changes"

    @property
    def options(self) -> dict[str, str]:
        return {"path": str(self.table)}

    def sink(self) -> Any:
        return delta.CONNECTOR.sink({**self.options, **self.write})

    def exists(self) -> bool:
        return (self.table / "_delta_log").exists()

    def versions(self) -> list[int | None]:
        return list(range(DeltaTable(str(self.table)).version() + 1))

    def spec(self, stop_at: str = "") -> dict[str, object]:
        self.runs += 1
        return {
            "log": str(self.log), self.system: self.options, "upsert": self.write,
            "checkpoint": str(self.folder / "checkpoint"), "guarantee": "exactly_once", "owner": f"o{self.runs}",
            "stop_at": stop_at,
        }  # fmt: skip

    def run(self, crash: str = "") -> int:
        code, self.error = self.zygote.run(self.spec(), self.folder, crash)
        return code

    def state(self, version: int | None = None) -> State:
        return self.as_state(DeltaTable(str(self.table), version=version).to_pyarrow_table())

    def as_state(self, table: Any) -> State:
        """Before the first batch of a pipeline that adds columns, the table has none of them."""
        rows = pa.table(table).to_pylist()
        found = [(r["id"], r["version"], r.get("text")) for r in rows]
        assert len({i for i, _, _ in found} if self.write is UPSERT else set(found)) == len(found), (
            "a row is there twice"
        )
        return frozenset(found)

    def decided(self) -> int:
        sink = self.sink()
        incarnation = (self.folder / "checkpoint" / "metadata").read_text()
        return len(list(open_ledger(sink, Scope(PIPELINE, sink.name, incarnation)).history()))

    def unnamed(self) -> list[Path]:
        """This package's files that no version of the table ever referenced."""
        table = DeltaTable(str(self.table))
        named = {
            Path(uri) for v in range(table.version() + 1) for uri in DeltaTable(str(self.table), version=v).file_uris()
        }
        return sorted({p for p in (self.table / "delivered").rglob("*") if p.is_file()} - named)


class IcebergWorld(DeltaWorld):
    system = "iceberg"

    def made(self) -> None:
        lake = self.folder / "lake"
        lake.mkdir()
        catalog = SqlCatalog("default", uri=f"sqlite:///{lake}/catalog.db", warehouse=f"file://{lake}")
        catalog.create_namespace("shop")
        catalog.create_table("shop.changes", KNOWN)

    @property
    def options(self) -> dict[str, str]:
        return {"warehouse": str(self.folder / "lake"), "table": "shop.changes"}

    def sink(self) -> Any:
        return iceberg.CONNECTOR.sink({**self.options, **self.write})

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
        return self.as_state((table.scan() if version is None else table.scan(snapshot_id=version)).to_arrow())

    def versions(self) -> list[int | None]:
        return [s.snapshot_id for s in self.open().snapshots()]

    def unnamed(self) -> list[Path]:
        """This package's files that no snapshot ever referenced."""
        table = self.open()
        named = {
            Path(task.file.file_path.removeprefix("file://"))
            for s in table.snapshots()
            for task in table.scan(snapshot_id=s.snapshot_id).plan_files()
        }
        return sorted({p for p in (self.folder / "lake").rglob("data/delivered/**/*") if p.is_file()} - named)


@pytest.fixture(scope="module", params=[pytest.param(m, marks=() if m in QUICK else pytest.mark.matrix) for m in MODES])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def begun(kind: str, log: Path, folder: Path, zygote: Zygote) -> DeltaWorld:
    world = IcebergWorld if kind.startswith("iceberg") else DeltaWorld
    return world(log, folder, zygote, MODES[kind])


@pytest.fixture(scope="module")
def states(kind: str, log: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """States of the table by number of batches."""
    world = begun(kind, log, tmp_path_factory.mktemp("undisturbed"), zygote)
    assert world.run() == 0, world.error
    found: list[State] = [frozenset()]
    for version in world.versions():
        state = world.state(version)
        if state and state != found[-1]:
            found.append(state)
    assert len(found) == world.decided() + 1 == BATCHES + 1
    if world.write is UPSERT:
        newest: dict[str, int] = {}
        for i in range(RECORDS):
            newest[f"id-{(i * 31) % KEYS}"] = i
        assert found[-1] <= {(k, v, str(v)) for k, v in newest.items()}
        return found
    everything = frozenset.union(*found)
    assert {(v, t) for _, v, t in everything} == {(n, str(n)) for n in range(RECORDS)}
    if "mergeSchema" in world.write:
        assert found[-1] == everything
    else:
        assert found[-1] < everything
        if world.system == "iceberg":
            assert found[-1] & found[-2], "some partitions stay"
    return found


@pytest.fixture
def world(kind: str, log: Path, zygote: Zygote, tmp_path: Path) -> DeltaWorld:
    return begun(kind, log, tmp_path / "world", zygote)


def test_a_kill_at_every_point_leaves_a_state_that_was_decided(world: DeltaWorld, states: list[State]) -> None:
    where = [
        p if p.startswith(("recover.claim", "recover.abort_orphans")) else f"{p}@batch=1"
        for p in points("exactly_once")
    ]
    where = [p for p in where if not p.startswith(("write.stage", "recover.check", "log:after"))]  # as elsewhere
    crash = ",".join(f"{p}!kill" for p in where)
    kills = 0
    while (code := world.run(crash)) != 0:
        assert code == -signal.SIGKILL, world.error
        kills += 1
        if world.exists():
            assert world.state() == states[world.decided()]
    assert kills == len(where)
    assert world.state() == states[-1]
    assert world.unnamed() == []


def test_zombie_cannot_bring_an_old_state_back(world: DeltaWorld, states: list[State]) -> None:
    """F7: stopped in its decision, after it read the table; then others replace the table's files."""
    zombie = world.zygote.start(world.spec("commit.apply:after"), world.folder)
    zombie.wait_stopped()
    assert world.run() == 0, world.error
    code, error = zombie.go_on()
    assert code == 3
    assert "[DELIVERED_" in error
    assert world.state() == states[-1]

"""mode upsert into Delta: a process that dies at every point of one history, and a zombie that looked before.

The judge compares the table with what an undisturbed run made of it after as many batches as are decided.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.crash.test_sqlite_crash import points
from tests.support.embedded_pipeline import PIPELINE
from tests.support.zygote import Zygote

from delivered.connectors.delta import CONNECTOR
from delivered.connectors.log import append
from delivered.model.identity import Scope

RECORDS, KEYS = 1_000, 97
UPSERT = {"mode": "upsert", "keyColumns": "id", "versionColumn": "version", "deleteColumn": "gone"}
State = frozenset[tuple[str, int, str]]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 changes of 97 keys, spread over two partitions."""
    path = tmp_path_factory.mktemp("log") / "changes"
    keys = [f"id-{(i * 31) % KEYS}".encode() for i in range(RECORDS)]
    append(str(path), pa.table({"key": keys, "value": [str(i).encode() for i in range(RECORDS)]}), partition_by=2)
    return path


class World:
    system = "delta"
    write = UPSERT

    def __init__(self, log: Path, folder: Path, zygote: Zygote) -> None:
        self.log, self.folder, self.zygote, self.runs, self.error = log, folder, zygote, 0, ""
        folder.mkdir(exist_ok=True)
        zygote.load(self.system)

    @property
    def table(self) -> Path:
        return self.folder / "changes"

    @property
    def options(self) -> dict[str, str]:
        return {"path": str(self.table)}

    def sink(self) -> Any:
        return CONNECTOR.sink({**self.options, **self.write})

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
        rows = pa.table(DeltaTable(str(self.table), version=version).to_pyarrow_table()).to_pylist()
        found = [(r["id"], r["version"], r["text"]) for r in rows]
        assert len({i for i, _, _ in found}) == len(found)
        return frozenset(found)

    def decided(self) -> int:
        sink = self.sink()
        incarnation = (self.folder / "checkpoint" / "metadata").read_text()
        return len(list(sink.ledger(Scope(PIPELINE, sink.name, incarnation)).history()))

    def unnamed(self) -> list[Path]:
        """Files of ours that no version of the table ever named."""
        table = DeltaTable(str(self.table))
        named = {
            Path(uri) for v in range(table.version() + 1) for uri in DeltaTable(str(self.table), version=v).file_uris()
        }
        return sorted({p for p in (self.table / "delivered").rglob("*") if p.is_file()} - named)


@pytest.fixture(scope="module")
def states(log: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    return undisturbed(World(log, tmp_path_factory.mktemp("undisturbed"), zygote))


def undisturbed(world: World) -> list[State]:
    """Of the table after so many batches."""
    assert world.run() == 0, world.error
    found: list[State] = [frozenset()]
    for version in world.versions():
        state = world.state(version)
        if state and state != found[-1]:
            found.append(state)
    assert len(found) == world.decided() + 1 == 4
    newest: dict[str, int] = {}
    for i in range(RECORDS):
        newest[f"id-{(i * 31) % KEYS}"] = i
    assert found[-1] <= {(k, v, str(v)) for k, v in newest.items()}
    return found


@pytest.fixture
def world(log: Path, zygote: Zygote, tmp_path: Path) -> World:
    return World(log, tmp_path / "world", zygote)


def test_a_kill_at_every_point_leaves_a_state_that_was_decided(world: World, states: list[State]) -> None:
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


def test_zombie_cannot_bring_an_old_state_back(world: World, states: list[State]) -> None:
    """F7: stopped inside its decision, after it looked at the table, whose files others replace then."""
    zombie = world.zygote.start(world.spec("commit.apply:after"), world.folder)
    zombie.wait_stopped()
    assert world.run() == 0, world.error
    code, error = zombie.go_on()
    assert code == 3
    assert "[DELIVERED_" in error
    assert world.state() == states[-1]

"""The sink of docs/new-connector.md in processes really killed at every crash point, under every guarantee.

Its files are read as by another client: by name, line by line.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.crash.killed import PARTITIONS, World, points, recovers_or_stages
from tests.support.embedded_pipeline import PIPELINE
from tests.support.scans import scanned
from tests.support.sweeps import sweep
from tests.support.toy import toy
from tests.support.zygote import Zygote

from delivered.model.fingerprint import Fingerprint, fingerprint, seed_of
from delivered.model.identity import Scope
from delivered.model.work import Ok

GUARANTEES = ("exactly_once", "at_least_once", "at_most_once")
WEAKER = {"at_least_once": pytest.mark.matrix, "at_most_once": pytest.mark.matrix}
"""`make test` sweeps these over memory and SQLite."""
OF_OTHERS = {"recover.claim:after", "write.{}:before"}
"""Where `make test` stops zombies over SQLite and Delta only."""


def where(point: str, guarantee: str) -> str:
    """The point in the second batch, or a point without a batch."""
    if point.startswith(("recover.claim", "recover.abort_orphans")):
        return point
    return f"{point}@batch={0 if point.startswith('batch.begin') and guarantee == 'at_least_once' else 1}"


class ToyWorld(World):
    kind = "toy"

    @property
    def database(self) -> Path:
        return self.folder / "ledger.db"

    @property
    def sink_spec(self) -> dict[str, Any]:
        return {"toy": self.kind, "folder": str(self.folder)}

    def rows(self) -> Counter[str]:
        seen = [p for p in (self.folder / "orders").glob("*") if not p.name.startswith(".")]
        return Counter(json.loads(line)["key"] for p in seen for line in p.read_text().splitlines())

    def staged(self) -> list[Path]:
        return [*(self.folder / "orders").glob(".rows*")]

    def abort_orphans(self) -> None:
        sink = toy(self.folder)
        assert isinstance(sink.committer(Scope(PIPELINE, sink.name, "other")).abort_orphans(()), Ok)

    def read_back(self) -> Fingerprint:
        sink = toy(self.folder)
        return sum((fingerprint(b, seed_of(PIPELINE, sink.name)) for b in scanned(sink)), Fingerprint())


@pytest.fixture
def world(log: Path, zygote: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> ToyWorld:
    zygote.load("sqlite")
    return ToyWorld(log, tmp_path, getattr(request, "param", "exactly_once"), zygote)


@pytest.mark.parametrize(
    ("world", "point"),
    # `make test` kills SQLite and files at the other points of the second batch.
    sweep([(g, p) for g in GUARANTEES for p in points(g)], lambda g, p: g == "exactly_once" and recovers_or_stages(p)),
    indirect=["world"],
)
def test_killed_once_at_each_point(world: ToyWorld, point: str) -> None:
    """F4, F6: the process dies there and is restarted."""
    assert world.run(f"{where(point, world.guarantee)}!kill") == -signal.SIGKILL, world.errors[-1]
    if world.guarantee == "exactly_once" and world.database.exists():
        assert world.rows().total() <= sum(d.fingerprint.count for d in world.decisions())  # none before its decision
    world.finish()
    world.judge()
    assert world.staged() == []


@pytest.mark.parametrize("world", GUARANTEES, indirect=True)
def test_without_a_crash_nothing_is_lost_or_repeated(world: ToyWorld) -> None:
    world.finish(1)
    assert world.judge() == (0, 0)


@pytest.mark.parametrize(
    ("nth", "moment"),
    sweep(
        product(range(1, PARTITIONS + 1), ["before", "after"]), lambda nth, moment: (nth == 1) == (moment == "after")
    ),
)
def test_killed_between_two_commits(world: ToyWorld, nth: int, moment: str) -> None:
    """P27: one shard of a decided batch is visible, the next is not."""
    assert world.run(f"commit.apply:{moment}#{nth}@batch=1!kill") == -signal.SIGKILL
    assert len(world.decisions()) == 2
    assert world.rows().total() < world.decisions()[-1].total.count or (nth, moment) == (PARTITIONS, "after")
    world.finish()
    assert world.judge() == (0, 0)


@pytest.mark.matrix  # as test_sqlite_crash.py, test_table_crash.py
def test_killed_again_while_recovering(world: ToyWorld) -> None:
    world.outlive_kills_of_recoveries()


@pytest.mark.parametrize("world", [pytest.param(g, marks=WEAKER.get(g, ())) for g in GUARANTEES], indirect=True)
@pytest.mark.parametrize(
    "stop_at",
    sweep(
        ["recover.claim:after", "write.{}:after", "write.{}:before", "commit.{}:before"],
        lambda stop_at: stop_at not in OF_OTHERS,
    ),
)
def test_zombie_driver_is_fenced(world: ToyWorld, stop_at: str) -> None:
    """F7: a process stopped past every timeout resumes after another one has finished its work."""
    world.fence_a_zombie(stop_at)


def test_zombie_between_two_commits_shows_nothing_twice(world: ToyWorld) -> None:
    """Already decided: another driver has committed it, and the zombie commits it again."""
    zombie = world.stop("commit.apply:before")
    world.finish(1)
    done = world.rows()
    zombie.go_on()
    assert world.rows() == done
    assert world.judge() == (0, 0)


def test_p1_last_file_of_commits_deleted_changes_nothing(world: ToyWorld) -> None:
    """P1: a replayed micro-batch was committed twice elsewhere."""
    world.outlive_a_deleted_commit()


def test_a_folder_made_anew_is_refused(world: ToyWorld) -> None:
    """F8: the external ledger has rows that are gone."""
    assert world.run("log:after@batch=1!kill") == -signal.SIGKILL
    shutil.rmtree(world.folder / "orders")
    assert world.run() == 3
    assert "[DELIVERED_TARGET_CHANGED]" in world.errors[-1]


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("commit is not idempotent", "commit.apply:after"),
        ("rows are shown before the decision", "write.prepare:after"),
    ],
)
def test_a_broken_copy_is_found(world: ToyWorld, kind: str, point: str) -> None:
    """Neither differs from the toy until a process dies; then the same judge finds repeats."""
    world.kind = kind
    assert world.run(f"{point}@batch=1!kill") == -signal.SIGKILL
    world.finish()
    assert max(world.rows().values()) == 2
    with pytest.raises(AssertionError):
        world.judge()

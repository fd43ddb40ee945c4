"""Processes really killed at every crash point, under every guarantee: a log into SQLite, no server.

The judge looks from outside, at the appended records, and at the table by plain SQL.
"""

from __future__ import annotations

import shutil
import signal
from itertools import product
from pathlib import Path

import pytest
from tests.crash.killed import BATCHES, PARTITIONS, RECORDS, World, points, recovers_or_stages
from tests.support.embedded_pipeline import PIPELINE, TABLE
from tests.support.sweeps import sweep
from tests.support.zygote import Zygote

from delivered.connectors.sqlite import CONNECTOR
from delivered.connectors.sqlite import client as database
from delivered.engine.context import open_ledger
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.work import Owner

STOPS = ("recover.claim:after", "write.{}:after", "write.{}:before", "commit.{}:before")


@pytest.fixture
def world(log: Path, zygote: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    zygote.load("sqlite")
    return World(log, tmp_path, getattr(request, "param", "exactly_once"), zygote)


@pytest.mark.parametrize(
    ("world", "point"),
    [
        # test_points.py has the others
        pytest.param(g, p, marks=[] if g == "exactly_once" and not recovers_or_stages(p) else [pytest.mark.matrix])
        for g in ("exactly_once", "at_least_once", "at_most_once")
        for p in points(g)
    ],
    indirect=["world"],
)
def test_killed_once_at_each_point(world: World, point: str) -> None:
    """F4, F6: the process dies there in the second batch (or where the point knows no batch), and is started again."""
    no_batch = point.startswith(("recover.claim", "recover.abort_orphans"))
    first_only = point.startswith("batch.begin") and world.guarantee == "at_least_once"
    where = "" if no_batch else "@batch=0" if first_only else "@batch=1"
    assert world.run(f"{point}{where}!kill") == -signal.SIGKILL, world.errors[-1]
    if world.guarantee == "exactly_once" and world.database.exists() and not no_batch:
        whole = sum(d.fingerprint.count for d in world.decisions())
        assert sum(world.rows().values()) == whole  # no torn batch, right after the crash
    world.finish()
    world.judge()
    assert world.staged() == []


@pytest.mark.parametrize("world", ["exactly_once", "at_least_once", "at_most_once"], indirect=True)
def test_without_a_crash_nothing_is_lost_or_repeated(world: World) -> None:
    world.finish(1)
    assert world.judge() == (0, 0)


@pytest.mark.parametrize("nth", sweep([1, 2, 3, 4], lambda nth: nth in (1, 4)))
def test_killed_between_two_applies(world: World, nth: int) -> None:
    """P27: rows of one shard are in the open transaction, of the next not; or a staged file is gone."""
    assert world.run(f"commit.apply:after#{nth}@batch=1!kill") == -signal.SIGKILL
    inside_transaction = nth <= PARTITIONS
    assert len(world.decisions()) == (1 if inside_transaction else 2)
    assert len(world.rows()) == world.decisions()[-1].total.count
    world.finish()
    assert world.judge() == (0, 0)


def test_killed_again_while_recovering(world: World) -> None:
    world.outlive_kills_of_recoveries()


@pytest.mark.parametrize("world", ["at_least_once"], indirect=True)
def test_at_least_once_repeats_what_was_sent_before_the_crash(world: World) -> None:
    assert world.run("write.send:after#2@batch=1!kill") == -signal.SIGKILL
    seen = world.rows()
    world.finish()
    lost, repeats = world.judge()
    assert lost == 0
    assert repeats == sum(seen.values()) - world.decisions()[0].total.count > 0


@pytest.mark.parametrize("world", ["at_most_once"], indirect=True)
def test_at_most_once_gives_up_the_batch_and_counts_it(world: World) -> None:
    assert world.run("write.send:after#2@batch=1!kill") == -signal.SIGKILL
    world.finish()
    lost, repeats = world.judge()
    assert repeats == 0
    assert lost > 0
    assert world.decisions()[-1].given_up.count == 400


def test_p1_last_file_of_commits_deleted_changes_nothing(world: World) -> None:
    """P1: a replayed micro-batch was committed twice elsewhere."""
    world.outlive_a_deleted_commit()


def test_p2_new_checkpoint_is_refused_not_skipped(world: World) -> None:
    """P2: batch numbers restart at 0, and batches were silently skipped elsewhere."""
    world.finish(1)
    shutil.rmtree(world.checkpoint)
    assert world.run() == 3
    assert "[DELIVERED_CHECKPOINT_NEW]" in world.errors[-1]
    assert len(world.rows()) == RECORDS


def test_older_checkpoint_put_back_stops(world: World) -> None:
    """F8: neither skipped nor appended."""
    world.finish(1)
    for name in ("offsets", "commits"):
        for batch in range(1, BATCHES):
            (world.checkpoint / name / str(batch)).unlink()
    assert world.run() == 3
    assert "[DELIVERED_LEDGER_AHEAD]" in world.errors[-1]
    assert world.rows().total() == RECORDS


@pytest.mark.parametrize(
    ("world", "stop_at"),
    sweep(
        product(("exactly_once", "at_least_once", "at_most_once"), STOPS),
        lambda world, stop_at: world == "exactly_once" or stop_at == "write.{}:after",  # test_points.py has the others
    ),
    indirect=["world"],
)
def test_zombie_driver_is_fenced(world: World, stop_at: str) -> None:
    """F7: a process stopped past every timeout resumes after another one has finished its work."""
    world.fence_a_zombie(stop_at)


def test_zombie_inside_the_transaction_blocks_with_a_clear_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stopped process holds SQLite's write lock: the new one says so in time; then both end well."""
    zombie = world.stop("commit.apply:after")
    monkeypatch.setattr(database, "CONNECT_TIMEOUT_S", 0.5)
    sink = CONNECTOR.sink({"path": str(world.database), "table": TABLE})
    with pytest.raises(DeliveredError, match="DELIVERED_DATABASE_LOCKED"):
        open_ledger(sink, Scope(PIPELINE, sink.name, "later")).claim(Owner("later"))
    zombie.kill()
    world.finish(1)
    assert world.judge() == (0, 0)


def test_change_of_guarantee_after_a_begun_batch_is_refused(world: World) -> None:
    world.guarantee = "at_most_once"
    assert world.run("write.send:after#2@batch=1!kill") == -signal.SIGKILL
    world.guarantee = "exactly_once"
    assert world.run() == 3
    assert "[DELIVERED_BATCH_BEGUN]" in world.errors[-1]

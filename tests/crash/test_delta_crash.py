"""Processes that are really killed, at every crash point, under every guarantee: a log into a Delta table.

The judge looks from outside: at the records that were appended, and at the table as the client library reads it.
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.crash.test_sqlite_crash import BATCHES, PARTITIONS, RECORDS, World, log, points
from tests.support.embedded_pipeline import PIPELINE
from tests.support.scans import scanned
from tests.support.zygote import Zygote

from delivered.connectors.delta import CONNECTOR
from delivered.contract.sink import Sink
from delivered.kits.table.stage import batch_of
from delivered.model.fingerprint import Fingerprint, fingerprint, seed_of
from delivered.model.identity import Scope
from delivered.model.outcome import Ok
from delivered.model.work import Decision

__all__ = ["log"]  # the fixture


class TableWorld(World):
    """A sink that is a folder of its own, named by its format in the child's spec."""

    format = ""

    @property
    def table(self) -> Path:
        return self.folder / "events"

    @property
    def options(self) -> dict[str, str]:
        return {"path": str(self.table)}

    @property
    def sink(self) -> Sink:
        raise NotImplementedError

    @property
    def incarnation(self) -> str:
        return (self.checkpoint / "metadata").read_text()

    @property
    def sink_spec(self) -> dict[str, Any]:
        return {self.format: self.options}

    def decisions(self) -> list[Decision]:
        return list(self.sink.ledger(Scope(PIPELINE, self.sink.name, self.incarnation)).history())

    def abort_orphans(self) -> None:
        assert isinstance(self.sink.committer(Scope(PIPELINE, self.sink.name, "other")).abort_orphans(()), Ok)

    def read_back(self) -> Fingerprint:
        seed = seed_of(PIPELINE, self.sink.name)
        return sum((fingerprint(b, seed) for b in scanned(self.sink)), Fingerprint())


class DeltaWorld(TableWorld):
    format = "delta"

    @property
    def sink(self) -> Sink:
        return CONNECTOR.sink({"path": str(self.table)})

    def rows(self) -> Counter[str]:
        if not self.table.exists():
            return Counter()
        return Counter(pa.table(DeltaTable(str(self.table)).to_pyarrow_table())["id"].to_pylist())

    def staged(self) -> list[Path]:
        """Files of batches, not of direct writers, that the table's log does not name."""
        there = {p for p in (self.table / "delivered").rglob("*.parquet") if "direct" not in p.parts}
        return sorted(there - {Path(uri) for uri in DeltaTable(str(self.table)).file_uris()})


@pytest.fixture
def world(log: Path, zygote: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> DeltaWorld:
    zygote.load("delta")
    return DeltaWorld(log, tmp_path, getattr(request, "param", "exactly_once"), zygote)


@pytest.mark.parametrize(
    ("world", "point"),
    [(g, p) for g in ("exactly_once", "at_least_once", "at_most_once") for p in points(g)],
    indirect=["world"],
)
def test_killed_once_at_each_point(world: TableWorld, point: str) -> None:
    """F4, F6: the process dies there in the second batch (or where the point knows no batch), and is started again."""
    no_batch = point.startswith(("recover.claim", "recover.abort_orphans"))
    first_only = point.startswith("batch.begin") and world.guarantee == "at_least_once"
    where = "" if no_batch else "@batch=0" if first_only else "@batch=1"
    assert world.run(f"{point}{where}!kill") == -signal.SIGKILL, world.errors[-1]
    if world.guarantee == "exactly_once" and not no_batch:
        whole = sum(d.fingerprint.count for d in world.decisions())
        assert sum(world.rows().values()) == whole  # no torn batch, right after the crash
    world.finish()
    world.judge()
    assert world.staged() == []


@pytest.mark.parametrize("nth", range(1, PARTITIONS + 1))
def test_killed_between_the_shards_of_a_decision(world: TableWorld, nth: int) -> None:
    """P27: files of one shard were taken into the decision, of the next not; nothing of the batch is seen."""
    assert world.run(f"commit.apply:after#{nth}@batch=1!kill") == -signal.SIGKILL
    assert len(world.decisions()) == 1
    assert world.rows().total() == world.decisions()[-1].total.count
    world.finish()
    assert world.judge() == (0, 0)


def test_killed_again_while_recovering(world: TableWorld) -> None:
    crash = "commit.decide:after@batch=1!kill,recover.apply:before!kill,recover.apply:after!kill"
    crash += ",recover.abort_orphans:after!kill"
    kills = [world.run(crash) for _ in range(5)]
    assert kills.count(-signal.SIGKILL) == 4
    assert kills[-1] == 0, world.errors[-1]
    assert world.judge() == (0, 0)


def test_p1_last_file_of_commits_deleted_changes_nothing(world: TableWorld) -> None:
    """P1: a replayed micro-batch was committed twice elsewhere."""
    world.finish(1)
    before = world.rows()
    (world.checkpoint / "commits" / str(BATCHES - 1)).unlink()
    world.finish(1)
    assert world.rows() == before
    assert world.judge() == (0, 0)


def test_p2_new_checkpoint_is_refused_not_skipped(world: TableWorld) -> None:
    """P2: with txnAppId and txnVersion, a new checkpoint restarts at 0, and its batches are skipped."""
    world.finish(1)
    shutil.rmtree(world.checkpoint)
    assert world.run() == 3
    assert "[DELIVERED_CHECKPOINT_NEW]" in world.errors[-1]
    assert len(world.rows()) == RECORDS


def test_p3_the_last_batch_is_known_when_the_log_was_cleaned_up(world: TableWorld) -> None:
    """P3: a replay recognised only within the retained history; compaction and vacuum of the table besides."""
    world.finish(1)
    table = DeltaTable(str(world.table))
    written = table.version()
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    table.optimize.compact()
    table.create_checkpoint()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    table.cleanup_metadata()
    assert not (world.table / "_delta_log" / f"{written:020d}.json").exists()
    (world.checkpoint / "commits" / str(BATCHES - 1)).unlink()
    world.finish(1)
    assert world.judge() == (0, 0)


def test_older_checkpoint_put_back_stops(world: TableWorld) -> None:
    """F8: neither skipped nor appended."""
    world.finish(1)
    for name in ("offsets", "commits"):
        for batch in range(1, BATCHES):
            (world.checkpoint / name / str(batch)).unlink()
    assert world.run() == 3
    assert "[DELIVERED_LEDGER_AHEAD]" in world.errors[-1]
    assert world.rows().total() == RECORDS


def test_older_copy_of_the_table_put_back_stops(world: TableWorld) -> None:
    assert world.run("log:after@batch=0!kill") == -signal.SIGKILL
    shutil.copytree(world.table, world.folder / "copy")
    world.finish()
    shutil.rmtree(world.table)
    (world.folder / "copy").rename(world.table)
    (world.checkpoint / "commits" / str(BATCHES - 1)).unlink()
    assert world.run() == 3
    assert "[DELIVERED_LEDGER_BEHIND]" in world.errors[-1]


@pytest.mark.parametrize("world", ["exactly_once", "at_least_once", "at_most_once"], indirect=True)
@pytest.mark.parametrize("stop_at", ["recover.claim:after", "write.{}:after", "write.{}:before", "commit.{}:before"])
def test_zombie_driver_is_fenced(world: TableWorld, stop_at: str) -> None:
    """F7: a process stopped past every time-out goes on after another one has finished its work."""
    exact = world.guarantee == "exactly_once"
    middle = ("stage" if exact else "send") if stop_at.endswith("after") else ("prepare" if exact else "flush")
    point = stop_at.format("decide" if exact and "commit" in stop_at else "record" if "commit" in stop_at else middle)
    fenced(world, point)


def test_zombie_inside_its_decision_is_fenced(world: TableWorld) -> None:
    """Stopped after it looked at the log and at the files: only its commit can still find the later claim."""
    assert "Concurrent transaction" in fenced(world, "commit.apply:after")


def fenced(world: TableWorld, point: str) -> str:
    """What the zombie says in the end."""
    zombie = world.stop(point)
    world.finish(1)
    done = world.rows()
    code, error = zombie.go_on()
    assert code == 3
    assert any(
        code in error for code in ("[DELIVERED_FENCED]", "[DELIVERED_STAGED_FILE_GONE]", "[DELIVERED_DECISION_FAILED]")
    ), error
    if world.guarantee == "exactly_once":
        assert world.rows() == done
    world.abort_orphans()
    world.judge()
    # What the zombie staged for a batch that others decided long ago is left to the table's vacuum.
    assert [f for f in world.staged() if (batch_of(f.name) or 0) >= BATCHES - 1] == []
    return error

"""Processes that are really killed, at every crash point, under every guarantee: a log into SQLite, no server.

The judge looks from outside: at the records that were appended, and at the table by plain SQL.
"""

from __future__ import annotations

import shutil
import signal
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.embedded_pipeline import PIPELINE, TABLE
from tests.support.scans import scanned
from tests.support.zygote import Child, Zygote

from delivered.connectors.log import append
from delivered.connectors.sqlite import CONNECTOR
from delivered.model.fingerprint import Fingerprint, fingerprint, seed_of
from delivered.model.identity import Scope
from delivered.model.outcome import Ok
from delivered.model.step import ROLE_OF_STEP, Moment, Role, StepId
from delivered.model.work import Decision

RECORDS = 1_000
PARTITIONS = 2
BATCHES = 3


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 records with distinct ids in two partitions, appended in three commits."""
    path = tmp_path_factory.mktemp("log") / "events"
    for first in (0, 300, 600):
        ids = range(first, min(first + 400, RECORDS) if first == 600 else first + 300)
        rows = pa.table({"key": [f"id-{i}".encode() for i in ids], "value": [b"v" * (i % 7) for i in ids]})
        append(str(path), rows, partition_by=PARTITIONS)
    return path


@dataclass
class World:
    """One pipeline: where it reads, writes and remembers."""

    log: Path
    folder: Path
    guarantee: str
    zygote: Zygote
    runs: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def database(self) -> Path:
        return self.folder / "sink.db"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def spec(self, stop_at: str = "") -> dict[str, Any]:
        """Of the next run."""
        self.runs += 1
        return {
            "log": str(self.log), **self.sink_spec, "checkpoint": str(self.checkpoint),
            "guarantee": self.guarantee, "owner": f"owner-{self.runs}", "stop_at": stop_at,
        }  # fmt: skip

    @property
    def sink_spec(self) -> dict[str, Any]:
        return {"database": str(self.database)}

    def stop(self, point: str) -> Child:
        """Start one that stops itself there, and wait until it did."""
        zombie = self.zygote.start(self.spec(point), self.folder)
        zombie.wait_stopped()
        return zombie

    def run(self, crash: str = "") -> int:
        """Run until the source is empty, or the process dies. Returns its exit code; -9 for SIGKILL."""
        code, error = self.zygote.run(self.spec(), self.folder, crash)
        self.errors.append(error)
        return code

    def rows(self) -> Counter[str]:
        """id -> how often a reader of the table sees it."""
        if not self.database.exists():
            return Counter()
        connection = sqlite3.connect(self.database)
        try:
            there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone()
            return Counter(r[0] for r in connection.execute(f"SELECT id FROM {TABLE}")) if there else Counter()
        finally:
            connection.close()

    def decisions(self) -> list[Decision]:
        connection = sqlite3.connect(self.database)
        try:
            found = connection.execute("SELECT decision FROM _delivered_decision ORDER BY batch").fetchall()
        finally:
            connection.close()
        return [Decision.from_json(text) for (text,) in found]

    def staged(self) -> list[Path]:
        return [p for p in Path(f"{self.database}.delivered").rglob("*") if p.is_file()]

    def finish(self, restarts_max: int = 3) -> None:
        for _ in range(restarts_max):
            if self.run() == 0:
                return
        raise AssertionError(self.errors[-1])

    def judge(self) -> tuple[int, int]:
        """(records lost, repeats), by the guarantee; every broken promise fails."""
        rows, expected = self.rows(), {f"id-{i}" for i in range(RECORDS)}
        assert set(rows) <= expected
        lost, repeats = len(expected - set(rows)), sum(n - 1 for n in rows.values())
        decided = self.decisions()
        if self.guarantee != "at_most_once":
            assert lost == 0
        if self.guarantee != "at_least_once":
            assert repeats == 0
        if self.guarantee == "at_most_once":
            assert lost <= decided[-1].given_up.count <= RECORDS
        else:
            assert decided[-1].given_up.count == 0
        if self.guarantee == "exactly_once":
            assert decided[-1].total == self.read_back()
            assert decided[-1].total.count == RECORDS
        assert [d.batch for d in decided] == list(range(BATCHES))
        return lost, repeats

    def abort_orphans(self) -> None:
        """What a zombie leaves goes with the next recovery."""
        sink = CONNECTOR.sink({"path": str(self.database), "table": TABLE})
        assert isinstance(sink.committer(Scope(PIPELINE, sink.name, "other")).abort_orphans(()), Ok)

    def read_back(self) -> Fingerprint:
        sink = CONNECTOR.sink({"path": str(self.database), "table": TABLE})
        batches = scanned(sink)
        return sum((fingerprint(b, seed_of(PIPELINE, sink.name)) for b in batches), Fingerprint())


@pytest.fixture
def world(log: Path, zygote: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    zygote.load("sqlite")
    return World(log, tmp_path, getattr(request, "param", "exactly_once"), zygote)


def points(guarantee: str) -> list[str]:
    """Every crash point that a first run or a recovery of this sink passes, but recover.apply: see below."""
    transactional = {StepId.WRITE_STAGE, StepId.WRITE_PREPARE, StepId.COMMIT_DECIDE, StepId.COMMIT_APPLY}
    direct = {StepId.WRITE_SEND, StepId.WRITE_FLUSH, StepId.COMMIT_RECORD}
    skipped = {StepId.RECOVER_APPLY, StepId.SOURCE_READ} | (direct if guarantee == "exactly_once" else transactional)
    if guarantee == "exactly_once":
        skipped.add(StepId.BATCH_BEGIN)
    skipped |= {step for step, role in ROLE_OF_STEP.items() if role is Role.RECEIVER}
    skipped |= {StepId.DEDUP_NOTE, StepId.DEDUP_KEEP}  # tests/broker/test_dedup_kill.py
    return [f"{step}:{moment}" for step in ROLE_OF_STEP if step not in skipped for moment in Moment]


@pytest.mark.parametrize(
    ("world", "point"),
    [(g, p) for g in ("exactly_once", "at_least_once", "at_most_once") for p in points(g)],
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


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_killed_between_two_applies(world: World, nth: int) -> None:
    """P27: rows of one shard are in the open transaction, of the next not; or a staged file is gone."""
    assert world.run(f"commit.apply:after#{nth}@batch=1!kill") == -signal.SIGKILL
    inside_transaction = nth <= PARTITIONS
    assert len(world.decisions()) == (1 if inside_transaction else 2)
    assert len(world.rows()) == world.decisions()[-1].total.count
    world.finish()
    assert world.judge() == (0, 0)


def test_killed_again_while_recovering(world: World) -> None:
    crash = "commit.decide:after@batch=1!kill,recover.apply:before!kill,recover.apply:after!kill"
    crash += ",recover.abort_orphans:after!kill"
    kills = [world.run(crash) for _ in range(5)]
    assert kills.count(-signal.SIGKILL) == 4
    assert kills[-1] == 0, world.errors[-1]
    assert world.judge() == (0, 0)


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
    world.finish(1)
    before = world.rows()
    (world.checkpoint / "commits" / str(BATCHES - 1)).unlink()
    world.finish(1)
    assert world.rows() == before
    assert world.judge() == (0, 0)


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


@pytest.mark.parametrize("world", ["exactly_once", "at_least_once", "at_most_once"], indirect=True)
@pytest.mark.parametrize("stop_at", ["recover.claim:after", "write.{}:after", "write.{}:before", "commit.{}:before"])
def test_zombie_driver_is_fenced(world: World, stop_at: str) -> None:
    """F7: a process stopped past every time-out goes on after another one has finished its work."""
    exact = world.guarantee == "exactly_once"
    middle = ("stage" if exact else "send") if stop_at.endswith("after") else ("prepare" if exact else "flush")
    point = stop_at.format("decide" if exact and "commit" in stop_at else "record" if "commit" in stop_at else middle)
    zombie = world.stop(point)
    world.finish(1)
    done = world.rows()
    code, error = zombie.go_on()
    assert code == 3
    assert "[DELIVERED_FENCED]" in error or "[DELIVERED_STAGED_FILE_GONE]" in error, error
    if exact:
        assert world.rows() == done
    world.abort_orphans()
    world.judge()
    assert world.staged() == []


def test_zombie_inside_the_transaction_blocks_with_a_clear_error(world: World) -> None:
    """The stopped process holds SQLite's write lock: the new one says so within 15 s; then both end well."""
    zombie = world.stop("commit.apply:after")
    assert world.run() == 3
    assert "[DELIVERED_DATABASE_LOCKED]" in world.errors[-1]
    zombie.kill()
    world.finish(1)
    assert world.judge() == (0, 0)


def test_change_of_guarantee_after_a_begun_batch_is_refused(world: World) -> None:
    world.guarantee = "at_most_once"
    assert world.run("write.send:after#2@batch=1!kill") == -signal.SIGKILL
    world.guarantee = "exactly_once"
    assert world.run() == 3
    assert "[DELIVERED_BATCH_BEGUN]" in world.errors[-1]

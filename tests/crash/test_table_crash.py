"""Processes really killed at every crash point, under every guarantee: a log into a Delta table, an Iceberg table, and
a folder of Parquet files.

The judge looks from outside, at the appended records, and at the table through an independent client.
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from tests.crash.killed import BATCHES, PARTITIONS, RECORDS, World, points
from tests.support.embedded_pipeline import PIPELINE
from tests.support.scans import scanned
from tests.support.sweeps import sweep
from tests.support.zygote import Zygote

from delivered.connectors import delta, files, iceberg
from delivered.contract.sink import Sink
from delivered.engine.context import open_ledger
from delivered.kits.table.shard import parse_batch
from delivered.model.fingerprint import Fingerprint, fingerprint, seed_of
from delivered.model.identity import Scope
from delivered.model.work import Decision, Ok


class TableWorld(World):
    """A sink with its own folder, named by its format in the child's spec."""

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
        return list(open_ledger(self.sink, Scope(PIPELINE, self.sink.name, self.incarnation)).history())

    def abort_orphans(self) -> None:
        assert isinstance(self.sink.committer(Scope(PIPELINE, self.sink.name, "other")).abort_orphans(()), Ok)

    def read_back(self) -> Fingerprint:
        seed = seed_of(PIPELINE, self.sink.name)
        return sum((fingerprint(b, seed) for b in scanned(self.sink)), Fingerprint())


class DeltaWorld(TableWorld):
    format = "delta"

    @property
    def sink(self) -> Sink:
        return delta.CONNECTOR.sink({"path": str(self.table)})

    def rows(self) -> Counter[str]:
        if not self.table.exists():
            return Counter()
        return Counter(pa.table(DeltaTable(str(self.table)).to_pyarrow_table())["id"].to_pylist())

    def staged(self) -> list[Path]:
        """Files of batches (not of direct writers) that the table's log does not reference."""
        there = {p for p in (self.table / "delivered").rglob("*.parquet") if "direct" not in p.parts}
        return sorted(there - {Path(uri) for uri in DeltaTable(str(self.table)).file_uris()})


class IcebergWorld(TableWorld):
    format = "iceberg"

    @property
    def options(self) -> dict[str, str]:
        return {"warehouse": str(self.folder / "lake"), "table": "shop.events"}

    @property
    def sink(self) -> Sink:
        return iceberg.CONNECTOR.sink(self.options)

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
        """Files of batches (not of direct writers) that no snapshot references."""
        table = self.open()
        folder = Path(table.location().removeprefix("file://")) / "data" / "delivered"
        there = {p for p in folder.rglob("*") if p.is_file() and "direct" not in p.parts}
        named = {Path(task.file.file_path.removeprefix("file://")) for task in table.scan().plan_files()}
        return sorted(there - named)

    def strays(self) -> list[Path]:
        """This package's unreferenced manifests, except those of direct writers."""
        table = self.open()
        folder = Path(table.location().removeprefix("file://")) / "metadata" / "delivered"
        there = {p for p in folder.rglob("*.avro") if "direct" not in p.parts}
        lists = {s.manifest_list for s in table.snapshots()}
        manifests = {m.manifest_path for s in table.snapshots() for m in s.manifests(table.io)}
        return sorted(there - {Path(name.removeprefix("file://")) for name in lists | manifests})

    def judge(self) -> tuple[int, int]:
        assert self.strays() == []
        return super().judge()


class FilesWorld(TableWorld):
    format = "files"

    @property
    def sink(self) -> Sink:
        return files.CONNECTOR.sink({"path": str(self.table)})

    def rows(self) -> Counter[str]:
        if not any(self.table.glob("batch=*")):
            return Counter()
        return Counter(ds.dataset(str(self.table), partitioning="hive").to_table()["id"].to_pylist())

    def staged(self) -> list[Path]:
        return [p for p in self.table.glob("_delivered/p-*/s-*/staged/*/*") if p.is_file()]


WORLDS: dict[str, type[TableWorld]] = {"delta": DeltaWorld, "iceberg": IcebergWorld, "files": FilesWorld}


GUARANTEES = ("exactly_once", "at_least_once", "at_most_once")
WEAKER = {"at_least_once": pytest.mark.matrix, "at_most_once": pytest.mark.matrix}
"""`make test` sweeps these over memory and SQLite."""


@pytest.fixture(params=list(WORLDS))
def system(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def guarantee() -> str:
    return "exactly_once"


@pytest.fixture
def world(system: str, guarantee: str, log: Path, zygote: Zygote, tmp_path: Path) -> TableWorld:
    zygote.load(system)
    return WORLDS[system](log, tmp_path, guarantee, zygote)


@pytest.mark.parametrize(
    ("system", "guarantee", "point"),
    sweep(
        [(s, g, p) for s in WORLDS for g in GUARANTEES for p in points(g)],
        # One history of a Delta and of an Iceberg table is killed at every point in test_table_modes_crash.py.
        lambda system, guarantee, point: (
            (system, guarantee) == ("files", "exactly_once") and point.startswith(("commit.decide", "commit.apply"))
        ),
    ),
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


@pytest.mark.parametrize("nth", sweep(range(1, PARTITIONS + 1), lambda nth: nth == 1))
def test_killed_between_the_shards_of_a_decision(world: TableWorld, nth: int) -> None:
    """P27: files of one shard were taken into the decision, of the next not; nothing of the batch is seen."""
    assert world.run(f"commit.apply:after#{nth}@batch=1!kill") == -signal.SIGKILL
    assert len(world.decisions()) == 1
    assert world.rows().total() == world.decisions()[-1].total.count
    world.finish()
    assert world.judge() == (0, 0)


def test_killed_again_while_recovering(world: TableWorld) -> None:
    world.outlive_kills_of_recoveries()


def test_p1_last_file_of_commits_deleted_changes_nothing(world: TableWorld) -> None:
    """P1: a replayed micro-batch was committed twice elsewhere."""
    world.outlive_a_deleted_commit()


def test_p2_new_checkpoint_is_refused_not_skipped(world: TableWorld) -> None:
    """P2: with txnAppId and txnVersion, a new checkpoint restarts at 0, and its batches are skipped."""
    world.finish(1)
    shutil.rmtree(world.checkpoint)
    assert world.run() == 3
    assert "[DELIVERED_CHECKPOINT_NEW]" in world.errors[-1]
    assert len(world.rows()) == RECORDS


@pytest.mark.parametrize("system", ["delta"])
def test_p3_the_last_batch_is_known_when_the_log_was_cleaned_up(world: DeltaWorld) -> None:
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


@pytest.mark.parametrize("system", ["delta"])
def test_older_copy_of_the_table_put_back_stops(world: DeltaWorld) -> None:
    assert world.run("log:after@batch=0!kill") == -signal.SIGKILL
    shutil.copytree(world.table, world.folder / "copy")
    world.finish()
    shutil.rmtree(world.table)
    (world.folder / "copy").rename(world.table)
    (world.checkpoint / "commits" / str(BATCHES - 1)).unlink()
    assert world.run() == 3
    assert "[DELIVERED_LEDGER_BEHIND]" in world.errors[-1]


@pytest.mark.parametrize(
    ("system", "stop_at", "guarantee"),
    [
        # With Iceberg, each starts a process that imports for seconds.
        pytest.param(s, p, g, marks=pytest.mark.matrix if s == "iceberg" and "claim" not in p else WEAKER.get(g, ()))
        for s in WORLDS
        for p in ("recover.claim:after", "write.{}:after", "write.{}:before", "commit.{}:before")
        for g in GUARANTEES
    ],
)
def test_zombie_driver_is_fenced(world: TableWorld, stop_at: str) -> None:
    """F7: a process stopped past every timeout resumes after another one has finished its work."""
    fenced(world, world.zombie_point(stop_at))


INSIDE = {
    # It has read the log and the files: only its commit can still detect the later claim.
    "delta": "Concurrent transaction",
    # Between the files of two shards: the second's have been removed when it resumes.
    "iceberg": "[DELIVERED_STAGED_FILE_GONE]",
    # With a file in the folder that it is about to rename: that folder is gone when it resumes.
    "files": "FENCED",
}


@pytest.mark.parametrize("system", list(INSIDE))
def test_zombie_inside_its_decision_is_fenced(world: TableWorld, system: str) -> None:
    assert INSIDE[system] in fenced(world, "commit.apply:after")


def fenced(world: TableWorld, point: str) -> str:
    """The zombie's final error."""
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
    # What the zombie staged for a batch decided long ago is left to the table's vacuum.
    assert [f for f in world.staged() if (parse_batch(f.name) or 0) >= BATCHES - 1] == []
    return error


@pytest.mark.parametrize("system", ["iceberg"])
def test_p3_the_last_batch_is_known_when_its_snapshot_expired(world: IcebergWorld) -> None:
    """P3: a replay recognised only within the retained snapshot history."""
    world.finish(1)
    table = world.open()
    with table.transaction() as change, change.update_snapshot().fast_append():
        pass  # now another writer's snapshot is the newest
    mine = [
        s.snapshot_id
        for s in table.snapshots()
        if s.summary and "delivered.decision" in s.summary.additional_properties
    ]
    assert len(mine) == BATCHES
    table.maintenance.expire_snapshots().by_ids(mine).commit()
    assert len(world.open().snapshots()) == 2  # the other writer's, and the claim's
    (world.checkpoint / "commits" / str(BATCHES - 1)).unlink()
    before = world.rows()
    world.finish(1)
    assert world.rows() == before
    assert [d.batch for d in world.decisions()] == [BATCHES - 1]


@pytest.mark.parametrize("system", ["iceberg"])
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


@pytest.mark.parametrize("system", ["files"])
def test_batch_folders_deleted_by_the_user_stay_delivered(world: FilesWorld) -> None:
    assert world.run("log:before@batch=2!kill") == -signal.SIGKILL
    for folder in world.table.glob("batch=*-0000000000"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    world.finish()
    assert [d.batch for d in world.decisions()] == [0, 1, 2]
    assert world.rows().total() == world.decisions()[-1].total.count - world.decisions()[0].total.count

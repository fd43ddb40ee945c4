"""A pipeline from a log into a serverless sink, in processes that are really killed.

The judge looks from outside, at the appended records, and at the sink through an independent client.
"""

from __future__ import annotations

import signal
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.embedded_pipeline import PIPELINE, TABLE
from tests.support.scans import scanned
from tests.support.steps import ROLE_OF_STEP, Role
from tests.support.zygote import Child, Zygote

from delivered.connectors.sqlite import CONNECTOR
from delivered.model.fingerprint import Fingerprint, fingerprint, seed_of
from delivered.model.identity import Scope
from delivered.model.step import Moment, StepId
from delivered.model.work import Decision, Ok

RECORDS = 1_000
PARTITIONS = 2
BATCHES = 3


@dataclass
class World:
    """One pipeline: its source, sink and checkpoint."""

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
        """Start one that stops itself there, and wait for that."""
        zombie = self.zygote.start(self.spec(point), self.folder)
        zombie.wait_stopped()
        return zombie

    def run(self, crash: str = "") -> int:
        """Run until the source is empty, or the process dies. Returns its exit code; -9 for SIGKILL."""
        code, error = self.zygote.run(self.spec(), self.folder, crash)
        self.errors.append(error)
        return code

    def rows(self) -> Counter[str]:
        """id -> number of times a reader sees it."""
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
        """(records lost, repeats), under the guarantee; violations fail."""
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

    def outlive_a_deleted_commit(self) -> None:
        """P1: Spark runs the last batch again; nothing changes."""
        self.finish(1)
        before = self.rows()
        (self.checkpoint / "commits" / str(BATCHES - 1)).unlink()
        self.finish(1)
        assert self.rows() == before
        assert self.judge() == (0, 0)

    def outlive_kills_of_recoveries(self) -> None:
        """Killed after a decision, then during three recoveries."""
        crash = "commit.decide:after@batch=1!kill,recover.apply:before!kill,recover.apply:after!kill"
        crash += ",recover.abort_orphans:after!kill"
        kills = [self.run(crash) for _ in range(5)]
        assert kills.count(-signal.SIGKILL) == 4
        assert kills[-1] == 0, self.errors[-1]
        assert self.judge() == (0, 0)

    def zombie_point(self, stop_at: str) -> str:
        """`write.{}:before` as the crash point of this guarantee: the last step before it, and the first after."""
        exact = self.guarantee == "exactly_once"
        middle = ("stage" if exact else "send") if stop_at.endswith("after") else ("prepare" if exact else "flush")
        return stop_at.format(("decide" if exact else "record") if "commit" in stop_at else middle)

    def fence_a_zombie(self, stop_at: str) -> None:
        """F7: a driver stopped past every timeout resumes after another one has finished its work."""
        zombie = self.stop(self.zombie_point(stop_at))
        self.finish(1)
        done = self.rows()
        code, error = zombie.go_on()
        assert code == 3
        assert "[DELIVERED_FENCED]" in error or "[DELIVERED_STAGED_FILE_GONE]" in error, error
        if self.guarantee == "exactly_once":
            assert self.rows() == done
        self.abort_orphans()
        self.judge()
        assert self.staged() == []

    def abort_orphans(self) -> None:
        """The next recovery aborts what a zombie left."""
        sink = CONNECTOR.sink({"path": str(self.database), "table": TABLE})
        assert isinstance(sink.committer(Scope(PIPELINE, sink.name, "other")).abort_orphans(()), Ok)

    def read_back(self) -> Fingerprint:
        sink = CONNECTOR.sink({"path": str(self.database), "table": TABLE})
        batches = scanned(sink)
        return sum((fingerprint(b, seed_of(PIPELINE, sink.name)) for b in batches), Fingerprint())


def points(guarantee: str) -> list[str]:
    """Every crash point that a first run or a recovery of this sink reaches, except recover.apply: see below."""
    transactional = {StepId.WRITE_STAGE, StepId.WRITE_PREPARE, StepId.COMMIT_DECIDE, StepId.COMMIT_APPLY}
    direct = {StepId.WRITE_SEND, StepId.WRITE_FLUSH, StepId.COMMIT_RECORD}
    skipped = {StepId.RECOVER_APPLY, StepId.SOURCE_READ} | (direct if guarantee == "exactly_once" else transactional)
    if guarantee == "exactly_once":
        skipped.add(StepId.BATCH_BEGIN)
    skipped |= {step for step, role in ROLE_OF_STEP.items() if role in (Role.RECEIVER, Role.WORKER, Role.AUDITOR)}
    skipped |= {StepId.DEDUP_NOTE, StepId.DEDUP_KEEP}  # tests/broker/test_dedup_kill.py
    return [f"{step}:{moment}" for step in ROLE_OF_STEP if step not in skipped for moment in Moment]


def recovers_or_stages(point: str) -> bool:
    """Where the second batch is not in the sink yet: `make test` kills processes of the toy there, and recoveries."""
    return point.startswith(("recover.", "write.stage:"))

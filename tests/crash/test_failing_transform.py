"""A row for which the transform raises is a dead letter if and only if its batch counts, despite crashes."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from tests.crash.letter_sim import EXACTLY, LEAST, MOST, NTH_MAX, LetterSim
from tests.crash.sim import Crash, codes, points
from tests.support.halted import run_loop
from tests.support.memory import CONNECTOR
from tests.support.memory.world import ROWS
from tests.support.sweeps import sweep

from delivered.connectors.log import append
from delivered.engine import Sinks, transform
from delivered.entry import Pipeline
from delivered.model.capability import Commit, Guarantee
from delivered.model.rows import OnBadRow, Rows
from delivered.operate.dead_letters import dead_letters


@dataclass
class TransformSim(LetterSim):
    """The transform raises for every third row.

    Attributes:
        mended: from this start of a driver on, it raises for none.
    """

    mended: int = 99

    def make_sinks(self) -> Sinks:
        first, letters = (CONNECTOR.sink({"world": self.name, "commit": c.value}) for c in self.commits)
        dead_letter = ("letters", letters) if self.on_bad_row is OnBadRow.DEAD_LETTER else None
        return Sinks.of([("first", first, None)], self.on_bad_row, dead_letter)

    def _read(self, piece: object) -> Iterator[Rows]:
        for rows in super()._read(piece):
            yield from transform.run_isolated(self.transform, rows, ROWS)

    def transform(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        for value in rows.column("value").to_pylist():
            if value.endswith(b"long") and self.starts < self.mended:
                raise ValueError(f"{value!r} is too long")
        return rows


def crashed(
    guarantee: Guarantee, how: str, commits: tuple[Commit, ...], expired: bool = False, mended: int = 99
) -> Iterator[TransformSim]:
    for point in points():
        for nth in range(1, NTH_MAX):
            crashes = (Crash(point, nth, how),)
            sim = TransformSim(guarantee, crashes=crashes, commits=commits, expire_on_start=expired, mended=mended)
            sim.run()
            if not sim.crashes[0].hit:
                break
            yield sim


BOTH = (Commit.TWO_PHASE, Commit.TWO_PHASE)


@pytest.mark.parametrize(
    ("guarantee", "last", "how", "expired"),
    sweep(
        [
            (EXACTLY, Commit.TWO_PHASE, "tree", False),
            (EXACTLY, Commit.TWO_PHASE, "kill", False),
            (EXACTLY, Commit.TWO_PHASE, "fail", False),
            (EXACTLY, Commit.TWO_PHASE, "tree", True),
            (EXACTLY, Commit.ONE_TRANSACTION, "tree", False),
            (LEAST, Commit.TWO_PHASE, "tree", False),
            (MOST, Commit.TWO_PHASE, "kill", False),
        ],
        lambda guarantee, last, how, expired: (
            guarantee is EXACTLY and how == "tree" and last is Commit.TWO_PHASE and not expired
        ),
    ),
)
def test_one_crash_at_every_point(guarantee: Guarantee, last: Commit, how: str, expired: bool) -> None:
    sims = list(crashed(guarantee, how, (Commit.TWO_PHASE, last), expired))
    assert len(sims) > 20
    assert [(s.crashes, w) for s in sims for w in s.verdict()] == []


def outcomes(sim: TransformSim) -> Counter[bytes]:
    """Each value, as a row or as a letter."""
    found: Counter[bytes] = Counter()
    for (_, value), count in sim.visible().items():
        found[value] += count
    return found


def test_a_decided_outcome_stays_when_the_function_fails_no_more() -> None:
    """Killed at every point; at the second start the function fails for no row."""
    some = 0
    for sim in crashed(EXACTLY, "tree", BOTH, mended=2):
        once = Counter(v for rows in sim.world.inputs for _, v in rows if v is not None)
        assert sim.problems == [] and outcomes(sim) == once, sim.crashes
        some += any(sink == "letters" for sink, _ in sim.visible())
    assert some > 10, "batches decided before the kill keep their letters"


def test_an_expired_transaction_of_other_rows_stops_the_query() -> None:
    """The rows of a decided batch must be written again, and the function fails no more."""
    sim = TransformSim(EXACTLY, crashes=(Crash("commit.decide:after", 1, "tree"),), commits=BOTH, mended=2)
    sim.expire_on_start = True
    sim.run()
    assert "REPLAY_DIFFERS" in codes(sim)
    assert max(outcomes(sim).values(), default=0) <= 1


def test_dropped_rows_are_counted_as_given_up() -> None:
    sim = TransformSim(MOST, on_bad_row=OnBadRow.DROP).run()
    assert sim.problems == []
    long = sum(1 for rows in sim.world.inputs for _, v in rows if v is not None and v.endswith(b"long"))
    assert (sim.last().given_up.count, sum(sim.visible().values())) == (long, 16 - long)


def test_what_a_letter_says() -> None:
    sim = TransformSim(EXACTLY, batches=1).run()
    told = sim.letters()
    assert {(t["sink"], t["batch"]) for t in told} == {("(transform)", 0)}
    assert {t["reason"] for t in told} == {f"ValueError: b'{p}-1-long' is too long" for p in (0, 1)}
    assert {json.loads(t["record"])["value"] for t in told} == {"0-1-long", "1-1-long"}


def failing_rows_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transform, "_build_rejections", lambda rows, bad: [])


def halves_of_a_failing_batch_forgotten(patch: pytest.MonkeyPatch) -> None:
    honest = transform._conform

    def second_half_lost(part: pa.RecordBatch, made: pa.Schema) -> pa.RecordBatch:
        return honest(part.slice(0, 1), made)

    patch.setattr(transform, "_conform", second_half_lost)


@pytest.mark.parametrize(
    "broken", [failing_rows_forgotten, halves_of_a_failing_batch_forgotten], ids=lambda f: f.__name__
)
def test_a_broken_isolation_is_found(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert any(sim.verdict() for sim in crashed(EXACTLY, "tree", BOTH))


# -- SQLite, in processes -------------------------------------------------------------------------------------------

CLEAN = """
import pyarrow as pa

def clean(rows):
    return pa.record_batch({"n": pa.array([int(v) for v in rows.column("value").to_pylist()], pa.int64())})
"""
VALUES = [b"1", b"two", b"3", b"4", b"\\xff", b"6"]
POINTS = ["source.read:after", "write.send:after", "write.flush:after", "commit.record:before", "log:before"]


def described(folder: Path) -> Path:
    (folder / "clean.py").write_text(CLEAN)
    append(str(folder / "in"), pa.table({"key": VALUES, "value": VALUES}))
    pipeline = {
        "pipeline": "numbers", "guarantee": "at_least_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "in"}, "transform": {"arrow": "clean:clean"},
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "numbers", "ifNotExists": True}],
        "on_bad_row": "dead_letter",
        "dead_letter": {"format": "sqlite", "path": "out.db", "table": "letters", "ifNotExists": True},
    }  # fmt: skip
    file = folder / "numbers.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


@pytest.mark.matrix
@pytest.mark.parametrize("point", POINTS)
def test_killed_under_at_least_once(tmp_path: Path, point: str) -> None:
    """No row and no letter is lost. Both are in one database; exactly_once needs letters that can be prepared."""
    file = described(tmp_path)
    assert run_loop(file, f"{point}!kill", wait_s=60) != 0
    assert run_loop(file, wait_s=60) == 0
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        rows = [n for (n,) in connection.execute("SELECT n FROM numbers ORDER BY n")]
    assert sorted(set(rows)) == [1, 3, 4, 6]
    letters = dead_letters(Pipeline.from_file(file))
    assert Counter(json.loads(n.record)["value"] for n in letters) == Counter(["two", "\\xff"])
    assert {n.sink for n in letters} == {"(transform)"}

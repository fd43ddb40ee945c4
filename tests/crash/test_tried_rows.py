"""Rows for which a library fails are found by trying: each is a dead letter if and only if its batch counts, despite
crashes."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pytest
from tests.crash.letter_sim import EXACTLY, NTH_MAX, LetterSim
from tests.crash.sim import Crash, points
from tests.support.memory.sink import MemorySink

from delivered.engine import Sinks
from delivered.kits.table.target import unwritable
from delivered.model.capability import Commit


@dataclass(frozen=True)
class TriedSink(MemorySink):
    """Its library fails for long values, and nothing but a trial tells which."""

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        del batch

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        def write(rows: pa.RecordBatch) -> None:
            if any(len(v or b"") > 5 for v in rows.column("value").to_pylist()):
                raise OverflowError("too long")

        return unwritable(batch, write)

    def _accepted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if any(len(v or b"") > 5 for v in batch.column("value").to_pylist()):
            raise OverflowError("too long")
        return super()._accepted(batch)


@dataclass
class TriedSim(LetterSim):
    def make_sinks(self) -> Sinks:
        group = super().make_sinks()
        first, letters = (member.sink for member in group.members)
        assert isinstance(first, MemorySink)
        return Sinks.of([("first", TriedSink(first.options), None)], self.on_bad_row, ("letters", letters))


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["kill", "tree", "fail"])
def test_one_crash_at_every_point(how: str) -> None:
    sims = []
    for point in points():
        for nth in range(1, NTH_MAX):
            crash = Crash(point, nth, how)
            sim = TriedSim(EXACTLY, crashes=(crash,), commits=(Commit.TWO_PHASE, Commit.ONE_TRANSACTION))
            sim.run()
            if not sim.crashes[0].hit:
                break
            sims.append(sim)
    assert len(sims) > 20
    assert [(s.crashes, w) for s in sims for w in s.verdict()] == []
    assert {told["reason"] for s in sims for told in s.letters()} == {"column 'value': OverflowError: too long"}


def test_a_trial_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TriedSink, "refused_rows", MemorySink.refused_rows)
    sim = TriedSim(EXACTLY, commits=(Commit.TWO_PHASE, Commit.ONE_TRANSACTION)).run()
    assert sim.verdict() != []

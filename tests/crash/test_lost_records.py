"""A decided batch whose prepared rows expired, and whose records the source has lost since.

What is left is written once; what is missing is given up once the user accepts it, and counted in the ledger. Crashes
at every point of that path."""

from __future__ import annotations

from itertools import product

import pyarrow as pa
import pytest
from tests.crash.group_sim import GroupSim
from tests.crash.sim import Crash, Sim, again, codes, other_rows, points
from tests.support.sweeps import occurrences, sweep

from delivered.audit.evidence import Counts, breaches, check_history
from delivered.engine.decide import LOST
from delivered.model.capability import Commit, Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Tolerance

EXACTLY = Guarantee.EXACTLY_ONCE
GONE = {b"0-0", b"0-1", b"1-0"}
ACCEPTED = Tolerance(lost_records=True)


def retained(batch: pa.RecordBatch, run: int) -> pa.RecordBatch:
    """From the second start on, the source lacks some records."""
    values = batch.column("value").to_pylist()
    return batch.filter(pa.array([not (run > 1 and v in GONE) for v in values], pa.bool_()))


def expired(group: bool = False) -> Sim:
    """The first batch is decided, none of it visible, and some of its records are gone."""
    kind = GroupSim if group else Sim
    sim = kind(EXACTLY, Commit.TWO_PHASE, (Crash("commit.decide:after"),), expire_on_start=True, change=retained)
    sim.starts_max = 3
    return sim.run()


@pytest.mark.parametrize("group", [False, True], ids=["one sink", "two sinks"])
def test_missing_records_are_named_and_nothing_is_written(group: bool) -> None:
    sim = expired(group)
    assert {*codes(sim)} == {"REPLAY_RECORDS_MISSING"}
    message = str(sim.errors[-1])
    assert 'The batch has the offsets from the start to {"0": 4, "1": 4}' in message
    assert '.option("lostRecords", "accept")' in message
    assert ("2 of shard 0 at sink 'first'" if group else "2 of shard 0 at sink 'memory'") in message
    assert sim.visible() == {}
    assert sim.world.unsettled() == []


@pytest.mark.parametrize("group", [False, True], ids=["one sink", "two sinks"])
def test_missing_records_are_given_up_once_the_user_accepts_it(group: bool) -> None:
    sim = again(expired(group), tolerance=ACCEPTED)
    assert codes(sim) == []
    lost = sim.expected() - sim.visible()
    assert sim.duplicated() == 0
    assert sum(lost.values()) == sim.given_up() == (5 if group else 3)
    assert [*sim._totals()] == []
    revised = next(d for d in sim.decisions() if d.revision)
    assert [p.given_up for p in revised.of(revised.scope.sink)] == [{LOST: 2}, {LOST: 1}]
    # The audit: the chain of totals holds, and the guarantee does not.
    newest = {d.batch: d for d in sim.decisions()}
    history = check_history(newest.values())
    assert (history.faults, [line.given_up for line in history.lines]) == ((), [3, 0])
    assert breaches(EXACTLY, Counts(), 3) == [
        "3 records were given up, according to the ledger; exactly_once promises none"
    ]
    # Without the option, the pipeline goes on.
    sim.world.inputs[0].append((b"k", b"more"))
    assert codes(again(sim, tolerance=Tolerance())) == []


def test_other_rows_are_never_given_up() -> None:
    sim = Sim(EXACTLY, Commit.TWO_PHASE, (Crash("commit.decide:after"),), expire_on_start=True, change=other_rows)
    sim.tolerance = ACCEPTED
    assert {*codes(sim.run())} == {"REPLAY_DIFFERS"}
    assert sim.visible() == {}


@occurrences(3)
@pytest.mark.parametrize(
    ("group", "how"),
    sweep(product([False, True], ["tree", "fail"]), lambda group, how: group == (how == "tree")),
    ids=["one sink-tree", "one sink-fail", "two sinks-tree", "two sinks-fail"],
)
def test_crash_at_every_point_while_missing_records_are_given_up(group: bool, how: str, nth_max: int) -> None:
    """Prepared rows expire at each restart, too."""
    wrong, hit = [], set()
    for point in points():
        for nth in range(1, nth_max + 1):
            sim, crash = expired(group), Crash(point, nth, how)
            sim.starts_max = 8
            again(sim, crashes=(crash,), tolerance=ACCEPTED)
            if not crash.hit:
                break
            hit.add(point)
            lost, given_up = sum((sim.expected() - sim.visible()).values()), sim.given_up()
            if codes(sim) or sim.problems or sim.duplicated() or lost != given_up or lost != (5 if group else 3):
                wrong.append((point, nth, codes(sim), sim.problems, sim.duplicated(), lost, given_up))
    assert wrong == []
    assert {"commit.decide:before", "commit.decide:after", "commit.apply:before", "write.prepare:after"} <= hit


def test_fingerprint_of_what_is_given_up_is_the_difference() -> None:
    sim = again(expired(), tolerance=ACCEPTED)
    first = next(d for d in sim.decisions() if not d.revision)
    revised = next(d for d in sim.decisions() if d.revision)
    assert revised.total + revised.given_up == first.total
    assert revised.total != Fingerprint()

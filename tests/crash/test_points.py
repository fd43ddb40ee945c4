"""Every named crash point x {task, driver, zombie} x guarantee x way to commit, with the guarantee's oracle."""

from __future__ import annotations

import pytest
from tests.crash.scenarios import CASES, NTH_MAX, Scenario, expected_points, judge, pairs, single
from tests.crash.sim import HOWS, points, role
from tests.support.steps import Role
from tests.support.sweeps import occurrences, sweep

from delivered.model.capability import Commit, Guarantee


@occurrences(NTH_MAX)
@pytest.mark.parametrize(
    ("guarantee", "commit", "how"),
    sweep(
        [(*case, how) for case in CASES for how in HOWS],
        # How a sink commits is irrelevant under the weaker guarantees, and at_least_once lets a zombie repeat rows.
        # test_sqlite_crash.py has zombies of one transaction.
        lambda guarantee, commit, how: (
            (guarantee is Guarantee.EXACTLY_ONCE or commit is Commit.TWO_PHASE)
            and (how != "zombie" or (commit is Commit.TWO_PHASE and guarantee is not Guarantee.AT_LEAST_ONCE))
        ),
    ),
)
def test_one_crash_at_every_point(guarantee: Guarantee, commit: Commit, how: str, nth_max: int) -> None:
    hit: set[str] = set()
    wrong: list[str] = []
    for scenario, sim in single(guarantee, commit, how, nth_max=nth_max):
        hit.add(scenario.crashes[0][0])
        wrong += judge((scenario, sim))
    assert wrong == []
    assert hit == expected_points(guarantee, how)


@occurrences(NTH_MAX)
@pytest.mark.parametrize("how", ["kill", "fail", "zombie_task"])
@pytest.mark.parametrize("guarantee", Guarantee)
def test_one_crash_of_a_task_whose_stage_reruns(guarantee: Guarantee, how: str, nth_max: int) -> None:
    """P31: the attempt that follows is numbered 0 again, and the first one may still be running."""
    runs = list(single(guarantee, Commit.TWO_PHASE, how, stages_rerun=True, nth_max=nth_max))
    assert [w for run in runs for w in judge(run)] == []
    assert {s.crashes[0][0] for s, _ in runs} == {p for p in expected_points(guarantee, how) if role(p) is Role.TASK}


def test_every_crash_point_belongs_to_a_guarantee() -> None:
    reachable = set().union(*(expected_points(g, "tree") for g in Guarantee))
    assert reachable == set(points())


@pytest.mark.matrix
@pytest.mark.parametrize(("guarantee", "commit"), CASES)
def test_two_crashes(guarantee: Guarantee, commit: Commit) -> None:
    runs = list(pairs(guarantee, commit, count=150, seed=20))
    assert [w for run in runs for w in judge(run)] == []
    both = sum(1 for _, sim in runs if all(c.hit for c in sim.crashes))
    assert both >= 20, "the sample must hold histories in which both crashes happened"


@pytest.mark.parametrize(
    ("guarantee", "commit", "at"),
    [
        (Guarantee.AT_LEAST_ONCE, Commit.TWO_PHASE, "write.send:after"),
        (Guarantee.AT_MOST_ONCE, Commit.TWO_PHASE, "batch.begin:after"),
    ],
)
def test_weaker_guarantees_cost_what_they_say(guarantee: Guarantee, commit: Commit, at: str) -> None:
    """Otherwise the oracles above would pass for the wrong reason."""
    sim = Scenario(guarantee, commit, ((at, 1, "tree", "end", False),)).run()
    assert sim.verdict() == []
    if guarantee is Guarantee.AT_LEAST_ONCE:
        assert sim.duplicated() > 0
    else:
        assert sim.lost() == sim.last().given_up.count > 0

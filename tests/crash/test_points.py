"""Every named crash point x {task, driver, zombie} x guarantee x way to commit, with the guarantee's oracle."""

from __future__ import annotations

import pytest
from tests.crash.scenarios import CASES, Scenario, expected_points, judge, pairs, single
from tests.crash.sim import HOWS, points
from tests.support.sweeps import sweep

from delivered.model.capability import Commit
from delivered.model.guarantee import Guarantee


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("guarantee", "commit"),
    # How a sink commits is irrelevant under the weaker guarantees.
    sweep(CASES, lambda guarantee, commit: guarantee is Guarantee.EXACTLY_ONCE or commit is Commit.TWO_PHASE),
)
def test_one_crash_at_every_point(guarantee: Guarantee, commit: Commit, how: str) -> None:
    hit: set[str] = set()
    wrong: list[str] = []
    for scenario, sim in single(guarantee, commit, how):
        hit.add(scenario.crashes[0][0])
        wrong += judge((scenario, sim))
    assert wrong == []
    assert hit == expected_points(guarantee, how)


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

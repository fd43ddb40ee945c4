"""Atomic batches across several sinks: every crash point x {task, driver, zombie}, also between the sinks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.crash.group_sim import BOTH_PREPARE, LAST_RESOURCE, GroupSim
from tests.crash.scenarios import NTH_MAX, expected_points, judge, pairs, single
from tests.crash.sim import HOWS, Checkpoint, Crash, Driver, again, codes, other_rows
from tests.support.sweeps import occurrences, sweep

from delivered.engine import Sinks, shard
from delivered.engine.context import Committers
from delivered.model.capability import Commit, Guarantee
from delivered.model.errors import UsageError
from delivered.model.work import Action, BatchPlan, Decision, Ok, ShardMessage

GROUPS = {"both prepare": BOTH_PREPARE, "last resource": LAST_RESOURCE}


@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("group", GROUPS)
def test_a_batch_reaches_every_sink_once(group: str, guarantee: Guarantee) -> None:
    sim = GroupSim(guarantee, commits=GROUPS[group]).run()
    assert sim.verdict() == []
    assert sim.visible() == sim.expected()


KEPT = {"both prepare": {"zombie_task"}, "last resource": {"kill"}}
"""Run by `make test`, which sweeps other roles and the weaker guarantees over one sink; pairs of crashes, below,
have them with both groups."""


@occurrences(NTH_MAX)
@pytest.mark.parametrize(
    ("group", "guarantee", "how"),
    sweep(
        [
            (group, guarantee, how)
            for group in GROUPS
            for guarantee in Guarantee
            for how in HOWS
            # How a sink commits is irrelevant under the weaker guarantees.
            if guarantee is Guarantee.EXACTLY_ONCE or group == "both prepare"
        ],
        lambda group, guarantee, how: guarantee is Guarantee.EXACTLY_ONCE and how in KEPT[group],
    ),
)
def test_one_crash_at_every_point(group: str, guarantee: Guarantee, how: str, nth_max: int) -> None:
    hit: set[str] = set()
    wrong: list[str] = []
    for scenario, sim in single(guarantee, Commit.TWO_PHASE, how, GROUPS[group], nth_max=nth_max):
        hit.add(scenario.crashes[0][0])
        wrong += judge((scenario, sim))
    assert wrong == []
    assert hit == expected_points(guarantee, how)


@pytest.mark.parametrize("guarantee", sweep(Guarantee, lambda g: g is Guarantee.EXACTLY_ONCE))
@pytest.mark.parametrize("group", GROUPS)
def test_two_crashes(group: str, guarantee: Guarantee) -> None:
    runs = list(pairs(guarantee, Commit.TWO_PHASE, count=100, seed=7, several=GROUPS[group]))
    assert [w for run in runs for w in judge(run)] == []
    assert sum(1 for _, sim in runs if all(c.hit for c in sim.crashes)) >= 10


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_p27_killed_between_two_applies_then_all_is_there(nth: int) -> None:
    """P27: some sinks show the batch and others do not, until the next start."""
    sim = GroupSim(Guarantee.EXACTLY_ONCE, batches=1, crashes=(Crash("commit.apply:after", nth, "tree"),))
    torn: list[int] = []
    sim.on_start = lambda sim, start: torn.append(sum(sim.visible().values())) if start else None
    sim.run()
    assert sim.verdict() == []
    assert 0 < torn[0] < sum(sim.expected().values())


def test_one_expired_promise_of_one_sink_is_written_again_alone() -> None:
    sim = GroupSim(Guarantee.EXACTLY_ONCE, batches=1, crashes=(Crash("commit.apply:after", 3, "tree"),))
    sim.expire_on_start = True
    plans: list[BatchPlan] = []
    tasks = sim.tasks

    def noted(driver: Driver, plan: BatchPlan) -> list[ShardMessage | None]:
        plans.append(plan)
        return tasks(driver, plan)

    sim.tasks = noted  # type: ignore[method-assign]
    sim.run()
    assert sim.verdict() == []
    # Shard 0 was in both sinks, shard 1 only in the first: only its part for the second repeats.
    assert [dict(p.rewrite) for p in plans] == [{}, {1: frozenset({"second"})}]
    assert sim.last().revision == 1


def test_last_resource_adds_its_rows_once_though_another_sink_is_written_again() -> None:
    sim = GroupSim(Guarantee.EXACTLY_ONCE, commits=LAST_RESOURCE, crashes=(Crash("commit.decide:after"),))
    sim.expire_on_start = True
    sim.run()
    assert sim.verdict() == []
    assert [(d.batch, d.revision) for d in sim.decisions()] == [(0, 0), (0, 1), (1, 0)]


def test_p5_a_replay_that_differs_at_one_sink_stops_the_query() -> None:
    sim = GroupSim(Guarantee.EXACTLY_ONCE, commits=LAST_RESOURCE, crashes=(Crash("commit.decide:after"),))
    sim.expire_on_start = True
    sim.change = other_rows
    sim.run()
    assert "REPLAY_DIFFERS" in codes(sim)


@pytest.mark.parametrize("group", GROUPS)
def test_at_most_once_is_begun_before_the_first_row_leaves_to_any_sink(group: str) -> None:
    sim = GroupSim(Guarantee.AT_MOST_ONCE, commits=GROUPS[group], batches=1)
    sim.crashes = (Crash("write.send:after", 1, "tree"),)
    sim.run()
    assert sim.verdict() == []
    # Rows of one read reached the first sink, none the second; the account includes all of both.
    assert {s for s, _ in sim.visible()} == {"first"}
    assert [sim.last().projected(n).given_up.count for n in ("first", "second")] == [8, 4]


@pytest.mark.parametrize("stop", ["commit.decide:after", "commit.apply:after", "write.prepare:after", "log:after"])
def test_another_sink_and_with_it_another_ledger(stop: str) -> None:
    """Stopped anywhere, then restarted with another deciding sink: the earlier decision is finished."""
    sim = GroupSim(Guarantee.EXACTLY_ONCE, crashes=(Crash(stop, 1, "tree"),))

    def change(sim: GroupSim, start: int) -> None:
        if start:
            sim.commits = (*BOTH_PREPARE, Commit.ONE_TRANSACTION)
            sim.sinks = sim.make_sinks()

    sim.on_start = change  # type: ignore[assignment]
    sim.run()
    assert codes(sim) == []
    both = Counter({k: n for k, n in sim.expected().items() if k[0] != "third"})
    assert Counter({k: n for k, n in sim.visible().items() if k[0] != "third"}) == both
    assert sim.world.unsettled() == []
    # It receives what comes after it was added.
    third = Counter({k: n for k, n in sim.visible().items() if k[0] == "third"})
    assert set(third.values()) == {1}
    assert len(third) == (16 if stop == "write.prepare:after" else 8)


@pytest.mark.parametrize("stop", ["commit.decide:after", "commit.apply:after", "write.prepare:after", "log:after"])
def test_sinks_that_change_places_and_change_back(stop: str) -> None:
    """Their ledgers take turns: the one that decided first lacks the batch that the other decided meanwhile."""
    nth = 2 if stop in ("commit.decide:after", "log:after") else 5
    sim = GroupSim(Guarantee.EXACTLY_ONCE, batches=3, crashes=(Crash("log:after"), Crash(stop, nth)))

    def change(sim: GroupSim, start: int) -> None:
        sim.sinks = Sinks(tuple(reversed(sim.make_sinks().members))) if start == 1 else sim.make_sinks()

    sim.on_start = change  # type: ignore[assignment]
    sim.run()
    assert codes(sim) == []
    assert all(c.hit for c in sim.crashes)
    assert sim.visible() == sim.expected()
    assert sim.world.unsettled() == []


def test_a_sink_left_out_while_its_part_is_open_is_refused() -> None:
    sim = GroupSim(Guarantee.EXACTLY_ONCE, crashes=(Crash("commit.decide:after"),))

    def leave_out(sim: GroupSim, start: int) -> None:
        if start:
            sim.commits = BOTH_PREPARE[:1]
            sim.sinks = sim.make_sinks()

    sim.on_start = leave_out  # type: ignore[assignment]
    sim.run()
    assert set(codes(sim)) == {"SINK_LEFT_OUT"}
    assert sum(sim.visible().values()) == 0
    assert len(sim.world.unsettled()) == 4  # nothing was touched
    sim.commits = BOTH_PREPARE
    sim.sinks = sim.make_sinks()
    again(sim, on_start=None)
    assert sim.verdict() == []
    assert sim.visible() == sim.expected()


def test_a_driver_with_the_former_sinks_is_fenced() -> None:
    """F7: paused before its decision; another driver runs with another deciding ledger; then it resumes."""
    sim = GroupSim(Guarantee.EXACTLY_ONCE, crashes=(Crash("commit.decide:before", 2, "zombie"),))

    def change(sim: GroupSim, start: int) -> None:
        if start:
            sim.commits = LAST_RESOURCE
            sim.sinks = sim.make_sinks()

    sim.on_start = change  # type: ignore[assignment]
    sim.run()
    assert sim.lost() == sim.duplicated() == 0
    assert sim.visible() == sim.expected()
    assert [d.batch for d in sim.decisions()] == [0, 1]


@pytest.mark.parametrize("group", GROUPS)
def test_p2_new_checkpoint_of_several_sinks(group: str) -> None:
    """P2: the ledger that decided for all knows of the other checkpoint."""
    sim = GroupSim(Guarantee.EXACTLY_ONCE, commits=GROUPS[group]).run()
    before = sim.visible()
    again(sim, checkpoint=Checkpoint("inc-2"))
    assert set(codes(sim)) == {"CHECKPOINT_NEW"}
    assert sim.visible() == before
    again(sim, checkpoint=Checkpoint("inc-3"), guarantee=Guarantee.AT_LEAST_ONCE)
    assert codes(sim) == []
    assert sim.visible() == before + before


def test_two_sinks_of_one_name_are_refused() -> None:
    sim = GroupSim(Guarantee.EXACTLY_ONCE)
    with pytest.raises(UsageError, match="SINK_NAME_TWICE"):
        Sinks.of([("a", m.sink, None) for m in sim.make_sinks().members])


# -- the verifier verified: break one thing at a time; a run above must find it ---------------------------------------


def second_sink_not_applied(patch: pytest.MonkeyPatch) -> None:
    honest = Committers.commit
    patch.setattr(
        Committers, "commit", lambda self, w, p: Ok(None) if p.sink != self._scope.sink else honest(self, w, p)
    )


def second_sink_not_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Committers, "abort_orphans", lambda self, keep: self.by_name[self._scope.sink].abort_orphans(keep))


def every_sink_written_again(patch: pytest.MonkeyPatch) -> None:
    honest = shard._build_shares

    def all_lines(sink: Any, plan: Any, number: int) -> Any:
        return honest(sink, replace(plan, rewrite={}), number)

    patch.setattr(shard, "_build_shares", all_lines)


def moved_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Decision, "to_move", property(lambda self: self.of(self.scope.sink)))


def all_seen_as_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Decision, "to_move", property(lambda self: self.participants))


def first_sink_alone_gives_up(patch: pytest.MonkeyPatch) -> None:
    honest = shard._build_shares
    patch.setattr(
        shard, "_build_shares", lambda s, p, n: honest(s, p, n)[:1] if p.action is Action.GIVE_UP else honest(s, p, n)
    )


def marker_of_the_deciding_sink_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Committers,
        "was_committed",
        lambda self, w, p: self.by_name[self._scope.sink].was_committed(
            replace(w, scope=replace(w.scope, sink="first")), p
        ),
    )


def runs(guarantee: Guarantee, group: tuple[Commit, ...], how: str = "tree") -> Callable[[], Iterator[list[str]]]:
    return lambda: (sim.verdict() for _, sim in single(guarantee, Commit.TWO_PHASE, how, group))


EXACTLY, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_MOST_ONCE
MUTANTS = {
    "second sink not applied": (second_sink_not_applied, runs(EXACTLY, LAST_RESOURCE)),
    "orphans of the second sink not aborted": (second_sink_not_aborted, runs(EXACTLY, BOTH_PREPARE)),
    "every sink written again": (every_sink_written_again, runs(EXACTLY, LAST_RESOURCE)),
    "rows of the last resource moved again": (moved_again, runs(EXACTLY, LAST_RESOURCE)),
    "rows of other sinks taken for its own": (all_seen_as_own, runs(EXACTLY, LAST_RESOURCE)),
    "only one sink's rows counted as given up": (first_sink_alone_gives_up, runs(MOST, BOTH_PREPARE)),
    "marker of one sink taken for all": (marker_of_the_deciding_sink_for_all, runs(EXACTLY, BOTH_PREPARE)),
}


@pytest.mark.parametrize("name", sweep(MUTANTS, lambda name: name != "marker of one sink taken for all"))
def test_broken_group_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, tried = MUTANTS[name]
    patch(monkeypatch)
    assert any(found for found in tried()), f"no run notices: {name}"

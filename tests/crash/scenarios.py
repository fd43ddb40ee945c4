"""Every way to stop every process at every crash point, generated from the steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.crash.group_sim import GroupSim
from tests.crash.sim import END, Crash, Sim, points, role
from tests.support.steps import Role

from delivered.model.capability import Commit, Guarantee

NTH_MAX = 40
"""Never reached: the search for the n-th occurrence ends with the first one not hit."""
ZOMBIE_NTH_MAX = 2
RESUMES = (
    "recover.claim:after",
    "recover.abort_orphans:after",
    "write.{prepare}:after",
    "commit.{decide}:before",
    "commit.{decide}:after",
    END,
)
CASES = [(g, c) for g in Guarantee for c in (Commit.TWO_PHASE, Commit.ONE_TRANSACTION)]


@dataclass(frozen=True)
class Scenario:
    """
    Attributes:
        decided_first: an earlier driver died after deciding the first batch: the crash hits a recovery.
        expired: every prepared transaction has timed out by each restart.
        several: how each of several sinks commits; empty: one sink, with `commit`.
        stages_rerun: as in `Sim`.
    """

    guarantee: Guarantee
    commit: Commit
    crashes: tuple[tuple[str, int, str, str, bool], ...]
    decided_first: bool = False
    expired: bool = False
    several: tuple[Commit, ...] = ()
    stages_rerun: bool = False

    def run(self) -> Sim:
        crashes = [Crash(*c) for c in self.crashes]
        if self.decided_first:
            step = "commit.decide" if self.guarantee is Guarantee.EXACTLY_ONCE else "commit.record"
            crashes.insert(0, Crash(f"{step}:after", 1, "tree"))
        if self.several:
            return GroupSim(
                self.guarantee, self.commit, tuple(crashes), expire_on_start=self.expired, commits=self.several,
                stages_rerun=self.stages_rerun,
            ).run()  # fmt: skip
        return Sim(
            self.guarantee, self.commit, tuple(crashes), expire_on_start=self.expired, stages_rerun=self.stages_rerun
        ).run()

    def __str__(self) -> str:
        stops = " + ".join(
            f"{how} at {point}#{nth}" + (f" until {resume}{' (same session)' if same else ''}" if "z" in how else "")
            for point, nth, how, resume, same in self.crashes
        )
        flags = (" after a decided batch" * self.decided_first) + (" promises expire" * self.expired)
        flags += " stages rerun" * self.stages_rerun
        sinks = " + ".join(self.several) or self.commit
        return f"{self.guarantee}, {sinks}: {stops}{flags}"


def single(
    guarantee: Guarantee,
    commit: Commit,
    how: str,
    several: tuple[Commit, ...] = (),
    *,
    stages_rerun: bool = False,
    nth_max: int = NTH_MAX,
) -> Iterator[tuple[Scenario, Sim]]:
    """Run one crash at each point and occurrence, up to the `nth_max`-th; yields only runs in which it was hit."""
    for point in points():
        if (how == "zombie_task" or stages_rerun) and role(point) is not Role.TASK:
            continue
        for decided_first, expired in _beginnings(guarantee, commit, how.startswith("zombie")):
            base = Scenario(guarantee, commit, (), decided_first, expired, several, stages_rerun)
            yield from _occurrences(base, point, how, nth_max)


def _beginnings(guarantee: Guarantee, commit: Commit, zombie: bool) -> list[tuple[bool, bool]]:
    if guarantee is Guarantee.EXACTLY_ONCE and commit is Commit.TWO_PHASE:
        if zombie:
            return [(False, False), (True, True)]
        return [(False, False), (False, True), (True, False), (True, True)]
    return [(False, False), (True, False)]


def resumes(guarantee: Guarantee) -> list[str]:
    """Where the other driver is when a zombie resumes, in this guarantee's steps."""
    exactly_once = guarantee is Guarantee.EXACTLY_ONCE
    return [
        r.format(prepare="prepare" if exactly_once else "flush", decide="decide" if exactly_once else "record")
        for r in RESUMES
    ]


def _occurrences(base: Scenario, point: str, how: str, nth_max: int) -> Iterator[tuple[Scenario, Sim]]:
    zombie = how.startswith("zombie")
    # How a sink commits is irrelevant under the weaker guarantees: test them once.
    plain = base.commit is Commit.ONE_TRANSACTION and base.guarantee is not Guarantee.EXACTLY_ONCE
    most = (1 if plain else ZOMBIE_NTH_MAX) if zombie else NTH_MAX
    for nth in range(1, min(most, nth_max) + 1):
        hit = False
        for resume, same in itertools.product(resumes(base.guarantee), (False, True)) if zombie else [(END, False)]:
            if same and (how == "zombie_task" or nth > 1 or base.decided_first):
                continue
            scenario = replace(base, crashes=((point, nth, how, resume, same),))
            run = scenario.run()
            if run.crashes[-1].hit:
                hit = True
                yield scenario, run
            else:
                break
        if not hit:
            return


def pairs(
    guarantee: Guarantee, commit: Commit, count: int, seed: int, several: tuple[Commit, ...] = ()
) -> Iterator[tuple[Scenario, Sim]]:
    """A seeded sample of two crashes in one history."""
    dice = random.Random(seed)
    for _ in range(count):
        stops = tuple(
            (
                dice.choice(points()),
                dice.randint(1, 4),
                dice.choice(("kill", "tree", "fail", "zombie", "zombie_task")),
                dice.choice(resumes(guarantee)),
                dice.random() < 0.5,
            )
            for _ in range(2)
        )
        stops = tuple(s for s in stops if s[2] != "zombie_task" or role(s[0]) is Role.TASK)
        expired = commit is Commit.TWO_PHASE and dice.random() < 0.3
        scenario = Scenario(guarantee, commit, stops, dice.random() < 0.3, expired, several)
        yield scenario, scenario.run()


def expected_points(guarantee: Guarantee, how: str) -> set[str]:
    exactly_once = guarantee is Guarantee.EXACTLY_ONCE
    foreign = (
        ("write.send", "write.flush", "commit.record", "batch.begin")
        if exactly_once
        else ("write.stage", "write.prepare", "commit.decide", "commit.apply", "recover.apply")
    )
    found = {p for p in points() if not p.startswith(foreign)}
    return {p for p in found if role(p) is Role.TASK} if how == "zombie_task" else found


def judge(run: tuple[Scenario, Sim]) -> list[str]:
    scenario, sim = run
    return [f"{scenario}: {problem}; errors {sim.errors!r}" for problem in sim.verdict()]

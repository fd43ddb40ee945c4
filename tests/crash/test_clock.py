"""Clocks that jump by an hour, and hosts whose clocks differ, at every crash point: no clock orders decisions (P30).

Each history has several incarnations, whose order decides what is finished, aborted and continued: runs of `df.write`,
or checkpoints of a stream. Every driver has a clock of its own.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.crash.scenarios import expected_points
from tests.crash.sim import Checkpoint, Crash, Sim, again, codes, points
from tests.support.sweeps import occurrences, sweep

from delivered.ledger import state_of
from delivered.model.capability import Commit, Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Account, Decision, LedgerState, Started, Tolerance

EXACTLY = Guarantee.EXACTLY_ONCE
HOUR_S = 3600
CLOCKS = {
    "the first host is ahead": (HOUR_S, 0, 0),
    "the first host is behind": (-HOUR_S, 0, 0),
    "it jumps ahead at the crash": (0, 0, HOUR_S),
    "it jumps back at the crash": (HOUR_S, HOUR_S, 0),
}
"""By how much it is off: in the first incarnation, in the second one until it is killed, and from then on."""
KINDS = ["run", "run after an older one", "run after a later one", "checkpoint", "next checkpoint"]
CASES = [
    (k, *c)
    for k in KINDS
    for c in ((Commit.TWO_PHASE, False), (Commit.TWO_PHASE, True), (Commit.ONE_TRANSACTION, False))
]
FAST = (("run", True), ("run after a later one", False), ("checkpoint", True))
"""By kind, and whether the rows of the killed one expire."""
ACCEPTED = Tolerance(new_checkpoint=True)
ROWS = 4


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number: by how many seconds this machine's wall clock is off."""
    seconds, now = [0], time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + seconds[0] * 1_000_000_000)
    monkeypatch.setattr(time, "time", lambda: now() / 1e9 + seconds[0])
    return seconds


def part(number: int) -> Checkpoint:
    """An incarnation that reads its own part of the input, in one batch."""
    start = number * ROWS
    return Checkpoint(f"r{number}", {"0": start, "1": start}, start + ROWS)


def history(
    kind: str, commit: Commit, expires: bool, clocks: tuple[int, int, int], off: list[int], crash: Crash
) -> Sim | None:
    """Incarnation 0 completes, 1 is killed, then comes what `kind` says, then a last one reads the rest.

    Args:
        expires: the killed one's prepared rows.

    Returns:
        None: the crash was not hit.
    """
    sim = Sim(EXACTLY, commit, batches=3, rows=ROWS, runs=kind.startswith("run"))
    off[0] = clocks[0]
    again(sim, checkpoint=part(0), tolerance=ACCEPTED)
    off[0] = clocks[1]
    killed = part(1)
    again(sim, checkpoint=killed, crashes=(crash,), starts_max=1)
    if not crash.hit:
        return None
    off[0], sim.starts_max = clocks[2], 3
    if expires:
        sim.world.expire()
    if kind == "run after an older one":
        again(sim, checkpoint=part(0))
    if kind == "run after a later one":
        again(sim, checkpoint=part(2))
    if kind == "next checkpoint" and continues(sim):
        return sim
    again(sim, checkpoint=part(1) if sim.runs else killed, tolerance=ACCEPTED)
    if sim.runs:
        return again(sim, checkpoint=part(2))
    assert continues(sim)
    return sim


def continues(sim: Sim) -> bool:
    """Start the last checkpoint where the refusal without an offset says; False: an earlier batch must be finished."""
    newest = sim.decisions()[-1]
    again(sim, checkpoint=Checkpoint("r2"), tolerance=Tolerance())
    assert {*codes(sim)} == {"CHECKPOINT_NEW"}
    assert f"incarnation {newest.scope.incarnation}" in str(sim.errors[-1])
    again(sim, checkpoint=Checkpoint("r2", json.loads(newest.offsets)), tolerance=ACCEPTED)
    return {*codes(sim)} != {"EARLIER_BATCH_EXPIRED"}


def wrong(sim: Sim) -> list[str]:
    found = [*sim.problems, *codes(sim)]
    if sim.lost() or sim.duplicated():
        found.append(f"lost {sim.lost()}, duplicated {sim.duplicated()}")
    if left := sim.world.unsettled():
        found.append(f"{len(left)} participants outlived their batch")
    sequences = [d.sequence for d in sim.decisions() if not d.revision]
    if sequences != [*range(1, 1 + len(sequences))]:
        found.append(f"sequences are {sequences}")
    return found


def faults(kind: str, commit: Commit, expires: bool, off: list[int], nth_max: int = 1) -> tuple[list[str], set[str]]:
    """What is wrong in any history, and which points were hit."""
    found, hit = [], set[str]()
    for name, clocks in CLOCKS.items():
        for point in points():
            for nth in range(1, nth_max + 1):
                sim = history(kind, commit, expires, clocks, off, Crash(point, nth))
                if sim is None:
                    break
                hit.add(point)
                found += [f"{name}, killed at {point}#{nth}: {w}" for w in wrong(sim)]
    return found, hit


@occurrences(2)
@pytest.mark.parametrize(
    ("kind", "commit", "expires"),
    sweep(CASES, lambda kind, commit, expires: commit is Commit.TWO_PHASE and (kind, expires) in FAST),
)
def test_p30_no_clock_orders_decisions(kind: str, commit: Commit, expires: bool, off: list[int], nth_max: int) -> None:
    found, hit = faults(kind, commit, expires, off, nth_max)
    assert found == []
    assert expected_points(EXACTLY, "tree") - hit <= {"log:after"}


@pytest.mark.parametrize("expires", sweep([True, False], lambda expires: not expires))
def test_p30_order_by_time_is_found(expires: bool, off: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def by_time(scope: Scope, owner: Any, epoch: int, decisions: Any, started: Any, archived: Any) -> LedgerState:
        aged = [replace(d, sequence=d.decided_at_ms) for d in decisions]
        found = state_of(scope, owner, epoch, aged, started, archived)
        known = {d.scope.incarnation: d for d in decisions}
        own = {} if found.last is None else {"last": known[scope.incarnation]}
        return replace(found, earlier=tuple(known[d.scope.incarnation] for d in found.earlier), **own)

    monkeypatch.setattr("tests.support.memory.store.state_of", lambda *args: by_time(*_listed(args)))
    found, _ = faults("run" if expires else "run after a later one", Commit.TWO_PHASE, expires, off)
    assert any("the first host is ahead, killed at commit.decide:after" in f and "lost" in f for f in found)


def _listed(args: tuple[Any, ...]) -> list[Any]:
    return [[*a] if i == 3 else a for i, a in enumerate(args)]


def decided(incarnation: str, at_ms: int, sequence: int) -> Decision:
    none = Fingerprint()
    return Decision(
        Scope("p", "s", incarnation), "a", EXACTLY, 0, "{}", (), {"s": Account(none, none)}, at_ms, sequence=sequence
    )  # fmt: skip


def test_records_of_an_earlier_release_precede_those_with_a_sequence_in_the_stores_order() -> None:
    stored = [
        decided("a", 9, 0),
        decided("new", 1, 1),
        decided("b", 8, 0),
        decided("own", 7, 0),
        decided("newer", 2, 2),
    ]
    started = {"z": Started(0, "{}", 2), "y": Started(0, "{}"), "x": Started(0, "{}", 1)}
    state = state_of(Scope("p", "s", "own"), None, 0, stored, started, lambda _: None)
    assert [d.scope.incarnation for d in state.oldest_first] == ["a", "b", "own", "new", "newer"]
    assert [d.scope.incarnation for d in state.earlier] == ["newer", "new", "b", "a"]
    assert [i for i, _ in state.earlier_started] == ["z", "x", "y"]
    assert (state.followed, state.next_sequence) == (2, 3)
    assert LedgerState().next_sequence == 1

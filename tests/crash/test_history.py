"""Restored state, expired transactions, lost replies, changed guarantees: one history each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from tests.crash.sim import ATTEMPTS_MAX, Checkpoint, Crash, Driver, Sim, again, codes, other_rows
from tests.support.memory.world import Answer, State

from delivered.engine import decide
from delivered.model.capability import Commit, Guarantee
from delivered.model.work import Tolerance

EXACTLY, LEAST, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
COMMITS = [Commit.TWO_PHASE, Commit.ONE_TRANSACTION]


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_p1_last_file_of_commits_removed(guarantee: Guarantee, commit: Commit) -> None:
    """P1: the batch runs again with the same id; nothing changes in the sink."""
    sim = Sim(guarantee, commit).run()
    before = sim.visible()
    sim.checkpoint.commits.discard(1)
    again(sim)
    assert sim.verdict() == []
    assert sim.visible() == before
    assert len(sim.decisions()) == 2


@pytest.mark.parametrize("guarantee", [EXACTLY, MOST])
def test_p2_new_checkpoint_is_refused_unless_accepted(guarantee: Guarantee) -> None:
    """P2: batch 0 of a new checkpoint is not batch 0 of the old one: neither skipped nor appended unasked."""
    sim = Sim(guarantee).run()
    before = sim.visible()
    again(sim, checkpoint=Checkpoint("inc-2"))
    assert set(codes(sim)) == {"CHECKPOINT_NEW"}
    assert sim.visible() == before
    again(sim, checkpoint=Checkpoint("inc-2"), tolerance=Tolerance(new_checkpoint=True))
    assert codes(sim) == []
    assert sim.visible() == before + before


def test_p2_new_checkpoint_under_at_least_once_repeats() -> None:
    sim = Sim(LEAST).run()
    before = sim.visible()
    again(sim, checkpoint=Checkpoint("inc-2"))
    assert sim.visible() == before + before


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_older_checkpoint_with_other_offsets_is_ledger_ahead(guarantee: Guarantee) -> None:
    """F8: the same batch number, other offsets: neither skipped nor appended."""
    sim = Sim(guarantee).run()
    before = sim.visible()
    sim.checkpoint.commits.discard(1)
    sim.checkpoint.offsets[1] = {"0": 7, "1": 6}
    again(sim)
    assert set(codes(sim)) == {"LEDGER_AHEAD"}
    assert sim.visible() == before


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_older_checkpoint_is_ledger_ahead(guarantee: Guarantee) -> None:
    sim = Sim(guarantee, batches=3).run()
    before = sim.visible()
    del sim.checkpoint.offsets[2]
    sim.checkpoint.commits -= {1, 2}
    again(sim)
    assert set(codes(sim)) == {"LEDGER_AHEAD"}
    assert sim.visible() == before


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_lost_ledger_is_ledger_behind_unless_accepted(guarantee: Guarantee) -> None:
    sim = Sim(guarantee, batches=3).run()
    sim.checkpoint.commits.discard(2)
    room = next(iter(sim.world.rooms.values()))
    kept, room.decisions = room.decisions, []
    room.started.clear()
    again(sim)
    assert set(codes(sim)) == {"LEDGER_MISSING"}
    room.decisions = kept[:1]
    again(sim)
    assert set(codes(sim)) == {"LEDGER_BEHIND"}
    again(sim, tolerance=Tolerance(missing_ledger=True))
    assert codes(sim) == []


def test_begun_batch_whose_decision_is_gone_is_ledger_behind() -> None:
    sim = Sim(MOST, batches=2).run()
    next(iter(sim.world.rooms.values())).decisions.pop()
    sim.world.inputs[0].append((b"k", b"more"))
    again(sim)
    assert set(codes(sim)) == {"LEDGER_BEHIND"}


def test_p5_expired_promise_and_other_rows_stops() -> None:
    """P5, P25: a decided shard expired, and the replay gives other rows: an error, and nothing more is applied."""
    crash = Crash("commit.apply:after", 1)
    sim = Sim(EXACTLY, crashes=(crash,), expire_on_start=True, change=other_rows).run()
    assert set(codes(sim)) == {"REPLAY_DIFFERS"}
    assert sum(sim.visible().values()) == sim.rows, "the shard that was applied before, and no other"
    assert sim.world.unsettled() == []


def test_p5_expired_promise_and_same_rows_is_written_again() -> None:
    crash = Crash("commit.apply:after", 1)
    sim = Sim(EXACTLY, crashes=(crash,), expire_on_start=True).run()
    assert sim.verdict() == []
    assert sim.decisions()[1].revision == 1


def fall_behind(state: State) -> Callable[[Sim, int], None]:
    """A start finds the last logged batch in this state: its server failed over to a copy from before `apply`."""

    def fall(sim: Sim, start: int) -> None:
        if start != 1:
            return
        for p in sim.world.participants.values():
            if p.state is State.APPLIED and p.work.batch == 0:
                p.state, p.opened_at = state, 0
        sim.world.visible, sim.world.log = [], []

    return fall


def test_a_logged_batch_that_is_prepared_again_is_applied_and_not_taken_for_an_orphan() -> None:
    crash = Crash("log:after")
    sim = Sim(EXACTLY, crashes=(crash,), on_start=fall_behind(State.PREPARED)).run()
    assert crash.hit
    assert sim.verdict() == []
    assert sim.starts == 2


def test_a_logged_batch_whose_rows_vanished_stops_and_can_be_written_again() -> None:
    sim = Sim(EXACTLY, crashes=(Crash("log:after"),), on_start=fall_behind(State.ABORTED)).run()
    assert set(codes(sim)) == {"LOGGED_BATCH_LOST"}
    sim.checkpoint.commits.discard(0)
    sim.checkpoint.offsets.pop(1)
    again(sim)
    assert sim.errors == []
    assert sim.visible() == sim.expected()


def test_expired_promise_and_other_number_of_shards_stops() -> None:
    def fewer(sim: Sim, start: int) -> None:
        if start == 1:
            sim.world.expire()
            source = type(sim.source.driver())
            slices = source.slices
            source.slices = lambda *a: slices(*a)[:1]  # type: ignore[method-assign]
            undo.append(lambda: setattr(source, "slices", slices))

    undo: list[object] = []
    try:
        sim = Sim(EXACTLY, crashes=(Crash("commit.decide:after"),), on_start=fewer).run()
    finally:
        for action in undo:
            action()  # type: ignore[operator]
    assert set(codes(sim)) == {"REPLAY_SHARDS_DIFFER"}
    assert sim.visible().total() == 0


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("answer", list(Answer))
@pytest.mark.parametrize("method", ["begin", "decide", "apply", "abort_orphans"])
def test_p6_p7_no_answer_is_looked_up(method: str, answer: Answer, guarantee: Guarantee, commit: Commit) -> None:
    """P6, P7: whether the request is in, out or late: the batch counts whole and once, as the guarantee says."""

    def lose(sim: Sim, start: int) -> None:
        if start == 0:
            sim.world.answers[method] = deque([answer])

    sim = Sim(guarantee, commit, on_start=lose).run()
    assert sim.verdict() == []


def test_p7_late_decision_cannot_get_in_after_it_was_called_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: reported as failed means that it is out for ever: fenced before it is looked up."""
    monkeypatch.setattr(decide, "OUTAGE_PATIENCE_S", -1.0)

    def late(sim: Sim, start: int) -> None:
        if start == 0:
            sim.world.answers["decide"] = deque([Answer.LATE])
        else:
            seen.append(sim.world.land() or len(sim.decisions()))

    seen: list[object] = []
    sim = Sim(EXACTLY, on_start=late).run()
    assert codes(sim) == ["DECISION_FAILED"]
    assert seen == [0]
    assert sim.verdict() == []


@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("commit", COMMITS)
def test_p19_a_decision_without_an_answer_is_made_again_only_once_it_is_fenced(
    commit: Commit, guarantee: Guarantee
) -> None:
    """P19: no blind retry. Out or late, twice in a row: looked up, decided again, and what comes late stays out."""

    def lose(sim: Sim, start: int) -> None:
        sim.world.answers["decide"] = deque([Answer.LATE, Answer.LOST])

    sim = Sim(guarantee, commit, on_start=lose).run()
    assert codes(sim) == []
    assert not sim.world.land()
    assert sim.verdict() == []


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("at", [None, "commit.decide:after", "commit.record:after", "commit.apply:after"])
def test_p16_commit_asked_for_again(guarantee: Guarantee, commit: Commit, at: str | None) -> None:
    """P16: apply again, decide never again, abort nothing."""
    crashes = (Crash(at, 1, "fail"),) if at else ()
    sim = Sim(guarantee, commit, crashes, commit_again=2).run()
    assert sim.verdict() == []
    assert len(sim.decisions()) == 2
    assert all(d.revision == 0 for d in sim.decisions())


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_batch_without_a_task(guarantee: Guarantee, commit: Commit) -> None:
    """Spark may run no task at all: the batch is decided empty, and recognised on replay."""
    sim = Sim(guarantee, commit)
    sim.tasks = lambda driver, plan: []  # type: ignore[method-assign]
    sim.run()
    assert [d.batch for d in sim.decisions()] == [0, 1]
    sim.checkpoint.commits.discard(1)
    again(sim)
    assert codes(sim) == []
    assert [d.batch for d in sim.decisions()] == [0, 1]


@pytest.mark.parametrize("after", [LEAST, MOST])
def test_decided_batch_is_finished_under_the_guarantee_of_its_decision(after: Guarantee) -> None:
    """Decided but not applied, then the guarantee is weakened: it is still applied."""
    for expired in (False, True):
        sim = Sim(EXACTLY, crashes=(Crash("commit.decide:after", 2),), expire_on_start=expired)
        sim.on_start = lambda sim, start: setattr(sim, "guarantee", after) if start else None
        sim.run()
        assert (sim.lost(), sim.duplicated()) == (0, 0)


@pytest.mark.parametrize(
    ("point", "nth"),
    [("write.send:after", 1), ("write.send:after", 5), ("write.flush:after", 3), ("commit.record:before", 2)],
)
def test_stricter_guarantee_after_at_least_once_is_refused_or_gives_up(point: str, nth: int) -> None:
    """What at_least_once may have sent must not be resent under a stricter guarantee."""

    def start_over(guarantee: Guarantee, tolerance: Tolerance) -> Sim:
        sim = Sim(LEAST, crashes=(Crash(point, nth),))
        sim.on_start = lambda sim, start: sim.__dict__.update(guarantee=guarantee, tolerance=tolerance) if start else 0
        return sim.run()

    sim = start_over(EXACTLY, Tolerance())
    assert set(codes(sim)) == {"BATCH_BEGUN"}
    assert sim.duplicated() == 0
    sim = start_over(MOST, Tolerance())
    assert (codes(sim), sim.duplicated()) == ([], 0)
    assert sim.lost() <= sim.last().given_up.count
    sim = start_over(EXACTLY, Tolerance(repeated_batch=True))
    assert (codes(sim), sim.lost()) == ([], 0)


@pytest.mark.checkpoint(
    "the guarantee, from at_least_once to a stricter one, over a batch that may have sent records",
    "refused",
    "`BATCH_BEGUN`; under at_most_once, the batch is given up",
)
@pytest.mark.parametrize("before", [EXACTLY, MOST])
@pytest.mark.parametrize("after", [EXACTLY, MOST])
def test_at_least_once_between_two_stricter_guarantees_is_not_forgotten(before: Guarantee, after: Guarantee) -> None:
    """Batch 0 is decided under `before`; batch 1 starts under at_least_once, and runs again under `after`."""
    crashes = (Crash("recover.check:before", 2), Crash("write.flush:after", 1 if before is EXACTLY else 4))
    sim = Sim(before, crashes=crashes)
    order = deque([before, LEAST])
    sim.on_start = lambda sim, _: setattr(sim, "guarantee", order.popleft() if order else after)
    sim.run()
    assert all(c.hit for c in sim.crashes)
    assert set(codes(sim)) == ({"BATCH_BEGUN"} if after is EXACTLY else set())
    assert sim.duplicated() == 0


def test_batch_begun_under_at_most_once_is_refused_under_exactly_once() -> None:
    sim = Sim(MOST, crashes=(Crash("write.send:after"),))
    sim.on_start = lambda sim, start: setattr(sim, "guarantee", EXACTLY) if start else None
    sim.run()
    assert set(codes(sim)) == {"BATCH_BEGUN"}


@pytest.mark.parametrize("guarantee", [EXACTLY, LEAST])
@pytest.mark.parametrize("expired", [False, True])
def test_new_checkpoint_finishes_what_the_earlier_one_decided(guarantee: Guarantee, expired: bool) -> None:
    """Decided, not applied, then the checkpoint is deleted: the decided rows are not aborted."""

    def delete(sim: Sim, start: int) -> None:
        if start == 1:
            sim.guarantee = guarantee
            sim.checkpoint = Checkpoint("inc-2")
            sim.tolerance = Tolerance(new_checkpoint=True)
            if expired:
                sim.world.expire()

    sim = Sim(EXACTLY, batches=1, crashes=(Crash("commit.decide:after"),), on_start=delete).run()
    if expired:
        assert set(codes(sim)) == {"EARLIER_BATCH_EXPIRED"}
        return
    assert codes(sim) == []
    assert {w.scope.incarnation for w, _ in sim.world.visible} == {"inc-1", "inc-2"}
    assert set(sim.visible().values()) == {2}


def test_p11_p13_abort_orphans_leaves_others_alone() -> None:
    """P11, P13: what a dead driver left is aborted; what belongs to another pipeline is not."""
    sim = Sim(EXACTLY, crashes=(Crash("write.prepare:after", 2),))
    foreign = Driver(sim, "other").planner.context
    work = type(foreign.scope)("q", "memory", "inc-9")
    from delivered.model.identity import Work

    theirs = sim.world.open(Work(work, 0, 0))
    sim.run()
    assert sim.world.unsettled() == [theirs]


def test_a_failed_batch_leaves_nothing_open_of_tasks_without_a_message() -> None:
    """All attempts of the second task are killed after prepare, so the driver never learns their handles."""
    killed = tuple(Crash("write.prepare:after", 2, "kill") for _ in range(ATTEMPTS_MAX))
    open_at_start: list[int] = []
    sim = Sim(EXACTLY, batches=1, crashes=killed)
    sim.on_start = lambda sim, _: open_at_start.append(len(sim.world.unsettled()))
    assert sim.run().verdict() == []
    assert [c.hit for c in killed] == [True] * ATTEMPTS_MAX
    assert open_at_start == [0, 0]


def test_failed_attempts_do_not_outlive_their_batch() -> None:
    """A task killed after prepare leaves an open participant; it is aborted by the time the batch is applied."""
    sim = Sim(EXACTLY, batches=1, crashes=(Crash("write.prepare:after", 1, "kill"),)).run()
    assert sim.starts == 1
    assert sim.verdict() == []

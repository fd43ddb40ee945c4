"""Mutation tests: the engine is broken on purpose, one way at a time, and the crash runs must find it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.crash.scenarios import single
from tests.crash.sim import Checkpoint, Crash, Sim, other_rows
from tests.support.memory import store
from tests.support.memory.store import MemoryCommitter
from tests.support.memory.world import Answer
from tests.support.sweeps import sweep

from delivered.engine import decide, recover, shard
from delivered.engine.arbiter import Grant, Grants
from delivered.ledger import Ledger
from delivered.model.capability import Commit, Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Action, BatchPlan, Failed, Ok, Unknown

EXACTLY, LEAST, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
Patch = Callable[[pytest.MonkeyPatch], None]
Runs = Callable[[], Iterator[list[str]]]


def crashes(guarantee: Guarantee, how: str, commit: Commit = Commit.TWO_PHASE) -> Runs:
    return lambda: (sim.verdict() for _, sim in single(guarantee, commit, how))


def stage_reruns(how: str) -> Runs:
    return lambda: (sim.verdict() for _, sim in single(MOST, Commit.TWO_PHASE, how, stages_rerun=True))


def stage_reran_in_part() -> Iterator[list[str]]:
    """The second shard's task is killed once it has prepared, and runs again as attempt 0 of another stage attempt."""
    sim = Sim(EXACTLY, batches=1, stages_rerun=True, crashes=(Crash("write.prepare:after", 2, "kill"),)).run()
    yield [*sim.verdict(), *map(str, sim.world.unsettled())]


def history(make: Callable[[], Sim], *, refused: str | None = None) -> Runs:
    """One history; with `refused`, it must end in the error of this code."""

    def run() -> Iterator[list[str]]:
        sim = make().run()
        if refused is None:
            yield sim.verdict()
        elif not any(getattr(e, "code", "") == f"DELIVERED_{refused}" for e in sim.errors):
            yield ["went on"]

    return run


def answers(method: str, answer: Answer) -> Callable[[], Sim]:
    def lose(sim: Sim, start: int) -> None:
        if start == 0:
            sim.world.answers[method] = deque([answer])

    return lambda: Sim(EXACTLY, on_start=lose)


def put_back(sim: Sim, start: int) -> None:
    if start == 1:
        sim.checkpoint.offsets[0] = {"0": 3, "1": 4}


def new_checkpoint(sim: Sim, start: int) -> None:
    if start == 1:
        sim.checkpoint = Checkpoint("inc-2")


def swap(target: Any, name: str, value: Any) -> Patch:
    return lambda patch: patch.setattr(target, name, value)


def apply_before_decide(patch: pytest.MonkeyPatch) -> None:
    honest = decide._decide

    def early(context: Any, decision: Any, *rest: Any) -> None:
        decide._apply(context, decision)
        honest(context, decision, *rest)

    patch.setattr(decide, "_decide", early)


def retry_decide(patch: pytest.MonkeyPatch) -> None:
    def again(context: Any, decision: Any, unknown: Unknown) -> Any:
        text = decision.to_json()
        context.ledger._store._deciding._room.decisions.append(text)
        return Ok(None)

    patch.setattr(decide, "_fence_and_look", again)


def standing_decision_decided_again(patch: pytest.MonkeyPatch) -> None:
    honest, honest_apply = decide._decide, decide._apply
    known: list[Any] = []

    def first(context: Any, decision: Any, new: Any, *rest: Any) -> None:
        known[:] = rest
        honest(context, decision, new, *rest)

    def again(context: Any, decision: Any) -> None:
        other = replace(decision, decided_at_ms=decision.decided_at_ms + 1)
        honest(context, other, decision.participants, *known)
        honest_apply(context, decision)

    patch.setattr(decide, "_decide", first)
    patch.setattr(decide, "_apply", again)


def xor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Fingerprint,
        "__add__",
        lambda a, b: Fingerprint(a.count + b.count, a.low ^ b.low, a.high ^ b.high),
    )


def incarnation_left_out(patch: pytest.MonkeyPatch) -> None:
    honest = store.state_of

    def of_any(scope: Scope, owner: Any, epoch: int, decisions: Any, *rest: Any) -> Any:
        return honest(scope, owner, epoch, [replace(d, scope=scope) for d in decisions][:1], *rest)

    patch.setattr(store, "state_of", of_any)


def skip_new_batches(patch: pytest.MonkeyPatch) -> None:
    honest = BatchPlan.action_for
    patch.setattr(
        BatchPlan, "action_for", lambda self, s: Action.SKIP if self.batch == 1 and s == 0 else honest(self, s)
    )
    patch.setattr(decide, "check_complete", lambda context, batch, said: None)


def never_give_up(patch: pytest.MonkeyPatch) -> None:
    honest = recover.BatchPlan

    def plan(*args: Any, **more: Any) -> BatchPlan:
        made = honest(*args, **more)
        return replace(made, action=Action.WRITE) if made.action is Action.GIVE_UP else made

    patch.setattr(recover, "BatchPlan", plan)


def attempt_numbers_believed(patch: pytest.MonkeyPatch) -> None:
    honest = shard.write_shard
    patch.setattr("tests.crash.sim.write_shard", lambda *args: honest(*args[:6]))


def begin_not_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recover, "_begin", lambda context, view, step, state: state.epoch)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_check_claim", lambda self, claim, head: None)
    patch.setattr(Ledger, "claim", lambda self, owner, batch=None: self.look())
    patch.setattr(Ledger, "resume", lambda self, owner_id, since=None: self.look())
    patch.setattr(decide, "_check_claim", lambda *args: None)


def every_attempt_may_send(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "ask", lambda self, *asked: Grant(asked[-1]))


def epoch_of_plan_ignored(patch: pytest.MonkeyPatch) -> None:
    """Without the other guard: of two plans of one session, only the later one's tasks are granted to send."""
    every_attempt_may_send(patch)
    patch.setattr(decide, "_check_claim", lambda *args: None)
    honest = recover.plan_batch
    patch.setattr(
        "delivered.engine.runner.plan_batch", lambda context, view, first, **rest: honest(context, view, first=first)
    )


def unknown_is_ok(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decide, "_fence_and_look", lambda context, decision, unknown: Ok(None))


def unknown_is_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decide, "_fence_and_look", lambda context, decision, unknown: Failed(unknown.reason))
    patch.setattr(decide, "OUTAGE_PATIENCE_S", -1.0)  # deciding again would find it written


def finish_by_the_pipelines_guarantee(patch: pytest.MonkeyPatch) -> None:
    honest = recover._finish_decided
    patch.setattr(
        recover,
        "_finish_decided",
        lambda context, d, *more, **named: honest(context, replace(d, guarantee=context.guarantee), *more, **named),
    )


def changed_guarantee() -> Sim:
    sim = Sim(EXACTLY, batches=1, crashes=(Crash("commit.decide:after"),))
    sim.on_start = lambda sim, start: setattr(sim, "guarantee", LEAST) if start else None
    return sim


def differing_replay() -> Sim:
    sim = Sim(EXACTLY, crashes=(Crash("commit.apply:after"),), expire_on_start=True)
    sim.change = other_rows
    return sim


def asked_again() -> Sim:
    return Sim(EXACTLY, crashes=(Crash("commit.apply:after", 1, "fail"),), commit_again=1)


def old_checkpoint() -> Sim:
    return Sim(EXACTLY, crashes=(Crash("commit.decide:after"),), on_start=put_back)


def other_checkpoint() -> Sim:
    return Sim(EXACTLY, batches=1, crashes=(Crash("log:after"),), on_start=new_checkpoint)


def rows_seen_twice() -> Iterator[list[str]]:
    """A duplicated pair: its count may agree, its fingerprint must not cancel."""
    one, two = Fingerprint(1, 5, 7), Fingerprint(1, 9, 2)
    if one + one == two + two:
        yield ["a doubled pair cancels"]


MUTANTS: dict[str, tuple[Patch, Runs]] = {
    "orphans not aborted": (swap(recover, "abort_orphans", lambda context, *keep: None), crashes(EXACTLY, "tree")),
    "failed attempts left open": (swap(decide, "_abort_leftovers", lambda *args: None), crashes(EXACTLY, "kill")),
    "attempts of a stage that reran left open": (
        swap(decide, "may_have_rerun", lambda shards: any(m.attempt for m in shards)),
        stage_reran_in_part,
    ),
    "offsets not compared": (
        swap(recover, "_check_offsets", lambda *args: None),
        history(old_checkpoint, refused="LEDGER_AHEAD"),
    ),
    "key without incarnation": (incarnation_left_out, history(other_checkpoint, refused="CHECKPOINT_NEW")),
    "apply before decide": (apply_before_decide, crashes(EXACTLY, "tree")),
    "no apply at recovery": (swap(recover, "_finish_decided", lambda *args, **named: {}), crashes(EXACTLY, "tree")),
    "no apply after the decision": (swap(decide, "_apply", lambda *args: None), crashes(EXACTLY, "tree")),
    "nobody is fenced": (no_fence, crashes(EXACTLY, "zombie")),
    "plans of an older claim pass": (epoch_of_plan_ignored, crashes(MOST, "zombie")),
    "decide sent again": (retry_decide, history(answers("decide", Answer.LOST))),
    "unknown decision taken for made": (unknown_is_ok, history(answers("decide", Answer.NOT_SENT))),
    "unknown decision taken for failed": (unknown_is_failed, history(answers("decide", Answer.LOST))),
    "standing decision decided again": (standing_decision_decided_again, history(asked_again)),
    "expired promise taken for kept": (
        swap(MemoryCommitter, "was_committed", lambda *args: True),
        crashes(EXACTLY, "tree"),
    ),
    "kept promise taken for expired": (
        swap(MemoryCommitter, "commit", lambda self, work, p: Failed("gone") if self._world.marker(work) else Ok(None)),
        crashes(EXACTLY, "tree"),
    ),
    "replay not compared": (
        swap(decide, "_find_missing", lambda *args: {}),
        history(differing_replay, refused="REPLAY_DIFFERS"),
    ),
    "finished under the pipeline's guarantee": (finish_by_the_pipelines_guarantee, history(changed_guarantee)),
    "a shard skipped in a new batch": (skip_new_batches, crashes(LEAST, "tree")),
    "begun batch sent again": (never_give_up, crashes(MOST, "tree")),
    "begin not recorded": (begin_not_recorded, crashes(MOST, "tree")),
    "every attempt may send": (every_attempt_may_send, crashes(MOST, "kill")),
    "attempt numbers believed": (attempt_numbers_believed, stage_reruns("kill")),
    "attempt numbers believed, a task paused": (attempt_numbers_believed, stage_reruns("zombie_task")),
    "XOR in place of addition": (xor, lambda: rows_seen_twice()),
}


@pytest.mark.parametrize("name", sweep(MUTANTS, lambda name: name != "plans of an older claim pass"))
def test_broken_engine_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, runs = MUTANTS[name]
    monkeypatch.setattr("tests.crash.sim.WAIT_S", 2.0)
    patch(monkeypatch)
    sims: list[Sim] = []
    honest = Sim.run

    def run(sim: Sim) -> Sim:
        sims.append(sim)
        return honest(sim)

    monkeypatch.setattr(Sim, "run", run)
    assert any(found for found in runs()), f"no run notices: {name}"
    # A mutant that no longer fits the engine's calls breaks every run, whether or not its fault would be noticed.
    assert not [e for sim in sims for e in sim.errors if isinstance(e, TypeError | AttributeError)]


@pytest.mark.matrix
def test_epochs_of_plans_hold_without_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds that plans of an older claim pass is clean as long as they do not."""
    every_attempt_may_send(monkeypatch)
    assert not any(crashes(MOST, "zombie")())


@pytest.mark.parametrize(
    "name", [n for n, (_, runs) in MUTANTS.items() if "history" in runs.__qualname__ or runs is stage_reran_in_part]
)
def test_histories_are_clean_in_the_whole_engine(name: str) -> None:
    """The histories that find mutants pass with the unmodified engine."""
    assert not any(MUTANTS[name][1]())

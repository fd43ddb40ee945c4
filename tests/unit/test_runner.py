"""The runner of batches, in one process: what it aborts, and when it recovers in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.memory import CONNECTOR
from tests.support.memory.world import ROWS, State, make_world

from delivered.engine import Sinks
from delivered.engine import runner as module
from delivered.engine.context import Context
from delivered.engine.runner import Runner
from delivered.engine.shard import write_shard
from delivered.model.capability import Guarantee
from delivered.model.errors import Fenced, InvariantBroken
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Origin, Rejection, Rows
from delivered.model.work import BatchPlan, CheckpointView, DriverAddress, Owner, ShardMessage, Tolerance
from delivered.pipeline.batches import Run
from delivered.pipeline.spec import PipelineSpec, Sender, SinkSpec

WORLD = "runner"


@pytest.fixture
def runner() -> Iterator[Runner]:
    make_world(WORLD)
    sinks = Sinks.one(CONNECTOR.sink({"world": WORLD, "commit": "two_phase"}))
    made = Runner(sinks, Context.open(sinks, Scope("p", "memory", "i"), Guarantee.EXACTLY_ONCE, Owner("o")))
    yield made
    made.close()


def view(batch: int, logged: int | None = None) -> CheckpointView:
    return CheckpointView("i", batch, f"o{batch}", batch - 1 if logged is None and batch else logged)


def shard(runner: Runner, plan: BatchPlan, number: int) -> ShardMessage:
    rows = pa.record_batch([[b"k"], [b"v%d" % number]], schema=ROWS)
    return write_shard(runner.sinks, plan, number, 0, iter([Rows(rows)]), ROWS)


def states() -> list[State]:
    from tests.support.memory.world import world

    return [p.state for p in world(WORLD).participants.values()]


def test_what_was_prepared_is_aborted_if_a_task_fails(runner: Runner) -> None:
    plan = runner.plan(view(0), ROWS)

    def write(messages: list[ShardMessage | None]) -> None:
        messages.append(shard(runner, plan, 0))
        raise ValueError("a task failed")

    with pytest.raises(ValueError, match="a task failed"):
        runner.finish(plan, write)
    assert states() == [State.ABORTED]


def test_what_was_prepared_is_aborted_if_the_commit_fails(runner: Runner) -> None:
    plan = runner.plan(view(0), ROWS)
    with pytest.raises(InvariantBroken):  # a shard without a message
        runner.finish(plan, lambda messages: messages.extend([shard(runner, plan, 0), None]))
    assert states() == [State.ABORTED]


def rejected(_: BatchPlan) -> Rows:
    bad = Rejection(Origin.SOURCE, "not JSON", {"key": b"k", "value": b"["}, "t", 0, 7)
    return Rows(pa.RecordBatch.from_pylist([], schema=ROWS), [bad])


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_rejected_before_the_transform_is_one_more_shard(fails: bool) -> None:
    make_world(WORLD), make_world(f"{WORLD}-letters")
    first, letters = (CONNECTOR.sink({"world": w, "commit": "two_phase"}) for w in (WORLD, f"{WORLD}-letters"))
    sinks = Sinks.of([("first", first, None)], OnBadRow.DEAD_LETTER, ("letters", letters))
    scope = Scope("p", sinks.decider.name, "i")
    runner = Runner(sinks, Context.open(sinks, scope, Guarantee.EXACTLY_ONCE, Owner("o")))
    plan = runner.plan(view(0), ROWS)
    messages = [shard(runner, plan, 0), *([None] if fails else [])]
    if fails:
        with pytest.raises(InvariantBroken):
            runner.commit(0, "o0", messages, rejected=rejected)
        runner.abort(messages)
        assert set(states()) == {State.ABORTED}
    else:
        decision = runner.commit(0, "o0", messages, rejected=rejected)
        assert decision is not None and decision.account("letters").total.count == 1
        assert {(p.shard, p.sink) for p in decision.participants} == {
            (n, s) for n in (0, 1) for s in ("first", "letters")
        }
    runner.close()


def test_only_the_batch_after_the_last_plan_goes_on_without_recovery(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.is_first(view(0))
    plan = runner.plan(view(0), ROWS, start="a")
    runner.finish(plan, lambda messages: messages.append(shard(runner, plan, 0)))
    assert not runner.is_first(view(1), "a")
    assert runner.is_first(view(1), "b"), "another start of the query"
    assert runner.is_first(view(2), "a"), "another process planned batch 1"
    assert runner.is_first(CheckpointView("i", 1, "o1", None), "a"), "batch 0 is not logged"

    def fails(*given: object, **more: object) -> BatchPlan:
        raise InvariantBroken("TEST", "no plan", next_step="none")

    monkeypatch.setattr(module, "plan_batch", fails)
    with pytest.raises(InvariantBroken):
        runner.plan(view(1), ROWS, start="a")
    assert runner.is_first(view(1), "a"), "the last plan failed"


@pytest.mark.parametrize(("run", "said"), [(True, "same runId"), (False, "nothing, if the later start is running")])
def test_a_plan_that_another_writer_overtook_says_what_to_do(runner: Runner, run: bool, said: str) -> None:
    """Nobody runs the rows of df.write again."""
    plan = runner.plan(view(0), ROWS)
    messages = [shard(runner, plan, 0)]
    runner.context.ledger.claim(runner.context.owner)
    with pytest.raises(Fenced, match=rf"PLAN_OUTDATED.*Next: .*{said}"):
        runner.commit(0, "o0", messages, run=run)


def test_a_session_whose_runs_another_application_overtook_says_how_to_go_on(tmp_path: Path) -> None:
    """Two notebooks that write in turns: the first is fenced for good, and nobody writes its rows."""
    sink = SinkSpec("sqlite", {"path": str(tmp_path / "out.db"), "table": "t"})
    rows = pa.schema({"id": pa.int64()})

    def write(owner: str, run_id: str) -> None:
        sender = Sender(Owner(owner), DriverAddress("localhost"))
        spec = PipelineSpec(
            "batch",
            Guarantee.EXACTLY_ONCE,
            (sink,),
            run_id=run_id,
            sender=sender,
            tolerance=Tolerance(new_checkpoint=True),
        )
        run = Run(spec, spec.checked(rows), rows)
        plan = run.plan(run.view())
        run.commit(0, [write_shard(run.sinks, plan, 0, 0, iter(()), rows)])

    write("a", "1")
    write("b", "2")
    with pytest.raises(Fenced, match=r"FENCED.*rows were not written.*Next: delivered\.register"):
        write("a", "3")
    write("c", "3")


def test_what_a_failed_batch_prepared_is_found_without_messages(runner: Runner) -> None:
    """Not what was decided; and nothing once a later claim was made: that owner names what is its own."""
    plan = runner.plan(view(0), ROWS)
    runner.finish(plan, lambda messages: messages.append(shard(runner, plan, 0)))
    outdated = runner.plan(view(1), ROWS)
    shard(runner, outdated, 0)
    runner.abort_unreported(outdated)
    assert states() == [State.APPLIED, State.ABORTED]
    again = runner.plan(view(1), ROWS)
    shard(runner, again, 0)
    runner.context.ledger.claim(runner.context.owner)
    runner.abort_unreported(again)
    assert states() == [State.APPLIED, State.ABORTED, State.PREPARED]

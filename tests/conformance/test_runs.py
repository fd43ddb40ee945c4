"""Runs of `df.write`: each is an incarnation named by its id, which every ledger remembers permanently."""

from __future__ import annotations

import itertools
import pickle
import time
from dataclasses import replace

import pyarrow as pa
import pytest
from tests.support.sinks import EXACT, SCHEMA, SHARDS, SINKS, Rig
from tests.support.sweeps import sweep

from delivered import ledger as rules
from delivered.engine import decide
from delivered.engine.context import Context
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Commit, Guarantee
from delivered.model.errors import Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.rows import Rows
from delivered.model.work import Account, Action, BatchPlan, CheckpointView, Decision, Ok, ShardMessage, Tolerance

KEPT = 3
"""Runs whose decisions a ledger keeps here."""
RUNS = KEPT + 3
_drivers = itertools.count()


ONCE_MORE = (
    "files-json", "iceberg-rest", "kafka-librdkafka", "mysql-one-transaction", "postgres-one-transaction", "rocketmq",
    "postgres-one-transaction-by-batch", "postgres-two-phase-by-batch", "mysql-two-phase-by-batch",
)  # fmt: skip
"""Left to `make verify`: sinks that differ little from another one of their system, and slow-starting RocketMQ."""


DRIVEN = [n for n in SINKS if "s3" not in n]


@pytest.fixture(params=sweep(DRIVEN, lambda name: name not in ONCE_MORE))
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(rules, "LEDGER_INCARNATIONS", KEPT)
    return Rig(SINKS[request.param](request))


class Run:
    """One `df.write`, as its own process."""

    def __init__(self, rig: Rig, name: str, guarantee: Guarantee = EXACT) -> None:
        self.rig = replace(rig, incarnation=name)
        made = self.rig.context(f"driver {next(_drivers)}", guarantee)
        self.context: Context = replace(made, tolerance=Tolerance(new_checkpoint=True))
        self.offsets = f"run {name}"

    def plan(self) -> BatchPlan:
        self.rig.sink.ready_target(self.rig.schema)
        return plan_batch(
            self.context, CheckpointView(self.rig.incarnation, 0, self.offsets, None, run=True), first=True
        )

    def write(self, plan: BatchPlan, rows: list[pa.RecordBatch]) -> list[ShardMessage]:
        messages = [write_shard(self.rig.sinks, plan, i, 0, iter([Rows(b)]), SCHEMA) for i, b in enumerate(rows)]
        found: list[ShardMessage] = pickle.loads(pickle.dumps(messages))
        return found

    def commit(self, messages: list[ShardMessage]) -> Decision | None:
        return commit_batch(self.context, 0, self.offsets, messages, run=True)

    def __call__(self, rows: list[pa.RecordBatch]) -> Decision | None:
        return self.commit(self.write(self.plan(), rows))


def visible_at_last(rig: Rig, expected: Fingerprint) -> bool:
    """Whether exactly these rows are in the sink. Kafka's brokers reply just before they end a transaction."""
    deadline = time.monotonic() + 120
    while (found := rig.visible()) != expected and found.count < expected.count and time.monotonic() < deadline:
        pass
    return found == expected


def rows_of(rig: Rig, number: int) -> list[pa.RecordBatch]:
    return [rig.rows(number, shard) for shard in range(SHARDS)]


def test_a_run_given_twice_is_written_once_however_many_came_between(rig: Rig) -> None:
    for i in range(RUNS):
        assert Run(rig, f"r{i}")(rows_of(rig, i)) is not None
    everything = rig.expected(*range(RUNS))
    assert visible_at_last(rig, everything)
    state = Run(rig, "r0").context.ledger.look()
    known = rig.sink.capability().system == "memory" or state.last is not None  # a folder of files keeps its record
    assert known or state.archived is not None
    for i in (0, 1, RUNS - 1, 0):
        again = Run(rig, f"r{i}")
        plan = again.plan()
        assert plan.action is Action.COMPARE
        shuffled = [pa.concat_batches(list(reversed(rows_of(rig, i))))]  # other partitions, same rows
        assert again.commit(again.write(plan, shuffled)) is None
    assert visible_at_last(rig, everything)
    assert Run(rig, "new")(rows_of(rig, 50)) is not None
    assert visible_at_last(rig, everything + rig.expected(50))


def test_a_run_id_that_comes_again_with_other_rows_is_refused(rig: Rig) -> None:
    for i in range(RUNS):
        Run(rig, f"r{i}")(rows_of(rig, i))
    everything = rig.expected(*range(RUNS))
    for i in (0, RUNS - 1):
        others = [rows_of(rig, 70), rows_of(rig, i)[:1], [*rows_of(rig, i), rig.rows(71, 0)], []]
        for rows in others:
            with pytest.raises(Refused, match="RUN_ID_TAKEN") as caught:
                Run(rig, f"r{i}")(rows)
            assert f"'r{i}'" in caught.value.message
            assert f"{rig.expected(i).count} records" in caught.value.message
    assert visible_at_last(rig, everything)
    assert Run(rig, "r0")(rows_of(rig, 0)) is None


# The run that is killed is at_most_once in either case; what a table of files remembers is shown above.
@pytest.mark.parametrize("rig", sweep(DRIVEN, lambda name: name not in (*ONCE_MORE, "delta", "iceberg")), indirect=True)
@pytest.mark.parametrize(
    "guarantee", sweep([Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE], lambda g: g is Guarantee.AT_LEAST_ONCE)
)
def test_weaker_guarantees_know_a_run_too(rig: Rig, guarantee: Guarantee) -> None:
    started = Run(rig, "begun", Guarantee.AT_MOST_ONCE)
    started.write(started.plan(), rows_of(rig, 90))  # sent; then it is killed
    for i in range(RUNS):
        Run(rig, f"r{i}", guarantee)(rows_of(rig, i))
    for i in (0, RUNS - 1):
        assert Run(rig, f"r{i}", guarantee)(rows_of(rig, i)) is None
        with pytest.raises(Refused, match="RUN_ID_TAKEN"):
            Run(rig, f"r{i}", guarantee)(rows_of(rig, 70))
    sent = rig.expected(90, *range(RUNS))
    assert visible_at_last(rig, sent)
    again = Run(rig, "begun", Guarantee.AT_MOST_ONCE)
    plan = again.plan()
    assert plan.action is Action.GIVE_UP  # its records may be in the sink
    again.commit(again.write(plan, rows_of(rig, 90)))
    assert visible_at_last(rig, sent)


def decided_and_killed(rig: Rig, name: str, number: int) -> None:
    """A run whose driver dies between decision and visibility of its rows."""
    run = Run(rig, name)
    plan = run.plan()
    prepared = tuple(p for m in run.write(plan, rows_of(rig, number)) for p in m.participants)
    total = sum((p.fingerprint for p in prepared), Fingerprint())
    decision = Decision(
        run.rig.scope, run.context.owner.id, EXACT, 0, run.offsets, prepared, {run.rig.scope.sink: Account(total)}, 0,
        sequence=run.context.ledger.look().next_sequence,
    )  # fmt: skip
    assert run.context.ledger.decide(decision) == Ok(None)


def test_a_run_killed_after_its_decision_is_finished_by_the_same_run(rig: Rig) -> None:
    decided_and_killed(rig, "r0", 0)
    with pytest.raises(Refused, match="RUN_ID_TAKEN"):
        Run(rig, "r0")(rows_of(rig, 1))
    assert Run(rig, "r0")(rows_of(rig, 0)) is None
    assert visible_at_last(rig, rig.expected(0))


def test_an_older_run_given_again_leaves_the_decided_rows_of_a_killed_one(rig: Rig) -> None:
    Run(rig, "r0")(rows_of(rig, 0))
    decided_and_killed(rig, "r1", 1)
    assert Run(rig, "r0")(rows_of(rig, 0)) is None
    if rig.sink.capability().commit is Commit.TWO_PHASE:
        assert visible_at_last(rig, rig.expected(0))
    Run(rig, "r2")(rows_of(rig, 2))  # finishes r1, which must still be prepared
    assert visible_at_last(rig, rig.expected(0, 1, 2))


@pytest.mark.parametrize("name", ["kafka", "postgres-two-phase"])
def test_p30_a_killed_run_is_not_taken_for_older_than_one_of_a_host_whose_clock_is_ahead(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, now = Rig(SINKS[name](request)), time.time_ns

    def ahead(run: str, number: int) -> None:
        with monkeypatch.context() as clock:
            clock.setattr(time, "time_ns", lambda: now() + 1_800 * 1_000_000_000)
            Run(rig, run)(rows_of(rig, number))

    def killed(name: str, number: int) -> Decision:
        """After its decision, before its rows are visible."""
        run = Run(rig, name)
        messages = run.write(run.plan(), rows_of(rig, number))
        with monkeypatch.context() as dead:
            dead.setattr(decide, "_apply", lambda *_: None)
            decision = run.commit(messages)
        assert decision is not None
        return decision

    ahead("r0", 0)
    killed("r1", 1)
    Run(rig, "r2")(rows_of(rig, 2))  # finishes r1
    assert Run(rig, "r1")(rows_of(rig, 1)) is None
    assert visible_at_last(rig, rig.expected(0, 1, 2))
    ahead("r3", 3)
    committer = Run(rig, "r4").context.committers
    for prepared in killed("r4", 4).participants:  # as if they had timed out
        assert committer.abort(prepared) == Ok(None)
    rewritten = Run(rig, "r4")(rows_of(rig, 4))
    assert rewritten is not None
    assert rewritten.revision == 1
    assert visible_at_last(rig, rig.expected(0, 1, 2, 3, 4))

"""Stateful queries: the state that Spark keeps of a batch matches the delivered rows, or the query stops."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from tests.crash.group_sim import LAST_RESOURCE, GroupSim
from tests.crash.scenarios import Crash
from tests.crash.sim import Checkpoint, Sim, again, codes, other_rows
from tests.support.steps import ROLE_OF_STEP, Role
from tests.support.sweeps import sweep

from delivered.engine import decide
from delivered.model.capability import Commit, Guarantee
from delivered.model.work import Tolerance

POINTS = [
    f"{step}:{moment}"
    for step, role in ROLE_OF_STEP.items()
    if role not in (Role.RECEIVER, Role.WORKER, Role.AUDITOR)
    for moment in ("before", "after")
]


def made(sim: Sim, change: Any = other_rows) -> Sim:
    sim.keeps_state = True
    sim.change = change
    return sim.run()


def odd_ones(batch: pa.RecordBatch, run: int) -> pa.RecordBatch:
    """Different rows in every run, among those not routed to the second of several sinks."""
    values = [v if v[-1] % 2 == 0 else b"%d/%s" % (run, v) for v in batch.column("value").to_pylist()]
    return pa.record_batch([batch.column("key"), pa.array(values, pa.binary())], schema=batch.schema)


def stopped(sim: Sim) -> list[str]:
    return [str(e) for e in sim.errors if getattr(e, "code", "") == "DELIVERED_REPLAY_DIFFERS"]


@pytest.mark.parametrize(
    ("guarantee", "commit"),
    # How a sink commits is irrelevant under the weaker guarantees.
    sweep(
        product(Guarantee, [Commit.TWO_PHASE, Commit.ONE_TRANSACTION]),
        lambda guarantee, commit: guarantee is Guarantee.EXACTLY_ONCE or commit is Commit.TWO_PHASE,
    ),
)
def test_state_that_lives_on_was_delivered(guarantee: Guarantee, commit: Commit) -> None:
    stops = 0
    for point in POINTS:
        for nth in (1, 2, 3):
            sim = made(Sim(guarantee, commit, (Crash(point, nth, "tree"),)))
            left = sim.state() - sim.visible()
            if guarantee is Guarantee.AT_MOST_ONCE and left:
                assert sum(left.values()) <= sim.last().given_up.count, (point, nth)
            else:
                assert not left, (point, nth)
            stops += bool(stopped(sim))
    assert stops >= 3


@pytest.mark.parametrize("guarantee", Guarantee)
@pytest.mark.parametrize("point", POINTS)
def test_the_same_rows_never_stop_a_query(point: str, guarantee: Guarantee) -> None:
    sim = made(Sim(guarantee, crashes=(Crash(point, 2, "tree"),)), None)
    assert stopped(sim) == []
    assert sim.verdict() == []


def test_rows_may_come_in_another_order_or_shard() -> None:
    """State depends only on a batch's rows, not on how they are shuffled."""
    sim = Sim(Guarantee.EXACTLY_ONCE, crashes=(Crash("log:before", 1, "tree"),))
    honest = sim.tasks

    def swapped(driver: Any, plan: Any) -> Any:
        pieces = sim._read
        if sim.starts > 1:
            other = {0: 1, 1: 0}
            sim._read = (
                lambda piece: pieces(  # type: ignore[method-assign]
                    type(piece)((type(piece.data[0])(other[int(piece.data[0])]), *piece.data[1:]))
                )
            )
        return honest(driver, plan)

    sim.tasks = swapped  # type: ignore[method-assign]
    made(sim, None)
    assert stopped(sim) == []
    assert sim.verdict() == []


def test_the_error_names_batch_shard_and_the_way_on() -> None:
    sim = made(Sim(Guarantee.EXACTLY_ONCE, crashes=(Crash("commit.decide:after", 1, "tree"),)))
    (said, *_) = stopped(sim)
    assert said.startswith("[DELIVERED_REPLAY_DIFFERS] Batch 0 is decided and delivered, and reran with other rows")
    assert "in shards [0, 1]. Shard 0 at sink" in said
    assert """.option("startingOffsets", '{"0":4,"1":4}') and, once, .option("newCheckpoint", "accept")""" in said


def test_lost_records_are_not_given_up_in_a_query_that_keeps_state_and_the_way_on_works() -> None:
    """The rerun's state would lack them for ever. A new checkpoint starts with empty state, where the batch ended."""
    sim = Sim(Guarantee.EXACTLY_ONCE, crashes=(Crash("commit.decide:after", 1, "tree"),), expire_on_start=True)
    sim.tolerance, sim.starts_max = Tolerance(lost_records=True), 3
    made(sim, lambda batch, run: batch if run == 1 else batch.slice(1))
    said = str(sim.errors[-1])
    assert said.startswith("[DELIVERED_REPLAY_DIFFERS]")
    assert "lostRecords cannot give those up in a query that keeps state" in said
    assert "the prepared rows of shards [0, 1] were dropped" in said
    assert '.option("newCheckpoint", "accept") and .option("missingLedger", "accept")' in said
    assert sim.visible() == Counter()
    end = sim.checkpoint.offsets[0]
    for tolerance, code in (
        (Tolerance(new_checkpoint=True), "EARLIER_BATCH_EXPIRED"),
        (Tolerance(new_checkpoint=True, missing_ledger=True), None),
    ):
        again(sim, checkpoint=Checkpoint("inc-2", dict(end)), tolerance=tolerance, starts_max=2, change=None)
        assert {*codes(sim)} == ({code} if code else set())
    assert sim.expected() - sim.visible() == Counter(v for part in sim.world.inputs for _, v in part[: sim.rows])
    assert sim.duplicated() == 0


@pytest.mark.parametrize("point", ["commit.decide:after", "log:before"])
def test_a_row_that_only_one_of_several_sinks_sees_is_compared(point: str) -> None:
    for commits in (LAST_RESOURCE, LAST_RESOURCE[::-1]):
        sim = GroupSim(Guarantee.EXACTLY_ONCE, commits=commits, crashes=(Crash(point, 1, "tree"),))
        made(sim, odd_ones)
        assert stopped(sim), commits


def test_a_shard_that_is_rewritten_to_one_sink_is_compared_at_the_other() -> None:
    """The second sink's rows are the same in every run, and only its participant expired."""
    sim = GroupSim(Guarantee.EXACTLY_ONCE, batches=1, crashes=(Crash("commit.apply:after", 3, "tree"),))
    sim.expire_on_start = True
    made(sim, odd_ones)
    assert stopped(sim)
    assert sim.world.unsettled() == []


def test_a_query_without_state_skips_unread() -> None:
    sim = Sim(Guarantee.EXACTLY_ONCE, crashes=(Crash("log:before", 1, "tree"),))
    sim.change = other_rows
    reads: Counter[int] = Counter()
    honest = sim._read

    def counted(piece: Any) -> Any:
        for batch in honest(piece):
            reads[sim.starts] += batch.good.num_rows
            yield batch

    sim._read = counted  # type: ignore[method-assign]
    sim.run()
    assert stopped(sim) == []
    assert reads[1] == reads[2] == 8  # batch 0, then only batch 1


def test_broken_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "check_same_state", lambda *args, **named: None)
    sim = made(Sim(Guarantee.EXACTLY_ONCE, crashes=(Crash("commit.decide:after", 1, "tree"),)))
    assert sim.state() - sim.visible()

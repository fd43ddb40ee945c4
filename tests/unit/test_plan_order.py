"""A plan lists its steps in the order in which the real engine reaches them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.crash.sim import planned
from tests.support.memory import CONNECTOR as MEMORY
from tests.support.memory.world import ROWS, make_world

from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.engine.context import Context, open_shared_ledger
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model import step
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.step import StepId
from delivered.model.work import CheckpointView, Owner

SPARK_OWN = {StepId.SOURCE_READ, StepId.LOG}
"""Reached by the Spark glue, around the engine."""


@pytest.fixture
def reached() -> Iterator[list[str]]:
    seen: list[str] = []

    def record(point: str, facts: dict[str, Any]) -> None:
        seen.append(point)

    step.install(record)
    yield seen
    step.install(None)


def memory(tmp_path: Path, commit: str) -> Sink:
    world = f"order-{uuid.uuid4().hex}"
    make_world(world)
    return MEMORY.sink({"world": world, "commit": commit})


def group(*sinks: Sink) -> Sinks:
    return Sinks.of([(f"sink-{i}", s, None) for i, s in enumerate(sinks)])


SINKS: dict[str, Callable[[Path], Sinks]] = {
    "memory two_phase": lambda tmp: Sinks.one(memory(tmp, "two_phase")),
    "memory one_transaction": lambda tmp: Sinks.one(memory(tmp, "one_transaction")),
    "sqlite": lambda tmp: Sinks.one(SQLITE.sink({"path": str(tmp / "out.db"), "table": "orders"})),
    "two that prepare": lambda tmp: group(memory(tmp, "two_phase"), memory(tmp, "two_phase")),
    "memory and sqlite as the last resource": lambda tmp: group(
        memory(tmp, "two_phase"), SQLITE.sink({"path": str(tmp / "out.db"), "table": "orders"})
    ),
}


def run_one_batch(sinks: Sinks, guarantee: Guarantee, shards: int = 2) -> None:
    scope = Scope("orders", sinks.decider.name, "incarnation-1")
    context = Context.open(sinks, scope, guarantee, Owner("driver-1"))
    plan = plan_batch(context, CheckpointView("incarnation-1", 0, '{"0":2}', None), first=True)
    messages = []
    for shard in range(shards):
        rows = pa.record_batch([pa.array([b"k"]), pa.array([f"v{shard}".encode()])], schema=ROWS)
        messages.append(write_shard(sinks, plan, shard, 0, iter([Rows(rows)]), ROWS))
    commit_batch(context, 0, '{"0":2}', messages)
    context.close()


@pytest.mark.parametrize("guarantee", Guarantee)
@pytest.mark.parametrize("name", SINKS)
def test_the_engine_meets_the_steps_in_the_order_of_the_plan(
    name: str, guarantee: Guarantee, tmp_path: Path, reached: list[str]
) -> None:
    sinks = SINKS[name](tmp_path)
    run_one_batch(sinks, guarantee)
    after = [point.removesuffix(":after") for point in reached if point.endswith(":after")]
    first_time = list(dict.fromkeys(after))
    plan = planned(sinks, guarantee)
    recovery = [s.id for s in plan.recovery if s.id is not StepId.RECOVER_APPLY]
    batch = list(dict.fromkeys(s.id for s in plan.steps if s.id not in SPARK_OWN))
    assert first_time == [*recovery, *batch]


@pytest.mark.parametrize("name", SINKS)
def test_the_deciding_step_is_the_one_after_which_the_ledger_knows_the_batch(name: str, tmp_path: Path) -> None:
    sinks = SINKS[name](tmp_path)
    scope = Scope("orders", sinks.decider.name, "incarnation-1")
    known: dict[str, bool] = {}

    def look(point: str, facts: dict[str, Any]) -> None:
        try:
            ledger = open_shared_ledger(sinks, scope)
            known.setdefault(point, ledger.look().last is not None)
            ledger.close()
        except Exception:  # the ledger does not exist yet, or is being written
            known.setdefault(point, False)

    step.install(look)
    try:
        run_one_batch(sinks, Guarantee.EXACTLY_ONCE)
    finally:
        step.install(None)
    deciding = planned(sinks, Guarantee.EXACTLY_ONCE).deciding.id
    assert not known[f"{deciding}:before"]
    assert known[f"{deciding}:after"]

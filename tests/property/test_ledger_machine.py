"""The ledger and the engine against a small model, under any order of events."""

from __future__ import annotations

import itertools
import json
from collections import deque

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.memory import CONNECTOR
from tests.support.memory.world import ROWS, Answer, make_world

from delivered.engine import Sinks
from delivered.engine.context import Context
from delivered.engine.decide import abort_batch, commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Commit, Guarantee
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.work import BatchPlan, CheckpointView, Owner, ShardMessage

SHARDS = 2


class Driver:
    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self.context = context
        self.plan: BatchPlan | None = None
        self.messages: list[ShardMessage] = []
        self.planned: tuple[int, int] | None = None


class LedgerMachine(RuleBasedStateMachine):
    """Up to three drivers do one step at a time, in any order; the model is the list of batches Spark logged."""

    @initialize(guarantee=st.sampled_from(list(Guarantee)), commit=st.sampled_from([*Commit][:2]))
    def start(self, guarantee: Guarantee, commit: Commit) -> None:
        self.guarantee = guarantee
        self.world = make_world("machine")
        self.sink = CONNECTOR.sink({"world": "machine", "commit": commit.value})
        self.scope = Scope("p", "memory", "inc")
        self.logged: set[int] = set()
        self.names = itertools.count()
        self.drivers = [self._driver() for _ in range(2)]
        self.owner_won: list[str] = []

    def _driver(self) -> Driver:
        name = f"d{next(self.names)}"
        return Driver(name, Context.open(Sinks.one(self.sink), self.scope, self.guarantee, Owner(name)))

    def _batch(self) -> int:
        return max(self.logged, default=-1) + 1

    @rule(i=st.integers(0, 1))
    def plan(self, i: int) -> None:
        driver, batch = self.drivers[i], self._batch()
        logged = max(self.logged, default=None)
        before, epoch = driver.planned or (None, None)
        first = before is None or before != batch - 1
        driver.plan, driver.planned = None, None
        try:
            driver.plan = plan_batch(
                driver.context, CheckpointView("inc", batch, json.dumps(batch), logged), first=first, since=epoch
            )
        except DeliveredError:
            return
        driver.planned = (batch, driver.plan.epoch)
        driver.messages = []

    @rule(i=st.integers(0, 1), retried=st.booleans())
    def write(self, i: int, retried: bool) -> None:
        driver = self.drivers[i]
        if driver.plan is None or len(driver.messages) == SHARDS:
            return
        shard = len(driver.messages)
        rows = [{"key": None, "value": f"{driver.plan.batch}/{shard}/{n}".encode()} for n in range(2)]
        for attempt in range(2 if retried else 1):
            batches = iter([pa.RecordBatch.from_pylist(rows, schema=ROWS)])
            message = write_shard(Sinks.one(self.sink), driver.plan, shard, attempt, map(Rows, batches), ROWS)
        driver.messages.append(message)

    @rule(i=st.integers(0, 1))
    def plan_and_write(self, i: int) -> None:
        """The common path to a committable batch: otherwise few examples would get that far."""
        self.plan(i)
        for _ in range(SHARDS):
            self.write(i, False)

    @rule(i=st.integers(0, 1), answer=st.sampled_from([None, *Answer]))
    def commit(self, i: int, answer: Answer | None) -> None:
        driver = self.drivers[i]
        if driver.plan is None or len(driver.messages) < SHARDS:
            return
        self.world.answers["decide"] = deque([answer] if answer else [])
        try:
            commit_batch(driver.context, driver.plan.batch, driver.plan.offsets, driver.messages)
        except DeliveredError:
            abort_batch(driver.context, driver.messages)
            driver.planned = None
        else:
            self.logged.add(driver.plan.batch)
        finally:
            self.world.answers.clear()
            driver.plan = None

    @rule(i=st.integers(0, 1))
    def die(self, i: int) -> None:
        self.drivers[i] = self._driver()

    @rule()
    def land(self) -> None:
        self.world.land()

    @precondition(lambda self: self.guarantee is Guarantee.EXACTLY_ONCE)
    @rule()
    def expire(self) -> None:
        self.world.expire()

    @rule()
    def forget_the_last_commit(self) -> None:
        self.logged.discard(max(self.logged, default=0))

    def _rows(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for _, batch in self.world.visible:
            for value in batch.column("value").to_pylist():
                found[value] = found.get(value, 0) + 1
        return found

    @invariant()
    def what_was_logged_is_there(self) -> None:
        if not hasattr(self, "world"):
            return
        rows = self._rows()
        ledger = self.world.room(self.scope).of("inc")
        decided = [d for d in ledger if not d.revision]
        assert [d.batch for d in decided] == list(range(len(decided))), "each batch is decided once, in order"
        assert self.logged <= {d.batch for d in decided}
        expected = [f"{b}/{s}/{n}".encode() for b in self.logged for s in range(SHARDS) for n in range(2)]
        if self.guarantee is not Guarantee.AT_MOST_ONCE:
            assert all(rows.get(value) for value in expected), "lost"
        else:
            missing = sum(value not in rows for value in expected)
            assert missing <= (ledger[-1].given_up.count if ledger else 0), "lost, and not counted"
        if self.guarantee is not Guarantee.AT_LEAST_ONCE:
            assert all(count == 1 for count in rows.values()), "duplicated"
        if self.guarantee is Guarantee.EXACTLY_ONCE:
            assert {int(v.split(b"/")[0]) for v in rows} <= {d.batch for d in decided}, "visible, and not decided"


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase

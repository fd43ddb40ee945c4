"""A key table next to the ledger: lookups, activation, expiry; in every such database."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.support.dedup import by_key, hashed, once, with_helpers
from tests.support.scans import scanned
from tests.support.sinks import SCHEMA, SINKS
from tests.support.sweeps import once_each

from delivered.engine import Sinks
from delivered.engine.context import Context
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.kits.sql.ledger import KeyTable
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.limits import KEY_MEMORIES_KEPT
from delivered.model.rows import Rows
from delivered.model.work import (
    Account,
    Action,
    BatchPlan,
    CheckpointView,
    Decision,
    Ok,
    Owner,
    ShardMessage,
    Tolerance,
)

KEY_TABLES = (
    "sqlite", "postgres-one-transaction", "postgres-two-phase", "mysql-one-transaction", "mysql-two-phase"
)  # fmt: skip
MINUTE = 60_000_000
WITHIN = 60 * MINUTE
BEGAN = 1_700_000_000_000_000
SHARDS = 2
Record = tuple[str | None, int | None, str]
"""Key, minute, content."""


class Once:
    """A pipeline with a key table. Tests choose keys and times."""

    def __init__(self, sink: Any, guarantee: Guarantee = Guarantee.EXACTLY_ONCE) -> None:
        self.sink, self.guarantee, self.owners = sink, guarantee, 0
        self.sinks = Sinks.one(sink)
        self.scope = Scope("once", sink.name, "inc-1")
        self.ends: dict[int, str] = {}
        self.logged: int | None = None
        self.context = self.start()

    def start(self) -> Context:
        """Another driver, which looks like another process to the ledger."""
        self.owners += 1
        owner = Owner(f"o{self.owners}")
        self.first = True
        self.context = Context.open(self.sinks, self.scope, self.guarantee, owner)
        return self.context

    def plan(self, batch: int, end: str) -> BatchPlan:
        view = CheckpointView(self.scope.incarnation, batch, json.dumps({"0": end}), self.logged)
        plan = plan_batch(self.context, view, first=self.first)
        self.first = False
        return plan

    def write(self, plan: BatchPlan, records: Sequence[Record]) -> list[ShardMessage]:
        columns = [[None if k is None else k.encode() for k, _, _ in records], [v.encode() for _, _, v in records]]
        rows = pa.record_batch([pa.array(c, pa.binary()) for c in columns], schema=SCHEMA)
        times = [None if m is None else BEGAN + m * MINUTE for _, m, _ in records]
        parts = by_key(with_helpers(rows, columns[0], times), SHARDS)
        return [
            write_shard(
                Sinks.one(self.sink),
                plan,
                s,
                0,
                map(Rows, once(self.sink, self.scope, plan.batch, WITHIN, [part])),
                SCHEMA,
            )
            for s, part in enumerate(parts)
        ]

    def run(self, batch: int, records: Sequence[Record], end: str = "") -> Decision | None:
        plan = self.plan(batch, end or str(batch))
        messages = self.write(plan, records)
        decision = commit_batch(self.context, batch, plan.offsets, messages)
        self.logged = batch
        return decision

    def there(self) -> Counter[str]:
        return Counter(
            v.decode() for b in scanned(self.sink) for v in b.column(b.schema.get_field_index("value")).to_pylist()
        )

    def known(self, batch: int, *keys: str) -> set[str]:
        memory = self.sink.key_memory(self.scope)
        found = memory.known(batch, [hashed(k.encode()) for k in keys])
        return {k for k in keys if hashed(k.encode()) in found}

    def rows(self, table: str) -> int:
        """Rows of this checkpoint, queried from the database."""
        memory: KeyTable[Any] = self.sink.key_memory(self.scope)
        with memory._database.borrow(writes=False) as connection:
            sql = memory._sql(f"SELECT count(*) FROM {{{table}}} WHERE number = {memory._number}")
            return int(connection.execute(sql, {}).fetchone()[0])


@pytest.fixture(params=once_each(KEY_TABLES))
def once_(request: pytest.FixtureRequest) -> Once:
    return Once(SINKS[request.param](request))


def test_repeats_within_the_time_are_dropped_and_others_are_not(once_: Once) -> None:
    once_.run(0, [("a", 0, "a"), ("a", 3, "a again"), ("b", 1, "b"), (None, 1, "x"), (None, 1, "x")])
    once_.run(1, [("a", 60, "a at its end"), ("b", 62, "b anew"), ("c", 5, "c")])
    once_.run(2, [("b", 122, "b of the new one"), ("c", 66, "c anew"), ("d", None, "d"), ("d", None, "d")])
    once_.run(3, [("d", None, "d"), ("c", 70, "c again"), ("e", 70, "e"), ("e", 131, "e anew"), ("e", 131, "e anew")])
    wanted = ["a", "b", "x", "x", "b anew", "c", "c anew", "d", "d", "e", "e anew"]
    assert once_.there() == Counter(wanted), "d has no time, and is known in its batch alone"


def test_a_batch_that_runs_again_does_not_take_its_own_keys_for_seen(once_: Once) -> None:
    """Rerun after a kill between tasks and decision; and by the same driver, after failed tasks."""
    records: list[Record] = [("a", 0, "a"), ("b", 1, "b"), ("a", 2, "a")]
    once_.write(once_.plan(0, "0"), records)
    once_.start()
    plan = once_.plan(0, "0")
    once_.write(plan, records[:1])
    messages = once_.write(plan, records)
    assert commit_batch(once_.context, 0, plan.offsets, messages) is not None
    assert once_.there() == Counter("ab")
    assert once_.rows("admitted") == 0


def test_keys_of_a_batch_that_was_not_decided_count_for_nothing(once_: Once) -> None:
    """F8: its offsets are lost with the checkpoint's last files; the batch is rerun, and ends earlier."""
    once_.run(0, [("a", 0, "a")])
    once_.write(once_.plan(1, "far"), [("b", 1, "b"), ("c", 2, "c")])
    once_.start()
    once_.run(1, [("b", 1, "b")], "near")
    once_.run(2, [("c", 2, "c"), ("b", 3, "b")])
    assert once_.there() == Counter("abc")


def test_a_decided_batch_finds_what_it_found_before(once_: Once) -> None:
    """Its decision expired keys and added its own: neither changes what rerun tasks see."""
    once_.run(0, [("old", 0, "old"), ("b", 50, "b")])
    once_.run(1, [("c", 100, "c")])  # now `old` expires
    plan = once_.plan(2, "2")
    before = once_.known(2, "old", "b", "c", "d")
    assert before == {"b", "c"}
    messages = once_.write(plan, [("d", 170, "d"), ("b", 105, "b")])
    commit_batch(once_.context, 2, plan.offsets, messages)
    assert once_.known(2, "old", "b", "c", "d") == before
    assert once_.known(3, "old", "b", "c", "d") == {"d"}


def test_a_key_is_remembered_to_the_end_of_its_time(once_: Once) -> None:
    """A batch's times expire keys for later batches, not within the batch."""
    once_.run(0, [("a", 0, "a")])
    once_.run(1, [("far", 500, "far"), ("a", 60, "a")])
    once_.run(2, [("b", 61, "b"), ("c", 61, "c")])
    once_.run(3, [("b", 121, "b")])
    found = once_.there()
    assert (found["a"], found["far"], found["c"]) == (1, 1, 1)
    assert found["b"] == 2, "it was over by the time of `far` when it came, and a repeat gets in rather than a loss"


def test_a_time_in_the_future_ends_no_memory(once_: Once) -> None:
    now = (time.time_ns() // 1_000 - BEGAN) // MINUTE
    once_.run(0, [("a", now, "a"), ("b", now, "b")])
    soon = 10**9  # 1,900 years
    once_.run(1, [("soon", soon, "soon")])
    once_.run(2, [("soon", soon + 10, "soon"), ("a", now + 1, "a")])
    assert once_.there() == Counter({"a": 1, "b": 1, "soon": 1})


def test_the_least_and_the_greatest_time_fit(once_: Once) -> None:
    """Sentinels, and record times in a wrong unit: their end is no 64-bit number. The least is over at once."""
    last, first = ((1 << 63) - 1 - BEGAN) // MINUTE, -(((1 << 63) + BEGAN) // MINUTE)
    once_.run(0, [("a", last, "a"), ("b", first, "b"), ("c", last - 59, "c")])
    once_.run(1, [("a", last, "a"), ("a", last - 1, "a"), ("c", last, "c"), ("d", 0, "d")])
    assert once_.there() == Counter({"a": 1, "b": 1, "c": 1, "d": 1})


def test_what_is_over_is_forgotten(once_: Once) -> None:
    for batch in range(12):
        once_.run(batch, [(f"{batch}-{i}", batch * 30 + i, "v") for i in range(10)])
        assert once_.rows("admitted") == 0
    assert 30 <= once_.rows("seen") <= 50, "of 120: those of the last 60 minutes, and of the batches that brought them"


def test_memories_of_old_checkpoints_go_and_a_missing_one_stops_the_batch(once_: Once) -> None:
    for n in range(5):
        once_.scope = Scope(once_.scope.pipeline, once_.scope.sink, f"inc-{n}")
        once_.logged = None
        once_.context = once_.start()
        once_.context = replace(once_.context, tolerance=Tolerance(new_checkpoint=True))
        once_.run(0, [("a", 0, f"a of {n}")])
        assert once_.rows("seen") == 1
    assert once_.there() == Counter(f"a of {n}" for n in range(5)), "a new checkpoint remembers nothing"
    left = []
    for n in range(5):
        once_.scope = Scope(once_.scope.pipeline, once_.scope.sink, f"inc-{n}")
        left.append(once_.rows("seen"))
    assert left == [0] * (4 - KEY_MEMORIES_KEPT) + [1] * (KEY_MEMORIES_KEPT + 1)
    once_.scope = Scope(once_.scope.pipeline, once_.scope.sink, "inc-0")
    with pytest.raises(DeliveredError, match="DEDUP_MEMORY_GONE"):
        once_.known(1, "a")


def test_a_memory_that_was_lost_is_not_begun_anew(once_: Once) -> None:
    once_.run(0, [("a", 0, "a")])
    memory: KeyTable[Any] = once_.sink.key_memory(once_.scope)
    with memory._database.borrow(writes=True) as connection:
        connection.execute(memory._sql(f"DELETE FROM {{memory}} WHERE number = {memory._number}"), {})
    once_.start()
    with pytest.raises(DeliveredError, match="DEDUP_MEMORY_GONE"):
        once_.run(1, [("a", 1, "a")])


@pytest.mark.parametrize("name", ["postgres-two-phase", "mysql-two-phase"])
def test_a_promise_that_is_gone_is_written_again_with_the_same_rows(name: str, request: pytest.FixtureRequest) -> None:
    """Decided with its keys; then a prepared transaction is rolled back by hand, and the shard is rewritten."""
    once_ = Once(SINKS[name](request))
    once_.run(0, [("old", 0, "old"), ("k", 55, "k")])
    once_.run(1, [("m", 110, "m")])
    records: list[Record] = [(f"n{i}", 300 + i, f"n{i}") for i in range(20)] + [
        ("k", 112, "k"),
        ("n3", 302, "n3 first"),
    ]
    plan = once_.plan(2, "2")
    messages = once_.write(plan, records)
    prepared = [p for m in messages for p in m.participants]
    decision = Decision(
        once_.scope, once_.context.owner.id, Guarantee.EXACTLY_ONCE, 2, plan.offsets, tuple(prepared),
        {once_.scope.sink: Account(sum((p.fingerprint for p in prepared), Fingerprint()))}, 1_800_000_000_000,
    )  # fmt: skip
    assert once_.context.ledger.decide(decision) == Ok(None)
    once_.context.committers.abort(prepared[0])
    once_.start()
    again = once_.plan(2, "2")
    assert again.action_for(prepared[0].shard) is Action.WRITE
    commit_batch(once_.context, 2, again.offsets, once_.write(again, records))
    wanted = Counter(["old", "k", "m", "n3 first", *(f"n{i}" for i in range(20) if i != 3)])
    assert once_.there() == wanted
    once_.logged = 2
    once_.run(3, [("n5", 310, "n5"), ("p", 310, "p")])
    assert once_.there() == wanted + Counter("p")


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_under_the_weaker_guarantees_a_decided_key_is_known_and_none_is_lost(
    guarantee: Guarantee, request: pytest.FixtureRequest
) -> None:
    """An interrupted batch: at_least_once resends its records; at_most_once gives them up, but remembers their keys."""
    once_ = Once(SINKS["sqlite"](request), guarantee)
    once_.run(0, [("a", 0, "a"), ("b", 0, "b")])
    once_.write(once_.plan(1, "1"), [("b", 1, "b"), ("c", 1, "c")])
    once_.start()
    once_.run(1, [("b", 1, "b"), ("c", 1, "c")])
    once_.run(2, [("c", 2, "c"), ("a", 2, "a"), ("d", 2, "d")])
    again = 2 if guarantee is Guarantee.AT_LEAST_ONCE else 1
    assert once_.there() == Counter({"a": 1, "b": 1, "c": again, "d": 1})

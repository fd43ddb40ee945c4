"""The contract of a sink, driven by its declared capability. One suite for all sinks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.sinks import EXACT, SCHEMA, SHARDS, SINKS, Rig, offsets
from tests.support.sweeps import sweep

from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.engine.context import same_target
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Commit, Guarantee
from delivered.model.errors import Fenced, LedgerBehind, Refused, TargetChanged, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Target, Work
from delivered.model.work import Account, Action, Decision, Failed, Ok, Owner, Prepared, Tolerance

WITH_A_LEDGER_OF_ANOTHER = ("kafka-librdkafka", "rocketmq", "-by-batch")
"""Their ledger is that of `kafka`, of `sqlite`, of the table without a column for the batch: in `make test`, they run
the tests of what a writer does."""
BY_BATCH = ("postgres-one-transaction-by-batch", "mysql-two-phase-by-batch")
"""Of those, `make test` takes each database and each way to commit once."""
LEFT_TO_VERIFY = ("-s3", "-rest", "-json", *BY_BATCH)
OVER_HTTP = pytest.mark.parametrize(
    "rig", sweep(SINKS, lambda name: name not in ("iceberg-s3", "files-json", *BY_BATCH)), indirect=True
)
"""Stores and catalogs differ from a folder in their requests, all of which tests with this mark make: they stage,
commit, read, and abort."""
EVERY_WRITER = pytest.mark.parametrize(
    "rig", sweep(SINKS, lambda name: not name.endswith(LEFT_TO_VERIFY)), indirect=True
)


@pytest.fixture(params=sweep(SINKS, lambda name: not name.endswith((*LEFT_TO_VERIFY, *WITH_A_LEDGER_OF_ANOTHER))))
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(SINKS[request.param](request))


@EVERY_WRITER
def test_says_what_it_does(rig: Rig) -> None:
    can = rig.sink.capability()
    texts = (can.system, can.mechanism, can.stage, can.prepare, can.decide, can.apply, can.send)
    assert all(text.strip() for text in texts)
    assert can.commit in (Commit.TWO_PHASE, Commit.ONE_TRANSACTION)
    assert not [f for f in rig.sink.preflight(EXACT) if f.refuses]
    rig.sink.check_schema(SCHEMA)


def test_a_plan_knows_which_columns_the_target_takes(rig: Rig) -> None:
    """As a start would: no row is written to find out."""
    rig.run(0)
    if (check := rig.sink.target_check()) is None:
        pytest.skip("any column that check_schema allows")
    check(SCHEMA)
    check(pa.schema([f.with_type(pa.null()) for f in SCHEMA]))
    wrong = pa.schema([SCHEMA.field(0).with_type(pa.date32()), *list(SCHEMA)[1:]])
    for schema in (SCHEMA.append(pa.field("more", pa.string())), wrong):
        with pytest.raises(UsageError):
            check(schema)


@OVER_HTTP
def test_batches_are_visible_once_and_add_up(rig: Rig) -> None:
    context = rig.context()
    for batch in range(3):
        plan = rig.plan(context, batch, first=batch == 0)
        commit_batch(context, batch, offsets(batch), rig.write(plan))
    state = rig.context().ledger.look()
    assert state.last is not None
    assert state.last.total == rig.visible() == rig.expected(0, 1, 2)


def test_the_ledger_keeps_which_transform_a_batch_ran_with(rig: Rig) -> None:
    """In decisions of any sink; none if unknown, as in earlier ledgers."""
    for batch, transform in enumerate(("", "a", "a", "b")):
        context = replace(rig.context(), transform=transform)
        decided = commit_batch(context, batch, offsets(batch), rig.write(rig.plan(context, batch)))
        last = rig.context().ledger.look().last
        assert last is not None
        assert decided is not None
        assert last.transforms == decided.transforms
        assert last.transform == transform
    assert [(t.fingerprint, t.batch, t.after) for t in last.transforms] == [
        ("", 0, ""), ("a", 1, offsets(0)), ("b", 3, offsets(2))
    ]  # fmt: skip
    assert last.transforms[2].accounts[rig.scope.sink].total == rig.expected(0, 1, 2)


@EVERY_WRITER
def test_nothing_is_visible_before_the_decision(rig: Rig) -> None:
    rig.run(0)
    context = rig.context()
    messages = rig.write(rig.plan(context, 1))
    assert all(m.prepared is not None and m.prepared.handle for m in messages)
    state = context.ledger.look()
    assert state.last is not None
    assert state.last.batch == 0
    for m in messages:
        assert m.prepared is not None
        assert isinstance(context.committers.abort(m.prepared), Ok)
    assert rig.visible() == rig.expected(0)


@EVERY_WRITER
def test_p16_commit_and_apply_again_change_nothing(rig: Rig) -> None:
    """P16: commit may be called several times for one epoch."""
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    decision = commit_batch(context, 0, offsets(0), messages)
    assert decision is not None
    assert commit_batch(rig.context(), 0, offsets(0), messages) == decision
    for _ in range(2):
        for p in decision.participants:
            work = Work(rig.scope, 0, p.shard, p.attempt)
            assert isinstance(context.committers.commit(work, p), Ok)
            assert context.committers.was_committed(work, p)
    assert rig.visible() == rig.expected(0)


@EVERY_WRITER
def test_recovery_finishes_a_decided_batch(rig: Rig) -> None:
    context = rig.context("dies")
    plan = rig.plan(context, 0)
    prepared = tuple(m.prepared for m in rig.write(plan) if m.prepared is not None)
    total = sum((p.fingerprint for p in prepared), Fingerprint())
    decision = Decision(rig.scope, "dies", EXACT, 0, plan.offsets, prepared, {rig.scope.sink: Account(total)}, 1)
    assert context.ledger.decide(decision) == Ok(None)  # the process dies before it applies
    again = rig.context("second")
    assert rig.plan(again, 0).action is Action.SKIP
    assert rig.visible() == rig.expected(0)
    assert all(again.committers.was_committed(Work(rig.scope, 0, p.shard, p.attempt), p) for p in prepared)
    assert not again.committers.was_committed(Work(rig.scope, 1, 0), prepared[0])


def test_participants_of_other_sinks_are_recorded_and_left_alone(rig: Rig) -> None:
    """The ledger also decides for other sinks; a later revision replaces their participants and repeats no own rows."""
    context = rig.context()
    plan = rig.plan(context, 0)
    own = tuple(m.prepared for m in rig.write(plan) if m.prepared is not None)
    other = Prepared(0, 0, Fingerprint(7, 7, 7), {"only": "they know"}, sink="elsewhere")
    total = sum((p.fingerprint for p in own), Fingerprint())
    accounts = {"elsewhere": Account(other.fingerprint)}
    decision = Decision(
        rig.scope, "first", EXACT, 0, plan.offsets, (*own, other), {rig.scope.sink: Account(total), **accounts}, 1
    )
    assert context.ledger.decide(decision) == Ok(None)
    for p in own:
        assert context.committers.commit(Work(rig.scope, 0, p.shard, p.attempt), p) == Ok(None)
    replaced = replace(decision, participants=(*own, replace(other, handle={"only": "again"})), revision=1)
    assert context.ledger.decide(replaced) == Ok(None)
    assert context.ledger.look().last == replaced
    assert rig.visible() == rig.expected(0)
    assert all(context.committers.was_committed(Work(rig.scope, 0, p.shard, p.attempt), p) for p in own)


@EVERY_WRITER
def test_batch_prepared_by_a_dead_driver_runs_again(rig: Rig) -> None:
    rig.run(0)
    rig.write(rig.plan(rig.context(), 1))  # prepared; then driver and tasks die
    context = rig.context("second")
    plan = rig.plan(context, 1)
    assert plan.action is Action.WRITE
    commit_batch(context, 1, offsets(1), rig.write(plan))
    assert rig.visible() == rig.expected(0, 1)


@OVER_HTTP
def test_abort_orphans_leaves_others_and_the_decided_alone(rig: Rig) -> None:
    other = Rig(rig.sink, pipeline=f"{rig.pipeline}.more")  # a name with the same prefix
    theirs = other.context()
    their_messages = other.write(other.plan(theirs, 0))
    context = rig.context()
    mine = rig.write(rig.plan(context, 0))
    keep, drop = (m.prepared for m in mine)
    assert keep is not None
    assert drop is not None
    assert context.committers.abort_orphans([keep]) == Ok(1)
    assert context.committers.abort_orphans([keep]) == Ok(0)
    assert commit_batch(theirs, 0, offsets(0), their_messages) is not None
    assert context.committers.abort_orphans(()) == Ok(1)
    their_seed_total = other.expected(0)
    assert other.visible() == their_seed_total


@EVERY_WRITER
def test_abort_orphans_reaches_earlier_incarnations(rig: Rig) -> None:
    rig.write(rig.plan(rig.context(), 0))
    later = Rig(rig.sink, pipeline=rig.pipeline, incarnation="i1")
    assert later.context().committers.abort_orphans(()) == Ok(SHARDS)


def test_a_decision_whose_rows_are_gone_is_not_taken_for_visible(rig: Rig) -> None:
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    assert isinstance(context.committers.abort_orphans(()), Ok)
    before = rig.visible() if rig.sink.capability().commit is Commit.TWO_PHASE else None
    with pytest.raises(Exception, match="DELIVERED_") as caught:
        commit_batch(context, 0, offsets(0), messages)
    one = rig.sink.capability().commit is Commit.ONE_TRANSACTION
    assert ("DECISION_FAILED" if one else "PROMISE_EXPIRED") in str(caught.value)
    assert before is None or rig.visible() == before
    again = rig.context("second")
    commit_batch(again, 0, offsets(0), rig.write(rig.plan(again, 0)))
    assert rig.visible() == rig.expected(0)


def test_claim_fences_every_earlier_owner(rig: Rig) -> None:
    old, new = rig.context("old"), rig.context("new")
    plan = rig.plan(old, 0)
    messages = rig.write(plan)
    assert new.ledger.claim(new.owner).owner is not None
    with pytest.raises(Fenced):
        old.ledger.resume("old")
    with pytest.raises(Fenced):
        old.ledger.claim(old.owner)
    prepared = tuple(m.prepared for m in messages if m.prepared is not None)
    decision = Decision(rig.scope, "old", EXACT, 0, plan.offsets, prepared, {}, 1)
    assert isinstance(old.ledger.decide(decision), Failed)
    state = new.ledger.resume("new")
    assert state.last is None
    assert state.owner is not None
    assert state.owner.id == "new"


def test_a_later_claim_of_the_same_owner_voids_the_earlier(rig: Rig) -> None:
    earlier, later = rig.context("one"), rig.context("one")
    plan = rig.plan(earlier, 0)
    messages = rig.write(plan)
    first = earlier.ledger.resume("one").epoch
    assert later.ledger.claim(later.owner).epoch > first
    with pytest.raises(Fenced):
        commit_batch(rig.context("one"), 0, offsets(0), messages)
    assert later.ledger.look().last is None


def test_history_is_in_order_and_of_this_incarnation(rig: Rig) -> None:
    for batch in range(4):
        rig.run(batch)
    assert [d.batch for d in rig.context().ledger.history()] == [0, 1, 2, 3]
    later = Rig(rig.sink, pipeline=rig.pipeline, incarnation="i1")
    assert list(later.context().ledger.history()) == []
    state = later.context().ledger.claim(Owner("later"))
    assert [(d.scope.incarnation, d.batch) for d in state.earlier] == [("i0", 3)]
    assert state.last is None


@EVERY_WRITER
@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_direct_rows_are_visible_before_the_record(rig: Rig, guarantee: Guarantee) -> None:
    context = rig.context(guarantee=guarantee)
    messages = rig.write(rig.plan(context, 0))
    assert all(m.prepared is not None and not m.prepared.handle for m in messages)
    assert rig.visible() == rig.expected(0)
    decision = commit_batch(context, 0, offsets(0), messages)
    assert decision is not None
    assert decision.total == rig.visible()


def test_at_most_once_batch_begun_and_not_recorded_is_given_up(rig: Rig) -> None:
    guarantee = Guarantee.AT_MOST_ONCE
    rig.write(rig.plan(rig.context(guarantee=guarantee), 0))  # sent; then the driver dies
    sent = rig.visible()
    context = rig.context("second", guarantee)
    plan = rig.plan(context, 0)
    assert plan.action is Action.GIVE_UP
    decision = commit_batch(context, 0, offsets(0), rig.write(plan))
    assert decision is not None
    assert decision.given_up == rig.expected(0)
    assert rig.visible() == sent


@pytest.mark.parametrize("guarantee", [Guarantee.AT_MOST_ONCE, Guarantee.EXACTLY_ONCE])
def test_a_new_checkpoint_knows_of_a_batch_begun_from_another(rig: Rig, guarantee: Guarantee) -> None:
    """F8: the checkpoint is deleted before its first batch is recorded; some of its records may be in the sink."""
    rig.write(rig.plan(rig.context(guarantee=Guarantee.AT_MOST_ONCE), 0))  # sent; then driver and checkpoint are gone
    sent = rig.visible()
    later = Rig(rig.sink, pipeline=rig.pipeline, incarnation="i1")
    with pytest.raises(Refused, match="CHECKPOINT_NEW"):
        later.plan(later.context("later", guarantee), 0)
    assert rig.visible() == sent


def test_a_batch_begun_and_recorded_is_no_news_to_a_new_checkpoint(rig: Rig) -> None:
    rig.run(0, rig.context(guarantee=Guarantee.AT_MOST_ONCE))
    later = Rig(rig.sink, pipeline=rig.pipeline, incarnation="i1")
    state = later.context().ledger.claim(Owner("later"))
    assert [d.batch for d in state.earlier] == [0]
    assert state.earlier_started == ()


@EVERY_WRITER
def test_empty_batch_and_empty_shards(rig: Rig) -> None:
    rig.run(0)
    context = rig.context()
    plan = rig.plan(context, 1)
    messages = [write_shard(rig.sinks, plan, s, 0, iter(()), SCHEMA) for s in range(SHARDS)]
    decision = commit_batch(context, 1, offsets(1), messages)
    assert decision is not None
    assert decision.fingerprint == Fingerprint()
    context = rig.context()
    rig.plan(context, 2)
    assert commit_batch(context, 2, offsets(2), []) is not None
    assert rig.visible() == rig.expected(0)


def test_a_target_that_was_made_anew_is_not_taken_for_the_former(rig: Rig) -> None:
    """A topic or table is dropped and recreated between two starts: delivered rows are gone, unknown to an external
    ledger."""
    rig.run(0)
    context = rig.context()
    decided = context.ledger.look().last
    assert decided is not None
    of_others = rig.sink.capability().system == "mysql" and not rig.sink.options.batch_column  # the table
    if of_others or rig.sink.capability().system in ("rocketmq", "pulsar"):  # their topics have no id
        assert decided.targets == {}
        return
    assert decided.targets == {sink: target.id for sink, target in context.committers.targets().items()} != {}
    rig.run(1)  # the same target: continues
    dropped = replace(decided, batch=2, offsets=offsets(2), participants=(), targets={rig.scope.sink: "another"})
    rig.plan(context, 2)
    assert context.ledger.decide(dropped) == Ok(None)
    with pytest.raises(TargetChanged, match="another") as caught:
        rig.plan(rig.context("second"), 3)
    assert decided.targets[rig.scope.sink] in str(caught.value)
    assert "newTarget" in str(caught.value)
    accepted = replace(rig.context("third"), tolerance=Tolerance(new_target=True))
    commit_batch(accepted, 3, offsets(3), rig.write(rig.plan(accepted, 3)))
    rig.run(4, rig.context("fourth"))  # accepted once; a later start compares with what was accepted
    assert rig.visible() == rig.expected(0, 1, 3, 4)


def test_a_decision_of_a_version_that_kept_targets_in_words_is_gone_on_from(rig: Rig) -> None:
    """They contained the target's name as spelt, besides its id."""
    rig.run(0)
    context = rig.context()
    decided = context.ledger.look().last
    assert decided is not None
    if not decided.targets:
        return
    rig.plan(context, 1)
    ((sink, known),) = decided.targets.items()
    assert " " not in known
    told = f"table a/b c with id {known.partition('@')[0]}"
    old = replace(decided, batch=1, offsets=offsets(1), participants=(), targets={sink: told})
    assert context.ledger.decide(old) == Ok(None)
    context = rig.context("second")
    rig.plan(context, 2)
    old = replace(old, owner="second", batch=2, offsets=offsets(2), targets={sink: "table a/b c with id another"})
    assert context.ledger.decide(old) == Ok(None)
    with pytest.raises(
        TargetChanged, match=f"to table a/b c with id another, but its target is now .* with id {known}"
    ):
        rig.plan(rig.context("third"), 3)


@pytest.mark.parametrize(
    "words", ["topic t with id {}", "table s.t with oid {}", "table a with id b with UUID {}", "generation {}", "{}"]
)
def test_every_form_of_a_decided_target_is_compared_by_its_id(words: str) -> None:
    now = Target("table t", "3f0c")
    assert same_target(words.format("3f0c"), now)
    assert not same_target(words.format("3f0"), now)
    assert not same_target(words.format("t"), now)
    assert same_target("table t with id 3f0c", Target("table t", "3f0c@db.t"))
    assert not same_target("3f0c@db.u", Target("table t", "3f0c@db.t"))


def test_a_decision_of_a_version_that_kept_no_target_is_gone_on_from(rig: Rig) -> None:
    rig.run(0)
    context = rig.context()
    decided = context.ledger.look().last
    assert decided is not None
    rig.plan(context, 1)
    old = replace(decided, batch=1, offsets=offsets(1), participants=(), targets={})
    assert "targets" not in old.to_json()
    assert context.ledger.decide(old) == Ok(None)
    made = rig.run(2, rig.context("second"))
    assert made is not None
    assert made.targets == decided.targets


def test_a_renamed_pipeline_is_told_its_former_name(rig: Rig) -> None:
    """`queryName` changed between two starts: the ledger has the checkpoint under the former name."""
    rig = replace(rig, incarnation=f"only-{rig.pipeline}")  # unique, like Spark's, as the server is shared
    for batch in range(2):
        rig.run(batch)
    renamed = replace(rig, pipeline=f"{rig.pipeline}-renamed")
    for batch in (1, 2):
        with pytest.raises(LedgerBehind, match="LEDGER_RENAMED") as caught:
            renamed.plan(renamed.context("second"), batch)
        assert f"{rig.pipeline!r}" in caught.value.message
        assert f"{renamed.pipeline!r}" in caught.value.message
        assert f'.option("pipeline", "{rig.pipeline}")' in str(caught.value.next_step)
        assert "missingLedger" not in str(caught.value)
    another = replace(rig, pipeline=f"{rig.pipeline}-other", incarnation=f"more-{rig.pipeline}")
    with pytest.raises(LedgerBehind, match="LEDGER_MISSING") as caught:
        another.plan(another.context("third"), 2)
    assert f"pipeline {another.pipeline!r}" in caught.value.message
    assert "Ledgers in the same place: " in caught.value.message
    another.run(0)  # an independent pipeline, from its first batch on
    assert rig.run(2) is not None


@dataclass
class WithSqlite(Rig):
    """A sink, and SQLite as the last resource, which decides for both."""

    last: Sink | None = None

    @property
    def sinks(self) -> Sinks:
        assert self.last is not None
        return Sinks.of([(None, self.sink, None), ("last", self.last, None)])


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    "system", ["kafka", "pulsar", "postgres-two-phase", "mysql-two-phase", "rocketmq", "rocketmq alone"]
)
def test_a_batch_that_an_older_ledger_lacks_is_not_doubled(
    request: pytest.FixtureRequest, tmp_path: Path, system: str, before: int
) -> None:
    """RocketMQ's ledger is a file of its own, with the journal of what was committed."""
    name, _, alone = system.partition(" ")
    folder = tmp_path if alone else tmp_path / "last"
    folder.mkdir(exist_ok=True)
    sink, last = SINKS[name](request), SQLITE.sink({"path": str(folder / "last.db"), "table": "orders"})
    rig = Rig(sink) if alone else WithSqlite(sink, last=last)
    context = rig.context()
    for batch in range(before):
        rig.run(batch, context)
    plan = rig.plan(context, before)
    shutil.copytree(folder, copy := tmp_path.with_name(f"{tmp_path.name}-copy"))
    commit_batch(context, before, offsets(before), rig.write(plan))
    visible = rig.visible()
    context.close()
    shutil.rmtree(folder)
    copy.rename(folder)
    with pytest.raises(LedgerBehind, match=r"shards \[0, 1\]") as caught:
        rig.run(before, rig.context("second"))
    assert caught.value.code == "DELIVERED_BATCH_VISIBLE"
    assert rig.visible() == visible == rig.expected(*range(before + 1))

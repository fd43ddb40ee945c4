"""Exactly once into Kafka: transactions that tasks prepare and the driver ends, against a real broker.

Every test here breaks something on purpose: a process, a broker, a prepared transaction, or the order of events.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tests.broker.cluster_help import Driver
from tests.broker.sink_help import EXACT, SCHEMA, Child, Rig, prepared, rows, wait_for
from tests.kafka_tools import read_committed
from tests.support.sinks import alone
from tests.support.sweeps import KAFKA_CLIENTS

from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import Transaction, describe, end, initialise, listed
from delivered.connectors.kafka import sink as warm
from delivered.connectors.kafka import topics
from delivered.contract.sink import Writer
from delivered.engine import decide
from delivered.engine.context import open_ledger
from delivered.model import step
from delivered.model.errors import Fenced, LedgerAhead, PromiseBroken, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.limits import CLAIMS_APART, TRANSACTION_SLOTS
from delivered.model.patience import within
from delivered.model.rows import Rows
from delivered.model.work import Action, Failed, Ok, Prepared, Promise, Unknown
from delivered_lab.verify.proxy import Api, Fired, KafkaProxy, NetworkFault, Rule


@pytest.fixture(params=KAFKA_CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


either_client = pytest.mark.parametrize("client", ["librdkafka", "arrow"], indirect=True)
"""In `make test`, too: what its transactions rest on, and conformance/test_sinks.py does not try with both."""


@pytest.fixture
def rig(kafka: Any, client: str) -> Rig:
    return Rig(kafka, kafka.topic(3), options={"client": client})


def test_batches_are_visible_once_and_only_after_their_decision(rig: Rig) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    messages = rig.write(plan)
    assert rig.visible() == []
    assert rig.visible("read_uncommitted") == rig.expected([0])
    rig.commit(context, 0, messages)
    assert rig.visible() == rig.expected([0])
    rig.run(context, 1)
    assert rig.visible() == rig.expected([0, 1])
    assert context.committers.open_transactions() == []


def test_a_task_may_die_after_prepare_and_another_process_applies(rig: Rig) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    with Child("write", rig.sink, plan, 0, [rows(rig.values_of(0, 0))], SCHEMA) as task:
        message = task.say()
        task.kill()
    assert [t.state for t in context.committers.open_transactions()] == ["Ongoing"]
    assert rig.visible() == []
    with Child("apply", rig.sink, rig.scope, rig.work(0), prepared(message)) as driver:
        assert driver.say() == Ok(None)
    assert rig.visible() == rig.expected([0], [0])


def test_a_writer_that_is_garbage_or_whose_process_ends_in_order_leaves_its_transaction_open(rig: Rig) -> None:
    context = rig.context()
    message = rig.write(rig.plan(context, 0), [0])[0]
    warm.close_all()
    assert [t.transactional_id for t in context.committers.open_transactions()] == [
        prepared(message).handle["transactional_id"]
    ]
    assert context.committers.commit(rig.work(0), prepared(message)) == Ok(None)
    assert rig.visible() == rig.expected([0], [0])


def test_p16_apply_may_be_called_again(rig: Rig) -> None:
    context = rig.context()
    message = rig.write(rig.plan(context, 0), [0])[0]
    for _ in range(3):
        assert context.committers.commit(rig.work(0), prepared(message)) == Ok(None)
    assert context.committers.was_committed(rig.work(0), prepared(message))
    assert rig.visible() == rig.expected([0], [0])


def test_many_participants_end_together_each_with_its_own_outcome(rig: Rig) -> None:
    context = rig.context()
    shards = list(range(60))  # more than one connection takes unanswered
    messages = rig.write(rig.plan(context, 0), shards)
    committer = rig.committer()
    fenced = Transaction.of(prepared(messages[7]))
    committed = [(rig.work(0, s), prepared(m)) for s, m in zip(shards, messages, strict=True)]
    wire = Wire(rig.sink.options.resolved())
    assert isinstance(initialise(wire, fenced.transactional_id, 60_000, time.monotonic() + 30), Ok)
    wire.close()
    for _ in range(2):
        outcomes = committer.commit_all(committed)
        assert [i for i, o in enumerate(outcomes) if o != Ok(None)] == [7]
        assert isinstance(outcomes[7], Failed)
    rest = [s for s in shards if s != 7]
    assert rig.visible() == rig.expected([0], rest)


@pytest.mark.matrix  # a dead broker is below, many participants above
def test_many_participants_of_a_dead_broker_have_unknown_outcomes_and_end_after_its_restart(
    mortal_kafka: Any, client: str
) -> None:
    kafka = mortal_kafka
    rig = Rig(kafka, kafka.topic(2), options={"client": client})
    context = rig.context()
    messages = rig.write(rig.plan(context, 0), range(4))
    committed = [(rig.work(0, s), prepared(m)) for s, m in enumerate(messages)]
    assert isinstance(context.committers.abort_orphans([p for _, p in committed]), Ok)  # connected
    kafka.broker.kill()
    with within(2):
        outcomes = context.committers.commit_all(committed)
    assert all(isinstance(o, Unknown) for o in outcomes)
    kafka.broker.restart()
    rig.commit(context, 0, messages)
    assert rig.visible() == rig.expected([0], range(4))


def test_apply_after_the_id_was_taken_again_fails_and_the_marker_tells(rig: Rig) -> None:
    context = rig.context()
    context.ledger.claim(context.owner)
    first, second = rig.write(rig.bare_plan(0))
    committer = context.committers
    assert committer.commit(rig.work(0), prepared(first)) == Ok(None)
    wire = Wire(rig.sink.options.resolved())
    for message in (first, second):
        taken = initialise(wire, prepared(message).handle["transactional_id"], 60_000, time.monotonic() + 30)
        assert isinstance(taken, Ok)
    wire.close()
    # The first was applied, the second never: only the marker shows that.
    assert isinstance(committer.commit(rig.work(0), prepared(first)), Failed)
    assert isinstance(committer.commit(rig.work(0, 1), prepared(second)), Failed)
    assert committer.was_committed(rig.work(0), prepared(first))
    assert not committer.was_committed(rig.work(0, 1), prepared(second))


def test_p5_an_expired_participant_is_found_by_its_missing_marker_and_written_again(rig: Rig) -> None:
    rig.options["transactionTimeout"] = "4"  # under load, two shards take seconds
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    wait_for(lambda: not context.committers.open_transactions())
    with pytest.raises(PromiseBroken, match="PROMISE_EXPIRED"):
        rig.commit(context, 0, messages)
    assert rig.visible() == []
    # The next start rewrites the missing shard, under the same decision.
    rig.options["transactionTimeout"] = "60"
    again = rig.context()
    plan = rig.plan(again, 0)
    assert set(plan.rewrite) == {0, 1}
    rig.commit(again, 0, rig.write(plan))
    assert rig.visible() == rig.expected([0])
    assert rig.plan(rig.context(), 0).rewrite == {}


def test_p5_one_expired_participant_of_two_is_written_again_alone(rig: Rig) -> None:
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    assert context.committers.abort(prepared(messages[1])) == Ok(None)  # as the broker does on a timeout
    with pytest.raises(PromiseBroken):
        rig.commit(context, 0, messages)
    again = rig.context()
    plan = rig.plan(again, 0)
    assert set(plan.rewrite) == {1}
    said = rig.write(plan)
    assert [m.did for m in said] == [Action.SKIP, Action.WRITE]
    rig.commit(again, 0, said)
    assert rig.visible() == rig.expected([0])


def test_p6_p7_a_lost_answer_is_unknown_and_asking_again_settles_it(mortal_kafka: Any, client: str) -> None:
    """The broker dies by SIGKILL between prepare and apply, and comes back: no row is lost, none is there twice."""
    kafka = mortal_kafka
    rig = Rig(kafka, kafka.topic(2), options={"client": client})
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    assert isinstance(context.committers.abort_orphans([prepared(m) for m in messages]), Ok)
    kafka.broker.kill()
    with within(2):
        assert isinstance(context.committers.commit(rig.work(0), prepared(messages[0])), Unknown)
    kafka.broker.restart()
    rig.commit(context, 0, messages)
    assert rig.visible() == rig.expected([0])
    rig.run(context, 1)
    assert rig.visible() == rig.expected([0, 1])


def begun(rig: Rig, value: bytes) -> Writer:
    """A writer with rows in its transaction."""
    writer = rig.sink.writer(rig.work(0), EXACT, SCHEMA)
    writer.stage(rows([value]))
    writer.stage(rows([value + b" too"]))
    return writer


@pytest.mark.matrix  # the same sequences: test_kafka_sink.py, test_kafka_lost_answers.py
@pytest.mark.parametrize("killed", ["once"])
def test_a_broker_killed_while_a_shard_is_sent_stores_it_once_and_in_order(
    mortal_kafka: Any, client: str, killed: str
) -> None:
    kafka = mortal_kafka
    rig = Rig(kafka, kafka.topic(1), options={"client": client})
    context = rig.context()
    rig.plan(context, 0)
    work, values = rig.work(0), [b"%0100d" % i for i in range(120_000)]
    writer = rig.sink.writer(work, EXACT, SCHEMA)
    for first in range(0, len(values), 20_000):
        writer.stage(rows(values[first : first + 20_000]))
        if first == 20_000 or (first == 80_000 and killed == "twice"):
            kafka.broker.kill()
            kafka.broker.restart()
    promise = writer.prepare(Fingerprint())
    assert context.committers.commit(work, Prepared.of(work, Fingerprint(), promise)) == Ok(None)
    assert [m.value() for m in read_committed(kafka.bootstrap, rig.topic)] == values


@pytest.mark.parametrize("api", [Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE])
def test_p9_an_attempt_that_gives_up_with_a_request_unanswered_ends_its_epoch(kafka: Any, api: Api) -> None:
    """The request may arrive after the abort: it must not open the transaction again, for nobody would end that."""
    fired: list[Fired] = []
    proxy = KafkaProxy(kafka.bootstrap, fired.append)
    try:
        rig = Rig(kafka, kafka.topic(1), options={"client": "arrow"})
        context = rig.context()
        rig.plan(context, 0)
        rig.options["kafka.bootstrap.servers"] = proxy.bootstrap
        proxy.add(Rule(api, NetworkFault.LOSE_REPLY, times=1000))
        writer = rig.sink.writer(rig.work(0), EXACT, SCHEMA)
        writer.stage(rows([bytes(900_000)] * 10))  # fills batches, and fewer than wait for answers
        wait_for(lambda: writer._session.producer._pump() or fired)
        held = writer._session.held
        writer.abort()
    finally:
        proxy.close()
    wait_for(lambda: not context.committers.open_transactions())
    now = describe(alone(context.committers)._wire, held.transactional_id)
    assert now is not None and now.participant != held
    assert rig.visible() == []


def test_p9_every_batch_has_an_epoch_of_its_own_and_a_late_end_hits_nothing(rig: Rig) -> None:
    context = rig.context()
    message = rig.write(rig.plan(context, 0), [0])[0]
    first = prepared(message)
    rig.commit(context, 0, [message])
    rig.run(context, 1)
    third_message = rig.write(rig.plan(context, 2, first=False), [0])[0]
    third = prepared(third_message)
    assert third.handle["transactional_id"] == first.handle["transactional_id"]
    assert (third.handle["producer_id"], third.handle["epoch"]) != (first.handle["producer_id"], first.handle["epoch"])
    # Late requests of batch 0, both kinds, while the same id holds batch 2.
    assert isinstance(end(alone(context.committers)._wire, Transaction.of(first), commit=True), Failed)
    assert isinstance(end(alone(context.committers)._wire, Transaction.of(first), commit=False), Failed)
    assert [t.participant for t in context.committers.open_transactions()] == [Transaction.of(third)]
    rig.commit(context, 2, [third_message])
    assert rig.visible() == sorted(rig.expected([0, 2], [0]) + rig.expected([1]))


@either_client
def test_p9_an_attempt_that_runs_again_takes_a_new_epoch_and_fences_the_sleeping_one(rig: Rig) -> None:
    """A zombie: the same batch, shard and attempt, in a task that slept while the batch ran again."""
    context = rig.context()
    plan = rig.plan(context, 0)
    zombie = begun(rig, b"zombie")
    awake = rig.write(plan, [0])
    with pytest.raises(Fenced, match="PRODUCER_FENCED"):
        zombie.stage(rows([b"zombie again"]))
        zombie.prepare(Fingerprint())
    zombie.abort()
    rig.commit(context, 0, awake)
    assert rig.visible() == rig.expected([0], [0])


@either_client
def test_only_the_running_batch_initialises_its_ids(rig: Rig) -> None:
    """A worker that took the next batch's id ahead, and late, would fence the worker that the shard went to."""
    rig.run(rig.context(), 0, first=True)
    wire = Wire(rig.sink.options.resolved())
    found = listed(wire, partial(topics.is_ours, rig.scope), [], time.monotonic() + 10)
    wire.close()
    assert set(found) == {topics.transactional_id(rig.work(0, shard)) for shard in (0, 1)}


def test_p10_ids_are_bounded_over_batches_attempts_and_incarnations(rig: Rig) -> None:
    context = rig.context()
    rig.plan(context, 0)
    for incarnation in ("i0", "i1"):
        rig.incarnation = incarnation
        for batch in range(5):
            for attempt in range(3):
                work = rig.work(batch, attempt=attempt)
                writer = rig.sink.writer(work, EXACT, SCHEMA)
                writer.stage(rows([b"x"]))
                writer.abort()
    wire = Wire(rig.sink.options.resolved())
    warm.close_all()
    found = listed(wire, partial(topics.is_ours, rig.scope), [], time.monotonic() + 10)
    wire.close()
    assert 1 < len(found) <= TRANSACTION_SLOTS


def test_p10_ids_are_bounded_over_claims(rig: Rig) -> None:
    for owner in range(2 * CLAIMS_APART + 1):
        context = rig.context(f"owner{owner}")
        rig.write(rig.plan(context, 0), [0])
    assert context.committers.abort_orphans(()) == Ok(1)
    wire = Wire(rig.sink.options.resolved())
    found = listed(wire, partial(topics.is_ours, rig.scope), [], time.monotonic() + 10)
    wire.close()
    assert len(found) == CLAIMS_APART, "one slot in each"


def test_tasks_of_a_superseded_driver_fence_none_of_its_successor(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start late, with the older driver's plan, while the newer one has prepared the same shards."""
    older, newer = rig.context("first"), rig.context("second")
    plan = rig.plan(older, 0)
    messages = rig.write(rig.plan(newer, 0))
    late = rig.write(plan)
    assert rig.commit(newer, 0, messages) is not None
    with pytest.raises(Fenced):
        rig.commit(older, 0, late)
    assert len(newer.committers.open_transactions()) == 2  # type: ignore[attr-defined]
    # Their driver has died: the running one aborts what they left open.
    rig.plan(newer, 1, first=False)
    assert len(newer.committers.open_transactions()) == 2  # type: ignore[attr-defined]
    monkeypatch.setattr(decide, "SWEEP_EVERY_S", 0.0)
    rig.run(newer, 1)
    wait_for(lambda: not newer.committers.open_transactions())  # type: ignore[attr-defined]
    assert rig.visible() == rig.expected([0, 1])


def test_a_driver_with_an_outdated_checkpoint_fences_nobody(rig: Rig) -> None:
    """It read the checkpoint while the other driver decided one batch more. One of the two must go on."""
    running, late = rig.context("first"), rig.context("second")
    rig.run(running, 0, first=True)
    messages = rig.write(rig.plan(running, 1, first=False))
    rig.commit(running, 1, messages)
    with pytest.raises(LedgerAhead, match="LEDGER_AHEAD"):
        rig.plan(late, 0)
    rig.run(running, 2)
    assert rig.visible() == rig.expected([0, 1, 2])


@pytest.mark.matrix
@pytest.mark.parametrize("start_after", range(4))
def test_of_two_drivers_at_once_one_survives(rig: Rig, start_after: int) -> None:
    """Five rounds each: the second one takes over in the middle of a batch of the first one."""
    for turn in range(5):
        first = Driver(rig, owner=f"first {turn}", start=done_in(rig))
        first.start()
        first.wait_for(start_after)
        second = Driver(rig, owner=f"second {turn}", start=first.done)
        second.start()
        wait_for(lambda a=first, b=second: a.ended or b.ended)
        survivors = [d for d in (first, second) if d.ended is None]
        assert len(survivors) == 1, (first.ended, second.ended)
        survivors[0].wait_for(2)
        survivors[0].stop()
        assert survivors[0].ended is None, survivors[0].ended
    assert rig.visible() == rig.expected(range(done_in(rig)))


def done_in(rig: Rig) -> int:
    """The batch after the newest decided one, which a checkpoint would name."""
    ledger = rig.ledger()
    last = ledger.look().last
    ledger.close()
    return 0 if last is None else last.batch + 1


def test_a_superseded_driver_aborts_no_transaction_of_its_successor(rig: Rig) -> None:
    """It pauses between its claim and the abortion of orphans."""
    older, newer = rig.context("first"), rig.context("second")
    older.ledger.claim(older.owner)
    messages = rig.write(rig.plan(newer, 0))
    with pytest.raises(Fenced):
        decide.abort_orphans(older)
    rig.commit(newer, 0, messages)
    assert rig.visible() == rig.expected([0])


def test_overlapping_attempts_and_alternating_batches_never_share_an_id() -> None:
    used = {topics.slot_of(batch, attempt) for batch in (6, 7) for attempt in (0, 1)}
    assert len(used) == 4 == TRANSACTION_SLOTS


def test_claims_in_a_row_share_no_id_and_ids_of_release_0_1_are_found(rig: Rig) -> None:
    former = {f"{topics.id_prefix(rig.scope)}7.{slot}" for slot in range(4)}
    works = [[rig.work(b, 7, a, claim) for b in (6, 7) for a in (0, 1)] for claim in range(CLAIMS_APART + 1)]
    used = [topics.transactional_id(work) for claim in works for work in claim]
    assert set(used[:4]) == former
    assert len(set(used)) == 4 * (CLAIMS_APART + 1)
    assert all(topics.is_ours(rig.scope, name) for name in used)


def test_p11_hanging_transactions_of_the_dead_are_shown_and_aborted(rig: Rig) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    with Child("write", rig.sink, plan, 0, [rows([b"orphan"])], SCHEMA) as task:
        task.say()
        task.kill()
    shown = context.committers.open_transactions()
    assert [(t.transactional_id, t.state, t.timeout_s) for t in shown] == [
        (topics.transactional_id(rig.work(0)), "Ongoing", 600)
    ]
    age = shown[0].age_s()
    assert age is not None and 0 <= age < 60
    assert any(p.startswith(rig.topic) for p in shown[0].targets)
    # A new checkpoint, hence another incarnation: the pipeline's own start unblocks readers.
    rig.incarnation = "i1"
    assert rig.committer().abort_orphans(()) == Ok(1)
    assert context.committers.open_transactions() == []
    assert rig.visible() == []


def test_p11_a_person_may_abort_or_apply_what_is_open_and_nothing_else(rig: Rig) -> None:
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    ids = [prepared(m).handle["transactional_id"] for m in messages]
    committer = alone(context.committers)
    held = {t.transactional_id: t.participant for t in committer.open_transactions()}
    with pytest.raises(UsageError, match="TRANSACTION_NOT_OPEN"):  # the id is that of a later transaction by now
        committer.end_by_id(ids[0], commit=True, handle=held[ids[1]])
    assert committer.end_by_id(ids[0], commit=True, handle=held[ids[0]]) == Ok(None)
    assert alone(context.committers).end_by_id(ids[1], commit=False) == Ok(None)
    wait_for(lambda: not context.committers.open_transactions())
    assert rig.visible() == rig.expected([0], [0])
    with pytest.raises(UsageError, match="TRANSACTION_NOT_OPEN"):
        alone(context.committers).end_by_id(ids[0], commit=True)
    with pytest.raises(UsageError, match="TRANSACTION_FOREIGN"):
        alone(context.committers).end_by_id("somebody.else.0.0", commit=False)


@either_client
def test_a_zombie_that_was_aborted_cannot_write_on(rig: Rig) -> None:
    context = rig.context()
    rig.plan(context, 0)
    zombie = begun(rig, b"zombie")
    zombie.stage(rows([bytes(900_000)] * 4))  # more than is held back
    wait_for(context.committers.open_transactions)
    assert context.committers.abort_orphans(()) == Ok(1)
    with pytest.raises(Fenced):
        zombie.stage(rows([b"zombie again"]))
        zombie.prepare(Fingerprint())
    zombie.abort()
    assert context.committers.open_transactions() == []
    assert rig.visible() == []


def test_abort_orphans_keeps_what_was_decided(rig: Rig) -> None:
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    assert context.committers.abort_orphans([prepared(messages[0])]) == Ok(1)
    assert context.committers.commit(rig.work(0), prepared(messages[0])) == Ok(None)
    assert isinstance(context.committers.commit(rig.work(0, 1), prepared(messages[1])), Failed)
    assert rig.visible() == rig.expected([0], [0])


def test_p13_sinks_whose_names_run_together_do_not_touch_each_other(kafka: Any, client: str) -> None:
    topic = kafka.topic(1)
    one = Rig(kafka, topic, pipeline="a.b", options={"client": client})
    other = Rig(kafka, topic, pipeline="a", options={"client": client})
    scopes = (replace(one.scope, sink="c"), replace(other.scope, sink="b.c"))
    assert scopes[0].prefix == scopes[1].prefix
    assert topics.id_prefix(scopes[0]) != topics.id_prefix(scopes[1])
    works = [replace(one.work(0), scope=s) for s in scopes]
    for scope in scopes:
        open_ledger(one.sink, scope).claim(one.context().owner)
    writers = [one.sink.writer(w, EXACT, SCHEMA) for w in works]
    promises = []
    for writer in writers:
        writer.stage(rows([b"x"]))
        promises.append(writer.prepare(Fingerprint()))
    # One of the two pipelines recovers; the other's prepared transaction must survive.
    assert one.sink.committer(scopes[0]).abort_orphans(()) == Ok(1)
    kept = one.sink.committer(scopes[1])
    assert kept.commit(works[1], Prepared.of(works[1], Fingerprint(), promises[1])) == Ok(None)


def test_p15_two_shards_in_one_process_have_nothing_in_common(rig: Rig) -> None:
    context = rig.context()
    rig.plan(context, 0)
    writers = [rig.sink.writer(rig.work(0, s), EXACT, SCHEMA) for s in (0, 1)]
    for s, writer in enumerate(writers):
        writer.stage(rows(rig.values_of(0, s)))
    writers[0].abort()
    prepared = Prepared.of(rig.work(0, 1), Fingerprint(), writers[1].prepare(Fingerprint()))
    assert context.committers.commit(rig.work(0, 1), prepared) == Ok(None)
    assert rig.visible() == rig.expected([0], [1])


@pytest.mark.matrix
def test_p24_epochs_run_out_and_the_pipeline_goes_on(mortal_kafka: Any, client: str) -> None:
    """The id is put at epoch 32764 in the broker's own log: the next batches cross the limit of 32767."""
    kafka = mortal_kafka
    rig = Rig(kafka, kafka.topic(1), options={"client": client})
    context = rig.context()
    rig.run(context, 0, first=True)
    rig.run(context, 1)
    from tests.broker.forged_epoch import force_epoch

    warm.close_all()
    names = [topics.transactional_id(rig.work(b, s)) for b in (0, 1) for s in (0, 1)]
    force_epoch(kafka, names, 32_764)
    seen = []
    for batch in range(2, 12):
        decision = rig.run(context, batch)
        assert decision is not None
        seen += [(p.handle["producer_id"], p.handle["epoch"]) for p in decision.participants]
    assert max(e for _, e in seen) >= 32_765
    assert min(e for _, e in seen) < 10, "a new producer id begins at a low epoch"
    assert len(set(seen)) == len(seen), "one epoch, one transaction"
    assert rig.visible() == rig.expected(range(12))


@either_client
def test_p24_a_shard_without_rows_opens_no_transaction(rig: Rig) -> None:
    context = rig.context()
    rig.plan(context, 0)
    writer = rig.sink.writer(rig.work(0), EXACT, SCHEMA)
    writer.stage(rows([]))
    assert writer.prepare(Fingerprint()) == Promise()
    assert context.committers.open_transactions() == []


def test_p27_the_window_between_the_first_and_the_last_shard_is_measured(rig: Rig, record_property: Any) -> None:
    """A reader may see a part of a batch for a moment. How long is measured, and printed."""
    context = rig.context()
    windows = []
    for batch in range(5):
        messages = rig.write(rig.plan(context, batch, first=batch == 0), range(4))
        started = time.perf_counter()
        rig.commit(context, batch, messages)
        windows.append((time.perf_counter() - started) * 1000)
    record_property("window_ms", windows)
    print(f"decide and apply of 4 shards, ms: {[round(w, 1) for w in windows]}")
    assert rig.visible() == rig.expected(range(5), range(4))


def test_recovery_of_a_decided_batch_whose_driver_died(rig: Rig) -> None:
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))

    def die(point: str, _: Any) -> None:
        if point == "commit.decide:after":
            raise KeyboardInterrupt

    step.install(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            rig.commit(context, 0, messages)
    finally:
        step.install(None)
    assert rig.visible() == []
    context.ledger.close()
    context.committers.close()
    later = rig.context("second")
    plan = rig.plan(later, 0)
    assert (plan.action, plan.rewrite) == (Action.SKIP, {})
    assert rig.visible() == rig.expected([0])


def test_records_of_one_key_keep_their_order(rig: Rig) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    from delivered.engine.shard import write_shard

    values = [b"%05d" % i for i in range(40_000)]
    batches = [rows(values[i : i + 7000], key=b"one") for i in range(0, len(values), 7000)]
    rig.commit(context, 0, [write_shard(rig.sinks, plan, 0, 0, map(Rows, batches), SCHEMA)])
    assert [m.value() for m in read_committed(rig.kafka.bootstrap, rig.topic)] == values

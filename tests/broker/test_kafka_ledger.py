"""The ledger in Kafka against a real broker: one owner, exact outcomes, bounded size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka.admin import ConfigResource, ResourceType
from kafka.protocol.producer.transaction import EndTxnRequest
from tests.broker.sink_help import EXACT, FIRST, SCHEMA, SECOND, Child, Rig, decision, rows, store_of
from tests.kafka_tools import read_committed

from delivered import ledger as rules
from delivered.clients.kafka import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import Transaction
from delivered.connectors.kafka import store as store_module
from delivered.connectors.kafka import topics
from delivered.connectors.kafka.committer import find_marker, marker_partition
from delivered.connectors.kafka.store import KafkaStore
from delivered.connectors.kafka.topics import STATE_PARTITION, CommittedReader, Keys, ledger_topic
from delivered.engine.context import open_ledger
from delivered.ledger import Ledger
from delivered.model import work
from delivered.model.errors import Fenced, LedgerBehind, OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.limits import OWNERS_REMEMBERED
from delivered.model.work import Failed, LedgerState, Ok, Outcome, Owner, Prepared, Started, Unknown


@pytest.fixture
def rig(kafka: Any) -> Rig:
    return Rig(kafka, "no-data-here")


def test_what_was_decided_is_found_by_another_process(rig: Rig, opened: Callable[[], Ledger]) -> None:
    one = opened()
    assert one.claim(FIRST) == LedgerState(owner=FIRST, epoch=1)
    for batch in range(3):
        assert one.decide(decision(rig.scope, batch)) == Ok(None)
    other = opened()
    state = other.resume("first")
    assert state.last is not None and state.last.batch == 2
    assert state.last == replace(decision(rig.scope, 2), decided_at_ms=state.last.decided_at_ms)
    assert [d.batch for d in other.history()] == [0, 1, 2]
    # It continues where the other one is, and both see it.
    assert other.decide(decision(rig.scope, 3)) == Ok(None)
    assert [led.resume("first").last.batch for led in (one, other)] == [3, 3]  # type: ignore[union-attr]


def test_claim_may_be_repeated_and_a_newer_owner_fences(rig: Rig, opened: Callable[[], Ledger]) -> None:
    one, two = opened(), opened()
    one.claim(FIRST)
    assert one.claim(FIRST).owner == FIRST
    assert one.decide(decision(rig.scope, 0)) == Ok(None)
    state = two.claim(SECOND)
    assert state.owner == replace(SECOND, superseded=("first",))
    assert state.last is not None and state.last.batch == 0
    with pytest.raises(Fenced, match="host-b"):
        one.resume("first")
    assert isinstance(one.decide(decision(rig.scope, 1)), Failed)
    assert isinstance(one.begin(Started(1, "o")), Failed)
    for again in (one, opened()):
        with pytest.raises(Fenced):
            again.claim(FIRST)
    # The loser's last attempt had no effect.
    assert two.decide(decision(rig.scope, 1, "second")) == Ok(None)
    assert two.resume("second").last == two.look().last
    assert [d.owner for d in two.history()] == ["first", "second"]


def test_a_superseded_driver_takes_no_id(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking one would fence the current owner, who would have to take it back."""
    one, two = opened(), opened()
    one.claim(FIRST)
    two.claim(SECOND)
    taken: list[str] = []
    monkeypatch.setattr(KafkaStore, "_take", lambda self, role: taken.append(role))
    with pytest.raises(Fenced):
        one.claim(FIRST)
    with pytest.raises(Fenced):
        opened().claim(FIRST)
    assert taken == []


def test_what_is_recorded_already_is_looked_up_before_it_is_believed(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated batch or decision writes nothing, so the broker would not reject a fenced driver."""
    one, two = opened(), opened()
    one.claim(FIRST)
    decided = decision(rig.scope, 0)
    for _ in range(2):
        assert one.begin(Started(1, "o")) == Ok(None)
        assert one.decide(decided) == Ok(None)
    other = one.decide(replace(decided, offsets="others"))
    assert isinstance(other, Failed) and "DECIDED_OTHERWISE" in other.reason
    two.claim(SECOND)
    assert isinstance(one.begin(Started(1, "o")), Failed)
    assert one.decide(decided) == Ok(None), "it is in, whoever asks"
    assert [d.offsets for d in two.history()] == [decided.offsets]


def test_a_claim_of_the_same_owner_voids_the_one_before(rig: Rig, opened: Callable[[], Ledger]) -> None:
    """A query restarted in one session: writes in flight from before must not succeed."""
    former, later = opened(), opened()
    former.claim(FIRST)
    later.claim(FIRST)
    assert isinstance(former.begin(Started(0, "o")), Failed)
    assert isinstance(former.decide(decision(rig.scope, 0)), Failed)
    assert later.look().last is None
    assert later.decide(decision(rig.scope, 0)) == Ok(None)
    assert former.resume("first").last is not None
    assert former.decide(decision(rig.scope, 1)) == Ok(None)


def test_a_decision_under_way_cannot_get_in_after_a_claim(rig: Rig, opened: Callable[[], Ledger]) -> None:
    """The older driver pauses between sending its record and the commit, and resumes when another owns the ledger."""
    one, two = opened(), opened()
    one.claim(FIRST)
    store = store_of(one)
    producer, key = store._producers["decide"], store._keys.key("last", rig.incarnation)
    writes = {0: [(key, decision(rig.scope, 0).to_json().encode())]}
    deadline = time.monotonic() + 120
    assert producer.add(writes, deadline) == 0
    assert producer.produce(writes) == 0
    assert two.claim(SECOND).last is None
    assert isinstance(producer.commit()[0], Failed)
    assert two.resume("second").last is None


@pytest.mark.parametrize("committed", [True, False])
def test_a_former_owner_that_takes_his_id_back_while_another_claims(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """Fenced once, but still the owner on record, it decides again: the claim must see or fence that."""
    one, two = opened(), opened()
    one.claim(FIRST)
    store, record = store_of(one), store_of(two)._record
    key = store._keys.key("last", rig.incarnation)
    writes = {0: [(key, decision(rig.scope, 0).to_json().encode())]}

    def meanwhile(owner: Owner, epoch: int) -> Outcome[None]:
        if committed:
            assert one.decide(decision(rig.scope, 0)) == Ok(None)
        else:
            store._take("decide")
            mine = store._producers["decide"]
            assert mine.add(writes, time.monotonic() + 30) == 0
            assert mine.produce(writes) == 0
        return record(owner, epoch)

    monkeypatch.setattr(store_of(two), "_record", meanwhile)
    state = two.claim(SECOND)
    if committed:
        assert state.last is not None and state.last.batch == 0
    else:
        assert state.last is None
        assert isinstance(store._producers["decide"].commit()[0], Failed)
    assert isinstance(one.decide(decision(rig.scope, 1)), Failed)
    assert two.resume("second").last == state.last


def test_an_unknown_outcome_is_settled_by_claim(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit's reply is lost, with and without the commit: `claim` resolves it, and nothing follows later."""
    one = opened()
    one.claim(FIRST)
    ask = Wire.ask_coordinator

    def lose(sent: bool) -> None:
        def asked(self: Wire, name: str, request: Any, **more: Any) -> Any:
            if not isinstance(request, EndTxnRequest) or not name.endswith("ledger.decide"):
                return ask(self, name, request, **more)
            if sent:
                ask(self, name, request, **more)
            raise NoAnswer("lost")

        monkeypatch.setattr(Wire, "ask_coordinator", asked)

    lose(sent=True)
    assert isinstance(one.decide(decision(rig.scope, 0)), Unknown)
    lose(sent=False)
    state = one.claim(FIRST)
    assert state.last is not None and state.last.batch == 0
    assert isinstance(one.decide(decision(rig.scope, 1)), Unknown)
    monkeypatch.undo()
    state = one.claim(FIRST)
    assert state.last is not None and state.last.batch == 0
    assert one.decide(decision(rig.scope, 1)) == Ok(None)


def test_two_processes_of_one_owner_do_not_fence_each_other(rig: Rig, opened: Callable[[], Ledger]) -> None:
    planning, deciding = opened(), opened()
    planning.claim(FIRST)
    for batch in range(3):
        planning.resume("first")
        assert planning.begin(Started(batch, "o")) == Ok(None)
        assert deciding.resume("first").started == Started(batch, "o")
        assert deciding.decide(decision(rig.scope, batch)) == Ok(None)
    # The deciding process claims, as after an unknown outcome: the planning one still continues.
    deciding.claim(FIRST)
    assert planning.resume("first").last == deciding.look().last
    assert planning.begin(Started(3, "o")) == Ok(None)
    assert deciding.decide(decision(rig.scope, 3)) == Ok(None)


def test_two_drivers_on_one_checkpoint_decide_every_batch_once(rig: Rig, opened: Callable[[], Ledger]) -> None:
    """Two real processes: the second takes over while the first decides as fast as it can."""
    arguments = (rig.sink, rig.scope)
    with Child("decide_for_ever", *arguments, FIRST, decision(rig.scope, 0)) as older:
        seen = [older.say() for _ in range(20)]
        with Child("decide_for_ever", *arguments, SECOND, decision(rig.scope, 0)) as newer:
            later = [newer.say() for _ in range(5)]
            while seen[-1][0] != "fenced":
                seen.append(older.say())
            newer.kill()
    by_first = [b for b, outcome in seen[:-1] if isinstance(outcome, Ok)]
    by_second = [b for b, outcome in later if isinstance(outcome, Ok)]
    assert by_second == list(range(by_first[-1] + 1, by_first[-1] + 6))
    kept = {d.batch: d.owner for d in opened().history()}
    assert {b: kept[b] for b in by_first + by_second} == {
        **dict.fromkeys(by_first, "first"),
        **dict.fromkeys(by_second, "second"),
    }


def test_look_takes_nothing_and_needs_no_topic(rig: Rig, opened: Callable[[], Ledger]) -> None:
    assert opened().look() == LedgerState()
    one = opened()
    one.claim(FIRST)
    assert opened().look().owner == FIRST
    assert one.decide(decision(rig.scope, 0)) == Ok(None)


def test_p2_each_incarnation_has_a_history_of_its_own(rig: Rig, opened: Callable[[], Ledger]) -> None:
    one = opened()
    one.claim(FIRST)
    assert one.decide(decision(rig.scope, 7)) == Ok(None)
    rig.incarnation = "i1"
    state = opened().claim(FIRST)
    assert (state.last, [d.batch for d in state.earlier]) == (None, [7])


def test_two_sinks_of_a_pipeline_share_the_topic_and_nothing_else(rig: Rig) -> None:
    scopes = [replace(rig.scope, sink=s) for s in ("a", "b")]
    one, two = (open_ledger(rig.sink, s) for s in scopes)
    one.claim(FIRST)
    two.claim(SECOND)
    assert one.decide(decision(scopes[0], 4)) == Ok(None)
    assert one.resume("first").owner == FIRST
    assert two.resume("second").last is None
    for led in (one, two):
        led.close()


@pytest.mark.matrix
def test_a_driver_that_died_while_deciding_blocks_no_other_pipeline(
    kafka: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction stays open until it expires. Only its own pipeline waits for that."""
    shared = {"ledgerTopic": f"shared-{time.time_ns()}"}
    one, other = (Rig(kafka, topic, options=shared) for topic in ("no-data", "no-data-either"))
    dying, going_on = one.ledger(), other.ledger()
    monkeypatch.setattr(store_module, "LEDGER_TRANSACTION_TIMEOUT_S", 600)
    dying.claim(FIRST)
    going_on.claim(SECOND)
    store = store_of(dying)
    producer, text = store._producers["decide"], decision(one.scope, 0).to_json().encode()
    last_key, kept_key = store._keys.key("last", one.incarnation), store._keys.key("kept", one.incarnation, 0)
    writes = {0: [(last_key, text)], 1: [(kept_key, text)]}
    assert producer.add(writes, time.monotonic() + 120) == 0
    assert producer.produce(writes) == 0
    monkeypatch.setattr("delivered.connectors.kafka.store.RECOVERY_WAIT_S", 0.5)
    for batch in range(3):
        assert going_on.decide(decision(other.scope, batch, "second")) == Ok(None)
        last = other.ledger().resume("second").last
        assert last is not None and last.batch == batch
    assert [d.batch for d in going_on.history()] == [0, 1, 2]
    with pytest.raises(OutcomeUnknown, match="still open"):
        one.ledger().resume("first")
    monkeypatch.undo()
    assert producer.commit()[0] == Ok(None)
    last = one.ledger().resume("first").last
    assert last is not None and last.batch == 0


def test_a_marker_is_found_behind_another_pipeline_s_open_shard(kafka: Any) -> None:
    """Both markers are in one partition, and the first shard stays open."""
    shared = {"ledgerTopic": f"shared-{time.time_ns()}"}
    topic = kafka.topic(1)
    one = Rig(kafka, topic, options=shared)
    other = next(
        rig
        for rig in (Rig(kafka, topic, options=shared) for _ in range(10_000))
        if marker_partition(rig.scope) == marker_partition(one.scope)
    )
    one.ledger().claim(FIRST)
    stages: list[Prepared] = []
    for rig, values in ((one, [b"open"]), (other, [b"committed"])):
        writer = rig.sink.writer(rig.work(0), EXACT, SCHEMA)
        writer.stage(rows(values))
        stages.append(Prepared.of(rig.work(0), Fingerprint(1, 2, 3), writer.prepare(Fingerprint(1, 2, 3))))
    assert other.committer().commit(other.work(0), stages[1]) == Ok(None)
    wire = Wire(one.sink.options.resolved())
    ours, theirs = map(Transaction.of, stages)
    newer = replace(theirs, epoch=theirs.epoch + 1)
    found = [
        find_marker(wire, shared["ledgerTopic"], other.work(batch), held, 0.5)
        for batch, held in ((0, theirs), (1, theirs), (1, newer))
    ]
    assert found == [Fingerprint(1, 2, 3), None, None]
    with pytest.raises(OutcomeUnknown, match="still open"):
        find_marker(wire, shared["ledgerTopic"], one.work(0), ours, 0.5)
    wire.close()
    assert one.committer().abort_orphans(()) == Ok(1)


def test_an_open_shard_hides_no_decision(rig: Rig, opened: Callable[[], Ledger], kafka: Any) -> None:
    """A marker in an open transaction blocks readers of its partition, so decisions are in another one."""
    rig.topic = kafka.topic(1)
    one = rig.ledger()
    one.claim(FIRST)
    writer = rig.sink.writer(rig.work(0), EXACT, SCHEMA)
    writer.stage(rows([b"x"]))
    writer.prepare(Fingerprint())
    started = time.monotonic()
    assert one.decide(decision(rig.scope, 0)) == Ok(None)
    assert one.resume("first").last is not None
    assert time.monotonic() - started < 10
    assert rig.committer().abort_orphans(()) == Ok(1)
    one.close()


@pytest.mark.parametrize("participants", [200, 4000])
def test_a_decision_may_name_many_shards(rig: Rig, opened: Callable[[], Ledger], participants: int) -> None:
    one = opened()
    one.claim(FIRST)
    big = decision(rig.scope, 0, participants=participants)
    assert one.decide(big) == Ok(None)
    assert opened().resume("first").last == big


def test_p4_the_topic_stays_as_small_as_its_keys_are_few(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch, kafka: Any
) -> None:
    monkeypatch.setattr(store_module, "LEDGER_HISTORY_BATCHES", 10)
    one = opened()
    for run in range(3):
        rig.incarnation = f"i{run}"
        one = opened()
        one.claim(FIRST)
        for batch in range(40):
            assert one.decide(decision(rig.scope, batch)) == Ok(None)
            if batch % 10 == 0:
                assert one.begin(Started(batch, "o")) == Ok(None)
    records = read_committed(kafka.bootstrap, ledger_topic(rig.scope, None))
    keys = {(m.partition(), m.key()) for m in records}
    assert len(records) > 240
    stops_earlier_releases = (STATE_PARTITION, Keys(rig.scope).old("owner"))  # one, however often it is claimed
    assert stops_earlier_releases in keys
    keys.remove(stops_earlier_releases)
    assert len(keys) == 1 + 3 * (1 + 1 + 10), "owner; last, begun and ten kept of each incarnation"
    assert [d.batch for d in one.history()] == list(range(30, 40))
    config = kafka.admin().describe_configs([ConfigResource(ResourceType.TOPIC, ledger_topic(rig.scope, None))])
    (found,) = [f.result(120) for f in config.values()]
    assert (found["cleanup.policy"].value, int(found["segment.bytes"].value)) == ("compact", 1 << 20)


def test_p4_the_oldest_incarnations_are_forgotten(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch job that runs daily is a new incarnation every day."""
    monkeypatch.setattr(rules, "LEDGER_INCARNATIONS", 3)
    for run in range(8):
        rig.incarnation = f"run{run}"
        one = opened()
        one.claim(Owner(f"driver{run}"))
        assert one.decide(decision(rig.scope, 0, f"driver{run}")) == Ok(None)
    assert len(opened().look().earlier) <= 4
    rig.incarnation = "run0"
    archived = opened().look().archived
    assert archived is not None and (archived.decided, archived.rows) == (True, 1)


def test_what_is_forgotten_at_once_is_bounded(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier ledger may have kept more incarnations than one record batch of tombstones can hold."""
    for run in range(6):
        rig.incarnation = f"run{run}"
        one = opened()
        one.claim(Owner("driver"))
        assert one.begin(Started(0, "o")) == Ok(None)
        if run % 2:
            assert one.decide(decision(rig.scope, 0, "driver")) == Ok(None)
    monkeypatch.setattr(rules, "LEDGER_INCARNATIONS", 0)
    monkeypatch.setattr(store_module, "_TOMBSTONES_MAX", 0)
    rig.incarnation = "newest"
    left = []
    for _ in range(7):
        state = opened().claim(Owner("driver"))
        left.append([d.scope.incarnation for d in state.earlier] + [i for i, _ in state.earlier_started])
    assert [len(names) for names in left] == [5, 4, 3, 2, 1, 0, 0]
    assert left[2] == ["run5", "run3", "run1"], "begun alone first, then the oldest decided"
    for run in range(6):
        rig.incarnation = f"run{run}"
        archived = opened().look().archived
        assert archived is not None and archived.decided == bool(run % 2)


def test_the_owner_is_remembered_with_those_before_it(rig: Rig, opened: Callable[[], Ledger]) -> None:
    for n in range(20):
        opened().claim(Owner(f"o{n}"))
    owner = opened().look().owner
    assert owner is not None
    assert (owner.id, len(owner.superseded), owner.superseded[0]) == ("o19", OWNERS_REMEMBERED, "o18")


@pytest.mark.matrix  # test_kafka_three_brokers.py restarts those of a ledger
def test_a_decision_waits_for_a_broker_that_restarts(mortal_kafka: Any) -> None:
    kafka = mortal_kafka
    rig = Rig(kafka, "no-data-here")
    one = rig.ledger()
    one.claim(FIRST)
    assert one.decide(decision(rig.scope, 0)) == Ok(None)
    kafka.broker.kill()
    with ThreadPoolExecutor(1) as pool:
        restarted = pool.submit(kafka.broker.restart)
        outcome = one.decide(decision(rig.scope, 1))
        restarted.result()
    if not isinstance(outcome, Ok):
        state = one.claim(FIRST)
        assert state.last is not None and state.last.batch == (1 if isinstance(outcome, Unknown) else 0)
        assert one.decide(decision(rig.scope, 1)) == Ok(None)
    assert [d.batch for d in one.history()] == [0, 1]
    one.close()


def test_a_topic_that_was_deleted_is_called_so(kafka: Any, rig: Rig, opened: Callable[[], Ledger]) -> None:
    """The brokers stay up. The next claim recreates the topic, which is empty."""
    one = opened()
    one.claim(FIRST)
    assert one.decide(decision(rig.scope, 0)) == Ok(None)
    topic = ledger_topic(rig.scope, None)
    kafka.admin().delete_topics([topic])[topic].result(120)
    deadline = time.monotonic() + 120
    while topic in kafka.admin().list_topics(timeout=60).topics:
        assert time.monotonic() < deadline
    with pytest.raises(LedgerBehind, match=rf"LEDGER_TOPIC_GONE.*{topic}.*deleted.*LEDGER_MISSING"):
        one.resume("first")
    assert one.claim(FIRST).last is None
    assert one.decide(decision(rig.scope, 1)) == Ok(None)


def test_resume_costs_one_request(rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened()
    one.claim(FIRST)
    one.resume("first")
    asked: list[Any] = []
    wire = store_of(one)._wire
    ask = wire.ask
    monkeypatch.setattr(wire, "ask", lambda *a, **k: (asked.append(a), ask(*a, **k))[1])
    one.resume("first")
    assert len(asked) == 1


def test_producers_of_the_ledger_are_no_shards(rig: Rig) -> None:
    """Aborting orphans must never fence the ledger's own ids."""
    assert not topics.is_ours(rig.scope, store_of(rig.ledger())._id("plan"))
    assert topics.is_ours(rig.scope, topics.transactional_id(rig.work(0)))


def test_ledger_of_the_release_before_is_continued_and_refused_there(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys lack the pipeline, so pipelines of one topic may share them."""
    with monkeypatch.context() as before:
        before.setattr(Keys, "key", Keys.old)
        before.setattr(work, "RECORD_FORMAT", 1)
        before.setattr(store_module, "MOVED", {})
        one = opened()
        one.claim(FIRST)
        assert one.begin(Started(0, "o")) == Ok(None)
        for batch in range(2):
            assert one.decide(decision(rig.scope, batch)) == Ok(None)
        other = Ledger(KafkaStore(rig.sink.options, replace(rig.scope, incarnation="theirs")), rig.scope)
        other.claim(FIRST)
        theirs = replace(rig.scope, incarnation="theirs", pipeline="another")
        assert other.decide(replace(decision(rig.scope, 9), scope=theirs)) == Ok(None)
        other.close()
    two = opened()
    looked = two.look()
    assert (looked.last, looked.started, looked.epoch) == (two.claim(SECOND).last, Started(0, "o"), 2)
    assert looked.last is not None
    assert (looked.last.batch, looked.earlier) == (1, ()), "a decision counts for the pipeline that it names"
    assert two.decide(decision(rig.scope, 2, "second")) == Ok(None)
    again = opened()
    assert [d.batch for d in again.history()] == [0, 1, 2]
    state = again.resume("second")
    assert state.last is not None
    assert (state.last.batch, state.started) == (2, Started(0, "o"))
    reader = CommittedReader(store_of(two)._wire, ledger_topic(rig.scope, None), STATE_PARTITION)
    owners = {r.key: r.value for r in reader.read(time.monotonic() + 60)}
    left = owners[Keys(rig.scope).old("owner")]
    assert left is not None
    assert json.loads(left)["format"] == work.RECORD_FORMAT > 1, "a release that reads up to 1 refuses it"

"""Whoever may write to the ledger's topic forges nothing in it, against a real broker (decision 108)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.broker.sink_help import FIRST, SECOND, Forger, Rig, decision, store_of, wait_for

from delivered.connectors.kafka import topics
from delivered.connectors.kafka.store import Trust
from delivered.connectors.kafka.topics import HISTORY_PARTITION, STATE_PARTITION, Keys, ledger_topic
from delivered.connectors.kafka.writes import holders
from delivered.ledger import Ledger
from delivered.model.errors import InvariantBroken
from delivered.model.work import Ok, Owner, Started


@pytest.fixture
def rig(kafka: Any) -> Rig:
    return Rig(kafka, "no-data-here")


def forged(rig: Rig) -> dict[int, list[tuple[bytes, bytes | None]]]:
    """What would make a start skip batches, lose its ledger, give it another owner, or stop it."""
    keys, own = Keys(rig.scope), rig.scope.incarnation
    text = decision(rig.scope, 7, "forged").to_json().encode()
    owner = Owner("forged", "host", 1, 0, ()).to_json(claims=99, writers=[1, 2], since=[0, 0]).encode()
    state = [(keys.key("last", own), text), (keys.old("last", own), text), (keys.key("last", "another"), text)]
    state += [(keys.key("begun", own), Started(7, "o").to_json().encode()), (keys.key("owner"), owner)]
    state += [(keys.old("owner"), owner), (keys.key("archive", 1), b"\xff"), (keys.key("last", own), None)]
    state += [(b"\xff", b"x"), (b"[]", b"x"), (b'"owner"', b"x"), (keys.key("last", own), b"[" * 100_000)]
    return {STATE_PARTITION: state, HISTORY_PARTITION: [(keys.key("kept", own, 7), text), (b"\xff", b"")]}


@pytest.mark.parametrize("transactional", [False, True], ids=["plainly", "in a transaction"])
def test_what_another_application_writes_is_not_the_ledger(
    rig: Rig, opened: Callable[[], Ledger], transactional: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither while its owner runs, nor for the next one, nor in the history that an audit reads."""
    one = opened()
    one.claim(FIRST)
    for batch in range(2):
        assert one.decide(decision(rig.scope, batch)) == Ok(None)
    forger = Forger(rig, transactional)
    for partition, records in forged(rig).items():
        forger.write(partition, *records)
    with caplog.at_level(logging.WARNING, "delivered"):
        assert one.decide(decision(rig.scope, 2)) == Ok(None), "it still owns the ledger"
        looked = opened().look()
    assert looked.last is not None
    assert (looked.last.batch, looked.started, looked.epoch, looked.earlier) == (2, None, 1, ())
    assert f"topic '{ledger_topic(rig.scope, None)}', partition 0, offset" in caplog.text
    for partition, records in forged(rig).items():
        forger.write(partition, *records)
    two = opened()
    state = two.claim(SECOND)
    assert state.last is not None
    assert (state.last.batch, state.epoch) == (2, 2)
    # Compaction keeps the newest record of a key: the claim wrote the truth again, above what was forged.
    reader = topics.CommittedReader(store_of(two)._wire, ledger_topic(rig.scope, None), STATE_PARTITION)
    newest = {r.key: r for r in reader.read(time.monotonic() + 60)}
    trust = store_of(two)._trust
    assert trust is not None
    keys = Keys(rig.scope)
    assert all(trust.holds(newest[key]) for key in (keys.key("owner"), keys.key("last", rig.scope.incarnation)))
    assert [d.batch for d in opened().history()] == [0, 1, 2]
    assert two.decide(decision(rig.scope, 3, "second")) == Ok(None)


def test_a_ledger_of_the_release_before_is_read_and_then_closed_to_others(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(Trust, "to_json", lambda self: {})
        one = opened()
        one.claim(FIRST)
        assert one.decide(decision(rig.scope, 0)) == Ok(None)
    two = opened()
    state = two.claim(SECOND)
    assert state.last is not None
    assert state.last.batch == 0
    assert two.decide(decision(rig.scope, 1, "second")) == Ok(None)
    Forger(rig, True).write(STATE_PARTITION, *forged(rig)[STATE_PARTITION])
    looked = opened().look()
    assert looked.last is not None
    assert (looked.last.batch, looked.epoch) == (1, 2)
    assert [d.batch for d in opened().history()] == [0, 1]


@pytest.mark.matrix
def test_a_ledger_whose_ids_the_brokers_forgot_goes_on(new_kafka: Callable[..., Any]) -> None:
    """After a week without a batch, its ids get new producers: while a claim lasts, and for the next one."""
    forgets = {"transactional.id.expiration.ms": "3000", "producer.id.expiration.ms": "3000"}
    forgets |= {"transaction.remove.expired.transaction.cleanup.interval.ms": "500"}
    rig = Rig(new_kafka(properties=forgets), "no-data-here")
    one = rig.ledger()
    one.claim(FIRST)
    assert one.decide(decision(rig.scope, 0)) == Ok(None)

    def forgotten() -> bool:
        store = store_of(one)
        return not holders(store._wire, [store._id(role) for role in ("plan", "decide")])

    wait_for(forgotten)
    looked = rig.ledger().look()
    assert looked.last is not None
    assert looked.last.batch == 0
    assert one.decide(decision(rig.scope, 1)) == Ok(None), "under a new producer id, in the same claim"
    looked = rig.ledger().look()
    assert looked.last is not None
    assert looked.last.batch == 1
    wait_for(forgotten)
    two = rig.ledger()
    state = two.claim(SECOND)
    assert state.last is not None
    assert (state.last.batch, state.epoch) == (1, 2)
    assert two.decide(decision(rig.scope, 2, "second")) == Ok(None)
    assert [d.batch for d in rig.ledger().history()] == [0, 1, 2]


def test_a_damaged_batch_stops_with_its_place(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = opened()
    one.claim(FIRST)
    assert one.decide(decision(rig.scope, 0)) == Ok(None)
    real = topics.CommittedReader._fetch

    def flipped(self: Any, offset: int, isolation: int) -> Any:
        part = real(self, offset, isolation)
        if part.records and self._partition == STATE_PARTITION:
            body = bytearray(part.records)
            body[80] ^= 1
            part.records = bytes(body)
        return part

    monkeypatch.setattr(topics.CommittedReader, "_fetch", flipped)
    with pytest.raises(InvariantBroken, match=r"LEDGER_DAMAGED.*partition 0, offset \d+: .*checksum"):
        opened().look()


def test_an_own_record_that_is_none_stops_with_its_place(rig: Rig, opened: Callable[[], Ledger]) -> None:
    """As a defect of ours would leave it: nothing is skipped."""
    one = opened()
    one.claim(FIRST)
    producer = store_of(one)._producers["plan"]
    outcome, _ = producer.write({STATE_PARTITION: [(Keys(rig.scope).key("last", rig.scope.incarnation), b"[1]")]})
    assert outcome == Ok(None)
    with pytest.raises(InvariantBroken, match=r"LEDGER_DAMAGED.*partition 0, offset \d+"):
        opened().look()
